"""A memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), of any version since 1.13, as one value."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from labkit.errors import InputError
from labkit.files import read_regular
from labkit.snapshot.entries import Entries, Rows, SnapshotError
from labkit.snapshot.plain import Unpickler

if TYPE_CHECKING:
    from numpy.typing import NDArray

LARGEST = 2**31
"""Bytes of a snapshot's file."""
_MOST_FRAMES = 10_000
"""Of one stack; Python and C++ together have hundreds."""
_MOST_DEVICES = 128
"""PyTorch's number of a device has 8 bits with a sign (`c10::DeviceIndex`)."""
_MOST_BYTES = 2**60
"""That all allocations of a trace or all blocks may have together: sums stay within 64 bits."""
_LIMIT = 2**63
_LONGEST_NAME = 500


class Frame(NamedTuple):
    """A place in a stack trace."""

    file: str
    line: int
    name: str

    @property
    def is_python(self) -> bool:
        """Whether it is Python's, and not C++'s."""
        return self.file.endswith((".py", ">"))


class Block(NamedTuple):
    """A part of a segment, when the snapshot was taken (`Block` in `torch/cuda/memory.py`)."""

    address: int
    nbytes: int
    requested: int
    """Bytes that were asked for; of an inactive block what was asked for last, or nothing."""
    state: str
    """`active_allocated`, `inactive`, or waiting for another stream: `active_awaiting_free`, `active_pending_free`."""
    stack: int
    """Place in `Snapshot.stacks`, or `NO_STACK`."""

    @property
    def is_allocated(self) -> bool:
        """Whether a tensor has it."""
        return self.state == "active_allocated"

    @property
    def is_awaiting(self) -> bool:
        """Whether nobody has it any more, but another stream may still use it."""
        return self.state in ("active_awaiting_free", "active_pending_free")


@dataclass(frozen=True)
class Segment:
    """Memory that the device gave in one piece, or mapped into one range, when the snapshot was taken."""

    device: int
    address: int
    nbytes: int
    stream: int
    pool: tuple[int, int]
    """(0, 0), or that of a private pool."""
    is_expandable: bool
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Trace:
    """What a device's allocator did, in order (`TraceEntry` in `torch/cuda/memory.py`): one row for each entry."""

    actions: tuple[str, ...]
    """Names that `action` has places of."""
    pools: tuple[tuple[int, int], ...]
    action: "NDArray[np.int64]"
    address: "NDArray[np.int64]"
    """Of an `oom`: what the device had free."""
    nbytes: "NDArray[np.int64]"
    """As asked for, of `alloc` and `free_...`; of `segment_...` what the device gave or took."""
    stream: "NDArray[np.int64]"
    time: "NDArray[np.int64]"
    """Microseconds, 0 where there is none."""
    stack: "NDArray[np.int64]"
    """Place in `Snapshot.stacks`, or `NO_STACK`."""
    pool: "NDArray[np.int64]"
    """Place in `pools`."""

    @classmethod
    def empty(cls) -> "Trace":
        """That of a device without recorded history."""
        return cls((), (), *[np.zeros(0, np.int64)] * 7)

    def __len__(self) -> int:
        return len(self.action)

    def code(self, name: str) -> int:
        """What `action` has for a name; -1 if it is not among them."""
        return self.actions.index(name) if name in self.actions else -1

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Action, address, bytes and stream of each entry."""
        names = self.actions
        columns = (self.action.tolist(), self.address.tolist(), self.nbytes.tolist(), self.stream.tolist())
        for action, address, nbytes, stream in zip(*columns, strict=True):
            yield names[action], address, nbytes, stream


@dataclass(frozen=True)
class Snapshot:
    """What a process's allocators held, and did before."""

    segments: tuple[Segment, ...]
    traces: tuple[Trace, ...]
    """For each device, counted from 0; empty where no history was recorded."""
    stacks: tuple[tuple[Frame, ...], ...]
    """Stack traces, innermost frame first."""
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Of the allocator: `PYTORCH_CUDA_ALLOC_CONF`, `expandable_segments`, ..."""

    def trace(self, device: int) -> Trace:
        """The trace of a device.

        Raises:
            InputError: there is none.
        """
        if not 0 <= device < len(self.traces):
            raise InputError(f"no memory snapshot of device {device}: it has {len(self.traces)}, counted from 0")
        return self.traces[device]

    @property
    def devices(self) -> tuple[int, ...]:
        """Those that anything is known of."""
        traced = {number for number, trace in enumerate(self.traces) if len(trace)}
        return tuple(sorted(traced | {segment.device for segment in self.segments}))


def load_snapshot(path: Path) -> Snapshot:
    """Read a snapshot's file. Nothing in it is executed.

    Raises:
        InputError: it cannot be read, is no snapshot, or is more than plain data.
    """
    try:
        content = read_regular(path, LARGEST)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return parse_snapshot(content)
    except SnapshotError as error:
        raise InputError(f"{path}: no memory snapshot: {error}") from error


def parse_snapshot(content: bytes) -> Snapshot:
    """A snapshot of what its file holds.

    Raises:
        SnapshotError: it is no snapshot, or is more than plain data.
    """
    entries = Entries()
    found = Unpickler(content, entries).load()
    if type(found) is list:  # as `torch.cuda.memory_snapshot()` gives it
        found = {"segments": found}
    if type(found) is not dict or not {"segments", "device_traces"} & found.keys():
        raise SnapshotError("it has neither segments nor traces")
    return _Reader(entries).read(found)


class _Reader:
    """Makes a snapshot of the dictionaries that PyTorch writes."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._seen: set[int] = set()
        """What was read: something that a file has in many places would be read for each."""
        self._traced = 0
        """Entries of the traces that were read."""
        self._frames: dict[int, Frame] = {}
        self._names: dict[str, str] = {}
        """Names of frames cut short, by what they are cut from."""

    def read(self, found: dict[str, Any]) -> Snapshot:
        segments = [self._segment(each) for each in _list(found, "segments")]
        written = _list(found, "device_traces")
        if len(written) > _MOST_DEVICES:
            raise SnapshotError(f"it has traces of more than {_MOST_DEVICES} devices")
        traces = [self._trace(each) for each in written]
        sizes = ((each.nbytes, *(max(block.nbytes, block.requested) for block in each.blocks)) for each in segments)
        if sum(map(sum, sizes)) > _MOST_BYTES:
            raise SnapshotError("its segments are larger than any GPU")
        settings = found.get("allocator_settings")
        plain = settings.items() if type(settings) is dict else ()
        return Snapshot(
            tuple(segments),
            tuple(traces),
            tuple(self._stack(frames) for frames in self._entries.stacks),
            {name: value for name, value in plain if type(value) in (str, int, float, bool)},
        )

    def _once(self, found: Any, sentence: str) -> None:
        """Refuse what was read before; it must live as long as the file's other contents do."""
        if id(found) in self._seen:
            raise SnapshotError(sentence)
        self._seen.add(id(found))

    def _segment(self, found: Any) -> Segment:
        if type(found) is not dict:
            raise SnapshotError("one of its segments is no dictionary")
        self._once(found, "it has one segment several times")
        device, blocks, address = _number(found, "device", "a segment", 0), [], _number(found, "address", "a segment")
        if device >= _MOST_DEVICES:
            raise SnapshotError(f"a segment is of device {device}, and PyTorch counts to {_MOST_DEVICES - 1}")
        for each in _list(found, "blocks"):
            blocks.append(self._block(each, address))
            address = blocks[-1].address + blocks[-1].nbytes
        return Segment(
            device,
            _number(found, "address", "a segment"),
            _number(found, "total_size", "a segment"),
            _number(found, "stream", "a segment", 0, least=-_LIMIT),
            self._entries.pools[self._entries.pool_place(found.get("segment_pool_id"))],
            found.get("is_expandable") is True,
            tuple(blocks),
        )

    def _block(self, found: Any, address: int) -> Block:
        if type(found) is not dict:
            raise SnapshotError("one of its blocks is no dictionary")
        self._once(found, "it has one block several times")
        history, size = found.get("history"), _number(found, "size", "a block")
        # Until PyTorch 2.0: what became of the block before, the latest first.
        latest = history[0] if type(history) is list and history and type(history[0]) is dict else {}
        requested = _number(found, "requested_size", "a block", _number(latest, "real_size", "a block", size))
        state = found.get("state")
        return Block(
            _number(found, "address", "a block", address),
            size,
            requested,
            state if type(state) is str else "",
            self._entries.stack_place(found.get("frames", latest.get("frames"))),
        )

    def _trace(self, found: Any) -> Trace:
        if type(found) is not list:
            raise SnapshotError("one of its traces is no list")
        if any(type(rows) is not Rows for rows in found):
            raise SnapshotError("an entry of a trace is no action of PyTorch's allocator")
        if found:
            self._once(found, "two of its devices have one trace")
        entries = self._entries
        self._traced += sum(rows.stop - rows.start for rows in found)
        if self._traced > len(entries):
            raise SnapshotError("its traces have the same entries several times")
        trace = Trace(tuple(entries.actions), tuple(entries.pools), *entries.columns(found))
        for name, values in (("address", trace.address), ("size", trace.nbytes), ("time", trace.time)):
            if int(values.min(initial=0)) < 0:
                raise SnapshotError(f"the {name} of an entry of a trace is no whole number that PyTorch writes")
        # An allocation that failed may have been of any size.
        if float(trace.nbytes[trace.action != trace.code("oom")].sum(dtype=np.float64)) > _MOST_BYTES:
            raise SnapshotError("its traces allocate more than any GPU could")
        return trace

    def _stack(self, frames: list[Any]) -> tuple[Frame, ...]:
        if len(frames) > _MOST_FRAMES:
            raise SnapshotError(f"a stack trace has more than {_MOST_FRAMES} frames")
        return tuple([self._frames.get(id(frame)) or self._frame(frame) for frame in frames])

    def _frame(self, found: Any) -> Frame:
        if type(found) is not dict:
            raise SnapshotError("a frame of a stack trace is no dictionary")
        file, name = found.get("filename"), found.get("name")
        frame = self._frames[id(found)] = Frame(
            self._short(file) if type(file) is str else "",
            _number(found, "line", "a frame", 0, least=-_LIMIT),
            self._short(name) if type(name) is str else "",
        )
        return frame

    def _short(self, text: str) -> str:
        if len(text) <= _LONGEST_NAME:
            return text
        short = self._names.get(text)
        if short is None:
            short = self._names[text] = text[:_LONGEST_NAME]
        return short


def _list(found: dict[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if value is None:
        return []
    if type(value) is not list:
        raise SnapshotError(f"its {name} are no list")
    return value


def _number(found: dict[str, Any], name: str, owner: str, missing: int | None = None, least: int = 0) -> int:
    value = found.get(name, missing)
    if type(value) is not int or not least <= value < _LIMIT:
        raise SnapshotError(f"the {name} of {owner} is no whole number that PyTorch writes")
    return value
