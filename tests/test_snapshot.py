"""Snapshots recorded from PyTorch's allocator, over the CUDA of `tests/pytorch_allocator`, replayed."""

import pickle
from pathlib import Path

import pytest

from labkit.errors import InputError
from labkit.snapshot import Event, read_events, replay
from labkit.workload.caching import AllocatorSettings

RECORDED = Path(__file__).parent / "pytorch_allocator"


@pytest.mark.parametrize("name", ["default", "expandable"])
def test_a_replay_reserves_what_was_recorded(name: str) -> None:
    """120 requests on two streams of a device of 400 MiB, which has to be given cached blocks back."""
    events = read_events(RECORDED / f"snapshot_{name}.pickle")
    replayed = replay(events, AllocatorSettings(expandable_segments=name == "expandable"))
    assert replayed.simulated == replayed.recorded
    assert len(replayed.recorded) > 50
    assert {"segment_free", "segment_unmap"} & {event.action for event in events}


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[print]]}))
    with pytest.raises(InputError, match=r"names builtins\.print"):
        read_events(path)


def test_what_is_no_snapshot_is_named(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    for content in (b"", b"text", pickle.dumps({"device_traces": []}), pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(InputError, match="no memory snapshot"):
            read_events(path)


def test_a_pickle_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(b"\x80\x04Nr" + (2**31).to_bytes(4, "little") + b".")
    with pytest.raises(InputError, match="names object 2147483648"):
        read_events(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", value) for value in ("12", None, 2**80, -5, 1.5, float("nan"))] + [("stream", []), ("addr", [])],
)
def test_entries_that_pytorch_does_not_write_are_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "snapshot.pickle"
    entry = {"action": "alloc", "addr": 512, "size": 512, "stream": 0}
    path.write_bytes(pickle.dumps({"device_traces": [[entry, entry | {field: value}]]}, protocol=2))
    with pytest.raises(InputError, match="of event 1 is no whole number"):
        read_events(path)


def test_devices_count_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({"device_traces": [[], []]}))
    assert read_events(path, 1) == []
    for device in (-1, 2):
        with pytest.raises(InputError, match=f"no memory snapshot of device {device}"):
            read_events(path, device)


def test_a_recording_that_began_late_is_refused() -> None:
    with pytest.raises(InputError, match="before the recording began"):
        replay([Event("free_completed", 512, 512, 0)])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "snapshot.pickle"
    entry = {"action": "alloc", "addr": 2**47 - 512, "size": 2**33, "stream": -1, "frames": ["x" * 300, "y" * 70000]}
    path.write_bytes(pickle.dumps({"device_traces": [[entry]]}, protocol))
    assert read_events(path) == [Event("alloc", 2**47 - 512, 2**33, -1)]
