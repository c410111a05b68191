from typing import Any

import pytest
import torch

from labkit.drivers.trace import te_shapes

ROWS, IN, OUT = 12, 8, 20


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gemm(a: torch.Tensor, transa: bool, b: torch.Tensor, transb: bool, out_dtype: object = None) -> torch.Tensor:
    result: torch.Tensor = te_shapes.generic_gemm(
        a, transa, b, transb, None, None, out_dtype, None, None, False, None, False, meta(1), 1, False
    )[0]
    return result


def test_the_three_products_of_a_linear_layer() -> None:
    weight, x, gradient = meta(OUT, IN), meta(3, 4, IN), meta(3, 4, OUT)
    assert gemm(weight, True, x, False).shape == (x @ weight.T).shape
    assert gemm(weight, False, gradient, False).shape == (gradient @ weight).shape
    x, gradient = meta(ROWS, IN), meta(ROWS, OUT)
    assert gemm(x, False, gradient, True).shape == (gradient.T @ x).shape
    assert gemm(x, False, gradient, True, te_shapes.DType.kFloat32).dtype == torch.float32
    into = meta(OUT, IN, dtype=torch.float32)
    options = (None, None, None, None, False, None, True, meta(1), 1, True)
    assert te_shapes.generic_gemm(x, False, gradient, True, into, *options)[0] is into


def test_rmsnorm_keeps_one_statistic_a_row_in_fp32() -> None:
    x, weight = meta(ROWS, IN), meta(IN)
    output, mean, rsigma = te_shapes.rmsnorm_fwd(x, weight, 1e-5, None, None, None, 0, False)
    assert (output.shape, output.dtype, mean) == (x.shape, x.dtype, None)
    assert (rsigma.shape, rsigma.dtype) == ((ROWS,), torch.float32)
    dx, dweight = te_shapes.rmsnorm_bwd(x, x, rsigma, weight, 0, False)
    assert (dx.shape, dweight.shape) == (x.shape, weight.shape)


def test_attention_with_narrower_values() -> None:
    query, key, value, lengths = meta(16, 2, 4, 48), meta(16, 2, 4, 48), meta(16, 2, 4, 32), meta(3, dtype=torch.int32)
    unread: list[Any] = [None] * 15
    forward = te_shapes.fused_attn_fwd(16, 16, *unread[:12], lengths, lengths, query, key, value)
    assert [tuple(tensor.shape) for tensor in forward] == [(16, 2, 4, 32), (2, 4, 16, 1), (2,)]
    assert [tensor.dtype for tensor in forward] == [torch.bfloat16, torch.float32, torch.int64]
    backward = te_shapes.fused_attn_bwd(16, 16, *unread, lengths, lengths, query, key, value)
    assert [None if g is None else g.shape for g in backward] == [query.shape, key.shape, value.shape, None, None]


def test_attention_with_sinks() -> None:
    query, lengths, sinks = meta(16, 2, 4, 48), meta(3, dtype=torch.int32), meta(1, 4, 1, 1, dtype=torch.float32)
    about: list[Any] = [None] * 15
    learnt = te_shapes.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX
    forward = te_shapes.fused_attn_fwd(
        16, 16, *about[:9], learnt, None, None, lengths, lengths, query, query, query, *about[:8], sinks
    )
    assert forward[3] is sinks
    *_, gradient = te_shapes.fused_attn_bwd(
        16, 16, *about[:11], learnt, None, None, None, lengths, lengths, query, query, query
    )
    assert gradient is not None
    assert (gradient.shape, gradient.dtype) == (sinks.shape, torch.float32)


def test_a_function_without_shapes_is_refused_by_name() -> None:
    module = te_shapes._module()
    with pytest.raises(NotImplementedError, match=r"no shapes for transformer_engine_torch\.nvfp4_data_transpose"):
        module.nvfp4_data_transpose(meta(1))
    layouts = module.NVTE_QKV_Layout
    assert layouts.NVTE_SBHD != layouts.NVTE_BSHD
    assert layouts.NVTE_SBHD == layouts.NVTE_SBHD
