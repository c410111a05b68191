"""What a rule says: `Finding`, and who refuses what breaks it: `Authority`."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Literal, NamedTuple, Self


class Authority(StrEnum):
    """Whose rule it is: a class, function or library, and the file in which it was read."""

    file: str
    """Relative to where packages are installed; empty where there is no one file."""

    def __new__(cls, name: str, file: str = "") -> Self:
        """A name that is a string, with its file."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.file = file
        return member

    CONFIG = "TransformerConfig", "megatron/core/transformer/transformer_config.py"
    """With `ModelParallelConfig` and `MLATransformerConfig`: held against it case by case (`make differential`)."""
    ARGUMENTS = "validate_args", "megatron/training/arguments.py"
    """With Megatron-LM's parser: likewise."""
    PARALLEL_STATE = "parallel_state", "megatron/core/parallel_state.py"
    DATA_PARALLEL = "DistributedDataParallel", "megatron/core/distributed/distributed_data_parallel.py"
    MICROBATCHES = "num_microbatches_calculator", "megatron/core/num_microbatches_calculator.py"
    SCHEDULES = "schedules", "megatron/core/pipeline_parallel/schedules.py"
    STAGES = "TransformerBlock", "megatron/core/transformer/transformer_block.py"
    HYBRID = "hybrid_layer_allocation", "megatron/core/models/hybrid/hybrid_layer_allocation.py"
    SPECS = "gpt_layer_specs", "megatron/core/models/gpt/gpt_layer_specs.py"
    LAYERS = "tensor_parallel", "megatron/core/tensor_parallel/layers.py"
    CHECKPOINT = "CheckpointFunction", "megatron/core/tensor_parallel/random.py"
    ATTENTION = "Attention", "megatron/core/transformer/attention.py"
    LATENT = "MultiLatentAttention", "megatron/core/transformer/multi_latent_attention.py"
    OWN_ATTENTION = "DotProductAttention", "megatron/core/transformer/dot_product_attention.py"
    OWN_NORM = "WrappedTorchNorm", "megatron/core/transformer/torch_norm.py"
    ROTARY = "RotaryEmbedding", "megatron/core/models/common/embeddings/rotary_pos_embedding.py"
    FUSED_ROTARY = "fused_mla_yarn_rope_apply", "megatron/core/fusions/fused_mla_yarn_rope_apply.py"
    MLP = "MLP", "megatron/core/transformer/mlp.py"
    MOE = "MoELayer", "megatron/core/transformer/moe/moe_layer.py"
    EXPERTS = "TEGroupedMLP", "megatron/core/transformer/moe/experts.py"
    SHARED_EXPERTS = "SharedExpertMLP", "megatron/core/transformer/moe/shared_experts.py"
    ROUTER = "TopKRouter", "megatron/core/transformer/moe/moe_utils.py"
    GDN = "GatedDeltaNet", "megatron/core/ssm/gated_delta_net/common.py"
    MAMBA = "MambaMixer", "megatron/core/ssm/mamba_mixer.py"
    PREDICTION = "MultiTokenPredictionBlock", "megatron/core/transformer/multi_token_prediction.py"
    OPTIMIZER = "OptimizerConfig", "megatron/core/optimizer/optimizer_config.py"
    DISTRIBUTED = "DistributedOptimizer", "megatron/core/optimizer/distrib_optimizer.py"
    LEARNING_RATE = "OptimizerParamScheduler", "megatron/core/optimizer_param_scheduler.py"
    FSDP = "MegatronFSDP", "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py"
    DETERMINISM = "determinism", "megatron/training/determinism.py"
    DATA = "SFTDataset", "megatron/training/datasets/sft_dataset.py"
    TRANSFORMER_ENGINE = "Transformer Engine", "transformer_engine/pytorch/attention/dot_product_attention/utils.py"
    TE_LOSS = "parallel_cross_entropy", "transformer_engine/pytorch/cross_entropy.py"
    KERNELS = "mamba_ssm, causal_conv1d, flash-linear-attention"
    APEX = "APEX"
    PYTORCH = "PyTorch"
    LABKIT = "labkit"
    """Nobody else refuses it: a contradiction in the file, a bound of labkit's, or what it does not support yet."""


class Finding(NamedTuple):
    """One broken rule (`error`) or idle choice (`warning`)."""

    severity: Literal["error", "warning"]
    field: str
    """Dotted path of the field in the workload."""
    reason: str
    remedy: str
    authority: Authority
    """Who refuses it, or reads nothing of it."""

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}; {self.remedy}"


def refuse(broken: bool, field: str, reason: str, remedy: str, authority: Authority) -> Iterator[Finding]:
    """An error, if the rule is broken."""
    if broken:
        yield Finding("error", field, reason, remedy, authority)


def divides(
    divisor: int, number: int, field: str, what: str, authority: Authority = Authority.LAYERS
) -> Iterator[Finding]:
    """An error, if `divisor` does not divide a number of the workload, with those that do."""
    if number % divisor:
        fits = [n for n in range(1, min(number, 64) + 1) if number % n == 0]
        yield Finding(
            "error",
            field,
            f"{divisor} does not divide {what} ({number})",
            f"use one of {', '.join(map(str, fits))}",
            authority,
        )
