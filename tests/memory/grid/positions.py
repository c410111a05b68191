"""Small models with YaRN's positions: grouped and latent attention, the fused rotary kernel, ranks, packed rows."""

from typing import Any

from tests.memory.grid import packed

BASE: dict[str, Any] = {
    **packed.BASE,
    "model": {**packed.BASE["model"], "position_embedding_type": "yarn"},
    "batch": {"seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 8},
    "training": {},
}
CONTEXT = {"parallelism.context_parallel_size": 2, "batch.seq_length": 16384}
PACKED = {
    "batch.packed": packed.BASE["batch"]["packed"],
    "batch.seq_length": 8192,
    "batch.micro_batch_size": 1,
}
ROPE_LATENT = packed.LATENT | {"model.position_embedding_type": "rope", "model.multi_latent_attention.v_head_dim": 64}
LATENT = ROPE_LATENT | {"model.multi_latent_attention.rope_type": "yarn"}
FUSED = {"training.kernels.apply_rope_fusion": True}
CORE = {"labels": ["core_attn", "mla_up_proj"]}

CHANGES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "grouped queries, core_attn": {"labels": ["core_attn"]},
    "grouped queries, full uniform 1": {"full": ("uniform", 1)},
    "grouped queries, short tables, half of a head asked for": {
        "model.original_max_position_embeddings": 1024,
        "model.rotary_percent": 0.5,
    },
    "grouped queries, two contexts": CONTEXT,
    "grouped queries, packed": PACKED,
    "grouped queries, two stages": {"parallelism.pipeline_model_parallel_size": 2, "model.num_layers": 4},
    "grouped queries, single precision": {
        "training.precision": "fp32",
        "training.kernels.attention_backend": "unfused",
    },
    "latent, rope": ROPE_LATENT,
    "latent": LATENT,
    "latent, core_attn, mla_up_proj": LATENT | CORE,
    "latent, long tables, full uniform 1": LATENT
    | {"model.original_max_position_embeddings": 32768, "full": ("uniform", 1)},
    "latent, two contexts": LATENT | CONTEXT,
    "latent, fused": LATENT | FUSED,
    "latent, fused, core_attn, mla_up_proj": LATENT | FUSED | CORE,
    "latent, fused, full uniform 1": LATENT | FUSED | {"full": ("uniform", 1)},
    "latent, fused, flash, no latent queries": LATENT
    | FUSED
    | packed.FLASH
    | {"model.multi_latent_attention.q_lora_rank": None},
    "latent, fused, two contexts": LATENT | FUSED | CONTEXT,
    "latent, fused, packed": LATENT | FUSED | PACKED,
    "latent, fused, packed, two contexts": LATENT | FUSED | PACKED | CONTEXT | {"batch.seq_length": 32768},
}
