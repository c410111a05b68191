"""A small workload with experts, and rows that somebody might have counted of it."""

from labkit import Workload

GPUS = ("h100-80gb", "h200-141gb")
EXPERTS = 8


def small(**changes: object) -> Workload:
    """Three MoE layers behind a dense one, at EP 4 of 4 ranks."""
    return Workload.from_mapping(
        {
            "model": {
                "name": "small",
                "num_layers": 4,
                "hidden_size": 512,
                "ffn_hidden_size": 1024,
                "num_attention_heads": 8,
                "vocab_size": 1000,
                "mixture_of_experts": {
                    "num_moe_experts": EXPERTS,
                    "moe_router_topk": 2,
                    "moe_ffn_hidden_size": 512,
                    "moe_layer_freq": [0, 1, 1, 1],
                    "moe_router_load_balancing_type": "none",
                },
            },
            "parallelism": {"world_size": 4, "expert_model_parallel_size": 4},
            "batch": {"seq_length": 2048, "global_batch_size": 4},
            **changes,
        }
    )


# Rank 1 has most rows of all layers, rank 3 most of one.
COUNTED = [
    [100, 100, 200, 200, 100, 100, 100, 100],
    [100, 100, 200, 200, 100, 100, 100, 100],
    [50, 50, 150, 150, 50, 50, 250, 250],
]
