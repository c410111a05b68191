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
_SHORT = 256
"""Texts and numbers of fewer bytes are passed over with the rest."""
_LIMIT = 2**63


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


def _harmless(length: int) -> re.Pattern[bytes]:
    """A run of opcodes that any pickle of `length` bytes may have: nearly all of one, passed over at once.

    Not in it are texts of `_SHORT` bytes or more, and places in the memo far beyond `length`.
    """
    by_argument: dict[int, list[bytes]] = {}
    for opcode in pickletools.opcodes:
        size = opcode.arg.n if opcode.arg else 0
        if size >= 0 and "PUT" not in opcode.name and opcode.name != "STOP":
            by_argument.setdefault(size, []).append(re.escape(opcode.code.encode("latin-1")))
    runs = [b"[%b].{%d}" % (b"".join(codes), size) for size, codes in sorted(by_argument.items())]

    def counted(zeros: int) -> bytes:
        """As many bytes as a byte says, which `zeros` bytes of zero follow."""
        return b"|".join(re.escape(bytes([size])) + b"\0" * zeros + b".{%d}" % size for size in range(_SHORT))

    runs += [b"[\x8aCU\x8c](?:%b)" % counted(0), b"X(?:%b)" % counted(3)]  # LONG1, SHORT_BIN..., BINUNICODE
    runs += [b"q.", b"r..[\0-%b]\0" % re.escape(bytes([min(length >> 16, 255)]))]  # BINPUT, LONG_BINPUT
    return re.compile(b"(?:%b)*+" % b"|".join(runs), re.DOTALL)


def _check_memo(content: bytes) -> None:
    """The unpickler's memo is as long as its largest place says: eleven bytes can ask for all memory.

    Raises:
        ValueError: a place that a pickle of this length does not need, or no pickle.
    """
    file, name, harmless = io.BytesIO(content), "", _harmless(len(content))
    while name != "STOP":
        run = harmless.match(content, file.tell())
        assert run is not None
        file.seek(run.end())
        opcode, argument, _ = next(pickletools.genops(file))
        name = opcode.name
        if "PUT" in name and not 0 <= int(argument or 0) <= len(content):
            raise ValueError(f"it has {len(content)} bytes and names object {argument}")


def _events(traces: Any, device: int) -> list[Event]:
    """The entries of a device's trace, which make room for their events one by one: there may be millions."""
    if not 0 <= device < len(traces):
        raise ValueError(f"it has {len(traces)}, counted from 0")
    entries: list[Any] = traces[device]
    for place, entry in enumerate(entries):
        entries[place] = _event(place, entry)
    return entries


def _event(place: int, entry: Any) -> Event:
    """An entry of a trace.

    Raises:
        ValueError: a field is not what PyTorch writes.
    """
    event = Event(entry["action"], entry.get("addr", 0), entry["size"], entry["stream"])
    _, address, size, stream = event
    fits = type(address) is type(size) is type(stream) is int
    if fits and 0 <= address < _LIMIT and 0 <= size < _LIMIT and -_LIMIT <= stream < _LIMIT:
        return event
    fields = (("address", address, 0), ("size", size, 0), ("stream", stream, -_LIMIT))
    wrong = next(name for name, value, least in fields if type(value) is not int or not least <= value < _LIMIT)
    raise ValueError(f"the {wrong} of event {place} is no whole number that PyTorch writes")


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
