"""The allocator simulation of a trace with several streams."""

from collections.abc import Sequence
from itertools import accumulate

from labkit.allocator import Simulated, simulate


def simulate_streams(events: Sequence[tuple[int, int]], stream_of: Sequence[int]) -> Simulated:
    """Replay `events` (see `labkit.allocator.simulate`), the allocation of serial n on stream `stream_of[n - 1]`.

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
