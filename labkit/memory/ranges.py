"""What an estimate rests on that the workload does not state: each such field gives the peak a range."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from labkit.memory.estimate import Estimate, estimate, fullest_stage
from labkit.memory.outline import outline
from labkit.summary import Case, PeakRange, Range, Summary
from labkit.workload import Routing, Workload
from labkit.workload.unstated import open_fields, with_fields


class _Choice(NamedTuple):
    """One value of an open field."""

    value: str
    fields: Mapping[str, Any]
    plausible: bool = True
    """Else a bound: given as a case of its own, but no part of the range of all fields together."""


class _Open(NamedTuple):
    field: str
    cause: str
    choices: tuple[_Choice, ...]


def ranged(result: Estimate) -> Summary:
    """The summary of an estimate, with a range for each field that was left open, and one for all of them together.

    The ends of the latter are estimates of their own. The single fields are asked of outlines, which take a tenth of
    the time: their peaks are the estimate's and what the tensors differ by, so allocator blocks are not followed.
    """
    ranges, low, high = [], dict[str, Any](), dict[str, Any]()
    peaks, base = [result.peak_allocated_bytes], outline(result.workload, result.stage).peak_bytes
    for each in _open(result.workload):
        cases = [(choice, result.peak_allocated_bytes + _moved(result, choice.fields, base)) for choice in each.choices]
        if len({peak for _, peak in cases}) == 1:
            continue  # it decides nothing here
        found = [Case(value=choice.value, peak_allocated_bytes=peak) for choice, peak in cases]
        ranges.append(Range.over(each.field, each.cause, found))
        plausible = [(peak, choice.fields) for choice, peak in cases if choice.plausible]
        peaks += [peak for peak, _ in plausible]
        low |= min(plausible, key=lambda case: case[0])[1]
        high |= max(plausible, key=lambda case: case[0])[1]
    if not ranges:
        return result.summary
    for fields in (low, high):
        changed = with_fields(result.workload, fields) if fields else None
        # Of the workload another stage may become the fullest; of one stage that was asked for it stays that.
        stage = None if result.stage == fullest_stage(result.workload) else result.stage
        peaks += [] if changed is None else [estimate(changed, stage).ledger.peak().bytes]
    together = PeakRange(low_bytes=min(peaks), high_bytes=max(peaks), causes=tuple(each.field for each in ranges))
    return result.summary.model_copy(update={"ranges": tuple(ranges), "peak_range": together})


def _open(workload: Workload) -> Iterator[_Open]:
    for each in open_fields(workload):
        others = (_Choice(*alternative) for alternative in each.alternatives)
        yield _Open(each.field, each.cause, (_Choice(each.assumed, {}), *others))
    if workload.routing is None and any(layer.mlp == "moe" for layer in workload.model.kinds):
        yield _Open(
            "routing",
            "the router decides how many rows reach this rank's experts",
            (
                _Choice("balanced", {}),
                _Choice("allowance", {"routing": Routing(kind="allowance")}),
                _Choice("worst", {"routing": Routing(kind="worst")}, plausible=False),
            ),
        )


def _moved(result: Estimate, fields: Mapping[str, Any], base_peak_bytes: int) -> int:
    """By how much the peak of the tensors moves from the estimate's with fields changed.

    Fields that cannot go together move nothing.
    """
    changed = with_fields(result.workload, fields) if fields else None
    if changed is None:
        return 0
    return outline(changed, result.stage).peak_bytes - base_peak_bytes
