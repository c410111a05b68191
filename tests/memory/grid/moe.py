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
SHARES = [0.62, 0.47]
ETP = {"parallelism.world_size": 8, "parallelism.expert_tensor_parallel_size": 2}
ONE_EXPERT_RANK = {"parallelism.expert_model_parallel_size": 1, "parallelism.world_size": 2}
GATHER = {"training.kernels.moe_token_dispatcher_type": "allgather"}
FLEX = {"training.kernels.moe_token_dispatcher_type": "flex"}
UNFUSED = {"training.kernels.moe_permute_fusion": False}
OVERLAP = {"training.kernels.moe_shared_expert_overlap": True}
MOE = "model.mixture_of_experts."
BF16_ROUTER = {f"{MOE}moe_router_dtype": None}
CAPACITY = {f"{MOE}moe_expert_capacity_factor": 1.3}
PADDED = CAPACITY | {f"{MOE}moe_pad_expert_input_to_capacity": True}
ONE_TENSOR_RANK = {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False}
EAGER = {"training.kernels.bias_activation_fusion": False}
SQUARED_RELU = {"model.activation_func": "squared_relu", "model.gated_linear_unit": False}
BIAS = {
    "model.add_bias_linear": True,
    "training.kernels.bias_dropout_fusion": False,
    f"{MOE}moe_shared_expert_intermediate_size": None,
}
WORST = {"routing.kind": "worst"}

CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rows that do not divide": UNEVEN,
    "routing allowance": {"routing.kind": "allowance"},
    "routing worst": WORST,
    "routing concentrated, rows that do not divide": UNEVEN | {"routing.kind": "concentrated", "routing.share": 0.37},
    "routing measured": {"routing.kind": "measured", "routing.rows_per_expert": HISTOGRAM},
    "routing skewed": {"routing.kind": "skewed", "routing.imbalance": 1.3},
    "routing per layer": {"routing.kind": "per_layer", "routing.shares": SHARES},
    "routing per layer, full": {"routing.kind": "per_layer", "routing.shares": SHARES, "full": ("uniform", 1)},
    "routing worst, moe": WORST | {"labels": ["moe"]},
    "routing allowance, full": {"routing.kind": "allowance", "full": ("uniform", 1)},
    "overlap": OVERLAP,
    "overlap, moe_act": OVERLAP | {"labels": ["moe_act"]},
    "one tensor rank": ONE_TENSOR_RANK,
    "expert tensor ranks": ETP,
    "expert tensor ranks by default": ETP | {"parallelism.expert_tensor_parallel_size": None},
    "expert tensor ranks, router in bf16": ETP | BF16_ROUTER,
    "expert tensor ranks, overlap": ETP | OVERLAP,
    "expert tensor ranks, one expert rank": ETP | ONE_EXPERT_RANK,
    "expert tensor ranks, moe_act, layernorm": ETP | {"labels": ["moe_act", "layernorm"]},
    "expert tensor ranks, permutation not fused": ETP | UNFUSED,
    "more expert than tensor ranks": ONE_TENSOR_RANK
    | {"parallelism.expert_model_parallel_size": 2, "parallelism.expert_tensor_parallel_size": 2},
    "permutation not fused": UNFUSED,
    "permutation not fused, moe": UNFUSED | {"labels": ["moe"]},
    "permutation not fused, overlap, shared routing": UNFUSED | OVERLAP | WORST,
    "gathered": GATHER,
    "gathered, permutation not fused": GATHER | UNFUSED,
    "gathered, expert tensor ranks": GATHER | ETP,
    "gathered, one expert rank": GATHER | ONE_EXPERT_RANK,
    "gathered, moe": GATHER | {"labels": ["moe"]},
    "gathered, moe_act": GATHER | {"labels": ["moe_act"]},
    "gathered, full": GATHER | {"full": ("block", 2)},
    "gathered, routing worst, router in bf16": GATHER | WORST | BF16_ROUTER,
    "flex": FLEX,
    "flex, expert tensor ranks": FLEX | ETP,
    "flex, overlap": FLEX | OVERLAP,
    "flex, moe": FLEX | {"labels": ["moe"]},
    "flex, moe_act, shared_experts": FLEX | {"labels": ["moe_act", "shared_experts"]},
    "flex, full": FLEX | {"full": ("uniform", 2)},
    "flex, routing worst, router in bf16": FLEX | WORST | BF16_ROUTER,
    "bias": BIAS,
    "bias, router in bf16, moe_act": BIAS | BF16_ROUTER | {"labels": ["moe_act"]},
    "bias, moe": BIAS | {"labels": ["moe"]},
    "bias, full": BIAS | {"full": ("uniform", 1)},
    "bias, one tensor rank, one expert rank, no fusion": BIAS
    | ONE_TENSOR_RANK
    | ONE_EXPERT_RANK
    | {"training.kernels.gradient_accumulation_fusion": False},
    "bias, gathered, routing worst": BIAS | GATHER | WORST,
    "bias, flex, gelu without gate": BIAS
    | FLEX
    | EAGER
    | {"model.activation_func": "gelu", "model.gated_linear_unit": False},
    "bias, latent experts": BIAS | {f"{MOE}moe_latent_size": 320},
    "latent experts": {f"{MOE}moe_latent_size": 320},
    "latent experts, moe": {f"{MOE}moe_latent_size": 320, "labels": ["moe"]},
    "gated shared experts": {f"{MOE}moe_shared_expert_gate": True},
    "gated shared experts, shared_experts": {f"{MOE}moe_shared_expert_gate": True, "labels": ["shared_experts"]},
    "gated shared experts, overlap": OVERLAP | {f"{MOE}moe_shared_expert_gate": True},
    "gated shared experts, overlap, flex": OVERLAP | FLEX | {f"{MOE}moe_shared_expert_gate": True},
    "eager activation": EAGER,
    "eager activation, router in bf16": EAGER | BF16_ROUTER,
    "eager activation, moe_act": EAGER | {"labels": ["moe_act"]},
    "eager activation, overlap": EAGER | OVERLAP,
    "gated gelu": EAGER | {"model.activation_func": "gelu"},
    "squared relu": EAGER | SQUARED_RELU,
    "squared relu, overlap, gathered rows of flex": EAGER | SQUARED_RELU | OVERLAP | FLEX,
    "squared relu weighted by one kernel": EAGER
    | SQUARED_RELU
    | {"training.kernels.use_fused_weighted_squared_relu": True},
    "squared relu, moe_act, expert tensor ranks": EAGER | SQUARED_RELU | ETP | {"labels": ["moe_act"]},
    "context parallel, expert tensor ranks": ETP | {"parallelism.context_parallel_size": 2},
    "multi-token prediction, routing measured": {
        "model.mtp_num_layers": 1,
        "routing.kind": "measured",
        "routing.rows_per_expert": HISTOGRAM,
    },
    "gathered in a narrow width": GATHER | {f"{MOE}moe_latent_size": 96},
    "padded to capacity, flex, expert tensor ranks": PADDED | FLEX | ETP,
    "eager activation, moe_act, flex": EAGER | FLEX | {"labels": ["moe_act"]},
    "fused router": {"training.kernels.moe_router_fusion": True},
    "fused router, sigmoid, bf16, moe": BF16_ROUTER
    | {
        "training.kernels.moe_router_fusion": True,
        f"{MOE}moe_router_score_function": "sigmoid",
        f"{MOE}moe_router_load_balancing_type": "seq_aux_loss",
        "labels": ["moe"],
    },
    "z-loss": {f"{MOE}moe_z_loss_coeff": 0.001},
    "auxiliary loss over all ranks": {f"{MOE}moe_router_load_balancing_type": "global_aux_loss"},
    "auxiliary loss per sequence": {
        f"{MOE}moe_router_load_balancing_type": "seq_aux_loss",
        "batch.micro_batch_size": 2,
    },
    "capacity": CAPACITY,
    "capacity, routing worst": CAPACITY | WORST,
    "capacity, gathered": CAPACITY | GATHER | WORST,
    "padded to capacity": PADDED,
    "padded to capacity, permutation not fused": PADDED | UNFUSED,
    "padded to capacity, flex": PADDED | FLEX,
}
