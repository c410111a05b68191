"""What a result rests on that its workload does not state: each such field gives the peak a range."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from labkit.summary import Case, PeakRange, Range, Summary
from labkit.workload import Workload
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
    """The fields that the workload does not state, with their plausible values."""
    for each in open_fields(workload):
        others = (Choice(*alternative) for alternative in each.alternatives)
        yield Open(each.field, each.cause, (Choice(each.assumed, {}), *others))


def ranged(summary: Summary, fields: Iterable[Open], singly: Peaks, together: Peaks) -> Summary:
    """The summary with a range for each of the fields that moves its peak, and one for all of them together.

    `singly` gives the peak with one field changed, `together` with all of them at their lowest or highest.
    """
    listed = tuple(fields)
    others = iter(singly([choice.fields for each in listed for choice in each.choices[1:]]))
    ranges, low, high = [], dict[str, Any](), dict[str, Any]()
    peaks: list[int | None] = [summary.peak_allocated_bytes]
    for each in listed:
        alternatives = [(next(others), choice) for choice in each.choices[1:]]
        ran = [(peak, choice) for peak, choice in alternatives if peak is not None]
        cases = [(summary.peak_allocated_bytes, each.choices[0]), *ran]
        if len({peak for peak, _ in cases}) == 1:
            continue  # it decides nothing here
        found = [Case(value=choice.value, peak_allocated_bytes=peak) for peak, choice in cases]
        ranges.append(Range.over(each.field, each.cause, found))
        plausible = [(peak, choice.fields) for peak, choice in cases if choice.plausible]
        peaks += [peak for peak, _ in plausible]
        low |= min(plausible, key=lambda case: case[0])[1]
        high |= max(plausible, key=lambda case: case[0])[1]
    if not ranges:
        return summary
    peaks += together([fields for fields in (low, high) if fields])
    known = [peak for peak in peaks if peak is not None]
    span = PeakRange(low_bytes=min(known), high_bytes=max(known), causes=tuple(each.field for each in ranges))
    return summary.model_copy(update={"ranges": tuple(ranges), "peak_range": span})
