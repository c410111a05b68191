"""The estimate against a trace of the real Megatron code: every phase, static and retained bytes apart.

Neither side knows the other. Every fourth case of a family runs in `make test`; the others carry the marker `grid`,
and `make grid` runs all of them.
"""

from collections.abc import Iterator

import pytest

from labkit.drivers.trace.server import TraceServer
from labkit.memory.estimate import estimate
from tests.memory.grid import FAMILIES, workload
from tests.memory.grid.agreement import BETWEEN_STEPS_TOLERANCE, PEAK_TOLERANCE, RETAINED_TOLERANCE, agreement

CASES = [
    pytest.param(f"{family}: {name}", marks=[] if position % 4 == 0 else [pytest.mark.grid])
    for family, module in FAMILIES.items()
    for position, name in enumerate(module.CHANGES)
]


@pytest.fixture(scope="module")
def server() -> Iterator[TraceServer]:
    with TraceServer() as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_estimate_agrees_with_the_trace(server: TraceServer, name: str) -> None:
    case = workload(name)
    errors = agreement(estimate(case).summary, server.run(case).summary)
    assert abs(errors.between_steps) <= BETWEEN_STEPS_TOLERANCE
    assert abs(errors.retained) <= RETAINED_TOLERANCE
    assert abs(errors.phase) <= PEAK_TOLERANCE, errors.worst_phase
    assert abs(errors.peak) <= PEAK_TOLERANCE
