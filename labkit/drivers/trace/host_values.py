"""Small tensors of numbers that the host has put on the device, and asks back: counts of rows, splits, lengths.

A trace's tensors have no data. What comes from the host is remembered by the allocation that holds it, through copies
and simple arithmetic on the device, and given back where a program reads it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.drivers.trace.cuda_surface import on_device, read_scalar
from labkit.drivers.trace.tracker import StorageTracker

_MOST, _MOST_ENDS = 2**14, 2**24
"""Elements worth remembering; where packed sequences end (int32) takes one for each token."""
_ATEN = torch.ops.aten
_COPY, _COPY_INTO, _READ = _ATEN._to_copy.default, _ATEN.copy_.default, _ATEN._local_scalar_dense.default
_ARITHMETIC = (
    _ATEN.sub.Tensor,
    _ATEN.floor_divide.default,
    _ATEN.floor_divide.Scalar,
    _ATEN.div.Tensor_mode,
    _ATEN.remainder.Scalar,
    _ATEN.clamp.default,
    _ATEN.eq.Scalar,
    _ATEN.ne.Scalar,
    _ATEN.any.default,
    _ATEN.equal.default,
    _ATEN.max.default,
    _ATEN.nonzero.default,
    _ATEN.cat.default,
    _ATEN.repeat_interleave.Tensor,
)
"""Done with remembered numbers where all of them are known."""


class HostValues:
    """Give `operators` to the tracker, which `tracker` returns once it is made."""

    def __init__(self, tracker: Callable[[], StorageTracker]) -> None:
        self._tracker = tracker
        self._values: dict[int, torch.Tensor] = {}

    @property
    def operators(self) -> Mapping[Any, Callable[..., Any]]:
        """Operators that this answers."""
        known: dict[Any, Callable[..., Any]] = {_COPY: self._to_copy, _COPY_INTO: self._copy_into, _READ: self._read}
        return known | {operator: self.computing(operator) for operator in _ARITHMETIC}

    def _to_copy(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        most = _MOST_ENDS if tensor.dtype == torch.int32 else _MOST
        if tensor.is_floating_point() or tensor.numel() > most:
            copied: torch.Tensor = _COPY(tensor, **options)
            return copied
        value = self._known(tensor) if on_device(tensor) else tensor
        device = options.get("device")
        if on_device(tensor) and device is not None and torch.device(device).type == "cpu" and value is not None:
            return value.to(dtype=options.get("dtype"), copy=True)
        copied = _COPY(tensor, **options)
        if on_device(copied) and value is not None:
            self._remember(copied, value.to(dtype=copied.dtype, copy=True), _COPY)
        return copied

    def _copy_into(self, destination: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        """Activations that are offloaded: no data reaches the host."""
        if on_device(destination) or not on_device(source):
            _COPY_INTO(destination, source, *rest, **options)
        return destination

    def _read(self, tensor: torch.Tensor) -> bool | int | float:
        value = self._known(tensor) if on_device(tensor) else None
        return read_scalar(tensor if value is None else value)

    def computing(self, operator: Any) -> Callable[..., Any]:
        """The operator, which also works out what it makes of remembered numbers."""

        def run(*arguments: Any, **options: Any) -> Any:
            values = [self._value(argument) for argument in arguments]
            if any(value is None for value in values):
                return operator(*arguments, **options)
            value = operator(*values, **options)
            if not isinstance(value, torch.Tensor):
                return value
            result = torch.empty(value.shape, dtype=value.dtype, device="meta")
            self._remember(result, value, operator)
            return result

        return run

    def _value(self, argument: Any) -> Any:
        """An argument with what is known of tensors on the device; None: nothing is."""
        if isinstance(argument, torch.Tensor):
            return self._known(argument) if on_device(argument) else None
        if isinstance(argument, list):
            values = [self._value(each) for each in argument]
            return None if any(value is None for value in values) else values
        return argument

    def _remember(self, tensor: torch.Tensor, value: torch.Tensor, operator: Any) -> None:
        self._tracker().seen(tensor, operator)
        held = self._tracker().allocation_of(tensor)
        if held is not None and tensor.is_contiguous():
            self._values[held.serial] = value.contiguous()

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor holds, which may be a part of an allocation."""
        held = self._tracker().allocation_of(tensor)
        value = None if held is None else self._values.get(held.serial)
        if value is None or value.dtype != tensor.dtype:
            return None
        return value.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
