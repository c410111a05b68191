"""Small relatives of Moonlight that differ in one thing each: layers, layouts, batches, training set-ups, recompute."""

from typing import Any

from labkit.workload import Workload
from labkit.workload.files import data_directory

BASE = Workload.load(data_directory() / "workloads" / "moonlight-16b.yaml").model_dump()
BASE["model"] |= {"num_layers": 3, "vocab_size": 1024}
BASE["model"]["mixture_of_experts"]["moe_layer_freq"] = [0, 1, 1]
NO_OVERLAP = {"training.kernels.moe_shared_expert_overlap": False}
ALONE = {
    "parallelism.world_size": 2,
    "parallelism.expert_model_parallel_size": 1,
    "model.mixture_of_experts.num_moe_experts": 8,
}
DENSE = NO_OVERLAP | {
    "model.mixture_of_experts": None,
    "parallelism.world_size": 2,
    "parallelism.expert_model_parallel_size": 1,
}
SOFTMAX = {
    "model.mixture_of_experts.moe_router_score_function": "softmax",
    "model.mixture_of_experts.moe_router_enable_expert_bias": False,
}
FULL_PRECISION = {
    "training.optimizer.use_precision_aware_optimizer": False,
    "training.optimizer.main_grads_dtype": "fp32",
    "training.optimizer.exp_avg_dtype": "fp32",
    "training.optimizer.exp_avg_sq_dtype": "fp32",
    "training.optimizer.fp8_recipe": None,
}

CONTEXT = {"parallelism.context_parallel_size": 2, "parallelism.expert_model_parallel_size": 4}

CHANGES: dict[str, dict[str, Any]] = {
    "as published": {},
    "core_attn": {"labels": ["core_attn"]},
    "mla_up_proj": {"labels": ["mla_up_proj"]},
    "mla_up_proj, core_attn": {"labels": ["mla_up_proj", "core_attn"]},
    "layernorm": {"labels": ["layernorm"]},
    "moe_act": {"labels": ["moe_act"]},
    "mlp": {"labels": ["mlp"]},
    "moe": {"labels": ["moe"]},
    "moe, moe_act, layernorm": {"labels": ["moe", "moe_act", "layernorm"]},
    "everything small": {"labels": ["layernorm", "mla_up_proj", "moe_act", "mlp"]},
    "shared_experts": NO_OVERLAP | {"labels": ["shared_experts"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full uniform 2": {"full": ("uniform", 2)},
    "full block 1": {"full": ("block", 1)},
    "query through a low rank": {"model.multi_latent_attention.q_lora_rank": 768},
    "query through a low rank, mla_up_proj": {
        "model.multi_latent_attention.q_lora_rank": 768,
        "labels": ["mla_up_proj"],
    },
    "no query and key norm": {"model.qk_layernorm": False},
    "one tensor rank": {
        "parallelism.tensor_model_parallel_size": 1,
        "parallelism.sequence_parallel": False,
        "batch.global_batch_size": 8,
    },
    "four tensor and expert ranks": {
        "parallelism.tensor_model_parallel_size": 4,
        "parallelism.expert_model_parallel_size": 4,
    },
    "experts on one rank": ALONE,
    "one expert a rank": {"model.mixture_of_experts.num_moe_experts": 8},
    "sixteen ranks": {"parallelism.world_size": 16, "batch.global_batch_size": 8},
    "no experts": DENSE,
    "no experts, mlp": DENSE | {"labels": ["mlp"]},
    "no shared experts": NO_OVERLAP | {"model.mixture_of_experts.moe_shared_expert_intermediate_size": None},
    "softmax router": SOFTMAX,
    "softmax after selection": SOFTMAX
    | {
        "model.mixture_of_experts.moe_router_pre_softmax": False,
        "model.mixture_of_experts.moe_router_num_groups": None,
        "model.mixture_of_experts.moe_router_group_topk": None,
    },
    "one expert a token": {"model.mixture_of_experts.moe_router_topk": 1},
    "router in bf16": {"model.mixture_of_experts.moe_router_dtype": None},
    "no auxiliary loss": {
        "model.mixture_of_experts.moe_router_load_balancing_type": "none",
        "model.mixture_of_experts.moe_aux_loss_coeff": 0.0,
    },
    "full-precision optimizer": FULL_PRECISION | {"training.data_parallel.grad_reduce_in_fp32": True},
    "full-precision optimizer, bf16 gradients": FULL_PRECISION,
    "main parameters as remainders": {"training.optimizer.fp8_recipe": None},
    "main parameters whole in the optimizer": {
        "training.optimizer.fp8_recipe": None,
        "training.optimizer.store_param_remainders": False,
    },
    "second moment in full precision": {"training.optimizer.exp_avg_sq_dtype": "fp32"},
    "first moment in full precision, remainders": {
        "training.optimizer.exp_avg_dtype": "fp32",
        "training.optimizer.fp8_recipe": None,
    },
    "weight gradients not fused": {"training.kernels.gradient_accumulation_fusion": False},
    "no overlap of reduction": {
        "training.data_parallel.overlap_grad_reduce": False,
        "training.data_parallel.overlap_param_gather": False,
    },
    "three micro-batches": {"batch.global_batch_size": 12},
    "micro-batch of two": {"batch.micro_batch_size": 2, "batch.global_batch_size": 8},
    "short sequence": {"batch.seq_length": 512},
    "whole vocabulary": {"model.vocab_size": 163840},
    "whole vocabulary, TE 2.18": {
        "model.vocab_size": 163840,
        "training.software.transformer_engine": "2.18.0",
    },
    "whole vocabulary, TE 2.20": {
        "model.vocab_size": 163840,
        "training.software.transformer_engine": "2.20.2",
    },
    "half of the positions turned": {"model.rotary_percent": 0.5},
    "unfused": {"training.kernels.attention_backend": "unfused", "batch.seq_length": 2048},
    "unfused, core_attn": {
        "training.kernels.attention_backend": "unfused",
        "batch.seq_length": 2048,
        "labels": ["core_attn"],
    },
    "flash": {"training.kernels.attention_backend": "flash"},
    "flash, micro-batch of two, core_attn": {
        "training.kernels.attention_backend": "flash",
        "batch.micro_batch_size": 2,
        "batch.global_batch_size": 8,
        "labels": ["core_attn"],
    },
    "flash, core_attn, mla_up_proj": {
        "training.kernels.attention_backend": "flash",
        "labels": ["core_attn", "mla_up_proj"],
    },
    "context parallel": CONTEXT,
    "context parallel, mla_up_proj": CONTEXT | {"labels": ["mla_up_proj"]},
    "context parallel, core_attn, mla_up_proj": CONTEXT | {"labels": ["core_attn", "mla_up_proj"]},
    "context parallel, all to all": CONTEXT | {"parallelism.cp_comm_type": "a2a"},
    "context parallel, all gather, full block 1": CONTEXT
    | {"parallelism.cp_comm_type": "all_gather", "full": ("block", 1)},
    "context parallel, no experts": DENSE | {"parallelism.context_parallel_size": 2, "parallelism.world_size": 4},
}
