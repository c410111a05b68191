"""Mamba 2 layers, between MLPs as in Nemotron-H."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "small Mamba",
        "num_layers": 4,
        "hidden_size": 384,
        "ffn_hidden_size": 1152,
        "num_attention_heads": 4,
        "vocab_size": 1000,
        "position_embedding_type": "none",
        "hybrid_layer_pattern": "M-MM",
        "mamba": {"mamba_state_dim": 64, "mamba_head_dim": 32, "mamba_num_groups": 4, "mamba_num_heads": 16},
    },
    "parallelism": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"micro_batch_size": 1, "global_batch_size": 2, "seq_length": 1024},
}

CP = {"parallelism.world_size": 4, "parallelism.context_parallel_size": 2}

CHANGES: dict[str, dict[str, Any]] = {
    "mamba": {},
    "context parallel": CP,
    "mlp": {"labels": ["mlp"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full uniform 3": {"full": ("uniform", 3)},
    "full block 2": {"full": ("block", 2)},
    "micro-batch of two": {"batch.micro_batch_size": 2, "batch.global_batch_size": 4},
    "one layer, micro-batch of two, full": {
        "model.hybrid_layer_pattern": "M",
        "model.num_layers": 1,
        "model.hidden_size": 1024,
        "model.mamba.mamba_num_heads": 8,
        "model.mamba.mamba_num_groups": 8,
        "model.mamba.mamba_state_dim": 16,
        "parallelism.world_size": 4,
        "parallelism.tensor_model_parallel_size": 4,
        "batch.seq_length": 4096,
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 4,
        "full": ("uniform", 1),
    },
    "one tensor rank": {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False},
    "no sequence parallelism": {"parallelism.sequence_parallel": False},
    "heads by the hidden size": {"model.mamba.mamba_num_heads": None},
    "a thousand narrow heads": {"model.mamba.mamba_num_heads": 32, "model.mamba.mamba_head_dim": 8},
    "one group a rank": {"model.mamba.mamba_num_groups": 2},
    "wide state": {"model.mamba.mamba_state_dim": 256},
    "long sequence": {"batch.seq_length": 8192},
    "uneven chunks": {"batch.seq_length": 1000},
    "context parallel, full uniform 2": CP | {"full": ("uniform", 2)},
    "context parallel, micro-batch of two": CP | {"batch.micro_batch_size": 2, "batch.global_batch_size": 4},
    "context parallel, a group shared": CP | {"model.mamba.mamba_num_groups": 2},
    "context parallel alone": CP
    | {
        "parallelism.context_parallel_size": 4,
        "parallelism.tensor_model_parallel_size": 1,
        "parallelism.sequence_parallel": False,
    },
}
