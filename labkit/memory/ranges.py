"""What an estimate rests on that the workload does not state: each such field gives the peak a range."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from labkit.memory.estimate import Estimate, estimate
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
    """The summary of an estimate, with a range for each field that was left open, and one for all of them together."""
    ranges, low, high, peak_with = [], dict[str, Any](), dict[str, Any](), _Peaks(result)
    peaks = [result.peak_allocated_bytes]
    for each in _open(result.workload):
        if not _decides(result, each):
            continue
        cases = [(choice, peak_with(choice.fields)) for choice in each.choices]
        found = [Case(value=choice.value, peak_allocated_bytes=peak) for choice, peak in cases]
        ranges.append(Range.over(each.field, each.cause, found))
        plausible = [(peak, choice.fields) for choice, peak in cases if choice.plausible]
        peaks += [peak for peak, _ in plausible]
        low |= min(plausible, key=lambda case: case[0])[1]
        high |= max(plausible, key=lambda case: case[0])[1]
    if not ranges:
        return result.summary
    if len(ranges) > 1:
        peaks += [peak_with(fields) for fields in (low, high)]
    together = PeakRange(low_bytes=min(peaks), high_bytes=max(peaks), causes=tuple(each.field for each in ranges))
    return result.summary.model_copy(update={"ranges": tuple(ranges), "peak_range": together})


def _open(workload: Workload) -> Iterator[_Open]:
    for each in open_fields(workload):
        others = (_Choice(*alternative) for alternative in each.alternatives)
        yield _Open(each.field, each.cause, (_Choice(each.assumed, {}), *others))
    if workload.routing is None and any(layer.mlp == "moe" for layer in workload.model.layers):
        yield _Open(
            "routing",
            "the router decides how many rows reach this rank's experts",
            (
                _Choice("balanced", {}),
                _Choice("allowance", {"routing": Routing(kind="allowance")}),
                _Choice("worst", {"routing": Routing(kind="worst")}, plausible=False),
            ),
        )


def _decides(result: Estimate, field: _Open) -> bool:
    """Whether the field moves the peak of the tensors: asked of outlines, which take a tenth of an estimate's time."""
    workloads = (with_fields(result.workload, choice.fields) for choice in field.choices)
    return len({outline(each, result.stage).peak_bytes for each in workloads if each is not None}) > 1


class _Peaks:
    """Prices an estimate's workload with fields changed, each change once."""

    def __init__(self, result: Estimate) -> None:
        self._workload = result.workload
        self._known: dict[frozenset[tuple[str, Any]], int] = {frozenset(): result.peak_allocated_bytes}

    def __call__(self, fields: Mapping[str, Any]) -> int:
        """The peak; fields that cannot go together leave it as it is."""
        key = frozenset(fields.items())
        if key not in self._known:
            changed = with_fields(self._workload, fields)
            self._known[key] = self._known[frozenset()] if changed is None else estimate(changed).ledger.peak().bytes
        return self._known[key]
