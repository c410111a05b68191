"""An estimate's peak with each value of what its workload leaves open."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.memory.estimate import BlockPeaks, Estimate, fullest_stage
from labkit.memory.outline import outline
from labkit.ranges import Peaks
from labkit.ranges import ranged as with_ranges
from labkit.summary import Summary
from labkit.workload import Workload
from labkit.workload.unstated import with_fields


def ranged(result: Estimate) -> Summary:
    """The summary of an estimate, with a range for each field that was left open, and one for all of them together.

    What is given is what an estimate comes to where the field is stated. Which fields decide nothing, and which values
    go together at the ends of the range, is asked of outlines, which take a tenth of the time.
    """
    workload = result.workload
    # Of a changed workload another stage may become the fullest; of one stage that was asked for it stays that.
    asked = None if result.stage == fullest_stage(workload) else result.stage
    base = result.peak_allocated_bytes - outline(workload, result.stage).peak_bytes
    # An observed peak raises those of other values as well.
    more = result.peak_allocated_bytes - result.own_peak_bytes

    def with_each(price: Callable[[Workload, int], int]) -> Peaks:
        def peaks(changes: Sequence[Mapping[str, Any]]) -> list[int | None]:
            changed = (with_fields(workload, fields) for fields in changes)
            return [
                None if each is None else price(each, fullest_stage(each) if asked is None else asked)
                for each in changed
            ]

        return peaks

    estimated = with_each(lambda changed, stage: more + BlockPeaks(changed, stage).peak.bytes)
    outlined = with_each(lambda changed, stage: base + outline(changed, stage).peak_bytes)
    return with_ranges(result.summary, estimated, outlined)
