"""An estimate's peak with each value of what its workload leaves open."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.memory.estimate import Estimate, estimate, fullest_stage
from labkit.memory.outline import outline
from labkit.ranges import Peaks
from labkit.ranges import ranged as with_ranges
from labkit.summary import Summary
from labkit.workload import Workload
from labkit.workload.unstated import with_fields


def ranged(result: Estimate) -> Summary:
    """The summary of an estimate, with a range for each field that was left open, and one for all of them together.

    The ends of the latter are estimates of their own. The single fields are asked of outlines, which take a tenth of
    the time: their peaks are the estimate's and what the tensors differ by, so allocator blocks are not followed.
    """
    workload = result.workload
    # Of a changed workload another stage may become the fullest; of one stage that was asked for it stays that.
    stage = None if result.stage == fullest_stage(workload) else result.stage
    base = result.peak_allocated_bytes - outline(workload, result.stage).peak_bytes

    def with_each(price: Callable[[Workload], int]) -> Peaks:
        def peaks(changes: Sequence[Mapping[str, Any]]) -> list[int | None]:
            changed = (with_fields(workload, fields) for fields in changes)
            return [None if each is None else price(each) for each in changed]

        return peaks

    outlined = with_each(lambda changed: base + outline(changed, result.stage).peak_bytes)
    estimated = with_each(lambda changed: estimate(changed, stage).ledger.peak().bytes)
    return with_ranges(result.summary, outlined, estimated)
