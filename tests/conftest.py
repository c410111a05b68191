"""What several test folders share: the browser that opens reports, the server that traces."""

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import labkit.report  # noqa: F401 (before a test imports nbformat: labkit/report/late.py)
from labkit import Workload
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import PhaseCallback, TraceServer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MOST_TRACES = 32


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
def trace_server() -> Iterator[TraceServer]:
    """One for all traces of a process of tests: its imports take seconds."""
    with TraceServer() as running:
        yield running


@pytest.fixture(scope="session")
def server(trace_server: TraceServer) -> TraceServer:
    """The same, which remembers: tests ask for the trace of the same small workload again and again."""
    return _Remembering(trace_server)


class _Remembering(TraceServer):
    """Asks another server for each trace once."""

    def __init__(self, server: TraceServer) -> None:
        self._server = server
        self._traced: dict[tuple[Workload, tuple[tuple[int, tuple[int, ...]], ...]], Trace] = {}

    def check(self, workload: Workload) -> None:
        self._server.check(workload)

    def _run(self, workload: Workload, stages: Mapping[int, tuple[int, ...]], on_phase: PhaseCallback | None) -> Trace:
        key = workload, tuple(stages.items())
        if on_phase is not None or key not in self._traced:
            if len(self._traced) == _MOST_TRACES:
                del self._traced[next(iter(self._traced))]
            self._traced[key] = self._server._run(workload, stages, on_phase)
        return self._traced[key]
