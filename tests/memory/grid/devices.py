"""GPUs other than Hopper: workspaces by compute capability, kernels that fill multiprocessors; and determinism.

What attention runs where nobody names a kernel follows from both.
"""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "devices",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1408,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "vocab_size": 1000,
        "mixture_of_experts": {
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 384,
            "moe_layer_freq": [0, 1, 1],
        },
    },
    "parallelism": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "batch": {"seq_length": 1024, "global_batch_size": 8},
    "training": {"gpu": "a100-80gb"},
}
B200 = {"training.gpu": "b200-180gb"}
GB200 = {"training.gpu": "gb200-186gb"}
DENSE = {
    "model.mixture_of_experts": None,
    "parallelism.world_size": 2,
    "parallelism.expert_model_parallel_size": 1,
    "parallelism.expert_tensor_parallel_size": None,
}
FLASH = DENSE | {"training.kernels.attention_backend": "flash"}
UNFUSED = DENSE | {"training.kernels.attention_backend": "unfused"}
LONG = {"batch.seq_length": 4096, "model.num_attention_heads": 2, "model.num_query_groups": 2}
GDN = DENSE | {
    "model.gated_delta_net": {
        "linear_attention_freq": [1, 1, 0],
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 96,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
    }
}
MAMBA = DENSE | {
    "model.num_layers": 4,
    "model.position_embedding_type": "none",
    "model.hybrid_layer_pattern": "M-M*",
    "model.mamba": {"mamba_state_dim": 64, "mamba_head_dim": 32, "mamba_num_groups": 4, "mamba_num_heads": 16},
}
AUTO = DENSE | {"training.kernels.attention_backend": "auto"}
HOPPER = {"training.gpu": "h100-80gb"}
DROPOUT = {"model.attention_dropout": 0.1, "model.hidden_dropout": 0.1}
DETERMINISTIC = {"training.kernels.deterministic_mode": True, "training.kernels.cross_entropy_loss_fusion": False}
EXPERTS = DETERMINISTIC | {"training.kernels.attention_backend": "auto"}

CHANGES: dict[str, dict[str, Any]] = {
    "A100": {},
    "A100 of 40 GB, moe_act": {"training.gpu": "a100-40gb", "labels": ["moe_act"]},
    "A100, workspaces as on Hopper": {"training.cublas_workspace_config": ":4096:8"},
    "A100, small workspaces": {"training.cublas_workspace_config": ":16:8:4096:1", "full": ("uniform", 1)},
    "A100, dense": DENSE,
    "A100, flash": FLASH,
    "A100, flash, few blocks": FLASH | LONG,
    "A100, unfused, core_attn": UNFUSED | {"labels": ["core_attn"]},
    "A100, gated delta net": GDN,
    "A100, Mamba": MAMBA,
    "B200": B200,
    "B200, flash, few blocks": B200 | FLASH | LONG,
    "B200, gated delta net": B200 | GDN,
    "GB200": GB200,
    "GB200, unfused, core_attn": GB200 | UNFUSED | {"labels": ["core_attn"]},
    "GB200, flash, few blocks": GB200 | FLASH | LONG,
    "GB200, Mamba, full uniform 2": GB200 | MAMBA | {"full": ("uniform", 2)},
    "A100, auto": AUTO,
    "A100, auto, wide heads": AUTO | {"model.kv_channels": 192},
    "A100, auto, heads that no kernel takes": AUTO | {"model.kv_channels": 100},
    "GB200, auto": GB200 | AUTO,
    "GB200, auto, wide heads": GB200 | AUTO | {"model.kv_channels": 192},
    "H100, auto, wide heads": HOPPER | AUTO | {"model.kv_channels": 192},
    "deterministic attention, flash": FLASH | {"training.kernels.deterministic_attention": True},
    "deterministic attention, flash, few blocks, full uniform 1": FLASH
    | LONG
    | {"training.kernels.deterministic_attention": True, "full": ("uniform", 1)},
    "deterministic attention, flash, context parallel": FLASH
    | {
        "parallelism.world_size": 4,
        "parallelism.context_parallel_size": 2,
        "training.kernels.deterministic_attention": True,
    },
    "deterministic, A100, auto, dropout": AUTO | DETERMINISTIC | DROPOUT,
    "deterministic, GB200, auto, dropout": GB200 | AUTO | DETERMINISTIC | DROPOUT,
    "deterministic, GB200, auto": GB200 | AUTO | DETERMINISTIC,
    "deterministic, H100, auto, dropout": HOPPER | AUTO | DETERMINISTIC | DROPOUT,
    "deterministic, H100, unfused, core_attn": HOPPER | UNFUSED | DETERMINISTIC | {"labels": ["core_attn"]},
    "deterministic, one rank": HOPPER
    | DENSE
    | DETERMINISTIC
    | {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False},
    "deterministic, Mamba": HOPPER | MAMBA | DETERMINISTIC,
    "deterministic, experts": HOPPER | EXPERTS,
    "deterministic, experts, moe_act": HOPPER | EXPERTS | {"labels": ["moe_act"]},
    "deterministic, A100, experts, full uniform 1": EXPERTS | {"full": ("uniform", 1)},
    "deterministic, experts, unfused permutation": HOPPER | EXPERTS | {"training.kernels.moe_permute_fusion": False},
    "deterministic, experts, allgather, unfused permutation": HOPPER
    | EXPERTS
    | {"training.kernels.moe_permute_fusion": False, "training.kernels.moe_token_dispatcher_type": "allgather"},
    "deterministic, experts of a capacity": HOPPER
    | EXPERTS
    | {
        "model.mixture_of_experts.moe_expert_capacity_factor": 1.25,
        "model.mixture_of_experts.moe_pad_expert_input_to_capacity": True,
        "training.kernels.moe_permute_fusion": False,
    },
}
