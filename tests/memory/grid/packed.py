"""Small models on packed sequences: kernels, rotary positions, layouts, context parallelism, recompute, layer kinds."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "packed",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1280,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 96,
        "vocab_size": 500,
    },
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {
        "seq_length": 8192,
        "global_batch_size": 8,
        "packed": {"lengths": [3072, 512, 1024, 2560, 960]},
    },
    "training": {"kernels": {"apply_rope_fusion": True}},
}
ONE_RANK = {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False}
MANY_HEADS = {"model.num_query_groups": None}
FLASH = {"training.kernels.attention_backend": "flash"}
CONTEXT = {"parallelism.context_parallel_size": 2, "batch.seq_length": 16384}
FOUR_CONTEXTS = ONE_RANK | {"parallelism.context_parallel_size": 4, "batch.seq_length": 16384}
ALL_TO_ALL = {"parallelism.cp_comm_type": "a2a"}
SPREAD = {"training.kernels.apply_rope_fusion": False}
DELTA_NETS = {
    "model.num_layers": 4,
    "model.gated_delta_net": {
        "linear_attention_freq": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 96,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    },
}
MAMBA = {
    "model.num_layers": 5,
    "model.hybrid_layer_pattern": "M-M*-",
    "model.mamba": {"mamba_state_dim": 64, "mamba_head_dim": 32, "mamba_num_groups": 4, "mamba_num_heads": 16},
}
LATENT = {
    "model.multi_latent_attention": {
        "kv_lora_rank": 128,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 48,
        "q_lora_rank": 96,
    },
    "model.num_query_groups": None,
    "model.kv_channels": None,
    "training.kernels.apply_rope_fusion": False,
}
EXPERTS = {
    "model.mixture_of_experts": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 256,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 0.01,
    },
    "parallelism.expert_model_parallel_size": 2,
    "parallelism.expert_tensor_parallel_size": 1,
}

CHANGES: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused, core_attn": {"labels": ["core_attn"]},
    "fused, all labels": {"labels": ["core_attn", "layernorm", "mlp"]},
    "fused, full uniform 1": {"full": ("uniform", 1)},
    "fused, full block 2": {"full": ("block", 2)},
    "fused, one rank": ONE_RANK,
    "fused, many heads": MANY_HEADS,
    "fused, many heads, no positions": MANY_HEADS | {"model.position_embedding_type": "none"},
    "fused, gate and norm": {"model.attention_output_gate": True, "model.qk_layernorm": True},
    "flash": FLASH,
    "flash, core_attn": FLASH | {"labels": ["core_attn"]},
    "flash, many heads, no positions": FLASH | MANY_HEADS | {"model.position_embedding_type": "none"},
    "flash, many sequences, one rank": FLASH | ONE_RANK | {"batch.packed.lengths": [64] * 128},
    "flash, deterministic": FLASH | {"training.kernels.deterministic_attention": True},
    "fused, two contexts": CONTEXT,
    "fused, two contexts, core_attn": CONTEXT | {"labels": ["core_attn"]},
    "fused, two contexts, full uniform 1": CONTEXT | {"full": ("uniform", 1)},
    "fused, four contexts": FOUR_CONTEXTS,
    "flash, two contexts": FLASH | CONTEXT,
    "flash, four contexts, core_attn": FLASH | FOUR_CONTEXTS | {"labels": ["core_attn"]},
    "fused, all to all": CONTEXT | ALL_TO_ALL,
    "fused, all to all, core_attn": CONTEXT | ALL_TO_ALL | {"labels": ["core_attn"]},
    "flash, all to all": FLASH | CONTEXT | ALL_TO_ALL,
    "flash, all to all, four contexts": FLASH | FOUR_CONTEXTS | ALL_TO_ALL,
    "spread rotary": SPREAD,
    "spread rotary, core_attn": SPREAD | {"labels": ["core_attn"]},
    "spread rotary, full uniform 1": SPREAD | {"full": ("uniform", 1)},
    "spread rotary, half of a head, many heads": SPREAD | MANY_HEADS | {"model.rotary_percent": 0.5},
    "spread rotary, two contexts": SPREAD | CONTEXT,
    "spread rotary, two contexts, full uniform 1": SPREAD | CONTEXT | {"full": ("uniform", 1)},
    "spread rotary, one sequence": SPREAD | {"batch.packed.lengths": [8192]},
    "spread rotary, one sequence, two contexts, full uniform 1": SPREAD
    | CONTEXT
    | {"batch.packed.lengths": [16384], "full": ("uniform", 1)},
    "delta nets": DELTA_NETS,
    "delta nets, gdn_norm_out": DELTA_NETS | {"labels": ["gdn_norm_out"]},
    "delta nets, full uniform 1": DELTA_NETS | {"full": ("uniform", 1)},
    "delta nets, two contexts": DELTA_NETS | CONTEXT,
    "mamba": MAMBA,
    "mamba, full uniform 1": MAMBA | {"full": ("uniform", 1)},
    "mamba, two contexts": MAMBA | CONTEXT,
    "mamba, two contexts, full uniform 1": MAMBA | CONTEXT | {"full": ("uniform", 1)},
    "latent": LATENT,
    "latent, core_attn, mla_up_proj": LATENT | {"labels": ["core_attn", "mla_up_proj"]},
    "latent, full uniform 1": LATENT | {"full": ("uniform", 1)},
    "latent, two contexts": LATENT | CONTEXT | {"batch.seq_length": 32768},
    "latent, flash": LATENT | FLASH,
    "experts": EXPERTS,
    "prediction": {"model.mtp_num_layers": 1},
    "prediction, two contexts": {"model.mtp_num_layers": 1} | CONTEXT | {"batch.seq_length": 32768},
    "learned positions": {"model.position_embedding_type": "learned_absolute"},
    "three stages, two contexts": CONTEXT
    | {
        "parallelism.pipeline_model_parallel_size": 3,
        "parallelism.world_size": 12,
        "batch.seq_length": 65536,
    },
    "pipeline": {"parallelism.pipeline_model_parallel_size": 2, "parallelism.world_size": 4, "model.num_layers": 4},
}
