"""PyTorch's FlexAttention, which Inductor writes as kernels: what they keep and hold.

Sources: `torch/_higher_order_ops/flex_attention.py` (`FlexAttentionAutogradOp`), `torch/_inductor/kernel/flex/`,
`torch/nn/attention/flex_attention.py` (`BlockMask`); PyTorch 2.11.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.patches import Replacement
from labkit.drivers.trace.te_shapes import attention_flops, seen_pairs
from labkit.drivers.trace.work import launched

_BLOCK = 128
"""Rows of a block of the mask (`_DEFAULT_SPARSE_BLOCK_SIZE`)."""


class _FlexAttention(torch.autograd.Function):
    """Keeps q, k, v, output and log-sum-exp; backward sums output times gradient first."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        statistics = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, output, statistics)
        launched(attention_flops(_pairs(query), query.shape[-1], value.shape[-1]), query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, statistics = ctx.saved_tensors
        flops = attention_flops(_pairs(query), query.shape[-1], value.shape[-1], backward=True)
        launched(flops, query, key, value, query, key, value, output, gradient)
        delta = torch.empty_like(statistics)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del delta
        return gradients


def _pairs(query: Tensor) -> int:
    rows = query.shape[-2]
    return seen_pairs(query.numel() // query.shape[-1], rows, rows, causal=True)


def _flex_attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    output: Tensor = _FlexAttention.apply(query, key, value)
    return output


def _create_block_mask(
    mask: Any, batch: Any, heads: Any, rows: int, keys: int, device: Any = "cuda", **options: Any
) -> list[Tensor]:
    """Which blocks of keys a block of queries sees, in part and in full, and the other way round."""
    queries, columns = -(-rows // _BLOCK), -(-keys // _BLOCK)
    shapes = [(1, 1, queries), (1, 1, queries, columns), (1, 1, columns), (1, 1, columns, queries)]
    return [torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes for _ in range(2)]


def replacements() -> Iterator[Replacement]:
    """Both functions of the module that the `lora` runtime calls."""
    from torch.nn.attention import flex_attention

    yield Replacement(flex_attention, "flex_attention", _flex_attention, "output, log-sum-exp; see this file")
    yield Replacement(flex_attention, "create_block_mask", _create_block_mask, "the mask's eight tables")
