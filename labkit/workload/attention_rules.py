"""Rules of attention layers (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `MLATransformerConfig.__post_init__`, `transformer/attention.py` of
Megatron Core; which kernels there are is `labkit.workload.attention_backends`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.attention_backends import attention_backend, backend_refusal
from labkit.workload.finding import Authority, Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_LONGEST_RING = 512
"""labkit's own bound: every step's kernel has an output of its own. The largest runs known take 64 ranks."""
_NARROWEST_TURNED = 4


def attention_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    mixers = {layer.mixer for layer in workload.model.kinds}
    if "attention" in mixers:
        yield from _heads(workload)
    if workload.model.multi_latent_attention is not None:
        yield from _latent(workload)
    if mixers & {"attention", "mla"}:
        yield from _rotary(workload)
        yield from _yarn(workload)
        yield from _context(workload)
        yield from _kernels(workload)


def _heads(workload: "Workload") -> Iterator[Finding]:
    model = workload.model
    heads, groups = model.num_attention_heads, model.key_value_heads
    if heads % groups:
        reason = f"{groups} key-value heads cannot be shared evenly by {heads} query heads"
        yield Finding("error", "model.num_query_groups", reason, f"use a divisor of {heads}", Authority.ATTENTION)
    if workload.training.runtime == "megatron":
        yield from _one_token(workload)


def _one_token(workload: "Workload") -> Iterator[Finding]:
    """`get_qkv_layout`: the values of one head of one token are contiguous as they lie in the packed projection.

    They are not copied out of it, and Transformer Engine knows no layout with their offset, unless queries and keys lie
    beside them.
    """
    model, batch, tp = workload.model, workload.batch, workload.parallelism.tp
    if batch.seq_length * batch.micro_batch_size > 1 or model.key_value_heads > tp:
        return
    moved = model.turns_positions or model.qk_layernorm or model.attention_output_gate
    if moved or model.num_attention_heads > tp:
        reason = "Transformer Engine knows no layout of a single token with one key-value head on a rank"
        yield Finding(
            "error",
            "batch.seq_length",
            reason,
            "use more tokens or more num_query_groups",
            Authority.TRANSFORMER_ENGINE,
        )


def _latent(workload: "Workload") -> Iterator[Finding]:
    model = workload.model
    if model.attention_output_gate:
        reason = "multi-latent attention has no output gate"
        yield Finding("error", "model.attention_output_gate", reason, "set it to false", Authority.CONFIG)
    if model.position_embedding_type == "yarn":
        reason = "multi-latent attention has its own positions"
        remedy = "use rope, and multi_latent_attention.rope_type: yarn"
        yield Finding("error", "model.position_embedding_type", reason, remedy, Authority.LABKIT)
    if workload.training.kernels.apply_rope_fusion:
        yield from _fused_latent(workload)
    idle = {
        "num_query_groups": model.num_query_groups is not None,
        "kv_channels": model.kv_channels is not None,
        "add_qkv_bias": model.add_qkv_bias,
        "position_embedding_type": model.position_embedding_type == "none",
    }
    for name, given in idle.items():
        if given and not any(layer.mixer == "attention" for layer in model.kinds):
            yield Finding(
                "warning", f"model.{name}", "multi-latent attention does not read it", "leave it out", Authority.LATENT
            )


def _fused_latent(workload: "Workload") -> Iterator[Finding]:
    """`MLATransformerConfig.__post_init__`, `validate_args`, `fused_mla_yarn_rope_apply`."""
    at, mla = "training.kernels.apply_rope_fusion", workload.model.multi_latent_attention
    if mla is None:
        return
    if mla.rope_type != "yarn":
        reason = "the fused rotary kernel of multi-latent attention turns YaRN positions alone"
        yield Finding(
            "error", at, reason, "set it to false or multi_latent_attention.rope_type: yarn", Authority.CONFIG
        )
    elif workload.model.position_embedding_type != "rope":
        reason = "Megatron-LM fuses rotary positions only where position_embedding_type is rope"
        yield Finding("error", at, reason, "set it to false or position_embedding_type: rope", Authority.LABKIT)
    if workload.training.precision == "fp32":
        reason = "the tables of a fused rotary kernel in fp32 are not supported by this version of labkit"
        yield Finding("error", at, reason, "set it to false", Authority.LABKIT)
    for name in ("qk_pos_emb_head_dim", "qk_head_dim", "v_head_dim"):
        width = getattr(mla, name)
        if width & (width - 1) or width < _NARROWEST_TURNED:
            reason = f"the fused rotary kernel takes widths that are powers of two, from 4 on, not {width}"
            remedy = "use such a width or apply_rope_fusion: false"
            yield Finding("error", f"model.multi_latent_attention.{name}", reason, remedy, Authority.FUSED_ROTARY)


def _yarn(workload: "Workload") -> Iterator[Finding]:
    """`megatron.training.arguments.validate_args`, `get_pos_emb_on_this_cp_rank`."""
    model, mla, chunks = workload.model, workload.model.multi_latent_attention, 2 * workload.parallelism.cp
    if (model.position_embedding_type if mla is None else mla.rope_type) != "yarn":
        return
    if mla is None and workload.training.kernels.apply_rope_fusion:
        reason = "Megatron-LM turns YaRN's positions without a fused kernel"
        yield Finding("error", "training.kernels.apply_rope_fusion", reason, "set it to false", Authority.LABKIT)
    rows = model.original_max_position_embeddings
    if chunks > 2 and rows % chunks:
        reason = f"context-parallel ranks split YaRN's tables of {rows} rows into {chunks} chunks"
        yield Finding(
            "error", "model.original_max_position_embeddings", reason, f"use a multiple of {chunks}", Authority.ROTARY
        )


def _rotary(workload: "Workload") -> Iterator[Finding]:
    model, mla = workload.model, workload.model.multi_latent_attention
    if mla is None and not model.turns_positions:
        return
    width = model.head_width if mla is None else mla.qk_pos_emb_head_dim
    field = "model.kv_channels" if mla is None else "model.multi_latent_attention.qk_pos_emb_head_dim"
    if model.rotary_width > width:
        yield Finding(
            "error", field, f"rotary positions turn pairs, and {width} is odd", "use an even width", Authority.ROTARY
        )
    elif model.rotary_width == 0:
        reason = f"{model.rotary_percent} of a head of {width} elements is none"
        yield Finding(
            "error", "model.rotary_percent", reason, "raise it or set position_embedding_type: none", Authority.ROTARY
        )


def _kernels(workload: "Workload") -> Iterator[Finding]:
    if workload.training.kernels.local:
        return  # `labkit.workload.local_rules`
    refused = backend_refusal(workload, attention_backend(workload))
    if refused is not None:
        yield Finding("error", *refused, Authority.TRANSFORMER_ENGINE)


def _context(workload: "Workload") -> Iterator[Finding]:
    """`get_attention_backend` and `AttnFuncWithCPAndQKVOA2A` of Transformer Engine."""
    model, layout = workload.model, workload.parallelism
    tp, cp = layout.tp, layout.cp
    if cp == 1:
        return
    if attention_backend(workload) == "flash" and layout.cp_comm_type == "all_gather":
        reason = "flash with all_gather is not supported by this version of labkit"
        yield Finding(
            "error", "parallelism.cp_comm_type", reason, "use p2p, a2a or attention_backend fused", Authority.LABKIT
        )
    if layout.cp_comm_type == "p2p" and cp > _LONGEST_RING:
        reason = f"the steps of a ring of {cp} ranks are more than are listed one by one"
        remedy = f"use cp_comm_type all_gather or at most {_LONGEST_RING} ranks"
        yield Finding("error", "parallelism.context_parallel_size", reason, remedy, Authority.LABKIT)
    if layout.cp_comm_type == "a2a":
        heads = {"num_attention_heads": model.num_attention_heads // tp}
        if model.multi_latent_attention is None:
            heads["num_query_groups"] = max(1, model.key_value_heads // tp)
        for name, of_rank in heads.items():
            if of_rank % cp:
                reason = (
                    f"a2a swaps rows for heads, and {cp} ranks cannot share the {of_rank} of a tensor-parallel rank"
                )
                yield Finding(
                    "error",
                    f"model.{name}",
                    reason,
                    "use fewer ranks or cp_comm_type p2p",
                    Authority.TRANSFORMER_ENGINE,
                )
