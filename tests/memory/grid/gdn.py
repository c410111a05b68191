"""Gated delta net layers (Qwen3-Next and Qwen3.5) alone and between attention layers."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "small GDN",
        "num_layers": 3,
        "hidden_size": 384,
        "ffn_hidden_size": 1152,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "gated_delta_net": {
            "linear_attention_freq": [1, 1, 1],
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 96,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    },
    "parallelism": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"micro_batch_size": 1, "global_batch_size": 2, "seq_length": 1024},
}

QWEN = {
    "model.num_layers": 4,
    "model.gated_delta_net.linear_attention_freq": 4,
    "model.num_attention_heads": 8,
    "model.num_query_groups": 2,
    "model.kv_channels": 128,
    "model.attention_output_gate": True,
    "model.qk_layernorm": True,
    "model.rotary_percent": 0.25,
}
CP = {"parallelism.world_size": 4, "parallelism.context_parallel_size": 2}
MOE = {
    "model.mixture_of_experts": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 256,
        "moe_shared_expert_intermediate_size": 192,
    },
    "parallelism.world_size": 4,
    "parallelism.expert_model_parallel_size": 2,
    "parallelism.expert_tensor_parallel_size": 1,
    "batch.global_batch_size": 4,
}

CHANGES: dict[str, dict[str, Any]] = {
    "gdn": {},
    "gdn_norm_out": {"labels": ["gdn_norm_out"]},
    "mlp": {"labels": ["mlp"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "micro-batch of two": {"batch.micro_batch_size": 2, "batch.global_batch_size": 4},
    "as many value heads as key heads": {"model.gated_delta_net.linear_num_value_heads": 4},
    "uneven chunks": {"batch.seq_length": 776},
    "full block 2": {"full": ("block", 2)},
    "no sequence parallelism": {"parallelism.sequence_parallel": False},
    "one tensor rank": {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False},
    "wide keys": {"model.gated_delta_net.linear_key_head_dim": 256, "model.gated_delta_net.linear_num_key_heads": 2},
    "long sequence": {"batch.seq_length": 8192},
    "qwen": QWEN,
    "qwen, every label": QWEN | {"labels": ["gdn_norm_out", "layernorm", "mlp", "core_attn"]},
    "qwen, full uniform 2": QWEN | {"full": ("uniform", 2)},
    "qwen, sixteen layers": QWEN | {"model.num_layers": 16},
    "qwen, two stages": QWEN | {"parallelism.world_size": 4, "parallelism.pipeline_model_parallel_size": 2},
    "qwen, context parallel": QWEN | CP,
    "qwen with experts": QWEN | MOE,
    "qwen with experts, every label": QWEN
    | MOE
    | {"labels": ["gdn_norm_out", "layernorm", "moe_act", "shared_experts"]},
    "qwen with experts, moe": QWEN | MOE | {"labels": ["moe"]},
    "context parallel": CP,
    "context parallel, gdn_norm_out": CP | {"labels": ["gdn_norm_out"]},
    "context parallel, full uniform 2": CP | {"full": ("uniform", 2)},
    "context parallel, micro-batch of two": CP | {"batch.micro_batch_size": 2, "batch.global_batch_size": 4},
    "LayerNorm": {"model.normalization": "LayerNorm"},
    "context parallel alone": CP
    | {
        "parallelism.world_size": 4,
        "parallelism.context_parallel_size": 4,
        "parallelism.tensor_model_parallel_size": 1,
        "parallelism.sequence_parallel": False,
    },
}
