"""Which of Transformer Engine's attention kernels a workload can have, and which one `auto` becomes.

Causal self-attention, sequence first. Sources: `get_attention_backend`
(`transformer_engine/pytorch/attention/dot_product_attention/utils.py`) with flash-attention 2.8 installed and neither
3 nor 4, and `nvte_get_fused_attn_backend` (`transformer_engine/common/fused_attn/fused_attn.cpp`) with cuDNN 9.21.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from labkit.workload.gpu import GPUS

if TYPE_CHECKING:
    from labkit.workload.model import Model
    from labkit.workload.workload import Workload

type Backend = Literal["fused", "flash", "unfused"]

_WIDEST_HEAD = 256
_MOST_SCORES_OF_PACKED = 2**30
"""`SM90_DET_FUSED_THD_BWD_MAX_BHSS`: sequences x heads x longest squared, from which on cuDNN would want too much."""
_BACKEND = "training.kernels.attention_backend"


class Refusal(NamedTuple):
    """Why a workload cannot have a kernel."""

    field: str
    reason: str
    remedy: str


def attention_backend(workload: "Workload") -> Backend:
    """The kernel that the workload's core attention runs: the stated one, or what `auto` becomes.

    Megatron Core's own (`DotProductAttention`) has none, whatever is stated. Transformer Engine prefers cuDNN's kernel
    from Hopper on and flash-attention before.
    """
    if workload.training.kernels.local:
        return "unfused"
    stated = workload.training.kernels.attention_backend
    if stated != "auto":
        return stated
    hopper = GPUS[workload.training.gpu].compute_capability >= (9, 0)
    preferred: tuple[Backend, Backend] = ("fused", "flash") if hopper else ("flash", "fused")
    return next((backend for backend in preferred if backend_refusal(workload, backend) is None), "unfused")


def keeps_no_scores(workload: "Workload") -> bool:
    """Whether core attention keeps nothing that label `core_attn` could save."""
    return attention_backend(workload) != "unfused" and workload.training.runtime == "megatron"


def backend_refusal(workload: "Workload", backend: Backend) -> Refusal | None:
    """Why the workload cannot have a kernel; None where it can."""
    single = workload.training.precision == "fp32"
    if backend == "unfused":
        remedy = f"use {'' if single else 'fused or '}context_parallel_size 1"
        refusal = Refusal(_BACKEND, "unfused attention has no context parallelism", remedy)
        return None if workload.parallelism.cp == 1 else refusal
    if single:
        return Refusal(_BACKEND, f"the {backend} kernel takes no fp32", "use unfused or auto")
    kernels, model = workload.training.kernels, workload.model
    capability = GPUS[workload.training.gpu].compute_capability
    remedy = "use such a width or training.kernels.attention_backend: unfused"
    for field, query, value in _widths(model, padded=bool(workload.packed_lengths)):
        refused = _flash_width(query, value) if backend == "flash" else fused_width(capability, query, value)
        if refused is not None:
            return Refusal(field, refused, remedy)
    if backend == "flash":
        return None
    if capability < (9, 0) and kernels.attends_deterministically:
        reason = "the fused kernel's backward is deterministic from Hopper on alone"
        return Refusal(_BACKEND, reason, "use flash, unfused or auto")
    if refused := fused_determinism(
        capability, dropout=model.attention_dropout, deterministic=kernels.attends_deterministically
    ):
        return Refusal(_BACKEND, refused, "use flash, unfused or auto, or set model.attention_dropout: 0.0")
    return _layout_refusal(workload, capability)


def _layout_refusal(workload: "Workload", capability: tuple[int, int]) -> Refusal | None:
    """Why sequences or ranks keep a workload from the fused kernel."""
    layout, lengths, model = workload.parallelism, workload.packed_lengths, workload.model
    if lengths and workload.training.kernels.attends_deterministically and capability == (9, 0):
        scores = len(lengths) * max(lengths) ** 2 * (model.num_attention_heads // layout.tp)
        if scores >= _MOST_SCORES_OF_PACKED:
            reason = f"the fused kernel's deterministic backward takes fewer than 2^30 scores on Hopper, not {scores}"
            return Refusal("batch.packed.lengths", reason, "pack shorter sequences or use flash or auto")
    if layout.cp > 1 and layout.cp_comm_type == "a2a":
        groups = model.num_attention_heads if model.multi_latent_attention is not None else model.key_value_heads
        for name, heads in (("num_attention_heads", model.num_attention_heads), ("num_query_groups", groups)):
            of_rank = max(1, heads // layout.tp)
            if of_rank % 2:
                reason = f"the fused kernel swaps rows for heads (a2a) of an even number of heads, not {of_rank}"
                return Refusal(f"model.{name}", reason, "use an even number on each rank or cp_comm_type p2p")
    return None


def _widths(model: "Model", *, padded: bool) -> Iterator[tuple[str, int, int]]:
    """The field, the width of queries and keys, and that of values of each kind of head.

    Values of packed sequences are `padded` to the width of queries (`_prepare_mla_core_attention_value`).
    """
    mixers, mla = {layer.mixer for layer in model.kinds}, model.multi_latent_attention
    if "attention" in mixers:
        yield "model.kv_channels", model.head_width, model.head_width
    if mla is not None and "mla" in mixers:
        query = mla.qk_head_dim + mla.qk_pos_emb_head_dim
        yield "model.multi_latent_attention", query, query if padded else mla.v_head_dim


def _flash_width(query: int, value: int) -> str | None:
    """`get_attention_backend`: narrower values are padded."""
    return _not_taken("flash", _WIDEST_HEAD, max(query, value))


def _not_taken(backend: Backend, widest: int, *widths: int) -> str | None:
    for width in widths:
        if width % 8 or width > widest:
            return f"the {backend} kernel takes heads of a multiple of 8 elements up to {widest}, not {width}"
    return None


def fused_width(capability: tuple[int, int], query: int, value: int) -> str | None:
    """Why cuDNN has no kernel with backward for heads of these widths; None where it has.

    128 everywhere; up to 256 on Hopper (cuDNN 9.5), but of several widths from 128 on only 192 with values of 128
    (9.11); that pair alone on Blackwell.
    """
    if (query, value) == (192, 128) and capability >= (9, 0):
        return None
    if refused := _not_taken("fused", _WIDEST_HEAD if capability == (9, 0) else 128, query, value):
        return refused
    if query != value and min(query, value) >= 128:
        taken = "the fused kernel takes queries of 192 and values of 128"
        return f"of unequal widths from 128 on {taken}, not {query} and {value}"
    return None


def fused_determinism(capability: tuple[int, int], *, dropout: float, deterministic: bool) -> str | None:
    """Why cuDNN's backward cannot be deterministic; None where it can, or need not be."""
    if deterministic and dropout and capability >= (10, 0):
        return "on Blackwell the fused kernel's deterministic backward has no attention_dropout"
    return None
