"""Mixture of experts: dispatchers, layouts of experts, routing, capacity, labels."""

from typing import Any

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "moe",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1408,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "multi_latent_attention": {
            "q_lora_rank": None,
            "kv_lora_rank": 128,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 32,
            "v_head_dim": 64,
        },
        "mixture_of_experts": {
            "num_moe_experts": 16,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 352,
            "moe_shared_expert_intermediate_size": 704,
            "moe_layer_freq": [0, 1, 1],
            "moe_aux_loss_coeff": 0.01,
            "moe_router_dtype": "fp32",
        },
    },
    "parallelism": {
        "world_size": 4,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
    "batch": {"seq_length": 768, "global_batch_size": 4},
    "training": {},
}
UNEVEN = {"batch.seq_length": 100}
HISTOGRAM = [[90, 30, 20, 10, 60, 60, 50, 40, 5, 5, 10, 10, 20, 30, 40, 50], [10] * 8 + [25] * 8]

CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows that do not divide": UNEVEN,
    "routing allowance": {"routing.kind": "allowance"},
    "routing worst": {"routing.kind": "worst"},
    "routing concentrated, rows that do not divide": UNEVEN | {"routing.kind": "concentrated", "routing.share": 0.37},
    "routing measured": {"routing.kind": "measured", "routing.rows_per_expert": HISTOGRAM},
    "routing worst, moe": {"routing.kind": "worst", "labels": ["moe"]},
    "routing allowance, full": {"routing.kind": "allowance", "full": ("uniform", 1)},
}
ETP = {"parallelism.world_size": 8, "parallelism.expert_tensor_parallel_size": 2}
GATHER = {"training.kernels.moe_token_dispatcher_type": "allgather"}
FLEX = {"training.kernels.moe_token_dispatcher_type": "flex"}
UNFUSED = {"training.kernels.moe_permute_fusion": False}
OVERLAP = {"training.kernels.moe_shared_expert_overlap": True}
MOE = "model.mixture_of_experts."
CHANGES |= {
    "overlap": OVERLAP,
    "etp": ETP,
    "etp default": {"parallelism.world_size": 8, "parallelism.expert_tensor_parallel_size": None},
    "etp bf16 router": ETP | {f"{MOE}moe_router_dtype": None},
    "etp overlap": ETP | OVERLAP,
    "etp no ep": ETP | {"parallelism.expert_model_parallel_size": 1, "parallelism.world_size": 2},
    "etp moe_act": ETP | {"labels": ["moe_act"]},
    "etp unfused": ETP | UNFUSED,
    "unfused": UNFUSED,
    "unfused moe": UNFUSED | {"labels": ["moe"]},
    "unfused overlap": UNFUSED | OVERLAP,
    "latent": {f"{MOE}moe_latent_size": 320},
    "zloss": {f"{MOE}moe_z_loss_coeff": 0.001},
    "global aux": {f"{MOE}moe_router_load_balancing_type": "global_aux_loss"},
    "seq aux": {f"{MOE}moe_router_load_balancing_type": "seq_aux_loss", "batch.micro_batch_size": 2},
    "cap": {f"{MOE}moe_expert_capacity_factor": 1.3},
    "cap worst": {f"{MOE}moe_expert_capacity_factor": 1.3, "routing.kind": "worst"},
    "cap pad": {f"{MOE}moe_expert_capacity_factor": 1.3, f"{MOE}moe_pad_expert_input_to_capacity": True},
    "cap pad unfused": UNFUSED
    | {f"{MOE}moe_expert_capacity_factor": 1.3, f"{MOE}moe_pad_expert_input_to_capacity": True},
}
CHANGES |= {
    "gather": GATHER,
    "gather unfused": GATHER | UNFUSED,
    "gather etp": GATHER | ETP,
    "gather alone": GATHER | {"parallelism.expert_model_parallel_size": 1, "parallelism.world_size": 2},
    "gather moe": GATHER | {"labels": ["moe"]},
    "gather moe_act": GATHER | {"labels": ["moe_act"]},
    "gather full": GATHER | {"full": ("uniform", 1)},
    "gather worst bf16": GATHER | {"routing.kind": "worst", f"{MOE}moe_router_dtype": None},
    "flex": FLEX,
    "flex etp": FLEX | ETP,
    "flex overlap": FLEX | OVERLAP,
    "flex moe": FLEX | {"labels": ["moe"]},
    "flex moe_act": FLEX | {"labels": ["moe_act"]},
    "flex full": FLEX | {"full": ("uniform", 1)},
    "flex bf16": FLEX | {f"{MOE}moe_router_dtype": None},
}
