"""The estimate against a trace of the real Megatron code: every phase, static and retained bytes apart.

Neither side knows the other; each pipeline stage is compared. One case of a family in 32 runs in `make test`; the
others carry the marker `grid`, and `make grid` runs all of them.
"""

import pytest

from labkit.drivers.trace.server import TraceServer
from tests.memory.grid import FAMILIES, workload
from tests.memory.grid.agreement import BETWEEN_STEPS_TOLERANCE, PEAK_TOLERANCE, RETAINED_TOLERANCE, stages

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(f"{family}: {name}", marks=[] if position % 32 == 0 else [pytest.mark.grid])
    for family, module in FAMILIES.items()
    for position, name in enumerate(module.CHANGES)
]


@pytest.mark.parametrize("name", CASES)
def test_estimate_agrees_with_the_trace(server: TraceServer, name: str) -> None:
    for pair in stages(workload(name), server):
        errors, rank = pair.agreement, pair.traced.rank
        assert abs(errors.between_steps) <= BETWEEN_STEPS_TOLERANCE, rank
        assert abs(errors.retained) <= RETAINED_TOLERANCE, rank
        assert abs(errors.phase) <= PEAK_TOLERANCE, (errors.worst_phase, rank)
        assert abs(errors.peak) <= PEAK_TOLERANCE, rank
