"""What a device's allocator held through a recorded trace: sums behind every entry, and what was live at a moment."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from labkit.snapshot import NO_STACK, Block, Segment, Snapshot, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_ALLOC, _REQUESTED, _COMPLETED = 0, 1, 2
_GAINS, _LOSSES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Lives:
    """Allocations, one in each place."""

    born: "Ints"
    """The entry that makes it; -1 of what was made before the recording began."""
    dies: "Ints"
    """The entry that lets go of it; the trace's length where none does."""
    address: "Ints"
    nbytes: "Ints"
    """As asked for."""
    stack: "Ints"
    """Place in `Snapshot.stacks`, or `NO_STACK`."""

    @property
    def before(self) -> int:
        """Bytes of those from before the recording."""
        return int(self.nbytes[self.born < 0].sum())

    def at(self, entry: int) -> "Lives":
        """Those that are live behind an entry; -1 is the beginning."""
        chosen = (self.born <= entry) & (self.dies > entry)
        columns = (self.born, self.dies, self.address, self.nbytes, self.stack)
        return Lives(*(column[chosen] for column in columns))


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A device's memory behind each entry of its trace. Bytes are those asked for; blocks are a little larger.

    What was allocated before the recording began shows where it is freed, or in the blocks at the end: so the sums are
    right from the first entry on.
    """

    trace: Trace
    segments: tuple[Segment, ...]
    """Of this device, at the end."""
    allocated: "Ints"
    """Held by tensors: an allocation ends where its freeing is requested."""
    awaiting: "Ints"
    """Freed, and perhaps still used by another stream."""
    reserved: "Ints"
    start: tuple[int, int]
    """Allocated and reserved before the first entry."""
    not_freed: int
    """Allocations that the blocks at the end do not have: their freeing was not recorded."""
    lives: Lives
    waits: Lives
    """Freed memory that another stream may still use, from the request to free it on."""

    @property
    def peak(self) -> int:
        """The entry behind which most is allocated; -1: at no time more than before the first."""
        if not len(self.allocated) or self.start[0] > int(self.allocated.max()):
            return -1
        return int(self.allocated.argmax())

    def at(self, entry: int) -> tuple[int, int]:
        """Allocated and reserved bytes behind an entry; -1 is the beginning."""
        return self.start if entry < 0 else (int(self.allocated[entry]), int(self.reserved[entry]))


def timeline_of(snapshot: Snapshot, device: int) -> Timeline:
    """The timeline of a device; without a trace only what was there at the end."""
    segments = tuple(segment for segment in snapshot.segments if segment.device == device)
    trace = snapshot.traces[device] if device < len(snapshot.traces) else Trace.empty()
    blocks = [block for segment in segments for block in segment.blocks]
    events = _by_address(trace)
    live, not_freed = _allocations(trace, events, [block for block in blocks if block.is_allocated])
    waits = _waiting(trace, events, blocks)
    reserved, reserved_before = _reserved(trace, segments)
    return Timeline(
        trace=trace,
        segments=segments,
        allocated=_sums(live, len(trace)),
        awaiting=_sums(waits, len(trace)),
        reserved=reserved,
        start=(live.before, reserved_before),
        not_freed=not_freed if segments else 0,
        lives=live,
        waits=waits,
    )


class _Events(NamedTuple):
    """The entries that allocate and free, those of an address together, in order."""

    entry: "Ints"
    kind: "NDArray[np.int8]"
    before: "NDArray[np.int8]"
    """Kind of the one before at the same address, -1 of the first."""
    after: "Ints"
    """Entry of the next one at the same address; the trace's length where there is none."""


def _by_address(trace: Trace) -> _Events:
    codes = [trace.code(name) for name in ("alloc", "free_requested", "free_completed")]
    kinds = np.full(len(trace.actions) + 1, -1, np.int8)
    for number, code in enumerate(codes):
        if code >= 0:
            kinds[code] = number
    kind = kinds[trace.action]
    entry = np.flatnonzero(kind >= 0)
    entry = entry[np.lexsort((entry, trace.address[entry]))]
    kind = kind[entry]
    before, after = np.full(len(entry), -1, np.int8), np.full(len(entry), len(trace))
    same = trace.address[entry[1:]] == trace.address[entry[:-1]]
    before[1:] = np.where(same, kind[:-1], -1)
    after[:-1] = np.where(same, entry[1:], len(trace))
    return _Events(entry, kind, before, after)


def _allocations(trace: Trace, events: _Events, blocks: list[Block]) -> tuple[Lives, int]:
    """Every allocation, and how many are live at the end of the trace and not among the blocks.

    One ends with the next entry of its address, whatever that is: the request to free it, or what comes later where the
    requests were not recorded.
    """
    made = events.kind == _ALLOC
    # What is let go of first and allocated nowhere was there before.
    lets_go = _COMPLETED if not (events.kind == _REQUESTED).any() else _REQUESTED
    gone = events.entry[(events.before < 0) & (events.kind == lets_go)]
    born, dies = events.entry[made], events.after[made]
    at_end = set(trace.address[born[dies == len(trace)]].tolist())
    kept = [block for block in blocks if block.address not in at_end]
    early = len(gone) + len(kept)
    lives = Lives(
        born=np.concatenate([born, np.full(early, -1)]),
        dies=np.concatenate([dies, gone, np.full(len(kept), len(trace))]),
        address=np.concatenate([trace.address[born], trace.address[gone], _ints(block.address for block in kept)]),
        nbytes=np.concatenate([trace.nbytes[born], trace.nbytes[gone], _ints(block.requested for block in kept)]),
        stack=np.concatenate([trace.stack[born], np.full(len(gone), NO_STACK), _ints(block.stack for block in kept)]),
    )
    return lives, len(at_end - {block.address for block in blocks})


def _waiting(trace: Trace, events: _Events, blocks: list[Block]) -> Lives:
    asked = (events.kind == _REQUESTED) & (events.before != _REQUESTED)
    late = events.entry[(events.before < 0) & (events.kind == _COMPLETED)] if asked.any() else events.entry[:0]
    at_end = set(trace.address[events.entry[asked & (events.after == len(trace))]].tolist())
    kept = [block for block in blocks if block.is_awaiting and block.address not in at_end]
    entry = events.entry[asked]
    return Lives(
        born=np.concatenate([entry, np.full(len(late) + len(kept), -1)]),
        dies=np.concatenate([events.after[asked], late, np.full(len(kept), len(trace))]),
        address=np.concatenate([trace.address[entry], trace.address[late], _ints(block.address for block in kept)]),
        nbytes=np.concatenate([trace.nbytes[entry], trace.nbytes[late], _ints(block.requested for block in kept)]),
        stack=np.concatenate([trace.stack[entry], trace.stack[late], _ints(block.stack for block in kept)]),
    )


def _reserved(trace: Trace, segments: Sequence[Segment]) -> tuple["Ints", int]:
    """Reserved bytes behind each entry, and before the first."""
    change = np.zeros(len(trace), np.int64)
    for names, sign in ((_GAINS, 1), (_LOSSES, -1)):
        for name in names:
            change += np.where(trace.action == trace.code(name), sign * trace.nbytes, 0)
    sums = np.cumsum(change)
    before = sum(segment.nbytes for segment in segments) - int(change.sum())
    before = max(before, -int(sums.min(initial=0)))
    return before + sums, before


def _sums(lives: Lives, length: int) -> "Ints":
    """Bytes behind each of `length` entries."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, lives.born + 1, lives.nbytes)
    np.subtract.at(change, lives.dies + 1, lives.nbytes)
    return np.cumsum(change)[1 : length + 1]


def _ints(values: Iterable[int]) -> "Ints":
    return np.fromiter(values, np.int64)
