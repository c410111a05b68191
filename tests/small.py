"""A small workload that still has every kind of layer: one dense and one MoE layer, traced in a second or two."""

from typing import Any

from labkit import Workload

MODEL: dict[str, Any] = {
    "name": "small",
    "num_layers": 2,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "multi_latent_attention": {
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_head_dim": 32,
        "qk_pos_emb_head_dim": 16,
        "v_head_dim": 32,
    },
    "mixture_of_experts": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 256,
        "moe_layer_freq": [0, 1],
        "moe_aux_loss_coeff": 0.001,
    },
}


def small(**changes: Any) -> Workload:
    """The small workload with top-level sections changed: keys with dots reach into them."""
    mapping: dict[str, Any] = {
        "model": MODEL,
        "parallelism": {
            "world_size": 4,
            "tensor_model_parallel_size": 2,
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 1,
            "sequence_parallel": True,
        },
        "batch": {"seq_length": 256, "global_batch_size": 2},
        "recompute": {"recompute_granularity": "selective", "recompute_modules": []},
        "training": {},
    }
    for path, value in changes.items():
        *sections, last = path.split("__")
        at = mapping
        for section in sections:
            at[section] = dict(at.get(section) or {})
            at = at[section]
        at[last] = value
    return Workload.from_mapping(mapping)


def selective(*labels: str) -> dict[str, Any]:
    """A selective recompute choice."""
    return {"recompute_granularity": "selective", "recompute_modules": list(labels)}


def full(method: str, num_layers: int) -> dict[str, Any]:
    """A full recompute choice."""
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": num_layers}
