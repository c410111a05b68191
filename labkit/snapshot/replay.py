"""The requests of a memory snapshot, made again."""

from typing import NamedTuple

from labkit.allocator import Allocator
from labkit.errors import InputError
from labkit.snapshot.snapshot import Trace
from labkit.workload.caching import DEFAULT, AllocatorSettings


class Replayed(NamedTuple):
    """Reserved bytes behind each allocation of a snapshot."""

    recorded: list[int]
    simulated: list[int]


def replay(trace: Trace, settings: AllocatorSettings = DEFAULT) -> Replayed:
    """Make the requests of a snapshot that was recorded from the process's start.

    Where the recording gives segments back to the device, the simulation gives back all that it can, as PyTorch does
    when memory is short and in `empty_cache`.

    Raises:
        InputError: something is freed that was allocated before the recording began.
    """
    allocator, found, reserved = Allocator(settings), Replayed([], []), 0
    gave_back = False
    for place, (action, address, nbytes, stream) in enumerate(trace.rows()):
        if action in ("segment_alloc", "segment_map"):
            reserved += nbytes
        elif action in ("segment_free", "segment_unmap"):
            reserved -= nbytes
            if not gave_back:
                allocator.empty_cache()
        elif action == "alloc":
            allocator.allocate(address, nbytes, stream)
            found.recorded.append(reserved)
            found.simulated.append(allocator.reserved)
        elif action == "free_completed":
            if not allocator.holds(address):
                late = "frees what was allocated before the recording began; record from the process's start"
                raise InputError(f"event {place} of the snapshot {late}")
            allocator.free(address)
        gave_back = action in ("segment_free", "segment_unmap")
    return found
