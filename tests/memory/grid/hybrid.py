"""Hybrid patterns: layers of one mixer or one MLP alone, as in Nemotron 3 and Qwen3.5 in Megatron's hybrid model."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "small hybrid",
        "num_layers": 6,
        "hidden_size": 384,
        "ffn_hidden_size": 1152,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "vocab_size": 1000,
        "hybrid_layer_pattern": "ME*-ME",
        "mamba": {"mamba_state_dim": 64, "mamba_head_dim": 32, "mamba_num_groups": 4, "mamba_num_heads": 16},
        "gated_delta_net": {
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 96,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
        "mixture_of_experts": {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 320},
    },
    "parallelism": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
    "batch": {"micro_batch_size": 1, "global_batch_size": 4, "seq_length": 1024},
}
LATENT = {
    "model.multi_latent_attention": {
        "kv_lora_rank": 64,
        "qk_head_dim": 48,
        "qk_pos_emb_head_dim": 32,
        "v_head_dim": 56,
        "q_lora_rank": 96,
    },
    "model.num_query_groups": None,
}
PREDICTION = {"model.hybrid_layer_pattern": "ME*-ME/*E", "model.mtp_num_layers": 1}
STAGES = {"parallelism.world_size": 8, "parallelism.pipeline_model_parallel_size": 2, "batch.global_batch_size": 8}
CHUNKS = STAGES | {"parallelism.virtual_pipeline_model_parallel_size": 2}

CHANGES: dict[str, dict[str, Any]] = {
    "nemotron": {},
    "every label": {"labels": ["layernorm", "mlp", "moe_act", "gdn_norm_out"]},
    "moe": {"labels": ["moe"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full uniform 4": {"full": ("uniform", 4)},
    "full block 3": {"full": ("block", 3)},
    "qwen": {"model.hybrid_layer_pattern": "GEGE*E"},
    "qwen, gdn_norm_out": {"model.hybrid_layer_pattern": "GEGE*E", "labels": ["gdn_norm_out"]},
    "qwen, mlp": {"model.hybrid_layer_pattern": "G-G-*-", "labels": ["mlp"]},
    "latent attention": LATENT | {"model.hybrid_layer_pattern": "ME+-+E"},
    "latent attention, all labels": LATENT
    | {
        "model.hybrid_layer_pattern": "ME+-+E",
        "labels": ["layernorm", "mla_up_proj", "core_attn", "mlp", "moe_act"],
    },
    "two stages, the first ends with a mixer, mlp": {
        "model.num_layers": 8,
        "model.hybrid_layer_pattern": "MEM*M-ME",
        "parallelism.world_size": 8,
        "parallelism.pipeline_model_parallel_size": 2,
        "batch.global_batch_size": 16,
        "labels": ["mlp"],
    },
    "mixers alone": {"model.hybrid_layer_pattern": "MG**GM"},
    "MLPs alone": {"model.hybrid_layer_pattern": "-E--E-"},
    "unfused latent attention, full uniform 2": LATENT
    | {
        "model.hybrid_layer_pattern": "++",
        "model.num_layers": 2,
        "model.hidden_size": 1536,
        "parallelism.tensor_model_parallel_size": 1,
        "parallelism.sequence_parallel": False,
        "training.kernels.attention_backend": "unfused",
        "full": ("uniform", 2),
    },
    "one MLP recomputed": {
        "model.hybrid_layer_pattern": "-",
        "model.num_layers": 1,
        "batch.seq_length": 128,
        "full": ("uniform", 1),
    },
    "query and key norms": {"model.qk_layernorm": True},
    "query and key norms of latent attention": LATENT
    | {"model.hybrid_layer_pattern": "ME+-+E", "model.qk_layernorm": True, "labels": ["mla_up_proj"]},
    "shared experts": {"model.mixture_of_experts.moe_shared_expert_intermediate_size": 256},
    "no positions": {"model.position_embedding_type": "none"},
    "one tensor rank": {
        "parallelism.tensor_model_parallel_size": 1,
        "parallelism.sequence_parallel": False,
        "parallelism.world_size": 2,
        "batch.global_batch_size": 4,
    },
    "micro-batch of two": {"batch.micro_batch_size": 2, "batch.global_batch_size": 8},
    "squared ReLU without gate": {
        "model.hybrid_layer_pattern": "M-M*-M",
        "model.activation_func": "squared_relu",
        "model.gated_linear_unit": False,
        "training.kernels.bias_activation_fusion": False,
        "model.mixture_of_experts": None,
        "parallelism.expert_model_parallel_size": 1,
    },
    "two stages": {
        "parallelism.world_size": 8,
        "parallelism.pipeline_model_parallel_size": 2,
        "batch.global_batch_size": 6,
    },
    "context parallel": {"parallelism.world_size": 8, "parallelism.context_parallel_size": 2},
    "context parallel, every mixer": {
        "model.hybrid_layer_pattern": "MG*E-M",
        "parallelism.world_size": 8,
        "parallelism.context_parallel_size": 2,
        "parallelism.cp_comm_type": "a2a",
        "labels": ["gdn_norm_out", "core_attn", "layernorm"],
    },
    "marked stages": STAGES | {"model.hybrid_layer_pattern": "ME*-|ME"},
    "marked chunks": CHUNKS | {"model.hybrid_layer_pattern": "ME|*|-|ME"},
    "marked chunks, qwen, full uniform 1": CHUNKS | {"model.hybrid_layer_pattern": "G|-G|*-|-", "full": ("uniform", 1)},
    "marked chunks, labels": CHUNKS
    | {"model.hybrid_layer_pattern": "G-|M|E*|E", "labels": ["gdn_norm_out", "moe_act", "layernorm"]},
    "marked chunks, the head alone": CHUNKS | {"model.hybrid_layer_pattern": "MEM|E|*-|"},
    "prediction": PREDICTION,
    "prediction of two tokens, Mamba": PREDICTION
    | {"model.hybrid_layer_pattern": "ME*-ME/M-/M-", "model.mtp_num_layers": 2, "labels": ["layernorm"]},
    "prediction, full uniform 1": PREDICTION | {"full": ("uniform", 1)},
    "prediction, delta net, marked stages, labels": PREDICTION
    | STAGES
    | {"model.hybrid_layer_pattern": "MEG|-ME/GE", "labels": ["gdn_norm_out", "moe_act"]},
    "prediction, marked chunks": PREDICTION | CHUNKS | {"model.hybrid_layer_pattern": "ME|*|-|ME/*-"},
    "prediction, context parallel": PREDICTION | {"parallelism.world_size": 8, "parallelism.context_parallel_size": 2},
}
