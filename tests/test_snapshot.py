"""Snapshots recorded from PyTorch's allocator, over the CUDA of `tests/pytorch_allocator`, replayed."""

import contextlib
import gzip
import io
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.snapshot import Snapshot, Trace, load_snapshot, parse_snapshot, replay
from labkit.snapshot.entries import Entries, SnapshotError
from labkit.snapshot.plain import Unpickler
from labkit.workload.caching import AllocatorSettings

RECORDED = Path(__file__).parent / "pytorch_allocator"
STEP = gzip.decompress((RECORDED / "step.pickle.gz").read_bytes())
"""As PyTorch 2.14 wrote it, of training steps that run out of memory (`record.py`)."""
NATIVE = gzip.decompress((RECORDED / "native.pickle.gz").read_bytes())
"""Shorter, with C++'s frames."""


def entries_of(trace: Trace, snapshot: Snapshot) -> list[dict[str, Any]]:
    """A trace as PyTorch's own entries."""
    found = []
    for place, (action, address, size, stream) in enumerate(trace.rows()):
        stack = snapshot.stacks[trace.stack[place]]
        found.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": stream,
                "time_us": int(trace.time[place]),
                "frames": [{"filename": frame.file, "line": frame.line, "name": frame.name} for frame in stack],
                "pool_id": trace.pools[trace.pool[place]],
            }
        )
    return found


@pytest.mark.parametrize("name", ["default", "expandable"])
def test_a_replay_reserves_what_was_recorded(name: str) -> None:
    """120 requests on two streams of a device of 400 MiB, which has to be given cached blocks back."""
    trace = load_snapshot(RECORDED / f"snapshot_{name}.pickle").trace(0)
    replayed = replay(trace, AllocatorSettings(expandable_segments=name == "expandable"))
    assert replayed.simulated == replayed.recorded
    assert len(replayed.recorded) > 50
    assert {"segment_free", "segment_unmap"} & set(trace.actions)


@pytest.mark.parametrize("content", [STEP, NATIVE], ids=["step", "native"])
def test_what_is_read_is_what_pytorch_wrote(content: bytes) -> None:
    """Every entry, one by one or by a pattern, is the one that Python's own unpickler finds."""
    found, written = parse_snapshot(content), pickle.loads(content)  # noqa: S301
    (trace,) = found.traces
    unread = {"compile_context", "user_metadata"}
    entries = [{key: value for key, value in each.items() if key not in unread} for each in written["device_traces"][0]]
    assert entries_of(trace, found) == entries
    assert found.settings["PYTORCH_CUDA_ALLOC_CONF"] == ""
    assert found.settings["max_split_size"] == -1
    for segment, its in zip(found.segments, written["segments"], strict=True):
        assert segment.nbytes == its["total_size"]
        blocks = [(block.address, block.nbytes, block.requested, block.state) for block in segment.blocks]
        names = ("address", "size", "requested_size", "state")
        assert blocks == [tuple(each[name] for name in names) for each in its["blocks"]]


def rewritten(content: bytes, change: Callable[[dict[str, Any]], object], protocol: int = 4) -> bytes:
    """A snapshot with something changed, as Python writes it."""
    written = pickle.loads(content)  # noqa: S301
    change(written)
    return pickle.dumps(written, protocol)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(protocol: int) -> None:
    again, first = parse_snapshot(rewritten(STEP, lambda _: None, protocol)), parse_snapshot(STEP)
    assert entries_of(again.trace(0), again) == entries_of(first.trace(0), first)
    assert [[block[:4] for block in segment.blocks] for segment in again.segments] == [
        [block[:4] for block in segment.blocks] for segment in first.segments
    ]


def test_frames_written_anew_for_each_entry_are_read() -> None:
    """PyTorch 2.0 made a dictionary for each frame of each entry."""

    def anew(written: dict[str, Any]) -> None:
        for entry in written["device_traces"][0]:
            entry["frames"] = [dict(frame) for frame in entry["frames"]]

    again, first = parse_snapshot(rewritten(STEP, anew)), parse_snapshot(STEP)
    assert entries_of(again.trace(0), again) == entries_of(first.trace(0), first)
    assert len(again.stacks) < len(again.trace(0)) / 2, "most are known by the bytes that write them"


def test_older_layouts_are_read() -> None:
    """A list of segments; what a block was before (`history`) instead of its stack; no addresses of blocks."""
    frame = {"filename": "train.py", "line": 3, "name": "forward"}
    history = [{"addr": 1024, "real_size": 900, "frames": [frame]}, {"addr": 1024, "real_size": 7, "frames": []}]
    blocks = [{"size": 1024, "state": "inactive"}, {"size": 1024, "state": "active_allocated", "history": history}]
    segments = [{"device": 1, "address": 0, "total_size": 2048, "stream": 0, "blocks": blocks}]
    (segment,) = parse_snapshot(pickle.dumps(segments)).segments
    assert segment.device == 1
    assert [(block.address, block.nbytes, block.requested) for block in segment.blocks] == [
        (0, 1024, 1024),
        (1024, 1024, 900),
    ]
    snapshot = parse_snapshot(pickle.dumps({"segments": segments}))
    assert snapshot.stacks[snapshot.segments[0].blocks[1].stack][0].name == "forward"
    assert snapshot.devices == (1,)


class Runs:
    """Unpickled by Python it would run something."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "snapshot.pickle"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"device_traces": [[Runs()]]}, protocol))
        with pytest.raises(InputError, match=r"no memory snapshot: it names (builtins|__builtin__)\.print"):
            load_snapshot(path)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cos\nsystem\n(S'ls'\ntR.", r"names os\.system"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93.", r"names os\.system"),
        (b"(ios\nsystem\n.", r"names os\.system"),
        (b"\x80\x04\x8c\x01a" + b"2\x86" * 60 + b"\x8c\x01a\x93.", "names something to run by what is no text"),
        (b"\x80\x04\x8c\x01a" + b"\x85" * 200_000 + b"\x8c\x01a\x93.", "names something to run by what is no text"),
        (b"\x80\x04" + b"(" * 1000 + b".", "more than 100 lists, dictionaries or tuples in each other"),
        (b"Pelsewhere\n.", "names the object elsewhere"),
        (b"\x82\x07.", "names extension 7"),
        (b"NR.", r"no plain data \(REDUCE\)"),
        (b"Nb.", r"no plain data \(BUILD\)"),
        (b"\x8f.", r"no plain data \(EMPTY_SET\)"),
        (b"\x96" + (2**40).to_bytes(8, "little") + b".", r"no plain data \(BYTEARRAY8\)"),
        (b"C\x01a.", r"no plain data \(SHORT_BINBYTES\)"),
        (b"\x80\x09N.", "protocol 9"),
        (b"\x80\x04Nr" + (2**31).to_bytes(4, "little") + b".", "names object 2147483648"),
        (b"\x8a\xff" + b"\x7f" * 255 + b".", "number of 255 bytes"),
        (b"I" + b"9" * 5000 + b"\n.", "number of 5000 digits"),
        (b"X" + (2**31).to_bytes(4, "little") + b".", "text of 2147483648 bytes"),
        (pickle.dumps({1: 2}), "key that is no text but of type int"),
        (pickle.dumps({(1, 2): 2}), "key that is no text but of type tuple"),
    ],
)
def test_what_is_no_plain_data_is_refused_by_name(content: bytes, reason: str) -> None:
    with pytest.raises(SnapshotError, match=reason):
        parse_snapshot(content)


def bombs() -> dict[str, bytes]:
    """Small files that other readers unfold into all memory, or for hours."""
    lists, key = b"\x80\x04]\x94", b"\x80\x04}\x94K\x00\x85\x94"
    for number in range(40):
        lists += b"]\x94(" + b"h%c" % number * 2 + b"e"
        key += b"h%c" % (number + 1) * 2 + b"\x86\x94"
    return {
        "lists of lists": lists + b"0" * 39 + b".",
        "a key of tuples of tuples": key + b"Ns" + b".",
        "keys that collide": pickle.dumps({number * (2**61 - 1): 0 for number in range(20000)}),
        "nothing but lists": b"\x80\x04" + b"]" * 2_000_000,
        "nothing but steps": b"\x80\x04" + b"N0" * 2_000_000,
        "deep": b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".",
        "one list of entries for all devices": b"\x80\x04}\x8c\x0ddevice_traces](](}(\x8c\x06actionh\x00u",
        "one list of blocks for all segments": rewritten(STEP, shared_blocks),
    }


def shared_blocks(written: dict[str, Any]) -> None:
    """As many blocks as a file of this size can speak of: 400 million."""
    (first, *_) = written["segments"]
    first["blocks"] = first["blocks"][:1] * 20_000
    written["segments"] = [dict(first) for _ in range(20_000)]


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in bombs().items()])
def test_no_small_file_takes_all_memory_or_forever(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sixtieth of the budget, that the test be quick."""
    monkeypatch.setattr("labkit.snapshot.plain._BUDGET", 20_000_000)
    with pytest.raises(SnapshotError):
        parse_snapshot(content)


def repeated(of: str) -> tuple[dict[str, Any], str]:
    """A snapshot that has one thing in several places, and how it is refused."""
    block = {"size": 512, "state": "inactive"}
    segment = {"device": 0, "address": 0, "total_size": 512, "stream": 0, "blocks": [block]}
    trace = [{"action": "alloc", "addr": 0, "size": 512, "stream": 0}]
    files: dict[str, tuple[dict[str, Any], str]] = {
        "trace": ({"device_traces": [trace, trace]}, "two of its devices have one trace"),
        "empty trace": ({"device_traces": [[]] * 129}, "traces of more than 128 devices"),
        "device": ({"segments": [segment | {"device": 128}]}, "is of device 128"),
        "segment": ({"segments": [segment, segment]}, "one segment several times"),
        "blocks": ({"segments": [segment, dict(segment)]}, "one block several times"),
        "block": ({"segments": [segment | {"blocks": [block, block]}]}, "one block several times"),
    }
    return files[of]


@pytest.mark.parametrize("of", ["trace", "empty trace", "device", "segment", "blocks", "block"])
def test_what_a_file_has_in_many_places_is_not_read_for_each(of: str) -> None:
    written, reason = repeated(of)
    with pytest.raises(SnapshotError, match=reason):
        parse_snapshot(pickle.dumps(written))


def test_traces_do_not_share_rows() -> None:
    """The third entry is recognised by a pattern, and its row kept in the memo for another trace."""
    keys = ("action", "alloc", "addr", "size", "stream")
    first = b"}\x94(" + b"\x8c\x06action\x94\x8c\x05alloc\x94"
    first += b"".join(b"\x8c%c%b\x94K\x00" % (len(key), key.encode()) for key in keys[2:]) + b"u"
    second = b"}\x94(h\x01h\x02h\x03K\x00h\x04K\x00h\x05K\x00u"
    place = 8  # a trace, the keys, the second and the third entry come before
    content = b"\x80\x04}\x8c\x0ddevice_traces](]("
    content += first + second + second + b"\x94e" + b"](h%ce" % place * 5 + b"es."
    with pytest.raises(SnapshotError, match="the same entries several times"):
        parse_snapshot(content)


def test_one_entry_many_times_is_one_piece() -> None:
    """Rows that lie one behind another are told of once, and each is paid for."""
    entry = {"action": "alloc", "addr": 0, "size": 512, "stream": 0}
    snapshot = parse_snapshot(pickle.dumps({"device_traces": [[entry] * 3]}))
    assert len(snapshot.trace(0)) == 3
    assert Entries().taken([dict(entry), dict(entry), dict(entry)]) == [(0, 3)]


def test_long_names_of_frames_are_cut_once() -> None:
    name = "n" * 1000
    frames = [{"filename": name, "line": line, "name": name} for line in range(3)]
    entry = {"action": "alloc", "addr": 0, "size": 512, "stream": 0, "frames": frames}
    (stack,) = parse_snapshot(pickle.dumps({"device_traces": [[entry]]})).stacks
    assert stack[0].file == name[:500]
    assert len({id(text) for frame in stack for text in (frame.file, frame.name)}) == 1


def test_segments_without_blocks_are_read() -> None:
    segments = [{"device": 0, "address": 512 * place, "total_size": 512} for place in range(5)]
    assert [segment.blocks for segment in parse_snapshot(pickle.dumps(segments)).segments] == [()] * 5


def test_what_is_no_snapshot_is_named(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    for content in (b"", b"text", b"\x80", pickle.dumps({}), pickle.dumps([1]), pickle.dumps({"device_traces": [1]})):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no memory snapshot"):
            load_snapshot(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", value) for value in ("12", None, 2**80, -5, 1.5, float("nan"))] + [("stream", []), ("addr", [])],
)
def test_entries_that_pytorch_does_not_write_are_refused(field: str, value: object) -> None:
    entry = {"action": "alloc", "addr": 512, "size": 512, "stream": 0}
    for before in (1, 10):  # read opcode by opcode, and where a pattern has been learned
        entries = [*(dict(entry) for _ in range(before)), entry | {field: value}]
        with pytest.raises(SnapshotError, match=r"no whole number|damaged"):
            parse_snapshot(pickle.dumps({"device_traces": [entries]}))


def test_devices_count_from_zero() -> None:
    snapshot = parse_snapshot(pickle.dumps({"device_traces": [[], []]}))
    assert len(snapshot.trace(1)) == 0
    for device in (-1, 2):
        with pytest.raises(InputError, match=f"no memory snapshot of device {device}"):
            snapshot.trace(device)


def test_a_recording_that_began_late_is_refused() -> None:
    entry = {"action": "free_completed", "addr": 512, "size": 512, "stream": 0}
    with pytest.raises(InputError, match="before the recording began"):
        replay(parse_snapshot(pickle.dumps({"device_traces": [[entry]]})).trace(0))


OPCODES = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(OPCODES), st.binary(max_size=4)), max_size=60).map(b"".join))
def test_no_opcodes_crash_it(content: bytes) -> None:
    with contextlib.suppress(SnapshotError):
        parse_snapshot(b"\x80\x04" + content + b".")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STEP) - 1), st.binary(max_size=3)), min_size=1, max_size=5))
def test_no_damage_crashes_it(changes: list[tuple[int, bytes]]) -> None:
    """Bytes of a real snapshot overwritten, inserted or missing: what can still be read is a snapshot."""
    content = STEP
    for place, new in changes:
        content = content[:place] + new + content[place + 1 :]
    with contextlib.suppress(SnapshotError):
        snapshot = parse_snapshot(content)
        assert all(trace.nbytes.dtype == np.int64 for trace in snapshot.traces)


def test_a_file_that_ends_early_is_refused() -> None:
    for length in range(0, len(STEP), 997):
        with pytest.raises(SnapshotError):
            parse_snapshot(STEP[:length])


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(name)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_read_as_python_reads_it(value: object, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    assert Unpickler(content, Entries()).load() == _Plain(io.BytesIO(content)).load()
