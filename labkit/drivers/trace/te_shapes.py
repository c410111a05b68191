"""Transformer Engine's compiled half (`transformer_engine_torch`) as functions that allocate and compute nothing.

Each function returns what the C++ one returns, with the same shapes and dtypes, and allocates nothing else; cuBLAS
and cuDNN workspaces that Transformer Engine hands in are Python tensors and seen without help. Each also says what
work the C++ one does (`launched`): its FLOPs, and the tensors it reads or writes. Sources:
`transformer_engine/pytorch/csrc/extensions/*.cpp` of 2.20 and the call sites in its Python half. Only what a step in
bf16 or FP8 calls is here (`te_quantized` for the latter): anything else raises `NotImplementedError` with its name.
"""

import enum
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace import te_quantized
from labkit.drivers.trace.patches import NOTHING, Replacement, installed
from labkit.drivers.trace.work import launched
from labkit.errors import WorkError
from labkit.workload.attention_backends import fused_determinism, fused_width

MODULE = "transformer_engine_torch"


class DType(enum.IntEnum):
    """`transformer_engine::DType` (csrc/common.h)."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class _AnyMember(type):
    """A class whose every attribute is a distinct integer: enumerations that Python only compares and passes on."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = sum(isinstance(member, int) for member in vars(cls).values())
        setattr(cls, name, value)
        return value


class NVTE_QKV_Layout(metaclass=_AnyMember):
    """How queries, keys and values lie in memory."""


class NVTE_Mask_Type(metaclass=_AnyMember):
    """Which keys a query sees."""


class NVTE_Softmax_Type(metaclass=_AnyMember):
    """What stands beside the scores in softmax's sum."""


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """cuDNN's fused attention kernels."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class FP8FwdTensors(enum.IntEnum):
    """Places in a module's list of quantizers for forward (`csrc/common.h`)."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Places in a module's list of quantizers for backward (`csrc/common.h`)."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class FusedAttentionParams:
    """The question `get_fused_attn_backend` answers."""

    head_dim_qk: int
    head_dim_v: int
    dropout: float
    deterministic: bool

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


_TORCH_DTYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}


def _dtype(value: Any, default: torch.dtype) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    return default if value is None else _TORCH_DTYPES[DType(value)]


def generic_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """cuBLASLt product in column-major terms: D [rows of B, columns of A] (`gemm.cpp`). A and B may be quantized."""
    if quantizer is not None:
        raise NotImplementedError(f"the trace has no shapes for products that {type(quantizer).__name__} quantizes")
    columns = A.shape[0] if transa else A.shape[-1]
    rows = (B.shape[-1],) if transb else tuple(B.shape[:-1])
    dtype = _dtype(out_dtype, te_quantized.high_precision(B))
    if D is None:
        D = torch.empty(*rows, columns, dtype=dtype, device=A.device)
    bias_gradient = torch.empty(bias.numel(), dtype=dtype, device=A.device) if grad and bias is not None else None
    te_quantized.rearrange_scales([A], transa)
    te_quantized.rearrange_scales([B], not transb)
    read = te_quantized.buffers([A], transa), te_quantized.buffers([B], not transb)
    launched(2 * columns * prod(B.shape), read, D, D if accumulate else None, bias)
    return D, bias_gradient, None, None


def te_general_grouped_gemm(
    A: Any,
    transa: bool,
    B: Any,
    transb: bool,
    D: Any,
    out_dtype: Any,
    m_splits: list[int],
    bias: Any,
    bias_type: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    *rest: Any,
) -> Any:
    """Products into outputs the caller allocated; returns the bias gradients it was given (`gemm.cpp`)."""
    te_quantized.rearrange_scales(A, transa)
    te_quantized.rearrange_scales(B, not transb)
    products = [(a, b) for a, b in zip(A, B, strict=True) if prod(a.shape) and prod(b.shape)]
    flops = sum(2 * (a.shape[0] if transa else a.shape[-1]) * prod(b.shape) for a, b in products)
    read = te_quantized.buffers(A, transa), te_quantized.buffers(B, not transb)
    launched(flops, read, D, D if accumulate else None, bias, launches=len(products))
    return bias


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Any, quantizer: Any, *rest: Any
) -> tuple[Any, None, Tensor]:
    """(output, no mean, 1/rms per row in fp32) (`normalization.cpp`)."""
    output = te_quantized.output(quantizer, ln_out, input.shape, input.dtype, input.device, fused=("delayed",))
    rsigma = torch.empty(input.numel() // input.shape[-1], dtype=torch.float32, device=input.device)
    launched(0, input, weight, te_quantized.buffers([output], True))
    return output, None, rsigma


def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """(input gradient, weight gradient) (`normalization.cpp`)."""
    launched(0, dz, x, x)
    return torch.empty_like(x), torch.empty_like(gamma)


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, ln_out: Any, quantizer: Any, *rest: Any
) -> tuple[Any, Tensor, Tensor]:
    """(output, mean, 1/standard deviation per row in fp32) (`normalization.cpp`)."""
    output, _, rsigma = rmsnorm_fwd(input, weight, eps, ln_out, quantizer)
    return output, torch.empty_like(rsigma), rsigma


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(input gradient, weight gradient, bias gradient) (`normalization.cpp`)."""
    launched(0, dz, x, x)
    return torch.empty_like(x), torch.empty_like(gamma), torch.empty_like(gamma)


def attention_flops(pairs: int, width: int, value_width: int, *, backward: bool = False) -> int:
    """Products of attention over `pairs` of query and key, all heads; backward makes the scores again."""
    return 2 * pairs * (3 * width + 2 * value_width if backward else width + value_width)


def seen_pairs(queries: int, rows: int, keys: int, *, causal: bool, window: int = -1) -> int:
    """Pairs of query and key that count.

    `queries` over all sequences and heads; each sequence has `rows` of them and as many `keys`. Under a causal mask the
    last query sees all keys; a `window` of earlier keys, where there is one (not -1), limits every query.
    """
    seen = keys - min(rows, keys) / 2 if causal else keys
    return int(queries * (seen if window < 0 else min(seen, window + 1)))


def packed_pairs(ends: Sequence[Tensor], heads: int, *, causal: bool, window: int = -1) -> int:
    """Pairs that count in packed sequences, of their cumulative lengths: of queries, and of keys."""
    rows, keys = ([end - begin for begin, end in pairwise(each.tolist())] for each in ends)
    return sum(
        seen_pairs(each * heads, each, its, causal=causal, window=window) for each, its in zip(rows, keys, strict=True)
    )


def _pairs(Q: Tensor, ends: tuple[Tensor, Tensor], rows: int, keys: int, mask: int, window: Any) -> int:
    masks = NVTE_Mask_Type
    causal = mask in (
        masks.NVTE_CAUSAL_MASK,
        masks.NVTE_PADDING_CAUSAL_MASK,
        masks.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
        masks.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
    )
    earlier = window[0] if window else -1
    if Q.dim() == 3:
        return packed_pairs(ends, Q.shape[-2], causal=causal, window=earlier)
    return seen_pairs(Q.numel() // Q.shape[-1], rows, keys, causal=causal, window=earlier)


def _has_sinks(softmax_type: Any) -> bool:
    types = NVTE_Softmax_Type
    return softmax_type in (types.NVTE_LEARNABLE_SOFTMAX, types.NVTE_OFF_BY_ONE_SOFTMAX)


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    qkv_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *rest: Any,
) -> list[Tensor]:
    """[output, softmax statistics in fp32, Philox seed and offset, the sinks that were given] (`attention.cpp`).

    The statistics are (batch, heads, queries, 1), of packed sequences (tokens, heads, 1).
    """
    sinks = [rest[8]] if _has_sinks(softmax_type) else []
    batch, heads = cu_seqlens_q.shape[0] - 1, Q.shape[-2]
    packed = Q.dim() == 3
    output = torch.empty(*Q.shape[:-1], V.shape[-1], dtype=Q.dtype, device=Q.device)
    pairs = _pairs(Q, (cu_seqlens_q, cu_seqlens_kv), max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size)
    launched(attention_flops(pairs, Q.shape[-1], V.shape[-1]), Q, K, V, output)
    return [
        output,
        torch.empty(
            (Q.shape[0], heads, 1) if packed else (batch, heads, max_seqlen_q, 1), dtype=torch.float32, device=Q.device
        ),
        torch.empty(2, dtype=torch.int64, device=Q.device),
        *sinks,
    ]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    o_format: Any,
    do_format: Any,
    dqkv_layout: Any,
    qkv_scale_inv_format: Any,
    do_scale_inv_format: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    bottom_right_diagonal: Any,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    *rest: Any,
) -> list[Tensor | None]:
    """[dQ, dK, dV, no dBias, that of sinks in fp32] (`attention.cpp`); cuDNN's workspace is not modelled.

    Gradients of one packed tensor are views of one packed gradient.
    """
    pairs = _pairs(Q, (cu_seqlens_q, cu_seqlens_kv), max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size)
    output_and_gradient = rest[:2]
    launched(attention_flops(pairs, Q.shape[-1], V.shape[-1], backward=True), Q, K, V, Q, K, V, output_and_gradient)
    layouts, sinks = NVTE_QKV_Layout, None
    if _has_sinks(softmax_type):
        sinks = torch.empty(1, Q.shape[-2], 1, 1, dtype=torch.float32, device=Q.device)
    if dqkv_layout in (layouts.NVTE_SB3HD, layouts.NVTE_T3HD, layouts.NVTE_SBH3D, layouts.NVTE_TH3D):
        dim = -3 if dqkv_layout in (layouts.NVTE_SB3HD, layouts.NVTE_T3HD) else -2
        packed = torch.empty(*Q.shape[: dim + 1], 3, *Q.shape[dim + 1 :], dtype=Q.dtype, device=Q.device)
        return [*packed.unbind(dim), None, sinks]
    return [*(torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in (Q, K, V)), None, sinks]


_CASTING_ACTIVATIONS = ("delayed", "mxfp8")
"""Formats that the kernels of activation functions write."""


def gated(input: Tensor, quantizer: Any, *rest: Any) -> Any:
    """activation(first half) x second half (`activation.cpp`)."""
    shape = (*input.shape[:-1], input.shape[-1] // 2)
    output = te_quantized.output(quantizer, None, shape, input.dtype, input.device, _CASTING_ACTIVATIONS)
    launched(0, input, te_quantized.buffers([output], True))
    return output


def pointwise(input: Tensor, quantizer: Any, *rest: Any) -> Any:
    """activation(input) (`activation.cpp`)."""
    output = te_quantized.output(quantizer, None, input.shape, input.dtype, input.device, _CASTING_ACTIVATIONS)
    launched(0, input, te_quantized.buffers([output], True))
    return output


def activation_gradient(grad: Tensor, input: Tensor, quantizer: Any, *rest: Any) -> Any:
    """Gradient of an activation's input (`activation.cpp`)."""
    output = te_quantized.output(quantizer, None, input.shape, input.dtype, input.device, _CASTING_ACTIVATIONS)
    launched(0, grad, input, te_quantized.buffers([output], True))
    return output


def scaled_gated(input: Tensor, scales: Tensor, quantizer: Any, *rest: Any) -> Any:
    """`gated`, each row times its scale (`activation.cpp`)."""
    return gated(input, quantizer)


def scaled_gated_gradient(
    grad: Tensor, input: Tensor, scales: Tensor, quantizer: Any, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input, and of the scales where the last argument asks for them (`activation.cpp`)."""
    launched(0, grad, input, input)
    return torch.empty_like(input), torch.empty_like(scales) if rest[-1] else None


def fused_rope_forward(input: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Rotated copy, contiguous whatever the input's strides (`apply_rope.cpp`)."""
    launched(0, input, input)
    return torch.empty(input.shape, dtype=input.dtype, device=input.device)


def thd_read_half_tensor(tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Early or late half of each sequence's rows (rows, heads, width) (`attention.cpp`)."""
    half = torch.empty(tensor.shape[0] // 2, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    launched(0, half, half)
    return half


def thd_read_second_half_lse(lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int) -> Tensor:
    """Late half of each sequence's statistics, (heads, rows) where they are packed (`attention.cpp`)."""
    half = torch.empty(*lse.shape[:-1], second_half_lse_seqlen, dtype=lse.dtype, device=lse.device)
    launched(0, half, half)
    return half


def thd_get_partitioned_indices(cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int) -> Tensor:
    """Which rows of packed sequences are a context-parallel rank's (`attention.cpp`)."""
    return torch.empty(total_tokens // world_size, dtype=torch.int32, device=cu_seqlens.device)


def thd_in_other_order(tensor: Tensor, cu_seqlens: Tensor, cp_size: int, total_tokens: int) -> Tensor:
    """Rows of packed sequences rank by rank, or sequence by sequence again (`attention.cpp`)."""
    tensor = tensor.contiguous()
    launched(0, tensor, tensor)
    return torch.empty_like(tensor)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """(norm, norm of each tensor or an empty tensor) in fp32 (`multi_tensor/l2norm.cpp`)."""
    launched(0, tensor_lists)
    device = tensor_lists[0][0].device
    count = len(tensor_lists[0]) if per_tensor else 0
    return (
        torch.empty(1, dtype=torch.float32, device=device),
        torch.empty(count, dtype=torch.float32, device=device),
    )


def get_fused_attn_backend(parameters: FusedAttentionParams) -> tuple[NVTE_Fused_Attn_Backend, str]:
    """cuDNN's kernel for any sequence length, where it takes the heads (`fused_attn.cpp`)."""
    capability = torch.cuda.get_device_capability()
    refused = fused_width(capability, parameters.head_dim_qk, parameters.head_dim_v) or fused_determinism(
        capability, dropout=parameters.dropout, deterministic=parameters.deterministic
    )
    if refused is not None:
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend, refused
    return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def fused_topk_with_score_function_fwd(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(probabilities, boolean map, intermediate scores in fp32), each like the logits (`router.cpp`)."""
    scores = torch.empty_like(logits, dtype=torch.float32)
    launched(0, logits, logits, scores)
    return torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool), scores


def fused_score_for_moe_aux_loss_fwd(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(scores in fp32, boolean map, intermediate scores in fp32), each like the logits (`router.cpp`)."""
    scores = torch.empty_like(logits, dtype=torch.float32)
    launched(0, logits, scores, scores)
    return scores, torch.empty_like(logits, dtype=torch.bool), torch.empty_like(scores)


def fused_moe_aux_loss_fwd(probs: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """(loss, its coefficient in fp32), scalars (`router.cpp`)."""
    device = probs.device
    launched(0, probs)
    return torch.empty((), dtype=probs.dtype, device=device), torch.empty((), dtype=torch.float32, device=device)


def fused_moe_aux_loss_bwd(
    Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int, num_cols: int, grad_aux_loss: Tensor
) -> Tensor:
    """Gradient of the scores (`router.cpp`)."""
    gradient = torch.empty(num_rows, num_cols, dtype=grad_aux_loss.dtype, device=grad_aux_loss.device)
    launched(0, gradient)
    return gradient


def _in_place(*args: Any, **kwargs: Any) -> None:
    """A kernel that only writes tensors it is given."""
    launched(0, args, [*kwargs.values()])


def _adam(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], *rest: Any) -> None:
    """Reads gradients, and reads and writes everything else: parameters and moments (`multi_tensor/adam.cu`)."""
    launched(0, tensor_lists, tensor_lists[1:])


_FUNCTIONS: dict[str, Any] = {
    "DType": DType,
    "NVTE_Fused_Attn_Backend": NVTE_Fused_Attn_Backend,
    "NVTE_QKV_Layout": NVTE_QKV_Layout,
    "NVTE_Mask_Type": NVTE_Mask_Type,
    "NVTE_Softmax_Type": NVTE_Softmax_Type,
    "FP8FwdTensors": FP8FwdTensors,
    "FP8BwdTensors": FP8BwdTensors,
    "FusedAttentionParams": FusedAttentionParams,
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
    "rmsnorm_fwd": rmsnorm_fwd,
    "rmsnorm_bwd": rmsnorm_bwd,
    "layernorm_fwd": layernorm_fwd,
    "layernorm_bwd": layernorm_bwd,
    "fused_attn_fwd": fused_attn_fwd,
    "fused_attn_bwd": fused_attn_bwd,
    **dict.fromkeys(("swiglu", "geglu", "qgeglu", "reglu", "sreglu", "clamped_swiglu"), gated),
    **dict.fromkeys(("gelu", "qgelu", "relu", "srelu", "silu"), pointwise),
    **{f"d{name}": activation_gradient for name in ("swiglu", "geglu", "qgeglu", "reglu", "sreglu", "clamped_swiglu")},
    **{f"d{name}": activation_gradient for name in ("gelu", "qgelu", "relu", "srelu", "silu")},
    **{f"scaled_{name}": scaled_gated for name in ("swiglu", "situglu")},
    **{f"scaled_d{name}": scaled_gated_gradient for name in ("swiglu", "situglu")},
    **te_quantized.FUNCTIONS,
    "fused_rope_forward": fused_rope_forward,
    "fused_rope_backward": fused_rope_forward,
    "thd_read_half_tensor": thd_read_half_tensor,
    "thd_read_second_half_lse": thd_read_second_half_lse,
    "thd_get_partitioned_indices": thd_get_partitioned_indices,
    **dict.fromkeys(("thd_cp_rank_order_to_sequence_order", "thd_sequence_order_to_cp_rank_order"), thd_in_other_order),
    **dict.fromkeys(("thd_second_half_lse_correction", "thd_out_correction", "thd_grad_correction"), _in_place),
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "get_fused_attn_backend": get_fused_attn_backend,
    "fused_topk_with_score_function_fwd": fused_topk_with_score_function_fwd,
    "fused_topk_with_score_function_bwd": _in_place,
    "fused_score_for_moe_aux_loss_fwd": fused_score_for_moe_aux_loss_fwd,
    "fused_score_for_moe_aux_loss_bwd": _in_place,
    "fused_moe_aux_loss_fwd": fused_moe_aux_loss_fwd,
    "fused_moe_aux_loss_bwd": fused_moe_aux_loss_bwd,
    "multi_tensor_adam": _adam,
    "multi_tensor_adam_param_remainder": _adam,
    "multi_tensor_adam_capturable": _adam,
    "multi_tensor_adam_capturable_master": _adam,
    "multi_tensor_scale": _in_place,
    "multi_tensor_sgd": _in_place,
    "multi_tensor_scale_tensor": _in_place,
    **dict.fromkeys(
        (
            "fused_amax_and_scale_update_after_reduction",
            "multi_tensor_compute_scale_and_scale_inv",
            "compute_amax",
            "fp8_block_scaling_compute_partial_amax",
            "fp8_block_scaling_partial_cast",
            "mxfp8_scaling_compute_partial_amax",
            "mxfp8_scaling_partial_cast",
            "fused_multi_row_padding",
            "fused_multi_row_unpadding",
        ),
        _in_place,
    ),
    # Versions decide code paths: cuBLASLt 13.2 keeps the grouped GEMM over lists (13.4 takes another one on Hopper).
    "get_cudnn_version": lambda: 92100,
    "get_cublasLt_version": lambda: 130200,
    "get_num_cublas_streams": lambda: 4,
}


def _refusal(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the trace has no shapes for {MODULE}.{name}")

    return refuse


class _Shapes(ModuleType):
    """The stand-in module: known functions, enumerations by first use, refusal for the rest."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = _AnyMember(name, (), {})
        else:
            value = _refusal(name)
        setattr(self, name, value)
        return value


def _module() -> _Shapes:
    module = _Shapes(MODULE)
    module.__spec__ = importlib.machinery.ModuleSpec(MODULE, None)
    vars(module).update(_FUNCTIONS)
    return module


def import_transformer_engine() -> None:
    """Import Transformer Engine's Python half over the stand-in, if that has not happened.

    It keeps the stand-in for good: that is why a trace runs in a worker process, and why no process may use a GPU
    after tracing.

    Raises:
        WorkError: the real compiled half is already loaded in this process.
    """
    if not isinstance(sys.modules.setdefault(MODULE, _module()), _Shapes):
        raise WorkError(
            "Transformer Engine's compiled half is already loaded in this process; trace in one that has not used it"
        )
    if "transformer_engine.pytorch" in sys.modules:
        return
    absent = ("transformer_engine.pytorch", "transformer_engine.jax")
    # The package imports its frameworks, which load the libraries, before anybody can say where they are: let it find
    # none at first. NVTE_PROJECT_BUILDING keeps it from loading the CUDA libraries themselves.
    with installed([Replacement(os.environ, "NVTE_PROJECT_BUILDING", "1", NOTHING)]):
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
        importlib.import_module("transformer_engine")
        for name in absent:
            del sys.modules[name]
        common = importlib.import_module("transformer_engine.common")
        with installed([Replacement(common, "load_framework_extension", lambda framework: None, NOTHING)]):
            importlib.import_module("transformer_engine.pytorch")
