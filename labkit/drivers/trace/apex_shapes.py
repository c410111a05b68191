"""APEX's layer norms, scaled softmax kernels and weight gradients, which Megatron Core's own (`local`) layers use.

NVIDIA's containers have them, and with its default options Megatron Core refuses local layers without. Sources: APEX
`apex/contrib/layer_norm/layer_norm.py` (`FastLayerNormFN`), `apex/normalization/fused_layer_norm.py`
(`FusedLayerNormAffineFunction`), `csrc/layer_norm_cuda_kernel.cu`, `csrc/megatron/scaled_*_softmax_cuda.cu`,
`csrc/megatron/fused_weight_gradient_dense_cuda.cu`.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.patches import Replacement
from labkit.drivers.trace.work import launched

_PARTIAL_ROWS = 16
"""`part_size` of `cuComputePartGradGammaBeta`: rows of partial fp32 sums of the weight's and bias' gradients."""


def _forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *, memory_efficient: bool) -> Tensor:
    """Saves the input (or, memory-efficient, the output and the bias), the weight, and fp32 statistics of each row."""
    x = x.contiguous()
    output = torch.empty_like(x)
    launched(0, x, output)
    rows = x.numel() // weight.numel()
    mean, inverse = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    if memory_efficient:
        ctx.save_for_backward(output, weight, None, inverse, bias)
    else:
        ctx.save_for_backward(x, weight, mean, inverse, None)
    return output


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gradient = gradient.contiguous()
    kept, weight, _, _, _ = ctx.saved_tensors
    gradients = torch.empty_like(kept), torch.empty_like(weight), torch.empty_like(weight)
    launched(0, gradient, kept, kept)
    _partial = [torch.empty(_PARTIAL_ROWS, weight.numel(), dtype=torch.float32, device=kept.device) for _ in range(2)]
    return gradients


class FastLayerNormFN(torch.autograd.Function):
    """The persistent kernel: the output is a view."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, epsilon: float, memory_efficient: bool = False
    ) -> Tensor:
        return _forward(ctx, x, gamma, beta, memory_efficient=memory_efficient).view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:  # noqa: D102
        return (*_backward(ctx, gradient), None, None)


class FusedLayerNormAffineFunction(torch.autograd.Function):
    """The kernel for any width."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, shape: Any, eps: float, memory_efficient: bool = False
    ) -> Tensor:
        return _forward(ctx, input, weight, bias, memory_efficient=memory_efficient)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:  # noqa: D102
        return (*_backward(ctx, gradient), None, None, None)


def _softmax_forward(scores: Tensor, *mask_and_scale: Any) -> Tensor:
    launched(0, scores, scores)
    return torch.empty_like(scores)


def _softmax_backward(gradient: Tensor, probabilities: Tensor, scale: Any) -> Tensor:
    """In place of the incoming gradient."""
    launched(0, gradient, probabilities, gradient)
    return gradient


def _accumulate_weight_gradient(x: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
    """One cuBLAS product, without TF32, straight into the gradient buffer."""
    launched(2 * x.numel() * gradient.shape[-1], x, gradient, main_grad, main_grad, tf32=False)


def _batch_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """`get_batch_per_block`, scaled_masked_softmax.h: 128 threads a block, one or two rows a warp."""
    elements = 1 << max(0, keys - 1).bit_length()
    return 128 // min(elements, 32) * (2 if elements <= 128 else 1)


def replacements() -> Iterator[Replacement]:
    """The modules; before Megatron Core is imported."""
    norms = "the output, fp32 mean and inverse deviation of each row; in backward three gradients and partial sums"
    for path, name, function in (
        ("apex.contrib.layer_norm.layer_norm", "FastLayerNormFN", FastLayerNormFN),
        ("apex.normalization.fused_layer_norm", "FusedLayerNormAffineFunction", FusedLayerNormAffineFunction),
    ):
        parts = path.split(".")
        for length in range(1, len(parts)):
            package = ".".join(parts[:length])
            if not hasattr(sys.modules.get(package), "labkit_stands_in"):
                yield Replacement(sys.modules, package, _module(package, __path__=[]), norms)
        yield Replacement(sys.modules, path, _module(path, **{name: function}), norms)
    for kernel in ("scaled_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"):
        module = _module(
            kernel, forward=_softmax_forward, backward=_softmax_backward, get_batch_per_block=_batch_per_block
        )
        yield Replacement(sys.modules, kernel, module, "the probabilities; backward overwrites the incoming gradient")
    functions = dict.fromkeys(("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"), _accumulate_weight_gradient)
    kernels = _module("fused_weight_gradient_mlp_cuda", **functions)
    yield Replacement(sys.modules, kernels.__name__, kernels, "nothing: it adds into main_grad")


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names, labkit_stands_in=True)
    return module
