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

CHANGES: dict[str, dict[str, Any]] = {
    "gdn": {},
    "gdn_norm_out": {"labels": ["gdn_norm_out"]},
    "mlp": {"labels": ["mlp"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "micro-batch of two": {"batch.micro_batch_size": 2, "batch.global_batch_size": 4},
    "as many value heads as key heads": {"model.gated_delta_net.linear_num_value_heads": 4},
    "uneven chunks": {"batch.seq_length": 776},
}
