"""The course of a step, summed by category, against the estimate's rows."""

from collections import Counter

import pytest

from labkit import Workload
from labkit.memory.course import Course, course
from labkit.memory.estimate import estimate
from labkit.memory.outline import block, outline, tensor
from labkit.summary import CATEGORIES, category
from tests.memory.grid import NAMES, workload

AT_A_BOUNDARY = {"transient", "retained: other"}
"""What of a pipeline's boundaries and the caller's outputs the rows count as the other one."""


def merged(held: dict[str, int]) -> dict[str, int]:
    """Bytes by category, those that a boundary's tensor may count to taken together."""
    found: Counter[str] = Counter()
    for name, nbytes in held.items():
        found["boundary" if name in AT_A_BOUNDARY else name] += nbytes
    return {name: nbytes for name, nbytes in found.items() if nbytes}


@pytest.mark.parametrize("name", NAMES[3::12])
def test_its_peaks_are_those_of_the_outline_and_made_of_what_the_rows_say(name: str) -> None:
    case = workload(name)
    for stage in range(case.parallelism.pp):
        found, ledger = course(case, stage, tensor), estimate(case, stage).ledger
        assert [(each.iteration, each.phase, each.bytes) for each in found.phases] == outline(case, stage).phases
        _made_of_nothing_less_than_nothing(found)
        highest = max(ledger.phase_peaks(blocks=False), key=lambda peak: peak.bytes)
        rows: Counter[str] = Counter()
        for row in ledger.at(highest.clock).rows:
            rows[category(row)] += row.bytes
        assert merged(found.peak.breakdown) == merged(rows)


def _made_of_nothing_less_than_nothing(found: Course) -> None:
    for holding in found.holdings:
        assert holding.min() >= 0


def test_a_study_of_moonlight_is_made_of_what_its_rows_say_to_the_byte() -> None:
    case = Workload.load("data/workloads/moonlight-16b.yaml")
    found, ledger = course(case, size=tensor), estimate(case).ledger
    for phase, peak in zip(found.phases, ledger.phase_peaks(blocks=False), strict=True):
        rows: Counter[str] = Counter()
        for row in ledger.at(peak.clock).rows:
            rows[category(row)] += row.bytes
        assert phase.breakdown == {name: rows[name] for name in CATEGORIES if rows[name]}


def test_blocks_are_those_of_fresh_segments() -> None:
    case = Workload.load("data/workloads/nemotron-3-nano.yaml")
    found = course(case)
    assert found.peak.bytes == outline(case, size=block).peak_bytes
    assert sum(found.peak.breakdown.values()) == found.peak.bytes
    assert found.peak.breakdown["allocator remainders"] > 0


def test_moments_run_through_the_step_that_has_the_peak() -> None:
    case = Workload.load("data/workloads/moonlight-16b.yaml")
    found = course(case)
    assert found.positions[0] >= 0
    assert list(found.positions) == sorted(set(found.positions))
    assert found.positions[-1] < 1
    assert found.iteration == found.peak.iteration == 2
    assert max(round(holding.sum()) for holding in found.holdings) == found.peak.bytes
    assert [stretch.phase for stretch in found.stretches] == ["forward", "backward", "grad_sync", "optimizer"]
    assert (found.stretches[0].start, found.stretches[-1].end) == (0, 1)
    # Through the forward pass layer after layer keeps what its backward needs.
    retained = CATEGORIES.index("retained: moe")
    forward = [
        holding[retained]
        for position, holding in zip(found.positions, found.holdings, strict=True)
        if position < found.stretches[0].end
    ]
    assert forward == sorted(forward)
    assert forward[-1] == max(holding[retained] for holding in found.holdings)
