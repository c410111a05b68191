"""What a result rests on that its workload does not state: each such field gives the peak a range."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from labkit.summary import Case, PeakRange, Range, Summary
from labkit.workload import Routing, Workload
from labkit.workload.unstated import open_fields

type Peaks = Callable[[Sequence[Mapping[str, Any]]], Sequence[int | None]]
"""The peak with fields changed, for each mapping of dotted paths to values; None where that could not run."""


class Choice(NamedTuple):
    """One value of an open field."""

    value: str
    fields: Mapping[str, Any]
    plausible: bool = True
    """Else a bound: given as a case of its own, but no part of the range of all fields together."""


class Open(NamedTuple):
    """A field that is left open; the first choice is the one that the result has taken."""

    field: str
    cause: str
    choices: tuple[Choice, ...]


def left_open(workload: Workload) -> Iterator[Open]:
    """What the workload does not state, with the plausible values of each."""
    for each in open_fields(workload):
        others = (Choice(*alternative) for alternative in each.alternatives)
        yield Open(each.field, each.cause, (Choice(each.assumed, {}), *others))
    if workload.routing is None and any(layer.mlp == "moe" for layer in workload.model.kinds):
        yield Open(
            "routing",
            "the router decides how many rows reach this rank's experts",
            (
                Choice("balanced", {}),
                Choice("allowance", {"routing": Routing(kind="allowance")}),
                Choice("worst", {"routing": Routing(kind="worst")}, plausible=False),
            ),
        )


def ranged(summary: Summary, peaks: Peaks, roughly: Peaks | None = None) -> Summary:
    """The summary with a range for each open field that moves its peak, and one for all of them together.

    The ends of the latter are looked for from the field that moves the peak most to the one that moves it least: a
    value is taken where it moves the peak further, as one may undo what another does.

    Args:
        summary: of the workload as it is.
        peaks: gives the peaks with fields changed.
        roughly: gives them with less effort and less exactly: which fields decide nothing, which go together.
    """
    opened, base = tuple(left_open(summary.workload)), summary.peak_allocated_bytes
    others = [choice.fields for each in opened for choice in each.choices[1:]]
    found = peaks(others) if roughly is None else _exactly(roughly(others), others, base, peaks)
    left = iter(found)
    ranges, moved = [], list[tuple[int, Mapping[str, Any]]]()
    for each in opened:
        alternatives = [(next(left), choice) for choice in each.choices[1:]]
        cases = [(peak, choice) for peak, choice in alternatives if peak is not None]
        if {peak for peak, _ in cases} <= {base}:
            continue  # it decides nothing here
        shown = [Case(value=choice.value, peak_allocated_bytes=peak) for peak, choice in cases]
        assumed = Case(value=each.choices[0].value, peak_allocated_bytes=base)
        ranges.append(Range.over(each.field, each.cause, [assumed, *shown]))
        moved += [(peak, choice.fields) for peak, choice in cases if choice.plausible]
    if not ranges:
        return summary
    lowest = sorted((case for case in moved if case[0] < base), key=lambda case: case[0])
    highest = sorted((case for case in moved if case[0] > base), key=lambda case: -case[0])
    together = [_furthest(base, cases, roughly or peaks, sign) for cases, sign in ((lowest, -1), (highest, 1))]
    if roughly is not None:
        combined = [fields for _, fields in together if fields and fields not in others]
        together = [(peak, {}) for peak in peaks(combined) if peak is not None]
    ends = [base, *(peak for peak, _ in (*together, *moved))]
    span = PeakRange(low_bytes=min(ends), high_bytes=max(ends), causes=tuple(each.field for each in ranges))
    return summary.model_copy(update={"ranges": tuple(ranges), "peak_range": span})


def _exactly(
    rough: Sequence[int | None], changes: Sequence[Mapping[str, Any]], base: int, peaks: Peaks
) -> list[int | None]:
    """The peaks of those that are not the base's."""
    moving = [fields for peak, fields in zip(rough, changes, strict=True) if peak not in (None, base)]
    exact = iter(peaks(moving))
    return [peak if peak in (None, base) else next(exact) for peak in rough]


def _furthest(
    base: int, cases: Sequence[tuple[int, Mapping[str, Any]]], peaks: Peaks, sign: int
) -> tuple[int, Mapping[str, Any]]:
    """The peak that is furthest in a direction, and the fields that make it; `cases` with the furthest first."""
    at, chosen = base, dict[str, Any]()
    for alone, fields in cases:
        both = {**fields, **chosen}
        (peak,) = peaks([both]) if chosen else (alone,)
        if peak is not None and sign * peak > sign * at:
            at, chosen = peak, both
    return at, chosen
