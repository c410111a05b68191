"""Multi-token prediction where it meets pipelines, context parallelism and layers with a state."""

from typing import Any

from tests.memory.grid import gdn, pipeline

BASE: dict[str, Any] = {
    **pipeline.BASE,
    "model": {
        **pipeline.BASE["model"],
        "num_layers": 4,
        "mtp_num_layers": 1,
        "mixture_of_experts": {**pipeline.BASE["model"]["mixture_of_experts"], "moe_layer_freq": [0, 1, 1, 1]},
    },
    "batch": {"seq_length": 768, "micro_batch_size": 2, "global_batch_size": 8},
}
DENSE = pipeline.DENSE
INTERLEAVED = pipeline.INTERLEAVED
TIED = {"model.untie_embeddings_and_output_weights": False}
TWO = {"model.mtp_num_layers": 2}
NO_FUSION = {"training.kernels.gradient_accumulation_fusion": False}
TENSOR = {
    "parallelism.world_size": 4,
    "parallelism.tensor_model_parallel_size": 2,
    "parallelism.sequence_parallel": True,
    "parallelism.expert_model_parallel_size": 2,
}
CONTEXT = {"parallelism.world_size": 4, "parallelism.context_parallel_size": 2}
ONE_STAGE = {"parallelism.pipeline_model_parallel_size": 1}
DELTA_NET = {
    "model.gated_delta_net": {**gdn.BASE["model"]["gated_delta_net"], "linear_attention_freq": 4},
    "model.multi_latent_attention": None,
    "model.num_query_groups": 4,
}

CHANGES: dict[str, dict[str, Any]] = {
    "two stages": {},
    "two stages, dense, shared weight": DENSE | TIED,
    "two stages, dense, shared weight, no fusion": DENSE | TIED | NO_FUSION,
    "two stages, two tokens": TWO,
    "two stages, tensor and expert ranks": TENSOR,
    "two stages, tensor ranks, whole rows": DENSE
    | TENSOR
    | {
        "parallelism.sequence_parallel": False,
        "parallelism.expert_model_parallel_size": 1,
        "model.position_embedding_type": "none",
        "batch.micro_batch_size": 1,
    },
    "two stages, full uniform 1": {"full": ("uniform", 1)},
    "two stages, full block 1": {"full": ("block", 1)},
    "two stages, labels": {"labels": ["mla_up_proj", "layernorm", "moe_act"]},
    "two stages, eager loss": {"training.kernels.cross_entropy_loss_fusion": False},
    "interleaved": INTERLEAVED,
    "interleaved, shared weight": INTERLEAVED | TIED,
    "interleaved, two tokens, full uniform 1": INTERLEAVED | TWO | {"full": ("uniform", 1)},
    "context parallel": CONTEXT,
    "context parallel, one stage": CONTEXT | ONE_STAGE,
    "context parallel, one stage, two tokens, full uniform 1": CONTEXT | ONE_STAGE | TWO | {"full": ("uniform", 1)},
    "context parallel, one stage, dense, all to all": CONTEXT
    | ONE_STAGE
    | DENSE
    | {
        "model.num_query_groups": 4,
        "parallelism.cp_comm_type": "a2a",
    },
    "context and tensor ranks, shared weight": CONTEXT | TENSOR | TIED | {"parallelism.world_size": 8},
    "delta nets": DELTA_NET | ONE_STAGE,
    "delta nets, two stages": DELTA_NET,
    "delta nets, context parallel, one stage": DELTA_NET | CONTEXT | ONE_STAGE,
}
