"""One trace server for the traces of this folder: its imports take seconds."""

from collections.abc import Iterator

import pytest

from labkit.drivers.trace.server import TraceServer


@pytest.fixture(scope="session")
def server() -> Iterator[TraceServer]:
    with TraceServer() as running:
        yield running
