"""Small dense models of Megatron Core's own layers (`transformer_impl: local`), without Transformer Engine's."""

from typing import Any

BASE: dict[str, Any] = {
    "model": {
        "name": "local",
        "num_layers": 3,
        "hidden_size": 512,
        "ffn_hidden_size": 1280,
        "num_attention_heads": 8,
        "vocab_size": 500,
        "normalization": "LayerNorm",
        "activation_func": "gelu",
        "gated_linear_unit": False,
        "add_bias_linear": True,
        "position_embedding_type": "learned_absolute",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "batch": {"seq_length": 768, "micro_batch_size": 2, "global_batch_size": 8},
    "training": {"kernels": {"transformer_impl": "local"}},
}
ONE_RANK = {"parallelism.tensor_model_parallel_size": 1, "parallelism.sequence_parallel": False}
TENSOR_ALONE = {"parallelism.sequence_parallel": False}
K = "training.kernels."
NO_KERNEL = {f"{K}masked_softmax_fusion": False}
BARE = {
    f"{K}{name}": False
    for name in (
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "cross_entropy_loss_fusion",
    )
} | {"training.software.apex": False}
"""Neither APEX nor fusions, as Megatron Core runs where nothing else is installed."""
NO_DROPOUT = {"model.attention_dropout": 0.0, "model.hidden_dropout": 0.0}
GROUPED = {"model.num_query_groups": 4}
ROPE = {"model.position_embedding_type": "rope"}
UNBIASED = {"model.add_bias_linear": False}
SWIGLU = UNBIASED | {"model.activation_func": "silu", "model.gated_linear_unit": True}
LLAMA = (
    ROPE
    | GROUPED
    | SWIGLU
    | NO_DROPOUT
    | TENSOR_ALONE
    | {"model.normalization": "RMSNorm", f"{K}persist_layer_norm": False}
)

EXPERTS = {
    "model.mixture_of_experts": {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 352,
        "moe_layer_freq": [0, 1, 1],
        "moe_aux_loss_coeff": 0.01,
        "moe_router_dtype": "fp32",
    },
    "parallelism.expert_model_parallel_size": 2,
    "parallelism.expert_tensor_parallel_size": 1,
}
EAGER = {f"{K}bias_activation_fusion": False, f"{K}bias_dropout_fusion": False}
MIXTURE = EXPERTS | ROPE | SWIGLU | NO_DROPOUT

CHANGES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "core_attn": {"labels": ["core_attn"]},
    "layernorm": {"labels": ["layernorm"]},
    "full uniform 1": {"full": ("uniform", 1)},
    "full block 2": {"full": ("block", 2)},
    "one rank": ONE_RANK,
    "one rank, core_attn": ONE_RANK | {"labels": ["core_attn", "layernorm"]},
    "no sequence parallelism": TENSOR_ALONE,
    "no sequence parallelism, full uniform 2": TENSOR_ALONE | NO_DROPOUT | {"full": ("uniform", 2)},
    "other norm kernel": {f"{K}persist_layer_norm": False, "model.hidden_size": 768, "labels": ["layernorm"]},
    "persistent norm kernel": {"model.hidden_size": 1024},
    "persistent norm kernel, layernorm": {"model.hidden_size": 1024, "labels": ["layernorm"]},
    "softmax of PyTorch": NO_KERNEL,
    "softmax of PyTorch, core_attn": NO_KERNEL | {"labels": ["core_attn"]},
    "softmax of PyTorch in fp32": NO_KERNEL | {f"{K}attention_softmax_in_fp32": True},
    "softmax of PyTorch in fp32, no dropout": NO_KERNEL | {f"{K}attention_softmax_in_fp32": True} | NO_DROPOUT,
    "scaled by layer": NO_KERNEL | {f"{K}apply_query_key_layer_scaling": True},
    "scaled by layer, full uniform 1": NO_KERNEL | {f"{K}apply_query_key_layer_scaling": True, "full": ("uniform", 1)},
    "scaled by layer, kernel": {f"{K}apply_query_key_layer_scaling": True},
    "a length no kernel takes": {"batch.seq_length": 770},
    "a mask": NO_KERNEL | {"batch.create_attention_mask_in_dataloader": True},
    "a mask, core_attn": NO_KERNEL | {"batch.create_attention_mask_in_dataloader": True, "labels": ["core_attn"]},
    "no dropout": NO_DROPOUT,
    "no bias, mlp": UNBIASED | NO_DROPOUT | {f"{K}bias_activation_fusion": False, "labels": ["mlp", "layernorm"]},
    "bare": BARE | ONE_RANK,
    "bare, core_attn": BARE | ONE_RANK | NO_DROPOUT | {"labels": ["core_attn"]},
    "bare, full uniform 1": BARE | ONE_RANK | NO_DROPOUT | {"full": ("uniform", 1)},
    "bare, tensor parallel, labels": BARE | TENSOR_ALONE | NO_DROPOUT | UNBIASED | {"labels": ["layernorm", "mlp"]},
    "llama": LLAMA,
    "llama, all labels": LLAMA | {"labels": ["core_attn", "layernorm", "mlp"]},
    "llama, full uniform 1": LLAMA | {"full": ("uniform", 1)},
    "llama, eager": LLAMA | BARE,
    "llama, fused rotary": LLAMA | {f"{K}apply_rope_fusion": True},
    "grouped queries, rotary": GROUPED | ROPE,
    "grouped queries, no positions, core_attn": GROUPED
    | {"model.position_embedding_type": "none", "labels": ["core_attn"]},
    "ranks share a key-value head": LLAMA | {"model.num_query_groups": 1},
    "one key-value head a rank, samples": NO_DROPOUT | {"model.num_query_groups": 2},
    "query and key norm": {"model.qk_layernorm": True},
    "query and key norm, llama": LLAMA | {"model.qk_layernorm": True},
    "query and key norm, bare": BARE | TENSOR_ALONE | {"model.qk_layernorm": True},
    "output gate": {"model.attention_output_gate": True} | GROUPED | ROPE | NO_DROPOUT,
    "fp32": {"training.precision": "fp32"},
    "fp32, one rank, full uniform 1": {"training.precision": "fp32", "full": ("uniform", 1)} | ONE_RANK,
    "weight gradients not fused": {f"{K}gradient_accumulation_fusion": False},
    "pipeline": {"parallelism.pipeline_model_parallel_size": 2, "model.num_layers": 4},
    "pipeline, tied, full uniform 1": {
        "parallelism.pipeline_model_parallel_size": 2,
        "model.num_layers": 4,
        "model.untie_embeddings_and_output_weights": False,
        "full": ("uniform", 1),
    },
    "interleaved, core_attn": {
        "parallelism.pipeline_model_parallel_size": 2,
        "parallelism.virtual_pipeline_model_parallel_size": 2,
        "model.num_layers": 4,
        "labels": ["core_attn"],
    },
    "before Hopper": {"training.gpu": "a100-40gb"} | ONE_RANK,
    "experts": MIXTURE,
    "experts, layernorm": MIXTURE | {"labels": ["layernorm"]},
    "experts, moe": MIXTURE | {"labels": ["moe"]},
    "experts, full uniform 1": MIXTURE | {"full": ("uniform", 1)},
    "experts, eager": MIXTURE | {f"{K}bias_activation_fusion": False},
    "experts, bias": EXPERTS | NO_DROPOUT | EAGER,
    "experts, bias, router in bf16, moe": EXPERTS
    | EAGER
    | {"model.mixture_of_experts.moe_router_dtype": None, "labels": ["moe", "layernorm"]},
    "experts over tensor ranks": MIXTURE | {"parallelism.expert_tensor_parallel_size": 2},
    "experts, router in bf16": MIXTURE | {"model.mixture_of_experts.moe_router_dtype": None},
    "experts of Transformer Engine": MIXTURE
    | {f"{K}transformer_impl": "transformer_engine", f"{K}moe_grouped_gemm": False},
    "experts, shared": MIXTURE | {"model.mixture_of_experts.moe_shared_expert_intermediate_size": 704},
    "one expert a rank": MIXTURE
    | {
        "model.mixture_of_experts.num_moe_experts": 2,
        "model.mixture_of_experts.moe_router_topk": 1,
        "model.mixture_of_experts.moe_router_pre_softmax": True,
    },
    "experts gathered": MIXTURE | {f"{K}moe_token_dispatcher_type": "allgather"},
}
