"""What PyTorch's caching allocator makes of a list of allocations: blocks, remainders, segments.

`torch.cuda.memory_allocated` counts whole blocks, not tensors, and `memory_reserved` counts segments, so both are
found by replaying the allocations through the allocator's own rules (PyTorch 2.14,
`c10/cuda/CUDACachingAllocator.cpp`; settings: `labkit.workload.caching`):

- requests are rounded up to 512 bytes, or to divisions of a power of two; up to 1 MiB they come from the small pool
  (segments of 2 MiB), larger ones from the large pool (segments of 20 MiB below 10 MiB, else the request rounded up
  to 2 MiB); every stream has pools of its own;
- the smallest free block that is large enough is taken (ties: the lowest address);
- a small-pool remainder of at least 512 bytes is split off, a large-pool one only above 1 MiB;
- a freed block merges with its free neighbours in the segment;
- with `expandable_segments` a pool has one segment for all, which is mapped page by page (2 MiB in the small pool,
  20 MiB in the large one) as far as needed, and every remainder of at least 512 bytes is split off;
- where the device's memory does not suffice, cached blocks go back to it: those that are large enough (with
  `max_split_size_mb`), then all whole segments, or all whole pages of expandable ones; else it is out of memory.

`tests/test_allocator_pytorch.py` plays the same requests through PyTorch's own code.

Known limitations: segments lie in the order they were made, where a GPU may give a freed address out again; a block
that another stream has used (`record_stream`) is reused at once, as its work is done when it is issued; pools of CUDA
graphs are not told apart.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from labkit.errors import InputError
from labkit.ledger import UNIT, rounded
from labkit.workload.caching import DEFAULT, AllocatorSettings
from labkit.workload.gpu import GIB, GPUS, MIB
from labkit.workload.training import Training

_SMALL_SEGMENT, _SEGMENT_UNIT = 2 * MIB, 2 * MIB
"""`kSmallBuffer`, `kRoundLarge`."""
_DIRECT_SEGMENT_FROM = 10 * MIB
"""`kMinLargeAlloc`."""
_UNLIMITED = 2**62


class _Block:
    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "put_back", "segment", "size")

    def __init__(self, address: int, size: int, pool: "_Pool", segment: int, mapped: bool = True) -> None:
        self.address = address
        self.segment = segment
        """Address of its segment."""
        self.size = size
        self.pool = pool
        self.mapped = mapped
        """False: addresses of an expandable segment without memory behind them."""
        self.free = True
        self.previous: _Block | None = None
        self.next: _Block | None = None
        self.put_back = 0
        """How many requests the large pools had seen when it was freed."""


class _Pool:
    """Free blocks of one stream, for small requests or for large ones."""

    __slots__ = ("blocks", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.blocks: list[tuple[int, int, _Block]] = []
        """Sorted (size, address, block)."""
        self.unmapped: list[tuple[int, _Block]] = []
        """Sorted (address, block), of expandable segments."""

    def put(self, block: _Block) -> None:
        if block.mapped:
            insort(self.blocks, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def take(self, block: _Block) -> None:
        if block.mapped:
            del self.blocks[bisect_left(self.blocks, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class OutOfMemory(Exception):
    """The device cannot give what a request needs, even after cached blocks went back to it."""

    def __init__(self, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(requested_bytes, allocated_bytes, reserved_bytes)
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class Allocator:
    """The caching allocator's books. `allocate` and `free` take any hashable name for an allocation.

    >>> allocator = Allocator()
    >>> allocator.allocate("a", 3 * 2**20)
    3145728
    >>> allocator.allocated, allocator.reserved
    (3145728, 20971520)
    """

    def __init__(
        self, settings: AllocatorSettings = DEFAULT, *, device_bytes: int = _UNLIMITED, limited: bool = True
    ) -> None:
        """`limited=False`: the device gives what is asked for, and garbage alone is measured by `device_bytes`."""
        self.allocated = 0
        self.reserved = 0
        self.retries = 0
        """How often all cached blocks went back to the device to make room (`num_alloc_retries`)."""
        self._expandable = settings.expandable_segments
        self._rounding = settings if settings.roundup_power2_divisions else None
        self._large_segment = settings.large_segment_size_mb * MIB
        self._max_split = _UNLIMITED if settings.max_split_size_mb is None else settings.max_split_size_mb * MIB
        self._max_rounding = settings.max_non_split_rounding_mb * MIB
        self._device = device_bytes if limited else _UNLIMITED
        self._allowed = self._garbage_above = _UNLIMITED
        # `set_fraction`: at 1.0 PyTorch neither limits itself nor collects garbage.
        if settings.per_process_memory_fraction < 1:
            allowed = int(settings.per_process_memory_fraction * device_bytes)
            self._allowed = allowed if limited else _UNLIMITED
            if settings.garbage_collection_threshold is not None:
                self._garbage_above = int(settings.garbage_collection_threshold * allowed)
        self._large_requests = 0
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._used: dict[object, _Block] = {}
        self._next_address = 0

    def allocate(self, name: object, nbytes: int, stream: int = 0) -> int:
        """Hand out a block for `nbytes` on `stream`; returns the block's size (0 for an empty tensor).

        Raises:
            OutOfMemory: the device does not suffice.
        """
        if nbytes == 0:
            return 0
        size = rounded(nbytes) if self._rounding is None else self._rounding.rounded(nbytes)
        small = size <= MIB
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._cached(pool, size) or self._new(pool, size)
        remainder = block.size - size
        if remainder and (
            remainder >= UNIT if small or self._expandable else remainder > MIB and size < self._max_split
        ):
            pool.put(self._split(block, size))
        block.free = False
        self._used[name] = block
        self.allocated += block.size
        return block.size

    def free(self, name: object) -> None:
        """Give an allocation's block back; an empty tensor has none."""
        block = self._used.pop(name, None)
        if block is None:
            return
        self.allocated -= block.size
        block.free = True
        self._put_back(block)

    def holds(self, name: object) -> bool:
        """Whether the name has a block."""
        return name in self._used

    def lift_limit(self) -> None:
        """From here on the device gives whatever is asked for."""
        self._device = self._allowed = _UNLIMITED

    def empty_cache(self) -> None:
        """Give back to the device what whole segments or pages are free (`torch.cuda.empty_cache`).

        Streams below zero are those of private pools, which CUDA graphs keep as long as they live.
        """
        for (stream, _), pool in self._pools.items():
            if stream < 0:
                continue
            for _, _, block in tuple(pool.blocks):
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.next is None:
                    self._release(block)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """`get_free_block`."""
        if not pool.small:
            self._large_requests += 1
        blocks = pool.blocks
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        if self._expandable:
            # A block that its segment can grow behind counts as large as it can become.
            while index + 1 < len(blocks) and _room(blocks[index + 1][2]) < _room(blocks[index][2]):
                index += 1
        found = blocks[index][0]
        if found >= (self._max_split if size < self._max_split else size + self._max_rounding):
            return None
        return blocks.pop(index)[2]

    def _new(self, pool: _Pool, size: int) -> _Block:
        """Memory that the device gives for a block of at least `size`; cached blocks make room for it if they must."""
        if self.reserved > self._garbage_above:
            self._collect_garbage()
        block = self._from_device(pool, size)
        if block is None and self._release_large_enough(pool, size):
            block = self._from_device(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._from_device(pool, size)
        if block is None:
            raise OutOfMemory(size, self.allocated, self.reserved)
        return block

    def _from_device(self, pool: _Pool, size: int) -> _Block | None:
        """`alloc_block`."""
        if pool.small:
            length = _SMALL_SEGMENT
        elif size < _DIRECT_SEGMENT_FROM:
            length = self._large_segment
        else:
            length = -(-size // _SEGMENT_UNIT) * _SEGMENT_UNIT
        if self.reserved + length > self._allowed:
            return None
        if self._expandable:
            return self._expanded(pool, size)
        if self.reserved + length > self._device:
            return None
        self.reserved += length
        return self._addresses(pool, length)

    def _addresses(self, pool: _Pool, length: int, mapped: bool = True) -> _Block:
        block = _Block(self._next_address, length, pool, self._next_address, mapped)
        self._next_address += length
        return block

    def _split(self, block: _Block, size: int) -> _Block:
        """Cut `block` to `size`; returns the rest, which is in no list yet."""
        rest = _Block(block.address + size, block.size - size, block.pool, block.segment, block.mapped)
        rest.put_back = self._large_requests
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size = rest, size
        return rest

    def _put_back(self, block: _Block) -> _Block:
        """Merge a free block that is in no list with its free neighbours, and list it; returns the whole."""
        pool, before, after = block.pool, block.previous, block.next
        if before is not None and before.free and before.mapped == block.mapped:
            pool.take(before)
            before.size += block.size
            before.next = after
            if after is not None:
                after.previous = before
            block = before
        if after is not None and after.free and after.mapped == block.mapped:
            pool.take(after)
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        block.put_back = self._large_requests
        pool.put(block)
        return block

    def _release(self, block: _Block) -> None:
        """Give a whole segment back to the device."""
        block.pool.take(block)
        self.reserved -= block.size

    def _release_large_enough(self, pool: _Pool, size: int) -> bool:
        """Release an oversize block that `size` fits in, or several that sum up to it, the largest first.

        `release_available_cached_blocks`: only with `max_split_size_mb`, and not of expandable segments.
        """
        if self._max_split == _UNLIMITED or self._expandable:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.blocks, (wanted,))
        if index < len(pool.blocks):
            self._release(pool.blocks[index][2])
            return True
        released = 0
        while released < wanted and pool.blocks and pool.blocks[-1][0] >= self._max_split:
            released += pool.blocks[-1][0]
            self._release(pool.blocks[-1][2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release large segments that nothing has used for longer than the average, until the threshold is kept.

        `garbage_collect_cached_blocks`; ages are counted in requests to the large pools.
        """
        excess = self.reserved - self._garbage_above
        idle = [
            block
            for pool in self._pools.values()
            if not pool.small
            for _, _, block in pool.blocks
            if block.previous is None and block.next is None and not self._expandable
        ]
        while idle and excess > 0:
            ages = {block: self._large_requests - block.put_back for block in idle}
            average = sum(ages.values()) / len(idle)
            for block in idle:
                if ages[block] >= average:
                    excess -= block.size
                    self._release(block)
            idle = [block for block in idle if ages[block] < average]

    def _expanded(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages until a free block has `size` (`try_allocate_expandable_block`)."""
        block = self._expandable_block(pool, size)
        if not block.mapped:
            mapped = self._map(block, min(block.size, size))
            if mapped is None:
                return None
            block = mapped
        while block.size < size:
            assert block.next is not None
            mapped = self._map(block.next, min(size - block.size, block.next.size))
            if mapped is None:
                return None
            block = mapped
        pool.take(block)
        return block

    def _expandable_block(self, pool: _Pool, size: int) -> _Block:
        """The first free block that has `size` with the unmapped ones behind it (`find_expandable_block`)."""
        for _, unmapped in pool.unmapped:
            first = unmapped.previous if unmapped.previous is not None and unmapped.previous.free else unmapped
            room = 0
            following: _Block | None = first
            while following is not None and following.free and room < size:
                room += following.size
                following = following.next
            if room >= size:
                return first
        page = self._page(pool)
        # `ExpandableSegment` reserves addresses for 9/8 of the device's memory.
        block = self._addresses(pool, -(-max(self._device * 9 // 8, size) // page) * page, mapped=False)
        pool.put(block)
        return block

    def _page(self, pool: _Pool) -> int:
        """What an expandable segment grows by."""
        return _SMALL_SEGMENT if pool.small else self._large_segment

    def _map(self, block: _Block, size: int) -> _Block | None:
        """Put pages behind the first `size` bytes of an unmapped block; None where the device has too few."""
        page = self._page(block.pool)
        length = -(-size // page) * page
        if self.reserved + length > self._device:
            return None
        self.reserved += length
        block.pool.take(block)
        if length < block.size:
            block.pool.put(self._split(block, length))
        block.mapped = True
        return self._put_back(block)

    def _unmap(self, block: _Block) -> None:
        """Take the whole pages from under a free block (`unmap_block`)."""
        page, start = self._page(block.pool), block.segment
        begin = start - (start - block.address) // page * page
        end = start + (block.address + block.size - start) // page * page
        if begin >= end:
            return
        pool = block.pool
        pool.take(block)
        self.reserved -= end - begin
        if end < block.address + block.size:
            pool.put(self._split(block, end - block.address))
        if begin > block.address:
            rest = self._split(block, begin - block.address)
            pool.put(block)
            block = rest
        block.mapped = False
        self._put_back(block)


def _room(block: _Block) -> int:
    """What a block has with the unmapped one behind it."""
    return block.size + (0 if block.next is None or block.next.mapped else block.next.size)


class Simulated(NamedTuple):
    """What a replay found."""

    block_bytes: dict[int, int]
    """Block size of each allocation, by its name."""
    reserved: list[tuple[int, int]]
    """(event index, most reserved bytes so far), whenever that grew."""
    retries: list[int]
    """Indices of events at which all cached blocks went back to the device to make room."""
    out_of_memory: tuple[int, OutOfMemory] | None
    """The first event that the device did not suffice for; from there on it gave whatever was asked for."""

    def is_beyond(self, training: Training, device_bytes: int) -> bool:
        """More is reserved than the allocator may take of a device."""
        may_take = training.allocator.per_process_memory_fraction * device_bytes
        return bool(self.reserved) and self.reserved[-1][1] > may_take

    def fragmentation(self, phase_of: Callable[[int], str]) -> str:
        """How a rank whose tensors fit does within the device's memory, in a sentence; empty where nothing happens.

        `phase_of` names the phase of an allocation, by its index among the events.
        """
        if self.out_of_memory is not None:
            index, failed = self.out_of_memory
            asked, allocated, reserved = (
                f"{nbytes / GIB:.2f} GiB"
                for nbytes in (failed.requested_bytes, failed.allocated_bytes, failed.reserved_bytes)
            )
            return (
                f"Fragmentation: in {phase_of(index)} it runs out of memory, asking for {asked} with {allocated} "
                f"allocated and {reserved} reserved; training.allocator.expandable_segments: true may help."
            )
        if self.retries:
            times = "once" if len(self.retries) == 1 else f"{len(self.retries)} times"
            return (
                f"Fragmentation: all cached blocks go back to the GPU {times} to make room, first in "
                f"{phase_of(self.retries[0])}; each time costs time."
            )
        return ""


EMPTY_CACHE = 0, 0
"""The event of `torch.cuda.empty_cache`."""


def simulate(
    events: Iterable[tuple[int, int]],
    streams: Sequence[int] | None = None,
    settings: AllocatorSettings = DEFAULT,
    *,
    device_bytes: int = _UNLIMITED,
    limited: bool = True,
) -> Simulated:
    """Replay events `(name, bytes)`: positive names allocate, `(-name, 0)` frees that name; or `EMPTY_CACHE`.

    Args:
        events: what is asked for, in order.
        streams: the stream of the allocation named n is `streams[n - 1]`; None: there is one stream alone.
        settings: of the allocator.
        device_bytes: see `Allocator`.
        limited: see `Allocator`.
    """
    allocator = Allocator(settings, device_bytes=device_bytes, limited=limited)
    allocate, free = allocator.allocate, allocator.free
    blocks: dict[int, int] = {}
    reserved: list[tuple[int, int]] = []
    retries: list[int] = []
    out_of_memory = None
    most = tried = 0
    for index, (name, nbytes) in enumerate(events):
        if name < 0:
            free(-name)
            continue
        if name == 0:
            allocator.empty_cache()
            continue
        stream = 0 if streams is None else streams[name - 1]
        try:
            blocks[name] = allocate(name, nbytes, stream)
        except OutOfMemory as failed:
            out_of_memory = index, failed
            allocator.lift_limit()
            blocks[name] = allocate(name, nbytes, stream)
        if allocator.reserved > most:
            most = allocator.reserved
            reserved.append((index, most))
        if allocator.retries > tried:
            tried = allocator.retries
            retries.append(index)
    return Simulated(blocks, reserved, retries, out_of_memory)


def simulate_unlimited(events: Sequence[tuple[int, int]], streams: Sequence[int], training: Training) -> Simulated:
    """Replay a rank's events with its allocator's settings as if the GPU had room for whatever is asked for.

    Raises:
        InputError: it is asked for more than an address can tell.
    """
    gpu_bytes = GPUS[training.gpu].total_memory_bytes
    try:
        return simulate(events, streams, training.allocator, device_bytes=gpu_bytes, limited=False)
    except OutOfMemory as failed:
        asked = f"the rank asks for {failed.requested_bytes / GIB:.3g} GiB at once"
        raise InputError(f"{asked}, which no GPU can address; make micro-batches or sequences smaller") from None


def simulate_training(
    events: Sequence[tuple[int, int]], streams: Sequence[int], training: Training, device_bytes: int | None = None
) -> Simulated:
    """The same; where that is more than there is, `retries` and `out_of_memory` say how the rank does within it.

    `device_bytes` are the GPU's if left out.
    """
    device_bytes = GPUS[training.gpu].total_memory_bytes if device_bytes is None else device_bytes
    free = simulate_unlimited(events, streams, training)
    if not free.is_beyond(training, device_bytes):
        return free
    within = simulate(events, streams, training.allocator, device_bytes=device_bytes)
    return free._replace(retries=within.retries, out_of_memory=within.out_of_memory)
