"""The estimate against a trace of the real Megatron code: every phase, static and retained bytes apart.

Neither side knows the other.
"""

from collections.abc import Iterator

import pytest

from labkit.drivers.trace.server import TraceServer
from labkit.memory.estimate import estimate
from labkit.summary import PhaseSummary, Summary
from tests.memory.grid import NAMES, workload


@pytest.fixture(scope="module")
def server() -> Iterator[TraceServer]:
    with TraceServer() as server:
        yield server


@pytest.mark.parametrize("name", NAMES)
def test_estimate_agrees_with_the_trace(server: TraceServer, name: str) -> None:
    case = workload(name)
    estimated, traced = estimate(case).summary, server.run(case).summary
    assert estimated.between_steps_bytes == pytest.approx(traced.between_steps_bytes, rel=1e-3)
    assert estimated.retained_bytes == pytest.approx(traced.retained_bytes, rel=5e-3)
    expected = _tensor_peaks(traced)
    for (iteration, phase), peak in _tensor_peaks(estimated).items():
        assert peak == pytest.approx(expected[iteration, phase], rel=1e-2), (iteration, phase)
    assert estimated.peak_allocated_bytes == pytest.approx(traced.peak_allocated_bytes, rel=1e-2)


def _tensor_peaks(summary: Summary) -> dict[tuple[int, str], int]:
    """The first micro-batch's peak of each phase of a step: all micro-batches are alike.

    Setup is left out: its peak is lower than any step's, and what it leaves is compared as bytes between steps.
    """
    phases: dict[tuple[int, str], PhaseSummary] = {}
    for phase in summary.phases:
        if phase.iteration:
            phases.setdefault((phase.iteration, phase.phase), phase)
    return {key: phase.peak_tensor_bytes for key, phase in phases.items()}
