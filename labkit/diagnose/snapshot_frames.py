"""What a stack trace says: which source line asked for memory, for which module, in which phase of a step."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from labkit.snapshot import Frame

Moment = Literal["setup", "forward", "backward", "recompute", "grad_sync", "optimizer", "unknown"]
"""A phase; `recompute` is forward code that backward runs again."""

_PLUMBING = (
    "/torch/",
    "/torchinductor",
    "/triton/",
    "/einops/",
    "/contextlib.py",
    "/functools.py",
    "/threading.py",
    "/megatron/core/transformer/module.py",
    "/megatron/core/transformer/utils.py",
    "/megatron/core/distributed/data_parallel_base.py",
    "/megatron/core/tensor_parallel/random.py",
    "/megatron/core/tensor_parallel/utils.py",
    "/megatron/core/utils.py",
    "/megatron/core/jit.py",
    "/transformer_engine/pytorch/cpp_extensions/",
    "/transformer_engine/pytorch/module/base.py",
    "/transformer_engine/pytorch/tensor/",
    "/transformer_engine/pytorch/quantized_tensor.py",
    "/transformer_engine/pytorch/utils.py",
    "/transformer_engine/pytorch/jit.py",
)
"""Files that allocate for whoever calls them."""

_OPTIMIZER = ("/optimizer/", "/optimizers/", "/torch/optim/", "/optimizer.py")
_GRAD_SYNC = (
    "/megatron/core/distributed/finalize_model_grads.py",
    "/megatron/core/distributed/param_and_grad_buffer.py",
    "/megatron/core/distributed/distributed_data_parallel.py",
    "/torch/distributed/fsdp/_runtime_utils.py",
)
_SYNC_FUNCTIONS = ("sync", "finalize", "reduce")
_SETUP_FUNCTIONS = ("__init__", "get_model", "setup_model_and_optimizer", "load_checkpoint", "model_provider")
_BACKWARD_FUNCTIONS = ("backward", "backward_step", "_engine_run_backward", "custom_backward")
_RECOMPUTING = (
    "/torch/utils/checkpoint.py",
    "/megatron/core/tensor_parallel/random.py",
    "/transformer_engine/pytorch/distributed.py",
)
_NATIVE_BACKWARD = ("torch::autograd::Engine", "torch::autograd::python::PythonEngine")


class Site(NamedTuple):
    """The line that a tensor is put down to."""

    place: str
    """`transformer_engine/pytorch/module/linear.py:1480 forward`: the innermost that is not plumbing."""
    caller: str
    """Who called it: the next one outward that is not plumbing; empty where there is none."""


UNRECORDED = Site("no stack trace was recorded", "")
NATIVE = Site("C++ without Python above it (autograd's thread: backward)", "")


def site_of(stack: Sequence[Frame]) -> Site:
    """Which source line a stack trace (innermost frame first) is put down to."""
    python = [frame for frame in stack if frame.is_python]
    if not python:
        return NATIVE
    telling = [frame for frame in python if not _is_plumbing(frame.file)]
    place, *callers = telling or python
    return Site(described(place), described(callers[0]) if callers and telling else "")


def moment_of(stack: Sequence[Frame]) -> Moment:
    """In which phase of a training step code with this stack trace runs, by names of Megatron's and PyTorch's files.

    A stack trace without any Python is autograd's own thread, where PyTorch's backward functions in C++ run.
    """
    python = [frame for frame in stack if frame.is_python]
    if not python:
        return "backward"
    in_hook = any("hook" in frame.name for frame in python)  # gradients that are reduced while backward runs
    if not in_hook and any(_has(frame.file, _GRAD_SYNC) and _has(frame.name, _SYNC_FUNCTIONS) for frame in python):
        return "grad_sync"
    if any(_has(frame.file, _OPTIMIZER) for frame in python):
        return "optimizer"
    is_backward = in_hook or any(frame.name in _BACKWARD_FUNCTIONS for frame in python)
    if is_backward or any(frame.name.startswith(_NATIVE_BACKWARD) for frame in stack):
        return "recompute" if _recomputes(python) else "backward"
    if any(frame.name in _SETUP_FUNCTIONS for frame in python):
        return "setup"
    return "forward" if any("forward" in frame.name for frame in python) else "unknown"


def _recomputes(python: Sequence[Frame]) -> bool:
    """Whether forward code runs inside a checkpoint's backward: frames further in than the checkpoint's."""
    for place, frame in enumerate(python):
        if _has(frame.file, _RECOMPUTING):
            return any("forward" in inner.name for inner in python[:place])
    return False


@lru_cache(10_000)
def _is_plumbing(file: str) -> bool:
    return file.startswith("<") or _has(f"/{file}", _PLUMBING)


def _has(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)


def described(frame: Frame) -> str:
    """A frame in a line, its path from the package down."""
    return f"{short_path(frame.file)}:{frame.line} {frame.name}"


def short_path(path: str) -> str:
    """A file's path without what differs from machine to machine.

    >>> short_path("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py")
    'torch/nn/modules/module.py'
    >>> short_path("/workspace/Megatron-LM/megatron/core/transformer/mlp.py")
    'megatron/core/transformer/mlp.py'
    """
    for packages in ("site-packages/", "dist-packages/"):
        _, found, rest = path.rpartition(packages)
        if found:
            return rest
    _, found, rest = path.rpartition("/megatron/")
    return f"megatron/{rest}" if found else "/".join(path.split("/")[-3:])
