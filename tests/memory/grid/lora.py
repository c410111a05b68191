"""The `lora` runtime: adapters on a frozen base, packed sequences as a tree of segments, hidden states as outputs."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "small adapted hybrid",
        "num_layers": 4,
        "hidden_size": 512,
        "ffn_hidden_size": 1536,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 64,
        "vocab_size": 1000,
        "attention_output_gate": True,
        "qk_layernorm": True,
        "rotary_percent": 0.25,
        "gated_delta_net": {
            "linear_attention_freq": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 96,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
        },
    },
    "parallelism": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"seq_length": 1400, "global_batch_size": 1, "packed": {"lengths": [700, 700]}},
    "training": {"runtime": "lora", "lora": {"rank": 4, "optimizer_step": False}},
}
PREFIX = {"batch.packed": {"lengths": [500, 700, 301], "shared_prefix": 141}, "batch.seq_length": 1220}
ALONE = {
    "parallelism.world_size": 1,
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.sequence_parallel": False,
}
DENSE = {"model.gated_delta_net": None, "model.attention_output_gate": False, "model.rotary_percent": 1.0}
EXPERTS = {
    "model.mixture_of_experts": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 320,
        "moe_shared_expert_intermediate_size": 448,
        "moe_shared_expert_gate": True,
    },
    "parallelism.expert_model_parallel_size": 2,
    "parallelism.expert_tensor_parallel_size": 1,
}
FLEX = EXPERTS | {"training.kernels.moe_token_dispatcher_type": "flex"}
STEPS = {"training.lora.optimizer_step": True}

CHANGES: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "prefix": PREFIX,
    "prefix, every label": PREFIX | {"labels": ["core_attn", "mlp", "gdn_norm_out"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "prefix, full block 3": PREFIX | {"full": ("block", 3)},
    "one rank": ALONE | PREFIX,
    "without sequence parallelism": {"parallelism.sequence_parallel": False},
    "more ranks than key-value heads": {
        "model.num_query_groups": 2,
        "parallelism.world_size": 4,
        "parallelism.tensor_model_parallel_size": 4,
    },
    "compiled": {"training.lora.compile_layers": True},
    "compiled, mlp": PREFIX | {"training.lora.compile_layers": True, "labels": ["core_attn", "mlp"]},
    "some linears": {"training.lora.target_modules": ["linear_proj", "in_proj", "linear_fc1"]},
    "rank 16": {"training.lora.rank": 16},
    "sequences of equal length": {"batch.packed": None, "batch.seq_length": 512, "batch.micro_batch_size": 2}
    | {"batch.global_batch_size": 2},
    "no_grad": {"training.lora.no_grad": True},
    "dense": DENSE,
    "dense, core_attn": DENSE | PREFIX | {"labels": ["core_attn"]},
    "dense, compiled, fused activation": DENSE | {"training.lora.compile_layers": True},
    "optimizer": STEPS,
    "optimizer, two data ranks, three micro-batches": STEPS
    | {"parallelism.world_size": 4, "batch.global_batch_size": 6},
    "experts": FLEX,
    "experts, all-to-all": EXPERTS,
    "experts, moe": FLEX | {"labels": ["moe", "core_attn"]},
    "experts, compiled, moe_act": FLEX | PREFIX | {"training.lora.compile_layers": True, "labels": ["moe_act"]},
    "experts, full uniform 2": FLEX | {"full": ("uniform", 2)},
    "experts, optimizer": FLEX | STEPS,
}
