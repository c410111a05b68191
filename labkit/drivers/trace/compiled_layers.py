"""Layers of the `lora` runtime under `torch.compile`, as far as Inductor keeps less than the eager code a trace runs.

The runtime's own additions are compiled functions (`labkit.drivers.trace.compiled`); Megatron's fused activation is
what Inductor makes of the eager one. Here is the rotation of queries and keys: its graph computes cosine and sine again
from the angles, which all layers share.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.patches import Replacement
from labkit.drivers.trace.work import launched


class _Rotation(torch.autograd.Function):
    """One kernel each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        launched(0, x, angles, x)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        launched(0, gradient, ctx.saved_tensors, gradient)
        return torch.empty_like(gradient), None


def replacements() -> Iterator[Replacement]:
    """What attention calls."""
    from megatron.core.transformer import attention

    def apply_rotary_pos_emb(x: Tensor, angles: Tensor, *rest: Any, **options: Any) -> Tensor:
        rotated: Tensor = _Rotation.apply(x, angles)
        return rotated

    yield Replacement(attention, "apply_rotary_pos_emb", apply_rotary_pos_emb, "the rotated copy, and its gradient")
