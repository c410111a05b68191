"""Parameters, gradients and optimizer: dtypes, who holds the main parameters, buffers, buckets, data-parallel groups.

Small sequences and a vocabulary that outweighs the layers, so that state decides every figure.
"""

from typing import Any

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "state",
        "num_layers": 2,
        "hidden_size": 512,
        "ffn_hidden_size": 1408,
        "num_attention_heads": 8,
        "vocab_size": 20000,
        "multi_latent_attention": {
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 32,
            "v_head_dim": 64,
        },
        "qk_layernorm": True,
        "mixture_of_experts": {
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 1056,
            "moe_layer_freq": [0, 1],
        },
    },
    "parallelism": {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
    "batch": {"seq_length": 128, "global_batch_size": 8},
    "training": {},
}
OPTIMIZER, DATA_PARALLEL = "training.optimizer.", "training.data_parallel."
AWARE = {f"{OPTIMIZER}use_precision_aware_optimizer": True}
COPIED = {f"{OPTIMIZER}fp8_recipe": "tensorwise"}
WHOLE = {f"{DATA_PARALLEL}use_distributed_optimizer": False, f"{DATA_PARALLEL}overlap_param_gather": False}
FP32_GRADIENTS = {f"{DATA_PARALLEL}grad_reduce_in_fp32": True}
NO_OVERLAP = {f"{DATA_PARALLEL}overlap_param_gather": False, f"{DATA_PARALLEL}overlap_grad_reduce": False}
DENSE = {"model.mixture_of_experts": None, "parallelism.expert_model_parallel_size": 1}
INSTANCES = {f"{DATA_PARALLEL}num_distributed_optimizer_instances": 2}
ONE_RANK = DENSE | {
    "parallelism.world_size": 1,
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.sequence_parallel": False,
    "batch.global_batch_size": 2,
}
LARGE_VOCABULARY = {"model.vocab_size": 129280, "model.num_layers": 1, "model.mixture_of_experts.moe_layer_freq": 1}


def moments(first: str, second: str) -> dict[str, Any]:
    """The precision-aware optimizer with these moments."""
    return AWARE | {f"{OPTIMIZER}exp_avg_dtype": first, f"{OPTIMIZER}exp_avg_sq_dtype": second}


CHANGES: dict[str, dict[str, Any]] = {
    "as megatron has it": {},
    "fp32 gradients": FP32_GRADIENTS,
    "no overlap": NO_OVERLAP,
    "average outside the collective": {f"{DATA_PARALLEL}average_in_collective": False},
    "instances of the optimizer": INSTANCES,
    "instances of the optimizer, large vocabulary": INSTANCES | LARGE_VOCABULARY | AWARE,
    "an instance of each rank": INSTANCES
    | {f"{DATA_PARALLEL}num_distributed_optimizer_instances": 4, "parallelism.world_size": 16}
    | {"batch.global_batch_size": 16, "parallelism.expert_model_parallel_size": 4}
    | {"parallelism.tensor_model_parallel_size": 4},
    "one rank": ONE_RANK,
    "sixteen ranks": {"parallelism.world_size": 16, "batch.global_batch_size": 16},
    "data-parallel size that alignment does not divide": {
        "parallelism.world_size": 12,
        "parallelism.expert_model_parallel_size": 4,
        "batch.global_batch_size": 6,
    },
    "several buckets": LARGE_VOCABULARY
    | {"parallelism.tensor_model_parallel_size": 1}
    | {"parallelism.sequence_parallel": False, "batch.global_batch_size": 8},
    "one bucket": LARGE_VOCABULARY | NO_OVERLAP,
    "main parameters as remainders": AWARE,
    "main parameters whole in the optimizer": AWARE | {f"{OPTIMIZER}store_param_remainders": False},
    "main parameters in fp16": AWARE | {f"{OPTIMIZER}main_params_dtype": "fp16"},
    "main parameters in fp16, large vocabulary": AWARE | LARGE_VOCABULARY | {f"{OPTIMIZER}main_params_dtype": "fp16"},
    "main parameters copied by megatron": AWARE | COPIED,
    "main parameters copied, fp32 gradients": AWARE | COPIED | FP32_GRADIENTS,
    "bf16 moments": moments("bf16", "bf16"),
    "bf16 moments, copied": moments("bf16", "bf16") | COPIED,
    "bf16 second moment": moments("fp32", "bf16"),
    "bf16 second moment, large vocabulary": moments("fp32", "bf16") | COPIED | LARGE_VOCABULARY,
    "bf16 first moment, large vocabulary": moments("bf16", "fp32") | LARGE_VOCABULARY,
    "bf16 second moment, one dense layer": moments("fp32", "bf16") | ONE_RANK | {"model.num_layers": 1},
    "fp16 moments": moments("fp16", "fp16"),
    "fp16 and bf16 moments": moments("fp16", "bf16") | COPIED,
    "no distributed optimizer": WHOLE,
    "no distributed optimizer, fp32 gradients": WHOLE | FP32_GRADIENTS,
    "no distributed optimizer, large vocabulary": WHOLE | LARGE_VOCABULARY,
    "no distributed optimizer, one rank": WHOLE | ONE_RANK,
    "momentum": WHOLE | {f"{OPTIMIZER}optimizer": "sgd"},
    "momentum, large vocabulary": WHOLE | LARGE_VOCABULARY | {f"{OPTIMIZER}optimizer": "sgd"},
    "weight gradients not fused": {"training.kernels.gradient_accumulation_fusion": False},
}
