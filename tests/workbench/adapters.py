"""A small workload with adapters on frozen weights, and a budget in which some of its sequences fit together."""

from typing import Any

from labkit import Workload

BUDGET = "3GiB"


def small(**changes: Any) -> Workload:
    """A dense model of four layers with LoRA, its own batch two sequences that share a prefix."""
    return Workload.from_mapping(
        {
            "model": {
                "name": "small",
                "num_layers": 4,
                "hidden_size": 1024,
                "ffn_hidden_size": 4096,
                "num_attention_heads": 8,
                "vocab_size": 8000,
                "attention_output_gate": True,
                "qk_layernorm": True,
            },
            "parallelism": {"world_size": 1},
            "batch": {
                "seq_length": 1536,
                "global_batch_size": 1,
                "packed": {"lengths": [1024, 1024], "shared_prefix": 512},
            },
            "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            "training": {"runtime": "lora", "lora": {"rank": 4}},
            **changes,
        }
    )
