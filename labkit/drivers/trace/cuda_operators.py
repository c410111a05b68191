"""PyTorch operators that decompose otherwise on the meta device, or in eager code, than they run on a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from labkit.drivers.trace.patches import Replacement
from labkit.drivers.trace.work import launched

_NORM = "the output and fp32 statistics of each row (aten/src/ATen/native/cuda/layer_norm_kernel.cu)"


def replacements() -> Iterator[Replacement]:
    """What a step calls of them; imports Megatron Core."""
    from megatron.core import activations
    from megatron.core.fusions import fused_cross_entropy

    yield Replacement(
        torch.nn.functional,
        "dropout",
        _dropout(torch.nn.functional.dropout),
        "the output and a mask of one byte an element (`native_dropout`), elsewhere noise of the input's dtype",
    )
    yield Replacement(
        torch.nn.functional,
        "layer_norm",
        lambda x, shape, weight=None, bias=None, eps=1e-5: _Norm.apply(x, weight, bias),
        f"{_NORM}; the meta device's makes none contiguous",
    )
    yield Replacement(
        torch.nn.functional,
        "rms_norm",
        lambda x, shape, weight=None, eps=None: _Norm.apply(x, weight),
        f"{_NORM}; the meta device has the composite operators",
    )
    yield Replacement(
        activations.squared_relu,
        "__wrapped__",
        _SquaredReLU.apply,
        "its output; compiled it saves its input, which is cheaper than its intermediate",
    )
    yield Replacement(
        fused_cross_entropy,
        "calculate_gradients",
        _with_scattered_copy(fused_cross_entropy.calculate_gradients),
        "one more fp32 copy of the logits: Inductor cannot scatter in place into a view of its input",
    )


def _dropout(original: Any) -> Any:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        # `is_fused_kernel_acceptable`, aten/src/ATen/native/Dropout.cpp
        if training and 0 < p < 1 and not inplace:
            return torch.native_dropout(input, p, True)[0]
        output: torch.Tensor = original(input, p, training, inplace)
        return output

    return dropout


def _with_scattered_copy(original: Any) -> Any:
    def calculate_gradients(softmax: torch.Tensor, *arguments: Any) -> Any:
        scattered = torch.empty_like(softmax)
        gradient = original(softmax, *arguments)
        del scattered
        return gradient

    return calculate_gradients


class _SquaredReLU(torch.autograd.Function):
    """`torch.compile` splits forward from backward where the fewest bytes cross: at the input (`partitioners.py`)."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        launched(0, x, x)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        launched(0, gradient, x, x)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class _Norm(torch.autograd.Function):
    """`_fused_rms_norm_cuda` with weight and inverse deviation, `layer_norm_cuda` with bias and mean, too.

    Forward and backward make their input contiguous for themselves.
    """

    @staticmethod
    def forward(context: Any, x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        rows = x.contiguous()
        output = torch.empty_like(rows)
        statistics = [torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in affine]
        context.save_for_backward(x, *affine, *statistics)
        launched(0, x, output)
        return output

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, *saved = context.saved_tensors
        rows = x.contiguous()
        launched(0, gradient, x, x)
        return torch.empty_like(rows), *(torch.empty_like(parameter) for parameter in saved[: len(saved) // 2])
