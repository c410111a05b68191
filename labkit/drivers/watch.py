"""What a driver sees of a cell being put together (`labkit.drivers.cell`). Imports no torch."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Watch:
    """Looks on while a cell comes about; this one looks away."""

    def inside(self, part: str) -> AbstractContextManager[object]:  # noqa: ARG002 (for those who look)
        """Around the making of a part: initialize, model, gradient_buffers, optimizer, batch."""
        return nullcontext()

    def has_model(self, modules: "list[torch.nn.Module]") -> None:
        """The rank's pipeline chunks, unwrapped, are there with parameters of their own."""

    def has_buffers(self, chunks: list[Any]) -> None:
        """The chunks' parameters and gradients lie in contiguous buffers now."""
