"""PyTorch's memory snapshots (`torch.cuda.memory._dump_snapshot`): read without running anything, and replayed."""

from labkit.snapshot.entries import NO_STACK, SnapshotError
from labkit.snapshot.replay import Replayed, replay
from labkit.snapshot.snapshot import LARGEST, Block, Frame, Segment, Snapshot, Trace, load_snapshot, parse_snapshot

__all__ = [
    "LARGEST",
    "NO_STACK",
    "Block",
    "Frame",
    "Replayed",
    "Segment",
    "Snapshot",
    "SnapshotError",
    "Trace",
    "load_snapshot",
    "parse_snapshot",
    "replay",
]
