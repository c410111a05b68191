"""Who makes a tensor: the module path, in forward and in backward, the operator or function, and on which stream.

Forward is easy: hooks keep a stack of the modules whose forward runs. Backward runs no module, only autograd nodes;
so when a module's forward returns, the nodes it made (reachable from its outputs and not yet claimed by a module
inside it) are labelled with its path, and backward reads the label of the node that runs. A recompute region runs
modules again, inside backward: the stack then names them, before any node does. The label also keeps the stream of
the forward, on which autograd runs the node.

Known limitation: nodes made between modules on a side stream are labelled with the stream of the module around them.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

OUTSIDE = "-"
"""The path of what no module makes; the model itself has the empty path."""

_LABEL = "labkit.module"

_BARE_ALLOCATIONS = frozenset(
    "arange clone copy empty empty_like empty_strided full full_like new_empty new_full new_zeros ones ones_like "
    "repeat zeros zeros_like _to_copy".split()
)
"""Operators that say nothing about the tensor: their caller names it."""

_HERE = Path(__file__).parent
_SILENT = (str(Path(torch.__file__).parent), str(_HERE), "<")
"""Files whose functions name nothing: PyTorch's, the trace's own, and generated code."""
_SPEAKING = str(_HERE / "te_shapes.py")
"""But for the functions that stand for Transformer Engine's."""


class Maker(NamedTuple):
    """Where a tensor comes from."""

    module: str
    """Path of the module whose forward or backward makes it; `OUTSIDE` if none."""
    producer: str
    """The operator, or the function that called it if the operator only allocates."""
    stream: int


class Origin:
    """Knows what runs. Follows no module outside `watching`; `stream` says which stream is current."""

    def __init__(self, stream: Callable[[], int] = lambda: 0) -> None:
        self.stream = stream
        self._paths: dict[torch.nn.Module, str] = {}
        self._stack: list[str] = []
        self._last = (OUTSIDE, 0)
        self._silent: dict[CodeType, bool] = {}

    @contextmanager
    def watching(self, *models: torch.nn.Module) -> Iterator[None]:
        """Follow the forward and backward of the modules in `models` (see `module_paths`)."""
        self._paths = {module: path for model in models for module, path in module_paths(model).items()}
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """What is made in this block belongs to `path`, a stretch of the program that no module runs."""
        self._stack.append(path)
        try:
            yield
        finally:
            self._stack.pop()

    def claim(self, tensor: torch.Tensor, module: torch.nn.Module) -> None:
        """What lies behind `tensor` and has no maker yet was made by `module`, on the current stream."""
        _label(tensor, (self._paths.get(module, OUTSIDE), self.stream()))

    def of(self, function: Any) -> Maker:
        """The maker of a tensor that `function` makes now."""
        module, stream = self._place()
        return Maker(module, self._producer(function), stream)

    def running(self) -> str:
        """Path of the module that runs, forward or backward; `OUTSIDE` if none does."""
        if self._stack:
            return self._stack[-1]
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return OUTSIDE
        module: str = node.metadata.get(_LABEL, self._last)[0]
        return module

    def _place(self) -> tuple[str, int]:
        stream = self.stream()
        if self._stack:
            return self._stack[-1], stream
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._last = (OUTSIDE, stream)
            return self._last
        # A node made between modules while a region was replayed has no label: it belongs to its neighbour.
        self._last = node.metadata.get(_LABEL, self._last)
        module, stream_of_node = self._last
        return module, stream or stream_of_node

    def _producer(self, function: Any) -> str:
        name = getattr(function, "__name__", "").split(".")[0]
        if name not in _BARE_ALLOCATIONS and name != "resize_":
            return name
        frame: FrameType | None = sys._getframe(3)
        for _ in range(24):
            if frame is None:
                break
            code = frame.f_code
            if code.co_name == "_engine_run_backward":
                node: Any = torch._C._current_autograd_node()
                return f"{node.name()}.{name}" if node is not None else name
            if not self._is_silent(code):
                return code.co_name
            frame = frame.f_back
        return name

    def _is_silent(self, code: CodeType) -> bool:
        silent = self._silent.get(code)
        if silent is None:
            silent = code.co_filename.startswith(_SILENT) and code.co_filename != _SPEAKING
            self._silent[code] = silent
        return silent

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        # With an empty stack a replayed region runs in backward, on behalf of the node that replays it.
        parent, stream = self._place()
        _label(args, (parent, stream))
        self._stack.append(self._paths.get(module, parent))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        path = self._stack.pop()
        _label(output, (path, self.stream()))


_LAYERS = "decoder.layers."


def module_paths(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The path of each module of `model`; decoder layers of a pipeline stage have their numbers in the whole model."""
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    first = layers[0].layer_number - 1 if layers else 0
    return {module: _numbered_from(first, path) for path, module in model.named_modules()}


def tensor_paths(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, str]]:
    """Each parameter and buffer of `model` and its path, numbered like its module's."""
    for module, path in module_paths(model).items():
        for attribute, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            yield tensor, f"{path}.{attribute}"


def _numbered_from(first: int, path: str) -> str:
    if not path.startswith(_LAYERS):
        return path
    index, dot, below = path.removeprefix(_LAYERS).partition(".")
    return f"{_LAYERS}{first + int(index)}{dot}{below}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _label(value: Any, label: tuple[str, int]) -> None:
    """Give `label` to every unlabelled autograd node behind the tensors in `value`."""
    with torch._C.DisableTorchFunction():
        waiting = [tensor.grad_fn for tensor in _tensors(value) if tensor.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        metadata: Any = node.metadata
        if _LABEL in metadata:
            continue
        metadata[_LABEL] = label
        waiting += [following for following, _ in node.next_functions if following is not None]
