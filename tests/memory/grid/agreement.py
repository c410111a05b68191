"""How far an estimate is from a trace of the same workload, and how far it may be."""

from typing import NamedTuple

from labkit.summary import Summary

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
    def holds(self) -> bool:
        """Whether what the grid promises holds: retained bytes and peak allocated."""
        return abs(self.retained) <= RETAINED_TOLERANCE and abs(self.peak) <= PEAK_TOLERANCE


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
    """The first micro-batch's peak of each phase of a step: all micro-batches are alike.

    Setup is left out: its peak is lower than any step's, and what it leaves is compared as bytes between steps.
    """
    phases: dict[str, int] = {}
    for phase in summary.phases:
        if phase.iteration:
            phases.setdefault(f"{phase.phase} of iteration {phase.iteration}", phase.peak_tensor_bytes)
    return phases
