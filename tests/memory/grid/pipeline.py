"""Pipeline stages: even, uneven, interleaved, with few and many micro-batches, under recompute; every stage counts."""

from typing import Any

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "pipeline",
        "num_layers": 8,
        "hidden_size": 512,
        "ffn_hidden_size": 1408,
        "num_attention_heads": 8,
        "vocab_size": 5000,
        "multi_latent_attention": {
            "q_lora_rank": 192,
            "kv_lora_rank": 128,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 32,
            "v_head_dim": 64,
        },
        "mixture_of_experts": {
            "num_moe_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 352,
            "moe_shared_expert_intermediate_size": 704,
            "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1],
        },
    },
    "parallelism": {"world_size": 2, "pipeline_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "batch": {"seq_length": 768, "global_batch_size": 16},
    "training": {},
}
DENSE = {"model.mixture_of_experts": None, "model.multi_latent_attention": None, "model.num_query_groups": 2}
FOUR = {"parallelism.world_size": 4, "parallelism.pipeline_model_parallel_size": 4}
INTERLEAVED = {"parallelism.virtual_pipeline_model_parallel_size": 2}
THREE = {
    "parallelism.world_size": 3,
    "parallelism.pipeline_model_parallel_size": 3,
    "model.num_layers": 6,
    "model.mixture_of_experts.moe_layer_freq": 1,
    "batch.global_batch_size": 18,
}
FLEX = {"training.kernels.moe_token_dispatcher_type": "flex"}
TENSOR = {
    "parallelism.world_size": 4,
    "parallelism.tensor_model_parallel_size": 2,
    "parallelism.sequence_parallel": True,
    "parallelism.expert_model_parallel_size": 2,
}

CHANGES: dict[str, dict[str, Any]] = {
    "two stages": {},
    "two stages, dense": DENSE,
    "four stages": FOUR,
    "four stages, few micro-batches": FOUR | {"batch.global_batch_size": 3},
    "four stages, as many micro-batches": FOUR | {"batch.global_batch_size": 4},
    "first stage short": {"parallelism.num_layers_in_first_pipeline_stage": 2},
    "last stage short": FOUR | {"parallelism.num_layers_in_last_pipeline_stage": 2},
    "first and last stage short": FOUR
    | {"parallelism.num_layers_in_first_pipeline_stage": 1, "parallelism.num_layers_in_last_pipeline_stage": 1},
    "embedding and loss take places": {
        "parallelism.account_for_embedding_in_pipeline_split": True,
        "parallelism.account_for_loss_in_pipeline_split": True,
    },
    "tensor and expert ranks": TENSOR,
    "tied embeddings, two data ranks": {
        "parallelism.world_size": 4,
        "model.untie_embeddings_and_output_weights": False,
        "batch.global_batch_size": 12,
        "training.data_parallel.overlap_grad_reduce": False,
        "training.data_parallel.overlap_param_gather": False,
    },
    "layout": {"parallelism.pipeline_model_parallel_layout": "Et*3|t*5L"},
    "layout, ends alone": FOUR | {"parallelism.pipeline_model_parallel_layout": "E|t*3|t*5,|L"},
    "layout, interleaved, full uniform 1": INTERLEAVED
    | {"parallelism.pipeline_model_parallel_layout": "Et|(tt|)*2t*3L", "full": ("uniform", 1)},
    "layout, a stage without layers": FOUR | {"parallelism.pipeline_model_parallel_layout": "Et*3||t*5|L"},
    "layout, chunks without layers": FOUR
    | INTERLEAVED
    | {"parallelism.pipeline_model_parallel_layout": "Ett|tt||t||tt|t|L"},
    "layout, chunks without layers, tensor and expert ranks, full uniform 1": TENSOR
    | INTERLEAVED
    | {"parallelism.pipeline_model_parallel_layout": "Et*4||t*4|L", "full": ("uniform", 1)},
    "layout, predictions alone": FOUR
    | {"parallelism.pipeline_model_parallel_layout": "Ett|t*4|tt|mL", "model.mtp_num_layers": 1},
    "layout, interleaved, two predictions alone": INTERLEAVED
    | {"parallelism.pipeline_model_parallel_layout": "Ett|tt|t*4|mmL", "model.mtp_num_layers": 2},
    "layout, predictions alone, full uniform 1": TENSOR
    | {
        "parallelism.pipeline_model_parallel_layout": "Et*8|mL",
        "model.mtp_num_layers": 1,
        "full": ("uniform", 1),
    },
    "interleaved": INTERLEAVED,
    "interleaved, dense": INTERLEAVED | DENSE,
    "interleaved, four stages": INTERLEAVED | FOUR,
    "interleaved, three stages": INTERLEAVED | THREE,
    "interleaved, four chunks": {
        "parallelism.virtual_pipeline_model_parallel_size": 4,
    },
    "interleaved, few micro-batches": INTERLEAVED | FOUR | {"batch.global_batch_size": 4},
    "interleaved, larger groups": INTERLEAVED
    | {"parallelism.microbatch_group_size_per_vp_stage": 4, "batch.global_batch_size": 20},
    "interleaved, one large group": INTERLEAVED
    | {"parallelism.microbatch_group_size_per_vp_stage": 8, "batch.global_batch_size": 8},
    "interleaved, four stages, a shorter last group": INTERLEAVED
    | FOUR
    | DENSE
    | {"parallelism.microbatch_group_size_per_vp_stage": 5, "batch.global_batch_size": 9},
    "interleaved, tensor and expert ranks": INTERLEAVED | TENSOR,
    "interleaved, every small label": INTERLEAVED | {"labels": ["layernorm", "mla_up_proj", "moe_act", "mlp"]},
    "interleaved, full uniform 1": INTERLEAVED | {"full": ("uniform", 1)},
    "interleaved, tensor and expert ranks, flex": INTERLEAVED | TENSOR | FLEX,
    "flex, few micro-batches, full block 1": FOUR | FLEX | {"batch.global_batch_size": 3, "full": ("block", 1)},
    "moe": {"labels": ["moe"]},
    "core_attn, dense": DENSE | {"labels": ["core_attn"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full uniform 2": FOUR | {"full": ("uniform", 2)},
    "full block 1": {"full": ("block", 1)},
    "no overlap": FOUR
    | {"training.data_parallel.overlap_param_gather": False, "training.data_parallel.overlap_grad_reduce": False},
    "allgather, latent experts, full uniform 1": {
        "parallelism.world_size": 8,
        "parallelism.tensor_model_parallel_size": 4,
        "parallelism.sequence_parallel": True,
        "parallelism.expert_model_parallel_size": 4,
        "model.mixture_of_experts.moe_latent_size": 96,
        "training.kernels.moe_token_dispatcher_type": "allgather",
        "full": ("uniform", 1),
    },
    "deterministic, many words": DENSE
    | {
        "model.vocab_size": 32000,
        "training.kernels.deterministic_mode": True,
        "training.kernels.cross_entropy_loss_fusion": False,
    },
}
