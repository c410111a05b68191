"""flash-attention 2.8 as functions that allocate and compute nothing: the package builds only where CUDA is.

Sources: `flash_attn/flash_attn_interface.py` (`FlashAttnFunc`) and `csrc/flash_attn/flash_api.cpp` (`mha_fwd`,
`mha_bwd`, `set_params_splitkv`) of 2.8.3, the newest that Transformer Engine 2.20 takes.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.te_shapes import attention_flops, packed_pairs, seen_pairs
from labkit.drivers.trace.work import launched
from labkit.workload.gpu import Gpu
from labkit.workload.kernels import flash_splits, flash_sums

_ROWS_OF_A_BLOCK = 128


def _rounded_width(width: int) -> int:
    return -(-width // 32) * 32 if width <= 192 else 256


def _flops(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, backward: bool = False) -> int:
    batch, rows, heads, width = query.shape
    pairs = seen_pairs(batch * rows * heads, rows, key.shape[1], causal=causal)
    return attention_flops(pairs, width, value.shape[-1], backward=backward)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, multiprocessors: int, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp, RNG state) of `mha_fwd`; with split keys, fp32 outputs of each split while it runs."""
    batch, rows, heads, width = query.shape
    output = torch.empty_like(query)
    launched(_flops(query, key, value, causal=causal), query, key, value, output)
    statistics = torch.empty(batch, heads, rows, dtype=torch.float32, device=query.device)
    splits = 1 if dropout else flash_splits(batch, heads, (rows, key.shape[1]), width, multiprocessors)
    if splits > 1:
        shape = (splits, batch, heads, rows)
        _parts = [
            torch.empty(*shape, *last, dtype=torch.float32, device=query.device)
            for last in ((), (_rounded_width(width),))
        ]
    return output, statistics, torch.empty(2, dtype=torch.int64, device=query.device)


def _backward(query: Tensor, key: Tensor, value: Tensor, sums: int, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `mha_bwd`."""
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _launch_backward(query, key, value, sums, causal=causal)
    return gradients


def _launch_backward(query: Tensor, key: Tensor, value: Tensor, sums: int, *, causal: bool) -> None:
    """Reads what forward read, its output and the gradient, and writes three gradients."""
    flops = _flops(query, key, value, causal=causal, backward=True)
    launched(flops, [query, key, value] * 2, [query] * 2)
    _scratch(query, key, sums)


def _scratch(query: Tensor, key: Tensor, sums: int) -> None:
    """What `mha_bwd` holds while it runs: fp32 sums of dQ, and dK and dV of every query head."""
    batch, rows, heads, width = query.shape
    padded = -(-rows // _ROWS_OF_A_BLOCK) * _ROWS_OF_A_BLOCK
    wide = [(batch, heads, padded), (sums, batch, padded, heads, _rounded_width(width))]
    scratch = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in wide]
    if key.shape[2] != heads:
        every_head = (batch, key.shape[1], heads, width)
        scratch += [torch.empty(every_head, dtype=key.dtype, device=key.device) for _ in range(2)]


def _sums(query: Tensor, multiprocessors: int, *, deterministic: bool) -> int:
    """Sums of dQ that are kept apart."""
    return flash_sums(query.shape[0], query.shape[2], multiprocessors) if deterministic else 1


def _packed_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[Tensor], *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, log-sum-exp (heads, rows), RNG state) of `mha_varlen_fwd` on (rows, heads, width) tensors.

    It splits keys where all sequences have one query each, which is no training.
    """
    rows, heads, width = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    pairs = packed_pairs(ends, heads, causal=causal)
    launched(attention_flops(pairs, width, value.shape[-1]), query, key, value, output)
    statistics = torch.empty(heads, rows, dtype=torch.float32, device=query.device)
    return output, statistics, torch.empty(2, dtype=torch.int64, device=query.device)


def _launch_packed_backward(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[Tensor], sums: int, *, causal: bool
) -> None:
    """What `mha_varlen_bwd` holds while it runs: 128 rows more for each sequence."""
    rows, heads, width = query.shape
    flops = attention_flops(packed_pairs(ends, heads, causal=causal), width, value.shape[-1], backward=True)
    launched(flops, [query, key, value] * 2, [query] * 2)
    padded = rows + _ROWS_OF_A_BLOCK * (len(ends[0]) - 1)
    wide = [(heads, padded), (sums, padded, heads, _rounded_width(width))]
    scratch = [torch.empty(shape, dtype=torch.float32, device=query.device) for shape in wide]
    if key.shape[1] != heads:
        every_head = (key.shape[0], heads, width)
        scratch += [torch.empty(every_head, dtype=key.dtype, device=key.device) for _ in range(2)]


def _packed_sums(query: Tensor, ends: Tensor, multiprocessors: int, *, deterministic: bool) -> int:
    return flash_sums(len(ends) - 1, query.shape[1], multiprocessors) if deterministic else 1


class _FlashAttnVarlenFunc(torch.autograd.Function):
    """`FlashAttnVarlenFunc`: keeps q, k, v as they lie, output, log-sum-exp, RNG state, and where sequences end."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, causal: bool, sums: int
    ) -> Tensor:
        output, statistics, state = _packed_forward(query, key, value, (ends, key_ends), causal=causal)
        ctx.causal, ctx.sums = causal, sums
        ctx.save_for_backward(query, key, value, output, statistics, ends, key_ends, state)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, *ends, _ = ctx.saved_tensors
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        _launch_packed_backward(query, key, value, ends, ctx.sums, causal=ctx.causal)
        return (*gradients, None, None, None, None)


class _FlashAttnFunc(torch.autograd.Function):
    """`FlashAttnFunc`: keeps q, k, v, output, log-sum-exp, RNG state."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout: float,
        multiprocessors: int,
        causal: bool,
        deterministic: bool,
    ) -> Tensor:
        output, statistics, state = _forward(query, key, value, dropout, multiprocessors, causal=causal)
        ctx.causal = causal
        ctx.save_for_backward(query, key, value, output, statistics, state)
        ctx.sums = _sums(query, multiprocessors, deterministic=deterministic)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, _, _, _ = ctx.saved_tensors
        return (*_backward(query, key, value, ctx.sums, causal=ctx.causal), None, None, None, None)


def replacements(gpu: Gpu) -> Iterator[Replacement]:
    """flash-attention as Transformer Engine finds it where it is installed."""
    backends = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.backends")
    utils = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    found = utils.FlashAttentionUtils

    def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, *rest: Any, **options: Any) -> Any:
        choices = options["causal"], options["deterministic"]
        return _FlashAttnFunc.apply(query, key, value, dropout_p, gpu.multiprocessors, *choices)

    def flash_attn_fwd(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, **options: Any) -> Any:
        causal = options["causal"]
        output, statistics, state = _forward(query, key, value, dropout_p, gpu.multiprocessors, causal=causal)
        return output, statistics, None, state

    def flash_attn_bwd(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, causal: bool, **options: Any
    ) -> None:
        sums = _sums(query, gpu.multiprocessors, deterministic=options["deterministic"])
        _launch_backward(query, key, value, sums, causal=causal)

    def varlen_func(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, *rest: Any, **options: Any
    ) -> Any:
        sums = _packed_sums(query, ends, gpu.multiprocessors, deterministic=options["deterministic"])
        return _FlashAttnVarlenFunc.apply(query, key, value, ends, key_ends, options["causal"], sums)

    def varlen_fwd(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, *rest: Any, **options: Any
    ) -> Any:
        output, statistics, state = _packed_forward(query, key, value, (ends, key_ends), causal=options["causal"])
        return output, statistics, None, state

    def varlen_bwd(
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        statistics: Tensor,
        *rest: Any,
        **options: Any,
    ) -> None:
        _dq, _dk, _dv, ends, key_ends, *_ = rest
        sums = _packed_sums(query, ends, gpu.multiprocessors, deterministic=options["deterministic"])
        _launch_packed_backward(query, key, value, (ends, key_ends), sums, causal=options["causal"])

    yield Replacement(backends, "flash_attn_func", flash_attn_func, "output, log-sum-exp, RNG state; see this file")
    # What context parallelism calls: `_flash_attn_forward` and `_flash_attn_backward` of the package.
    yield Replacement(backends, "_flash_attn_fwd", flash_attn_fwd, "output, log-sum-exp, RNG state; see this file")
    yield Replacement(backends, "_flash_attn_bwd", flash_attn_bwd, "what `_scratch` says: gradients are given")
    yield Replacement(backends, "flash_attn_varlen_func", varlen_func, "output, log-sum-exp, RNG state; see this file")
    yield Replacement(backends, "_flash_attn_varlen_fwd", varlen_fwd, "output, log-sum-exp, RNG state; see this file")
    yield Replacement(backends, "_flash_attn_varlen_bwd", varlen_bwd, "what `_launch_packed_backward` says")
    versions = ("v2_plus", "v2_1_plus", "v2_3_plus", "v2_4_plus", "v2_4_1_plus", "v2_5_plus", "v2_5_7_plus")
    for name in ("is_installed", *versions, "v2_6_0_plus", "v2_7_0_plus"):
        yield Replacement(found, name, True, NOTHING)
    yield Replacement(found, "version", Version("2.8.3"), NOTHING)
