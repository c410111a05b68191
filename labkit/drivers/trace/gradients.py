"""Gradients that meet: autograd adds one to the other in place where nothing else needs it.

`torch/csrc/autograd/input_buffer.cpp`, `accumulate`: the gradient that came first takes the sum if the buffer holds
its last reference and it is dense. Under a dispatch mode, where every tensor may be a subclass, the engine never does
so: a trace would book a tensor that a GPU run does not make.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import _engine_run_backward

from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.tracker import StorageTracker

_ENGINE = frozenset((_engine_run_backward.__name__, "custom_backward"))
"""Functions that call it: PyTorch's, and Megatron's, which begins a pass (`pipeline_parallel/schedules.py`)."""
_ADD = torch.ops.aten.add.Tensor

_INTO_ZEROS = {
    "IndexBackward0": "index_put",
    "GatherBackward0": "scatter_add",
    "IndexSelectBackward0": "index_add",
    "MaskedSelectBackward0": "masked_scatter",
    **dict.fromkeys(("TopkBackward0", "SortBackward0", "MaxBackward0", "MinBackward0"), "scatter"),
}
"""Nodes of autograd and the operator with which they write a gradient into zeros that they have just made."""

type Add = Callable[..., Tensor]
type _References = tuple[int, int, int]


def adder(otherwise: Add = _ADD) -> Add:
    """`aten::add` for `StorageTracker(instead=...)`: the engine's sums of gradients go where `InputBuffer` puts them.

    `otherwise` answers a program's own sums. How many references there are when the engine holds the last one depends
    on what lies between it and Python; so that is looked at first.
    """
    alone: list[_References] = []

    def look(first: Tensor, second: Tensor, **options: Any) -> Tensor:
        if _called_by_engine(sys._getframe(1)):
            alone.append(_references(first))
        total: Tensor = _ADD(first, second, **options)
        return total

    with StorageTracker(Origin(), instead={_ADD: look}):
        x = torch.ones(2, device="meta", requires_grad=True)
        y = x * 1
        (_Branch.apply(y) + _Branch.apply(y)).sum().backward()

    def add(first: Tensor, second: Tensor, **options: Any) -> Tensor:
        if torch._C._current_graph_task_id() != -1 and _called_by_engine(sys._getframe(1)):
            references = _references(first)
            if references == alone[0] and is_non_overlapping_and_dense_or_false(first):
                return first
        return otherwise(first, second, **options)

    return add


def into_zeros() -> dict[Any, Callable[..., Tensor]]:
    """Operators for `StorageTracker(instead=...)`: what a node writes into its own zeros goes there.

    `FunctionsManual.cpp`, `index_backward`, `value_selecting_reduction_backward`; `TensorAdvancedIndexing.cpp`,
    `gather_backward` and others ask `areAnyTensorSubclassLike`, as all tensors are under a dispatch mode, and then make
    another.
    """
    aten = torch.ops.aten
    pairs = {
        aten.index_put.default: aten.index_put_.default,
        aten.scatter_add.default: aten.scatter_add_.default,
        aten.index_add.default: aten.index_add_.default,
        aten.masked_scatter.default: aten.masked_scatter_.default,
        aten.scatter.src: aten.scatter_.src,
    }
    return {function: _within_its_node(function, in_place) for function, in_place in pairs.items()}


def _within_its_node(function: Any, in_place: Any) -> Callable[..., Tensor]:
    name = function.overloadpacket.__name__

    def run(*arguments: Any, **options: Any) -> Tensor:
        node: Any = torch._C._current_autograd_node()
        inside = node is not None and _INTO_ZEROS.get(node.name()) == name
        written: Tensor = (in_place if inside else function)(*arguments, **options)
        return written

    return run


class _Branch(torch.autograd.Function):
    """Makes a gradient of its own, which no one keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


def _references(tensor: Tensor) -> _References:
    """To the tensor, to its storage and to its Python object."""
    of_tensor: Any = tensor._use_count  # type: ignore[attr-defined]  # PyTorch's stubs leave it out
    storage = tensor.untyped_storage()
    return of_tensor(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)


def _called_by_engine(frame: FrameType | None) -> bool:
    """Whether no Python code lies between autograd's engine and the dispatch mode that leads to `frame`."""
    while frame is not None and frame.f_code.co_name in ("__torch_dispatch__", "_fn", "inner"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in _ENGINE
