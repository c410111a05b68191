"""CUDA memory snapshots: each device's page, what ended the run, and what two snapshots differ in."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from labkit.diagnose.facts import Evidence, Facts, MemoryReport, OutOfMemory, Phase
from labkit.diagnose.reading import Reading, Source
from labkit.diagnose.snapshot_compare import Held, SnapshotComparison, compared
from labkit.diagnose.snapshot_findings import findings
from labkit.diagnose.snapshot_frames import UNRECORDED
from labkit.diagnose.snapshot_holes import holes_at
from labkit.diagnose.snapshot_live import MOMENTS, Group, Origins, step_ends
from labkit.diagnose.snapshot_page import (
    DevicePage,
    Failure,
    Grown,
    Growth,
    Line,
    PhasePeak,
    Point,
    Pool,
    SnapshotPage,
    gib,
)
from labkit.diagnose.snapshot_timeline import Timeline, timeline_of
from labkit.errors import InputError
from labkit.snapshot import LARGEST, Snapshot, SnapshotError, parse_snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_BEGINS = re.compile(
    rb"\x80|\((?:dp|lp|i[\w.]+\n[\w.]+\n)|[}\]]q\0|c[\w.]+\n[\w.]+\n(?:p\d+\n|q.|\()"
)  # fmt: skip
"""Pickles of protocol 2 and later; in protocols 0 and 1 of dictionaries, of lists, and of what would be imported."""
_LINES, _STRETCHES, _FAILURES = 200, 200, 5
_MOST_DEVICES = 64
_FEWEST_STEPS, _GROWN, _MOSTLY, _GROWING_LINES = 3, 0.01, 0.9, 5
"""Memory grows if nine of ten steps, of at least three, leave more than the one before, and at last 1 % of the peak."""


@dataclass(frozen=True)
class SnapshotReading(Reading):
    """What a snapshot says."""

    held: tuple[Held, ...] = ()
    """Of each device, for a comparison."""


def accepts(head: bytes) -> bool:
    """Whether it begins like a pickle."""
    return _BEGINS.match(head) is not None


def read(source: Source) -> SnapshotReading:
    """What a snapshot says; nothing in it is executed.

    Raises:
        InputError: it is damaged, no snapshot, or more than plain data.
    """
    content = source.stream.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise InputError(f"{source.name}: no memory snapshot of at most {gib(LARGEST)}; record fewer entries")
    try:
        snapshot = parse_snapshot(content)
    except SnapshotError as error:
        raise InputError(f"{source.name}: no memory snapshot: {error}") from error
    del content
    if len(snapshot.devices) > _MOST_DEVICES:
        raise InputError(f"{source.name}: no memory snapshot: it has {len(snapshot.devices)} devices")
    origins = Origins(snapshot)
    pages, held, facts = [], [], Facts()
    for device in snapshot.devices:
        timeline = timeline_of(snapshot, device)
        page = _page(snapshot, origins, timeline, device)
        pages.append(page)
        at_peak, at_end = timeline.lives.at(timeline.peak), timeline.lives.at(len(timeline.trace) - 1)
        held.append(Held(device, tuple(origins.groups(at_peak)), tuple(origins.groups(at_end))))
        facts.out_of_memory += _out_of_memory(source.name, page)
        if page.entries and not page.failures:
            facts.memory.append(_report(source.name, page))
    if not pages:
        raise InputError(f"{source.name}: no memory snapshot: it has no segments and no entries")
    return SnapshotReading(
        source.name,
        "memory snapshot",
        facts=facts,
        findings=tuple(finding for page in pages for finding in findings(source.name, page)),
        detail=SnapshotPage(source=source.name, devices=tuple(pages)),
        held=tuple(held),
    )


def comparison(readings: Sequence[Reading]) -> SnapshotComparison | None:
    """What the second of two snapshots has that the first has not; None of any other number of them."""
    found = [reading for reading in readings if isinstance(reading, SnapshotReading)]
    if len(found) != 2:
        return None
    before, after = found
    return compared((before.source, before.held), (after.source, after.held))


def _page(snapshot: Snapshot, origins: Origins, timeline: Timeline, device: int) -> DevicePage:
    length = len(timeline.trace)
    moments = origins.moments(timeline)
    groups = origins.groups(timeline.lives.at(timeline.peak))
    start, end = _point(timeline, moments, -1), _point(timeline, moments, length - 1)
    blocks = [block for segment in timeline.segments for block in segment.blocks if block.is_allocated]
    expandable = any(segment.is_expandable for segment in timeline.segments)
    return DevicePage(
        device=device,
        entries=length,
        seconds=end.seconds,
        start=start,
        peak=_point(timeline, moments, timeline.peak),
        end=end,
        blocks_bytes=sum(block.nbytes for block in blocks),
        expandable_segments=expandable or snapshot.settings.get("expandable_segments") is True,
        phases=tuple(_phase_peaks(timeline, moments)),
        live=tuple(_line(origins, group) for group in groups[:_LINES]),
        left_out=len(groups[_LINES:]),
        left_out_bytes=sum(group.nbytes for group in groups[_LINES:]),
        failures=tuple(_failures(origins, timeline, moments)),
        growth=_growth(origins, timeline, moments),
        pools=tuple(_pools(timeline)),
        timeline=tuple(_point(timeline, moments, entry) for entry in _stretches(timeline)),
    )


def _point(timeline: Timeline, moments: "Ints", entry: int) -> Point:
    allocated, reserved = timeline.at(entry)
    time = timeline.trace.time
    timed = entry >= 0 and int(time[0]) > 0
    return Point(
        entry=entry,
        seconds=round((int(time[entry]) - int(time[0])) / 1e6, 6) if timed else None,
        phase=MOMENTS[int(moments[entry])] if entry >= 0 else "unknown",
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        awaiting_bytes=int(timeline.awaiting[entry]) if entry >= 0 else timeline.waits.before,
    )


def _phase_peaks(timeline: Timeline, moments: "Ints") -> Iterator[PhasePeak]:
    for code, phase in enumerate(MOMENTS):
        inside = np.flatnonzero(moments == code)
        allocated, reserved = timeline.allocated[inside], timeline.reserved[inside]
        if allocated.any():
            yield PhasePeak(phase=phase, allocated_bytes=int(allocated.max()), reserved_bytes=int(reserved.max()))


def _stretches(timeline: Timeline) -> list[int]:
    """Of equal stretches of the trace the entry with most allocated, and the last entry."""
    length = len(timeline.trace)
    bounds = np.unique(np.linspace(0, length, min(_STRETCHES, length) + 1).astype(np.int64)).tolist()
    chosen = [begin + int(timeline.allocated[begin:end].argmax()) for begin, end in pairwise(bounds)]
    return sorted({*chosen, length - 1}) if length else []


def _line(origins: Origins, group: Group) -> Line:
    site, moment = group.origin
    return Line(
        site=site.place,
        caller=site.caller,
        phase=moment,
        bytes=group.nbytes,
        count=group.tensors,
        stack=origins.lines(group.stack),
    )


def _failures(origins: Origins, timeline: Timeline, moments: "Ints") -> Iterator[Failure]:
    trace = timeline.trace
    failed = np.flatnonzero(trace.action == trace.code("oom"))[-_FAILURES:]
    for entry in failed.tolist():
        holes, stream = holes_at(timeline, entry), int(trace.stream[entry])
        usable, origin = holes.usable(stream), origins.of(int(trace.stack[entry]))
        yield Failure(
            at=_point(timeline, moments, entry),
            requested_bytes=int(trace.nbytes[entry]),
            stream=stream,
            device_free_bytes=int(trace.address[entry]),
            unallocated_bytes=holes.total,
            usable_bytes=usable.total,
            largest_usable_bytes=usable.largest,
            private_bytes=int(holes.nbytes[holes.private].sum()),
            site="" if origin.site == UNRECORDED else origin.site.place,
            caller=origin.site.caller,
        )


def _growth(origins: Origins, timeline: Timeline, moments: "Ints") -> Growth | None:
    """Whether what is left behind the optimizer rises; the first step, which makes the optimizer's state, aside."""
    ends = step_ends(moments)[1:]
    if len(ends) < _FEWEST_STEPS:
        return None
    left = timeline.allocated[ends]
    grown = int(left[-1] - left[0])
    if grown < _GROWN * timeline.at(timeline.peak)[0] or float((np.diff(left) > 0).mean()) < _MOSTLY:
        return None
    first, last = (origins.groups(timeline.lives.at(int(end))) for end in (ends[0], ends[-1]))
    before = {group.origin: group.nbytes for group in first}
    more = [(group.nbytes - before.get(group.origin, 0), group.origin.site) for group in last]
    more = sorted((each for each in more if each[0] > 0), reverse=True)[:_GROWING_LINES]
    return Growth(
        steps=len(ends),
        first=_point(timeline, moments, int(ends[0])),
        last=_point(timeline, moments, int(ends[-1])),
        lines=tuple(Grown(site=site.place, caller=site.caller, bytes=nbytes) for nbytes, site in more),
    )


def _pools(timeline: Timeline) -> Iterator[Pool]:
    for pool in sorted({segment.pool for segment in timeline.segments} - {(0, 0)}):
        segments = [segment for segment in timeline.segments if segment.pool == pool]
        blocks = [block for segment in segments for block in segment.blocks if block.is_allocated]
        yield Pool(
            pool=f"({pool[0]}, {pool[1]})",
            reserved_bytes=sum(segment.nbytes for segment in segments),
            allocated_bytes=sum(block.nbytes for block in blocks),
        )


_PHASES: dict[str, Phase] = {
    "setup": "setup",
    "forward": "forward",
    "backward": "backward",
    "recompute": "backward",
    "grad_sync": "grad_sync",
    "optimizer": "optimizer",
    "evaluation": "evaluation",
    "saving": "saving",
    "unknown": "",
}


def _report(source: str, page: DevicePage) -> MemoryReport:
    """What a run that did not fail had allocated, while it was recorded."""
    return MemoryReport(
        evidence=Evidence.quote(source, None, f"GPU {page.device}, peak {page.peak.sentence}"),
        allocated=page.end.allocated_bytes,
        max_allocated=page.peak.allocated_bytes,
        reserved=page.end.reserved_bytes,
        max_reserved=max(phase.reserved_bytes for phase in page.phases) if page.phases else page.end.reserved_bytes,
    )


def _out_of_memory(source: str, page: DevicePage) -> Iterator[OutOfMemory]:
    """The last failure of a device: earlier ones did not end the run."""
    for failure in page.failures[-1:]:
        at = failure.at
        yield OutOfMemory(
            evidence=Evidence.quote(source, None, f"GPU {page.device}, {failure.sentence}"),
            device=page.device,
            phase=_PHASES[at.phase],
            place=failure.site,
            replays=at.phase == "recompute",
            recorded=True,
            usable=failure.usable_bytes,
            largest=failure.largest_usable_bytes,
            expandable=page.expandable_segments,
            requested=failure.requested_bytes,
            free=failure.device_free_bytes,
            allocated=at.allocated_bytes,
            reserved=at.reserved_bytes,
        )
