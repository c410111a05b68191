"""Rules of attention layers (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `MLATransformerConfig.__post_init__`, `transformer/attention.py` of
Megatron Core; which kernels there are is `labkit.workload.attention_backends`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.attention_backends import attention_backend, backend_refusal
from labkit.workload.finding import Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_LONGEST_RING = 512
"""labkit's own bound: every step's kernel has an output of its own. The largest runs known take 64 ranks."""


def attention_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    mixers = {layer.mixer for layer in workload.model.kinds}
    if "attention" in mixers:
        yield from _heads(workload)
    if workload.model.multi_latent_attention is not None:
        yield from _latent(workload)
    if mixers & {"attention", "mla"}:
        yield from _rotary(workload)
        yield from _context(workload)
        yield from _kernels(workload)


def _heads(workload: "Workload") -> Iterator[Finding]:
    model, tp = workload.model, workload.parallelism.tp
    heads, groups = model.num_attention_heads, model.key_value_heads
    if heads % groups:
        reason = f"{groups} key-value heads cannot be shared evenly by {heads} query heads"
        yield Finding("error", "model.num_query_groups", reason, f"use a divisor of {heads}")
    if groups % tp and tp % groups:
        reason = f"{groups} key-value heads are neither a multiple nor a divisor of tensor_model_parallel_size ({tp})"
        yield Finding("error", "model.num_query_groups", reason, f"use a multiple or a divisor of {tp}")
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
    moved = model.position_embedding_type == "rope" or model.qk_layernorm or model.attention_output_gate
    if moved or model.num_attention_heads > tp:
        reason = "Transformer Engine knows no layout of a single token with one key-value head on a rank"
        yield Finding("error", "batch.seq_length", reason, "use more tokens or more num_query_groups")


def _latent(workload: "Workload") -> Iterator[Finding]:
    model = workload.model
    if model.attention_output_gate:
        reason = "multi-latent attention has no output gate"
        yield Finding("error", "model.attention_output_gate", reason, "set it to false")
    if workload.training.kernels.apply_rope_fusion:
        reason = "the fused rotary kernel of multi-latent attention turns YaRN positions alone"
        yield Finding("error", "training.kernels.apply_rope_fusion", reason, "set it to false")
    idle = {
        "num_query_groups": model.num_query_groups is not None,
        "kv_channels": model.kv_channels is not None,
        "add_qkv_bias": model.add_qkv_bias,
        "position_embedding_type": model.position_embedding_type == "none",
    }
    for name, given in idle.items():
        if given and not any(layer.mixer == "attention" for layer in model.kinds):
            yield Finding("warning", f"model.{name}", "multi-latent attention does not read it", "leave it out")


def _rotary(workload: "Workload") -> Iterator[Finding]:
    model, mla = workload.model, workload.model.multi_latent_attention
    if mla is None and model.position_embedding_type != "rope":
        return
    width = model.head_width if mla is None else mla.qk_pos_emb_head_dim
    field = "model.kv_channels" if mla is None else "model.multi_latent_attention.qk_pos_emb_head_dim"
    if model.rotary_width > width:
        yield Finding("error", field, f"rotary positions turn pairs, and {width} is odd", "use an even width")
    elif model.rotary_width == 0:
        reason = f"{model.rotary_percent} of a head of {width} elements is none"
        yield Finding("error", "model.rotary_percent", reason, "raise it or set position_embedding_type: none")


def _kernels(workload: "Workload") -> Iterator[Finding]:
    refused = backend_refusal(workload, attention_backend(workload))
    if refused is not None:
        yield Finding("error", *refused)


def _context(workload: "Workload") -> Iterator[Finding]:
    """`get_attention_backend` and `AttnFuncWithCPAndQKVOA2A` of Transformer Engine."""
    model, layout = workload.model, workload.parallelism
    tp, cp = layout.tp, layout.cp
    if cp == 1:
        return
    if attention_backend(workload) == "flash" and layout.cp_comm_type == "all_gather":
        reason = "flash with all_gather is not supported by this version of labkit"
        yield Finding("error", "parallelism.cp_comm_type", reason, "use p2p, a2a or attention_backend fused")
    if layout.cp_comm_type == "p2p" and cp > _LONGEST_RING:
        reason = f"the steps of a ring of {cp} ranks are more than are listed one by one"
        remedy = f"use cp_comm_type all_gather or at most {_LONGEST_RING} ranks"
        yield Finding("error", "parallelism.context_parallel_size", reason, remedy)
    if layout.cp_comm_type == "a2a":
        heads = {"num_attention_heads": model.num_attention_heads // tp}
        if model.multi_latent_attention is None:
            heads["num_query_groups"] = max(1, model.key_value_heads // tp)
        for name, of_rank in heads.items():
            if of_rank % cp:
                reason = (
                    f"a2a swaps rows for heads, and {cp} ranks cannot share the {of_rank} of a tensor-parallel rank"
                )
                yield Finding("error", f"model.{name}", reason, "use fewer ranks or cp_comm_type p2p")
