"""Gradients that meet: autograd adds one to the other in place where nothing else needs it.

`torch/csrc/autograd/input_buffer.cpp`, `accumulate`: the gradient that came first takes the sum if the buffer holds
its last reference and it is dense. Under a dispatch mode, where every tensor may be a subclass, the engine never does
so: a trace would book a tensor that a GPU run does not make.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import _engine_run_backward

_ENGINE = _engine_run_backward.__code__
_ALONE = (4, 2, 4)
"""References to a tensor, to its storage and to its Python object that `add` counts when the engine holds the last."""


def add(first: Tensor, second: Tensor, **options: Any) -> Tensor:
    """`aten::add`: the engine's own sums of gradients go where `InputBuffer` puts them."""
    if torch._C._current_graph_task_id() != -1 and _called_by_engine(sys._getframe(1)):
        storage = first.untyped_storage()
        of_tensor: Any = first._use_count  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
        references = of_tensor(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(first)
        if references == _ALONE and is_non_overlapping_and_dense_or_false(first):
            return first
    total: Tensor = torch.ops.aten.add.Tensor(first, second, **options)
    return total


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether no Python code lies between autograd's engine and the dispatch mode that leads to `frame`."""
    while frame is not None and frame.f_code.co_name in ("__torch_dispatch__", "_fn", "inner"):
        frame = frame.f_back
    return frame is not None and frame.f_code is _ENGINE
