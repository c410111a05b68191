"""What can make a study's cells: for each driver what decides its results, and how a run starts it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from labkit.study.matrix import CellDriver
from labkit.study.runner import Driver
from labkit.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from labkit.drivers.trace.server import Limits


class Started(NamedTuple):
    """A driver that takes calls."""

    driver: Driver
    check: Callable[[Workload], None]
    """Raises `InputError` for launch arguments that Megatron refuses."""


class Kind(NamedTuple):
    """A way to make cells."""

    source: str
    """What its figures are called in frames and reports."""
    varies: bool
    """Whether the same cell may have other figures the next time."""
    versions: Callable[[], Mapping[str, str] | None]
    """Of everything that takes part on this machine; None where it cannot run: its cells come from another one."""
    start: Callable[[int, "Limits | None"], AbstractContextManager[Started]]
    """The driver for `workers` calls at once, within limits; leaving ends what still runs."""
    workers: int | None = None
    """The most calls at once; None: as many as the run is told."""


def _trace_versions() -> Mapping[str, str]:
    from labkit.drivers.trace.versions import trace_versions

    return trace_versions()


@contextmanager
def _start_trace(workers: int, limits: "Limits | None") -> "Iterator[Started]":
    from labkit.drivers.trace.server import TraceServer

    with TraceServer(workers, limits) as server:
        yield Started(server.run_stages, server.check)


def _cuda_versions() -> Mapping[str, str] | None:
    from labkit.drivers.cuda.machine import cuda_versions, installed_gpus

    return cuda_versions() if installed_gpus() else None


@contextmanager
def _start_cuda(_workers: int, limits: "Limits | None") -> "Iterator[Started]":
    from labkit.drivers.cuda.driver import CudaDriver, Plan

    driver = CudaDriver(Plan() if limits is None else Plan(seconds=limits.seconds))
    try:
        # What Megatron refuses of launch arguments, the ranks find out: an outcome.
        yield Started(driver.run, lambda _workload: None)
    finally:
        driver.close()


KINDS: dict[CellDriver, Kind] = {
    "trace": Kind("traced", varies=False, versions=_trace_versions, start=_start_trace),
    "cuda": Kind("measured", varies=True, versions=_cuda_versions, start=_start_cuda, workers=1),
}
