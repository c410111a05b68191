"""Small dense models that differ in their attention: heads, gates, norms, positions, kernels, layouts, recompute."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "attention",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1280,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 192,
        "vocab_size": 500,
    },
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"seq_length": 4096, "micro_batch_size": 2, "global_batch_size": 8},
    "training": {},
}
ONE_RANK = {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False}
GATED = {"model.attention_output_gate": True}
QK_NORM = {"model.qk_layernorm": True}

UNFUSED = {"training.kernels.attention_backend": "unfused"}
FLASH = {"training.kernels.attention_backend": "flash"}
CONTEXT = {"parallelism.context_parallel_size": 2, "batch.seq_length": 8192}
FOUR_CONTEXTS = ONE_RANK | {"parallelism.context_parallel_size": 4, "batch.seq_length": 16384}
ALL_TO_ALL = {"parallelism.cp_comm_type": "a2a"}
ALL_GATHER = {"parallelism.cp_comm_type": "all_gather"}
BARE = {"model.position_embedding_type": "none"}
TENSOR_ALONE = {"parallelism.sequence_parallel": False}
FOUR_RANKS = {"parallelism.tensor_model_parallel_size": 4}

CHANGES: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "grouped queries, core_attn": {"labels": ["core_attn"]},
    "grouped queries, all labels": {"labels": ["core_attn", "layernorm", "mlp"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full block 2": {"full": ("block", 2)},
    "one rank": ONE_RANK,
    "one rank, core_attn": ONE_RANK | {"labels": ["core_attn"]},
    "no sequence parallelism": TENSOR_ALONE,
    "no sequence parallelism, full uniform 2": TENSOR_ALONE | {"full": ("uniform", 2)},
    "many heads": {"model.num_query_groups": None},
    "many heads, one rank": ONE_RANK | {"model.num_query_groups": None},
    "one key-value head": ONE_RANK | {"model.num_query_groups": 1},
    "ranks share a key-value head": FOUR_RANKS | {"model.num_query_groups": 2},
    "ranks share a key-value head, core_attn": FOUR_RANKS | {"model.num_query_groups": 2, "labels": ["core_attn"]},
    "ranks share a key-value head, gate and norm": FOUR_RANKS | {"model.num_query_groups": 2} | GATED | QK_NORM,
    "gated": GATED,
    "gated, core_attn": GATED | {"labels": ["core_attn"]},
    "gated, many heads": GATED | {"model.num_query_groups": None},
    "query and key norm": QK_NORM,
    "query and key norm, many heads": QK_NORM | {"model.num_query_groups": None},
    "query and key norm, no sequence parallelism": QK_NORM | TENSOR_ALONE,
    "bias": {"model.add_qkv_bias": True},
    "no positions": BARE,
    "no positions, many heads": BARE | {"model.num_query_groups": None},
    "no positions, many heads, core_attn": BARE | {"model.num_query_groups": None, "labels": ["core_attn"]},
    "no positions, query and key norm": BARE | QK_NORM,
    "half of a head turned": {"model.rotary_percent": 0.5},
    "fused rotary": {"training.kernels.apply_rope_fusion": True},
    "fused rotary, half of a head, core_attn": {
        "training.kernels.apply_rope_fusion": True,
        "model.rotary_percent": 0.5,
        "labels": ["core_attn"],
    },
    "unfused": UNFUSED,
    "unfused, core_attn": UNFUSED | {"labels": ["core_attn"]},
    "unfused, before 2.19, core_attn": UNFUSED
    | {"training.software.transformer_engine": "2.18.0", "labels": ["core_attn"]},
    "unfused, one rank, core_attn": UNFUSED | ONE_RANK | {"labels": ["core_attn"]},
    "unfused, many heads, full uniform 1": UNFUSED | {"model.num_query_groups": None, "full": ("uniform", 1)},
    "unfused, a length no kernel takes": UNFUSED | TENSOR_ALONE | {"batch.seq_length": 4100, "labels": ["core_attn"]},
    "unfused, no positions, many heads": UNFUSED | BARE | {"model.num_query_groups": None},
    "flash": FLASH,
    "flash, core_attn": FLASH | {"labels": ["core_attn"]},
    "flash, one sequence": FLASH | {"batch.micro_batch_size": 1},
    "flash, gated, core_attn": FLASH | GATED | {"labels": ["core_attn"]},
    "flash, no positions, many heads": FLASH | BARE | {"model.num_query_groups": None},
    "flash, no positions, many heads of 128": FLASH | BARE | {"model.num_query_groups": None, "model.kv_channels": 128},
    "flash, no positions, many heads of 128, core_attn": FLASH
    | BARE
    | {"model.num_query_groups": None, "model.kv_channels": 128, "labels": ["core_attn"]},
    "flash, full uniform 1, longer": FLASH | {"batch.seq_length": 8192, "full": ("uniform", 1)},
    "context parallel": CONTEXT,
    "context parallel, core_attn": CONTEXT | {"labels": ["core_attn"]},
    "context parallel, full uniform 1": CONTEXT | {"full": ("uniform", 1)},
    "context parallel, many heads, one rank": CONTEXT | ONE_RANK | {"model.num_query_groups": None},
    "four context ranks": FOUR_CONTEXTS,
    "four context ranks, core_attn": FOUR_CONTEXTS | {"labels": ["core_attn"]},
    "context parallel, all to all": CONTEXT | ALL_TO_ALL,
    "context parallel, all to all, core_attn": CONTEXT | ALL_TO_ALL | {"labels": ["core_attn"]},
    "four context ranks, all to all, many heads, full uniform 1": FOUR_CONTEXTS
    | ALL_TO_ALL
    | {"model.num_query_groups": None, "full": ("uniform", 1)},
    "context parallel, all gather": CONTEXT | ALL_GATHER,
    "context parallel, all gather, core_attn": CONTEXT | ALL_GATHER | {"labels": ["core_attn"]},
    "four context ranks, all gather": FOUR_CONTEXTS | ALL_GATHER,
    "flash, context parallel": FLASH | CONTEXT,
    "flash, context parallel, core_attn": FLASH | CONTEXT | {"labels": ["core_attn"]},
    "flash, context parallel, full uniform 1": FLASH | CONTEXT | {"full": ("uniform", 1)},
    "flash, context parallel, one sequence, many heads": FLASH
    | CONTEXT
    | ONE_RANK
    | {"batch.micro_batch_size": 1, "batch.seq_length": 2048, "model.num_query_groups": None},
    "flash, four context ranks": FLASH | FOUR_CONTEXTS,
    "flash, context parallel, all to all": FLASH | CONTEXT | ALL_TO_ALL,
    "flash, four context ranks, all to all, core_attn": FLASH | FOUR_CONTEXTS | ALL_TO_ALL | {"labels": ["core_attn"]},
    "flash, context parallel, no positions, many heads of 128": FLASH
    | CONTEXT
    | BARE
    | {"model.num_query_groups": None, "model.kv_channels": 128},
    "short sequence": {"batch.seq_length": 256, "batch.micro_batch_size": 1},
}
