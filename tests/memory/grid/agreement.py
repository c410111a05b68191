"""How far an estimate is from a trace of the same workload, and how far it may be."""

from collections.abc import Iterator
from typing import NamedTuple

from labkit.drivers.trace.server import TraceServer
from labkit.memory.estimate import estimate
from labkit.summary import Summary
from labkit.workload import Workload

RETAINED_TOLERANCE = 2e-3
PEAK_TOLERANCE = 1e-2
"""Of the peak allocated, and of each phase's peak of tensors."""
BETWEEN_STEPS_TOLERANCE = 1e-3


class Agreement(NamedTuple):
    """Signed relative errors of an estimate against a trace: above zero where the estimate is higher."""

    between_steps: float
    retained: float
    peak: float
    """Of the peak allocated, which counts allocator blocks."""
    phase: float
    """Of the tensors at the peak of the phase where the two differ most."""
    worst_phase: str

    @property
    def severity(self) -> float:
        """How much of what the grid allows is used up, by the worse of retained bytes and peak allocated."""
        return max(abs(self.retained) / RETAINED_TOLERANCE, abs(self.peak) / PEAK_TOLERANCE)

    @property
    def holds(self) -> bool:
        """Whether what the grid promises holds: retained bytes and peak allocated."""
        return self.severity <= 1


class Pair(NamedTuple):
    """Both sides of one pipeline stage."""

    estimated: Summary
    traced: Summary

    @property
    def agreement(self) -> Agreement:
        """The estimate's errors."""
        return agreement(self.estimated, self.traced)


def stages(workload: Workload, server: TraceServer) -> Iterator[Pair]:
    """Both sides of every pipeline stage: recompute can move the peak from one to another."""
    for stage in range(workload.parallelism.pp):
        estimated = estimate(workload, stage)
        yield Pair(estimated.summary, server.run(workload, rank=estimated.rank).summary)


def agreement(estimated: Summary, traced: Summary) -> Agreement:
    """The errors of `estimated`."""
    ours, theirs = _tensor_peaks(estimated), _tensor_peaks(traced)
    phases = {phase: _error(ours.get(phase, 0), peak) for phase, peak in theirs.items()}
    worst = max(phases, key=lambda phase: abs(phases[phase]))
    return Agreement(
        _error(estimated.between_steps_bytes, traced.between_steps_bytes),
        _error(estimated.retained_bytes, traced.retained_bytes),
        _error(estimated.peak_allocated_bytes, traced.peak_allocated_bytes),
        phases[worst],
        worst,
    )


def _error(ours: int, theirs: int) -> float:
    return ours / theirs - 1 if theirs else float(ours != theirs)


def _tensor_peaks(summary: Summary) -> dict[str, int]:
    """The peak of each phase of a step.

    Setup is left out: its peak is lower than any step's, and what it leaves is compared as bytes between steps.
    """
    return {
        f"{phase.phase} of iteration {phase.iteration}": phase.peak_tensor_bytes
        for phase in summary.phases
        if phase.iteration
    }
