"""PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`), and their requests replayed."""

import io
import pickle
from pathlib import Path
from typing import Any, NamedTuple

from labkit.allocator import Allocator
from labkit.errors import InputError
from labkit.files import read_regular
from labkit.workload.caching import DEFAULT, AllocatorSettings

_LARGEST = 2**31
"""Bytes of a snapshot's file."""


class _PlainData(pickle.Unpickler):
    """A snapshot is dictionaries, lists, text and numbers; a pickle that names anything else could run it."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}")


class Event(NamedTuple):
    """An entry of a device's trace (`TraceEntry` in `c10/core/CachingDeviceAllocator.h`)."""

    action: str
    address: int
    """0 of `oom`, which has none."""
    bytes: int
    """As asked for, of `alloc` and `free_...`; of `segment_...` what the device gave or took."""
    stream: int


class Replayed(NamedTuple):
    """Reserved bytes behind each allocation of a snapshot."""

    recorded: list[int]
    simulated: list[int]


def read_events(path: Path, device: int = 0) -> list[Event]:
    """What a snapshot's trace of `device` has, in order. Nothing in the file is executed.

    Raises:
        InputError: the file is no snapshot, or has no such device.
    """
    try:
        snapshot = _PlainData(io.BytesIO(read_regular(path, _LARGEST))).load()
        trace = snapshot["device_traces"][device]
        return [Event(entry["action"], entry.get("addr", 0), entry["size"], entry["stream"]) for entry in trace]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises what it likes
        raise InputError(f"{path}: no memory snapshot of device {device}: {str(error)[:200]}") from error


def replay(events: list[Event], settings: AllocatorSettings = DEFAULT) -> Replayed:
    """Make the requests of a snapshot that was recorded from the process's start.

    Where the recording gives segments back to the device, the simulation gives back all that it can, as PyTorch does
    when memory is short and in `empty_cache`.

    Raises:
        InputError: something is freed that was allocated before the recording began.
    """
    allocator, found, reserved = Allocator(settings), Replayed([], []), 0
    gave_back = False
    for place, event in enumerate(events):
        if event.action in ("segment_alloc", "segment_map"):
            reserved += event.bytes
        elif event.action in ("segment_free", "segment_unmap"):
            reserved -= event.bytes
            if not gave_back:
                allocator.empty_cache()
        elif event.action == "alloc":
            allocator.allocate(event.address, event.bytes, event.stream)
            found.recorded.append(reserved)
            found.simulated.append(allocator.reserved)
        elif event.action == "free_completed":
            if not allocator.holds(event.address):
                late = "frees what was allocated before the recording began; record from the process's start"
                raise InputError(f"event {place} of the snapshot {late}")
            allocator.free(event.address)
        gave_back = event.action in ("segment_free", "segment_unmap")
    return found
