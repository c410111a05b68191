"""PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`), and their requests replayed."""

import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NamedTuple

from labkit.allocator import Allocator
from labkit.errors import InputError
from labkit.files import read_regular
from labkit.workload.caching import DEFAULT, AllocatorSettings

_LARGEST = 2**31
"""Bytes of a snapshot's file."""
_RUN = re.compile(
    b"(?:%b)*+"
    % b"|".join(
        re.escape(opcode.code.encode("latin-1")) + b".{%d}" % (opcode.arg.n if opcode.arg else 0)
        for opcode in pickletools.opcodes
        if (opcode.arg is None or opcode.arg.n >= 0) and "PUT" not in opcode.name and opcode.name != "STOP"
    ),
    re.DOTALL,
)
"""Opcodes with arguments of a fixed size that name no place in a pickle's memo: most of it, passed over at once."""


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


def _check_memo(content: bytes) -> None:
    """The unpickler's memo is as long as its largest place says: eleven bytes can ask for all memory.

    Raises:
        ValueError: a place that a pickle of this length does not need, or no pickle.
    """
    file, name = io.BytesIO(content), ""
    while name != "STOP":
        run = _RUN.match(content, file.tell())
        assert run is not None
        file.seek(run.end())
        opcode, argument, _ = next(pickletools.genops(file))
        name = opcode.name
        if "PUT" in name and not 0 <= int(argument or 0) <= len(content):
            raise ValueError(f"it has {len(content)} bytes and names object {argument}")


def _events(traces: Any, device: int) -> list[Event]:
    if not 0 <= device < len(traces):
        raise ValueError(f"it has {len(traces)}, counted from 0")
    return [_event(place, entry) for place, entry in enumerate(traces[device])]


def _event(place: int, entry: Any) -> Event:
    """An entry of a trace.

    Raises:
        ValueError: a field is not what PyTorch writes.
    """
    event = Event(entry["action"], entry.get("addr", 0), entry["size"], entry["stream"])
    for name, value, least in (
        ("address", event.address, 0),
        ("size", event.bytes, 0),
        ("stream", event.stream, -(2**63)),
    ):
        if type(value) is not int or not least <= value < 2**63:
            raise ValueError(f"the {name} of event {place} is no whole number that PyTorch writes")
    return event


def read_events(path: Path, device: int = 0) -> list[Event]:
    """What a snapshot's trace of `device` has, in order. Nothing in the file is executed.

    Raises:
        InputError: the file is no snapshot, or has no such device.
    """
    try:
        content = read_regular(path, _LARGEST)
        _check_memo(content)
        return _events(_PlainData(io.BytesIO(content)).load()["device_traces"], device)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises what it likes
        reason = str(error)[:200] or type(error).__name__
        raise InputError(f"{path}: no memory snapshot of device {device}: {reason}") from error


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
