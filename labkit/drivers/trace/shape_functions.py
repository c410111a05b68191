"""What PyTorch's shape functions answered, remembered: many are written in Python and take half a millisecond a call.

A shape function (an operator's kernel for the meta device) knows nothing of a tensor but its sizes, strides and dtype,
and of PyTorch's state the default dtype, so that arguments alike have results alike. Remembered is only what can be
made again exactly: one new tensor, whose storage is no larger than its strides ask for, or the first argument,
unchanged.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.drivers.trace.cuda_surface import META, on_device

_PLAIN = (Tensor, torch.nn.Parameter)
_CONSTANTS = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)


class _New(NamedTuple):
    """A new tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_FIRST = object()
"""The first argument."""


class ShapeFunctions:
    """Runs operators; on the meta device each with given shapes once."""

    def __init__(self) -> None:
        self._answers: dict[Any, Any] = {}
        self._slow: dict[Any, bool] = {}

    def run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `function` makes of its arguments."""
        slow = self._slow.get(function)
        if slow is None:
            slow = self._slow[function] = _is_slow(function)
        key = _key(function, args, kwargs) if slow else None
        if key is None:
            return function(*args, **kwargs)
        answer = self._answers.get(key)
        if answer is None:
            result = function(*args, **kwargs)
            answer = _again(result, args, key)
            if answer is None:
                self._slow[function] = False
            else:
                self._answers[key] = answer
            return result
        if answer is _FIRST:
            return args[0]
        return torch.empty_strided(answer.shape, answer.stride, dtype=answer.dtype, device=META)


def _is_slow(function: Any) -> bool:
    """Whether its shape function is Python's, and what it returns is new or its first argument."""
    if not isinstance(function, torch._ops.OpOverload) or torch._C.DispatchKey.Meta not in function.py_kernels:
        return False
    schema = function._schema
    written = [argument.alias_info is not None for argument in schema.arguments]
    return len(schema.returns) == 1 and not function.is_view and not any(written[1:])


def _key(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that a shape function can see of its arguments; None where that is more than is looked at here."""
    seen: list[Any] = [function, torch.get_default_dtype()]
    for argument in args:
        if type(argument) in _PLAIN:
            # Numbers that Python gave may be tensors without dimensions, which promote no dtype.
            if not on_device(argument) or not argument.dim():
                return None
            seen += (argument.shape, argument.stride(), argument.dtype, argument.storage_offset())
        elif type(argument) in _CONSTANTS:
            seen += (type(argument), argument)
        elif type(argument) is list and all(type(item) is int for item in argument):
            seen += (list, len(argument), *argument)
        else:
            return None
    for name, argument in kwargs.items():
        if type(argument) not in _CONSTANTS:
            return None
        seen += (name, type(argument), argument)
    return tuple(seen)


def _again(result: Any, args: tuple[Any, ...], key: Any) -> Any:
    """How to make `result` again; None if that is not known."""
    if type(result) not in _PLAIN or not on_device(result):
        return None
    if args and result is args[0]:
        return _FIRST if _key(key[0], args, {}) == key[: len(key)] else None
    made = _New(result.shape, result.stride(), result.dtype)
    twin = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=META)
    alike = twin.untyped_storage().nbytes() == result.untyped_storage().nbytes() and not result.storage_offset()
    mine = all(type(a) not in _PLAIN or a.untyped_storage()._cdata != result.untyped_storage()._cdata for a in args)
    return made if alike and mine else None
