"""What several test folders share: the browser that opens reports, the server that traces."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import labkit.report  # noqa: F401 (before a test imports nbformat: labkit/report/late.py)
from labkit.drivers.trace.server import TraceServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: whichever file ends last has one process to itself."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def chromium_path() -> Path:
    """The Chromium or Chrome on PATH.

    Without one a browser test is skipped; with LABKIT_REQUIRE_BROWSER=1 (as .ci/run sets) it fails instead.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing = f"no Chromium on PATH (looked for {', '.join(BROWSERS)}); Debian: apt-get install chromium"
        if os.environ.get("LABKIT_REQUIRE_BROWSER") == "1":
            pytest.fail(missing)
        pytest.skip(missing)
    return Path(found)


@pytest.fixture(scope="session")
def server() -> Iterator[TraceServer]:
    """One for all traces of a process of tests: its imports take seconds."""
    with TraceServer() as running:
        yield running
