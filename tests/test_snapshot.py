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


def test_a_recording_that_began_late_is_refused() -> None:
    with pytest.raises(InputError, match="before the recording began"):
        replay([Event("free_completed", 512, 512, 0)])
