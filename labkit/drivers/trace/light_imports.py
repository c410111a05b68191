"""Modules that Transformer Engine and PyTorch import for compilers and exporters, which no trace runs.

Importing TorchDynamo and ONNX costs more than half of what Transformer Engine and Megatron Core themselves do. In a
process that has not imported them, stand-ins take their places while the rest is imported.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from labkit.drivers.trace.compiled import compile_nothing
from labkit.drivers.trace.patches import NOTHING, Replacement

_DYNAMO = "torch._dynamo"
_ONNX = "transformer_engine.pytorch.onnx_extensions"


class _StandIn(ModuleType):
    """A module whose every name is one and the same function."""

    def __init__(self, name: str, function: Callable[..., Any], **names: Any) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__dict__.update(names)
        self._function = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._function


def _unchanged(function: Any = None, *args: Any, **options: Any) -> Any:
    """A decorator, with or without options, that leaves its function as it is."""
    return (lambda function: function) if function is None else function


def _refuse(*args: Any, **options: Any) -> Any:
    raise NotImplementedError("a trace exports nothing to ONNX")


def _deterministic_without_inductor(mode: bool, *, warn_only: bool = False) -> None:
    """The original also tells Inductor, whose import needs TorchDynamo."""
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def replacements() -> Iterator[Replacement]:
    """Stand-ins in `sys.modules`, and a `torch.compile` that compiles nothing."""
    yield Replacement(
        torch, "compile", compile_nothing, "what is alive at the end of a compiled region, at that moment"
    )
    yield Replacement(torch, "use_deterministic_algorithms", _deterministic_without_inductor, NOTHING)
    if _DYNAMO not in sys.modules:
        rules = SimpleNamespace(clear_lru_cache=_unchanged)  # torch.distributed clears it with every new group
        dynamo = _StandIn(_DYNAMO, _unchanged, config=SimpleNamespace(), trace_rules=rules)
        yield Replacement(sys.modules, _DYNAMO, dynamo, NOTHING)
        yield Replacement(sys.modules, f"{_DYNAMO}.comptime", _StandIn(f"{_DYNAMO}.comptime", _unchanged), NOTHING)
        yield Replacement(torch, "_dynamo", dynamo, NOTHING)
    if _ONNX not in sys.modules:
        yield Replacement(sys.modules, _ONNX, _StandIn(_ONNX, _refuse), NOTHING)


def flash_linear_attention() -> Iterator[Replacement]:
    """Two of flash-linear-attention's functions without the rest: its packages import every operator they have.

    The packages are bare ones with the real path, and the two names `fla.modules` has of old are given to the modules
    Megatron Core asks them for. Needs the GPU's Triton driver.
    """
    root = find_spec("fla")
    for name in ("ops", "modules"):
        if f"fla.{name}" not in sys.modules and root is not None and root.submodule_search_locations:
            package = ModuleType(f"fla.{name}")
            package.__path__ = [f"{folder}/{name}" for folder in root.submodule_search_locations]
            yield Replacement(sys.modules, package.__name__, package, NOTHING)
    for old, module in (("convolution", "causal_conv1d"), ("l2norm", "norm.l2norm")):
        yield Replacement(sys.modules, f"fla.modules.{old}", import_module(f"fla.modules.{module}"), NOTHING)
