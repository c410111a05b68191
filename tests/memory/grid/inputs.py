"""The batch and its mask: a square of bytes that the forward step keeps, and checkpoints have as an argument."""

from typing import Any

from tests.memory.grid import attention, gdn, hybrid, moe, pipeline

BASE: dict[str, Any] = {
    "model": {
        "name": "inputs",
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 896,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "vocab_size": 500,
    },
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {
        "seq_length": 4096,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "create_attention_mask_in_dataloader": True,
    },
    "training": {},
}
CORE = {"labels": ["core_attn"]}
FULL = {"full": ("uniform", 1)}
STAGES = {"parallelism.pipeline_model_parallel_size": 2, "parallelism.world_size": 8, "batch.global_batch_size": 16}
CHUNKS = STAGES | {"parallelism.virtual_pipeline_model_parallel_size": 2}
PREDICTION = {"model.mtp_num_layers": 1}
EXPERTS = {"model.mixture_of_experts": moe.BASE["model"]["mixture_of_experts"] | {"moe_layer_freq": [0, 1, 1, 1]}}
LATENT = {
    "model.num_query_groups": None,
    "model.multi_latent_attention": pipeline.BASE["model"]["multi_latent_attention"],
}
HYBRID = {
    "model.hybrid_layer_pattern": "M*-G",
    "model.mamba": hybrid.BASE["model"]["mamba"],
    "model.gated_delta_net": hybrid.BASE["model"]["gated_delta_net"],
}
DELTA = {"model.gated_delta_net": gdn.BASE["model"]["gated_delta_net"] | {"linear_attention_freq": [1, 1, 1, 0]}}
CONTEXT = {"parallelism.context_parallel_size": 2}

CHANGES: dict[str, dict[str, Any]] = {
    "a mask": {},
    "no mask": {"batch.create_attention_mask_in_dataloader": False},
    "one tensor rank": attention.ONE_RANK,
    "one tensor rank, no mask": attention.ONE_RANK | {"batch.create_attention_mask_in_dataloader": False},
    "core_attn": CORE,
    "every label": {"labels": ["core_attn", "layernorm", "mlp"]},
    "full uniform 1": FULL,
    "full uniform 3": {"full": ("uniform", 3)},
    "full block 2": {"full": ("block", 2)},
    "full block 1, one tensor rank": attention.ONE_RANK | {"full": ("block", 1)},
    "unfused": attention.UNFUSED | {"batch.seq_length": 1024},
    "unfused, core_attn": attention.UNFUSED | CORE | {"batch.seq_length": 1024},
    "flash": attention.FLASH,
    "flash, core_attn, one sequence": attention.FLASH | CORE | {"batch.micro_batch_size": 1},
    "context parallel": CONTEXT,
    "context parallel, core_attn, all to all": CONTEXT | CORE | attention.ALL_TO_ALL | {"model.num_query_groups": None},
    "context parallel, full uniform 2": CONTEXT | {"full": ("uniform", 2)},
    "context parallel, two stages, full": CONTEXT | STAGES | FULL,
    "learned positions, one tensor rank": attention.ONE_RANK | {"model.position_embedding_type": "learned_absolute"},
    "prediction": PREDICTION,
    "prediction, core_attn": PREDICTION | CORE,
    "prediction, full uniform 1": PREDICTION | FULL,
    "prediction, two stages, full uniform 1": PREDICTION | STAGES | FULL,
    "prediction, context parallel, two stages": PREDICTION | CONTEXT | STAGES,
    "experts, moe": EXPERTS | {"labels": ["moe"]},
    "experts, moe, core_attn": EXPERTS | {"labels": ["moe", "core_attn"]},
    "experts, full uniform 1": EXPERTS | FULL,
    "latent attention, core_attn": LATENT | {"labels": ["core_attn", "mla_up_proj"]},
    "hybrid": HYBRID,
    "hybrid, full uniform 1": HYBRID | FULL,
    "gated delta net, core_attn": DELTA | CORE,
    "gated delta net, full block 2": DELTA | {"full": ("block", 2)},
    "two stages": STAGES,
    "two stages, core_attn": STAGES | CORE,
    "four stages, full uniform 1": STAGES
    | FULL
    | {"parallelism.pipeline_model_parallel_size": 4, "parallelism.world_size": 16, "batch.global_batch_size": 32},
    "interleaved": CHUNKS,
    "interleaved, full uniform 1": CHUNKS | FULL,
    "interleaved, core_attn, many micro-batches": CHUNKS | CORE | {"batch.global_batch_size": 32},
    "interleaved, prediction, full uniform 1": CHUNKS | FULL | PREDICTION,
}
