"""Small tensors of numbers that the host has put on the device, and asks back: counts of rows, splits, lengths.

A trace's tensors have no data. What comes from the host is remembered by the allocation that holds it, through copies
on the device, and given back where a program reads it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from labkit.drivers.trace.cuda_surface import on_device
from labkit.drivers.trace.tracker import StorageTracker

_MOST = 2**14
"""Elements worth remembering."""
_COPY, _COPY_INTO = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default


class HostValues:
    """Give `operators` to the tracker, which `tracker` returns once it is made."""

    def __init__(self, tracker: Callable[[], StorageTracker]) -> None:
        self._tracker = tracker
        self._values: dict[int, torch.Tensor] = {}

    @property
    def operators(self) -> Mapping[Any, Callable[..., Any]]:
        """Operators that this answers."""
        return {_COPY: self._to_copy, _COPY_INTO: self._copy_into}

    def _to_copy(self, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if tensor.is_floating_point() or tensor.numel() > _MOST:
            copied: torch.Tensor = _COPY(tensor, **options)
            return copied
        value = self._known(tensor) if on_device(tensor) else tensor
        device = options.get("device")
        if on_device(tensor) and device is not None and torch.device(device).type == "cpu" and value is not None:
            return value.to(dtype=options.get("dtype"), copy=True)
        copied = _COPY(tensor, **options)
        if on_device(copied) and value is not None:
            self._tracker().seen(copied, _COPY)
            held = self._tracker().allocation_of(copied)
            if held is not None:
                self._values[held.serial] = value.to(dtype=copied.dtype, copy=True)
        return copied

    def _copy_into(self, destination: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        """Activations that are offloaded: no data reaches the host."""
        if on_device(destination) or not on_device(source):
            _COPY_INTO(destination, source, *rest, **options)
        return destination

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        held = self._tracker().allocation_of(tensor)
        value = None if held is None else self._values.get(held.serial)
        if value is None or value.numel() != tensor.numel():
            return None
        return value.reshape(tensor.shape)
