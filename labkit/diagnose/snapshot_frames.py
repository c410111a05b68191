"""What a stack trace says: which source line asked for memory, for which module, in which phase of a step."""

from collections.abc import Sequence
from enum import IntFlag, auto
from functools import lru_cache, reduce
from operator import or_
from typing import Literal, NamedTuple

from labkit.snapshot import Frame

Moment = Literal[
    "setup", "forward", "backward", "recompute", "grad_sync", "optimizer", "evaluation", "saving", "unknown"
]
"""A phase; `recompute` is forward code that backward runs again; `evaluation` and `saving` are no part of a step."""

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

_OPTIMIZER = (
    "/megatron/core/optimizer/",
    "/torch/optim/",
    "/apex/optimizers/",
    "/transformer_engine/pytorch/optimizers/",
)
_GRAD_SYNC = (
    "/megatron/core/distributed/finalize_model_grads.py",
    "/megatron/core/distributed/param_and_grad_buffer.py",
    "/megatron/core/distributed/distributed_data_parallel.py",
    "/torch/distributed/fsdp/_runtime_utils.py",
)
_SYNC_FUNCTIONS = ("grad_sync", "finalize_model_grads", "reduce")
_BUILDING_FUNCTIONS = ("setup_model_and_optimizer", "get_megatron_optimizer", "get_model", "load_checkpoint")
_SETUP_FUNCTIONS = ("__init__", "model_provider")
"""Those that build, and those that anything may call while it runs."""
_EVALUATING_FUNCTIONS = ("evaluate", "evaluate_and_print_results", "validation_step", "evaluation_loop")
_SAVING_FUNCTIONS = ("save_checkpoint", "save_checkpoint_and_time", "save_parameter_state")
_BACKWARD_FUNCTIONS = ("backward", "backward_step", "_engine_run_backward", "custom_backward")
_NATIVE_TELLING = ("torch::autograd::generated::", "at::native::", "at::", "c10d::")
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


class _Mark(IntFlag):
    """What a frame says."""

    PYTHON = auto()
    PLUMBING = auto()
    FORWARD = auto()
    BACKWARD = auto()
    HOOK = auto()
    """Without a forward around it, backward's: gradients are reduced while it runs."""
    SYNC = auto()
    OPTIMIZER = auto()
    RECOMPUTE = auto()
    BUILD = auto()
    SETUP = auto()
    EVALUATE = auto()
    SAVE = auto()


_PYTHON = int(_Mark.PYTHON)
_TELLING = int(_Mark.PYTHON | _Mark.PLUMBING)


def site_of(stack: Sequence[Frame]) -> Site:
    """Which source line a stack trace (innermost frame first) is put down to."""
    telling = (frame for frame in stack if _marks(frame) & _TELLING == _PYTHON)
    if place := next(telling, None):
        caller = next(telling, None)
        return Site(described(place), described(caller) if caller else "")
    python = (frame for frame in stack if _marks(frame) & _PYTHON)
    if place := next(python, None):
        return Site(described(place), "")
    return _native_site(stack)


def _native_site(stack: Sequence[Frame]) -> Site:
    """Of C++ alone: autograd's function, if one is there; else the innermost of PyTorch's operators."""
    for prefix in _NATIVE_TELLING:
        for frame in stack:
            if frame.name.startswith(prefix):
                return Site(frame.name.partition("(")[0], "")
    return NATIVE


def moment_of(stack: Sequence[Frame]) -> Moment:
    """In which phase of a training step code with this stack trace runs, by names of Megatron's and PyTorch's files.

    A stack trace without any Python is autograd's own thread, where PyTorch's backward functions in C++ run, unless its
    C++ frames say otherwise.
    """
    marks = _Mark(reduce(or_, map(_marks, stack), 0))
    if _Mark.SAVE in marks:
        return "saving"
    if _Mark.EVALUATE in marks:
        return "evaluation"
    if _Mark.SYNC in marks and _Mark.HOOK not in marks:
        return "grad_sync"
    if _Mark.BUILD in marks:
        return "setup"
    if _Mark.OPTIMIZER in marks:
        return "optimizer"
    hooked = _Mark.HOOK in marks and _Mark.FORWARD not in marks
    if _Mark.BACKWARD in marks or hooked or not stack:
        return "recompute" if _Mark.RECOMPUTE in marks and _recomputes(stack) else "backward"
    if _Mark.SETUP in marks:
        return "setup"
    return "forward" if _Mark.FORWARD in marks else "unknown"


def _recomputes(stack: Sequence[Frame]) -> bool:
    """Whether forward code runs inside a checkpoint's backward: frames further in than the checkpoint's."""
    inner = 0
    for frame in stack:
        if _marks(frame) & _Mark.RECOMPUTE:
            return bool(inner & _Mark.FORWARD)
        inner |= _marks(frame)
    return False


@lru_cache(2**16)
def _marks(frame: Frame) -> int:
    file, name = f"/{frame.file}", frame.name
    if not frame.is_python:
        return int(_Mark.BACKWARD) if name.startswith(_NATIVE_BACKWARD) else 0
    said = {
        _Mark.PLUMBING: frame.file.startswith("<") or _has(file, _PLUMBING),
        _Mark.FORWARD: "forward" in name,
        _Mark.BACKWARD: name in _BACKWARD_FUNCTIONS,
        _Mark.HOOK: "hook" in name,
        _Mark.SYNC: _has(file, _GRAD_SYNC) and _has(name, _SYNC_FUNCTIONS),
        _Mark.OPTIMIZER: _has(file, _OPTIMIZER),
        _Mark.RECOMPUTE: _has(file, _RECOMPUTING),
        _Mark.BUILD: name in _BUILDING_FUNCTIONS,
        _Mark.SETUP: name in _SETUP_FUNCTIONS,
        _Mark.EVALUATE: name in _EVALUATING_FUNCTIONS,
        _Mark.SAVE: name in _SAVING_FUNCTIONS,
    }
    return int(_Mark.PYTHON) | sum(int(mark) for mark, is_so in said.items() if is_so)


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
