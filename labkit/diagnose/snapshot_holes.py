"""Where memory was free inside PyTorch's segments at a moment: what a request could have had, and could not."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.diagnose.snapshot_timeline import Timeline
from labkit.ledger import UNIT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_GAINS, _LOSSES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Holes:
    """Free pieces of segments, each the whole of what lies free in one piece."""

    nbytes: "Ints"
    stream: "Ints"
    """Of the segment: only this stream's requests can have it."""
    private: "NDArray[np.bool_]"
    """In a private pool, such as a CUDA graph's."""

    @property
    def total(self) -> int:
        """Bytes in all."""
        return int(self.nbytes.sum())

    def usable(self, stream: int) -> "Holes":
        """Those that a request on a stream can have."""
        chosen = (self.stream == stream) & ~self.private
        return Holes(self.nbytes[chosen], self.stream[chosen], self.private[chosen])

    @property
    def largest(self) -> int:
        """Bytes of the largest; 0 if there are none."""
        return int(self.nbytes.max(initial=0))


class _Ranges(NamedTuple):
    """Memory of the device: a range each, there once or taken away once."""

    start: "Ints"
    end: "Ints"
    sign: "Ints"
    stream: "Ints"
    private: "NDArray[np.bool_]"
    fixed: "NDArray[np.bool_]"
    """A segment of its own, which its neighbours in address do not continue."""


def holes_at(timeline: Timeline, entry: int) -> Holes:
    """The free pieces behind an entry, from the segments at the end and what was done to them since.

    A block that is gone at the end counts with its bytes rounded up to 512, where it may have been up to 1 MiB larger.
    """
    ranges = _ranges(timeline, entry)
    live_start, live_end = _live(timeline, entry)
    position = np.concatenate([ranges.start, ranges.end, live_start, live_end])
    none, one = np.zeros(len(live_start), np.int64), np.ones(len(live_start), np.int64)
    there = np.concatenate([ranges.sign, -ranges.sign, none, none])
    used = np.concatenate([np.zeros(2 * len(ranges.start), np.int64), one, -one])
    edge = np.concatenate([ranges.fixed, ranges.fixed, none == 1, none == 1])
    places, group = np.unique(position, return_inverse=True)
    change, uses, edges = (np.zeros(len(places), np.int64) for _ in range(3))
    np.add.at(change, group, there)
    np.add.at(uses, group, used)
    np.add.at(edges, group, edge.astype(np.int64))
    # Pieces between neighbouring positions.
    free = ((np.cumsum(change) > 0) & (np.cumsum(uses) <= 0))[:-1]
    begins = free & ~(np.concatenate([[False], free[:-1]]) & (edges[: len(free)] == 0))
    first = np.flatnonzero(begins)
    if not len(first):
        return Holes(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    nbytes = np.add.reduceat(np.where(free, np.diff(places), 0), first)
    given = np.flatnonzero(ranges.sign > 0)
    given = given[np.argsort(ranges.start[given], kind="stable")]
    owner = given[np.searchsorted(ranges.start[given], places[first], side="right") - 1]
    return Holes(nbytes, ranges.stream[owner], ranges.private[owner])


def _ranges(timeline: Timeline, entry: int) -> _Ranges:
    """The segments at the end, without what came since and with what went."""
    trace, segments = timeline.trace, timeline.segments
    names = [*_GAINS, *_LOSSES]
    signs = np.zeros(len(trace.actions) + 1, np.int64)
    for name in names:
        if (code := trace.code(name)) >= 0:
            signs[code] = -1 if name in _GAINS else 1
    later = np.arange(len(trace)) > entry
    chosen = np.flatnonzero(later & (signs[trace.action] != 0))
    mapping = [code for name in ("segment_map", "segment_unmap") if (code := trace.code(name)) >= 0]
    private = np.array([pool != (0, 0) for pool in trace.pools], np.bool_)
    start = _ints([segment.address for segment in segments])
    return _Ranges(
        np.concatenate([start, trace.address[chosen]]),
        np.concatenate([start + _ints([each.nbytes for each in segments]), (trace.address + trace.nbytes)[chosen]]),
        np.concatenate([np.ones(len(segments), np.int64), signs[trace.action][chosen]]),
        np.concatenate([_ints([each.stream for each in segments]), trace.stream[chosen]]),
        np.concatenate([np.array([each.pool != (0, 0) for each in segments], np.bool_), private[trace.pool[chosen]]]),
        np.concatenate(
            [np.array([not each.is_expandable for each in segments], np.bool_), ~np.isin(trace.action[chosen], mapping)]
        ),
    )


def _live(timeline: Timeline, entry: int) -> tuple["Ints", "Ints"]:
    """Where blocks in use began and ended."""
    lives, waits = timeline.lives.at(entry), timeline.waits.at(entry)
    start = np.concatenate([lives.address, waits.address])
    nbytes = -(-np.concatenate([lives.nbytes, waits.nbytes]) // UNIT) * UNIT
    # Those that are still there have known sizes.
    blocks = sorted(
        (block.address, block.nbytes)
        for segment in timeline.segments
        for block in segment.blocks
        if block.is_allocated or block.is_awaiting
    )
    if blocks:
        known, sizes = _ints([address for address, _ in blocks]), _ints([size for _, size in blocks])
        place = np.minimum(np.searchsorted(known, start), len(known) - 1)
        at_end = np.concatenate([lives.dies, waits.dies]) == len(timeline.trace)
        nbytes = np.where(at_end & (known[place] == start), sizes[place], nbytes)
    return start, start + nbytes


def _ints(values: list[int]) -> "Ints":
    return np.array(values, np.int64)
