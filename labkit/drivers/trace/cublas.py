"""The cuBLAS workspaces PyTorch takes from its own allocator, below any tensor.

`aten/src/ATen/cuda/CublasHandlePool.cpp`: each pair of cuBLAS handle and stream gets one workspace, kept for the
life of the process, the first time it is used for a product; a handle belongs to a thread. Training has two: the
thread that runs forward and autograd's device thread. The size is `Training.workspaces`. Transformer Engine's
own workspaces are Python tensors and seen without help.
"""

from typing import Any

import torch

from labkit.drivers.trace.origin import Maker
from labkit.drivers.trace.tracker import StorageTracker

PRODUCER = "CublasHandlePool"

_PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"))


class CublasWorkspaces:
    """Books the workspace of each thread and stream at its first product; give `before_operator` to the tracker."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = nbytes
        self._seen: set[tuple[str, int]] = set()

    def before_operator(self, tracker: StorageTracker, operator: Any) -> None:
        """Book a workspace if `operator` is the first product of this thread and stream."""
        if operator._schema.name not in _PRODUCTS:
            return
        # Backward of meta tensors runs on the caller's thread: the graph task tells the two apart.
        thread = "forward thread" if torch._C._current_graph_task_id() == -1 else "autograd thread"
        stream = tracker.origin.of(operator).stream
        if (thread, stream) not in self._seen:
            self._seen.add((thread, stream))
            tracker.book(self.bytes, (self.bytes,), "uint8", Maker(thread, PRODUCER, stream))
