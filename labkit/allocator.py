"""What the CUDA caching allocator makes of a list of allocations: blocks, remainders, segments.

`torch.cuda.memory_allocated` counts whole blocks, not tensors, and `memory_reserved` counts segments, so both are
found by replaying the allocations through the allocator's own rules (PyTorch `c10/cuda/CUDACachingAllocator.cpp`,
each stream alone, no garbage collection, `max_split_size_mb` unset):

- requests are rounded up to 512 bytes; up to 1 MiB they come from the small pool (segments of 2 MiB), larger ones
  from the large pool (segments of 20 MiB below 10 MiB, else the request rounded up to 2 MiB);
- the smallest free block that is large enough is taken (ties: the lowest address);
- a small-pool remainder of at least 512 bytes is split off, a large-pool one only above 1 MiB;
- a freed block merges with its free neighbours in the segment.

Known limitation: with `expandable_segments` PyTorch splits large remainders from 512 bytes on and grows one segment
per pool; the growth is modelled as whole 20 MiB (large) or 2 MiB (small) pages without unmapping.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from labkit.ledger import UNIT, rounded
from labkit.workload.gpu import MIB

_SMALL_SEGMENT, _LARGE_SEGMENT, _SEGMENT_UNIT = 2 * MIB, 20 * MIB, 2 * MIB
_DIRECT_SEGMENT_FROM = 10 * MIB


class _Block:
    __slots__ = ("address", "free", "next", "previous", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None


class Allocator:
    """The caching allocator's books. `allocate` and `free` take any hashable name for an allocation.

    >>> allocator = Allocator()
    >>> allocator.allocate("a", 3 * 2**20)
    3145728
    >>> allocator.allocated, allocator.reserved
    (3145728, 20971520)
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        self.expandable_segments = expandable_segments
        self.allocated = 0
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """Free blocks of the small (True) and the large pool, as sorted (size, address)."""
        self._blocks: dict[int, _Block] = {}
        """Free blocks by address."""
        self._used: dict[object, _Block] = {}
        self._next_address = 0

    def allocate(self, name: object, nbytes: int) -> int:
        """Hand out a block for `nbytes`; returns the block's size (0 for an empty tensor)."""
        size = rounded(nbytes)
        if size == 0:
            return 0
        small = size <= MIB
        pool = self._free[small]
        index = bisect_left(pool, (size, -1))
        block = self._blocks.pop(pool.pop(index)[1]) if index < len(pool) else self._segment(size, small)
        remainder = block.size - size
        smallest = UNIT if small or self.expandable_segments else MIB + 1
        if remainder >= smallest:
            rest = _Block(block.address + size, remainder, small)
            rest.previous, rest.next = block, block.next
            if block.next is not None:
                block.next.previous = rest
            block.next, block.size = rest, size
            self._return(rest)
        block.free = False
        self._used[name] = block
        self.allocated += block.size
        return block.size

    def _return(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address))
        self._blocks[block.address] = block

    def _withdraw(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]
        del self._blocks[block.address]

    def _segment(self, size: int, small: bool) -> _Block:
        if small:
            length = _SMALL_SEGMENT
        elif self.expandable_segments:
            length = -(-size // _LARGE_SEGMENT) * _LARGE_SEGMENT
        elif size < _DIRECT_SEGMENT_FROM:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        block = _Block(self._next_address, length, small)
        self._next_address += length
        self.reserved += length
        return block

    def free(self, name: object) -> None:
        """Give an allocation's block back; an empty tensor has none."""
        block = self._used.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        before, after = block.previous, block.next
        if before is not None and before.free:
            self._withdraw(before)
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free:
            self._withdraw(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        self._return(block)


class Simulated(NamedTuple):
    """What a replay found."""

    block_bytes: dict[int, int]
    """Block size of each allocation, by its name."""
    reserved: list[tuple[int, int]]
    """(event index, reserved bytes from there on), whenever it grew."""


def simulate(events: Iterable[tuple[int, int]], *, expandable_segments: bool = False) -> Simulated:
    """Replay events `(name, bytes)`: positive names allocate, `(-name, 0)` frees that name."""
    allocator = Allocator(expandable_segments=expandable_segments)
    blocks: dict[int, int] = {}
    reserved: list[tuple[int, int]] = []
    for index, (name, nbytes) in enumerate(events):
        if name < 0:
            allocator.free(-name)
            continue
        before = allocator.reserved
        blocks[name] = allocator.allocate(name, nbytes)
        if allocator.reserved != before:
            reserved.append((index, allocator.reserved))
    return Simulated(blocks, reserved)


def simulate_streams(events: Sequence[tuple[int, int]], stream_of: Sequence[int]) -> Simulated:
    """Replay `events` (see `simulate`), the allocation of serial n on stream `stream_of[n - 1]`.

    The caching allocator reuses a block only on the stream it was made on (`BlockComparatorSize` and `get_free_block`
    in `CUDACachingAllocator.cpp`), so the streams are replayed one by one. That a block which another stream has used
    (`record_stream`) is reused a little later is not modelled.
    """
    places: dict[int, list[int]] = {}
    for place, (serial, _) in enumerate(events):
        places.setdefault(stream_of[abs(serial) - 1], []).append(place)
    blocks: dict[int, int] = {}
    growth: list[tuple[int, int]] = []
    for indices in places.values():
        alone = simulate(events[index] for index in indices)
        blocks |= alone.block_bytes
        before = 0
        for index, reserved in alone.reserved:
            growth.append((indices[index], reserved - before))
            before = reserved
    growth.sort()
    totals = accumulate(nbytes for _, nbytes in growth)
    return Simulated(blocks, [(place, total) for (place, _), total in zip(growth, totals, strict=True)])
