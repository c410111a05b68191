"""A workload as Megatron Core builds it: configuration, model, gradient buffers, optimizer.

The same code serves every driver; nothing here knows what the device is. The steps are separate functions because a
driver accounts for each of them. Sources: `megatron.training.training.get_model`, `setup_model_and_optimizer` and
`megatron.core.models.gpt.gpt_layer_specs`, Megatron Core 0.19.
"""

from typing import Any

import torch
from megatron.core import activations, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import (
    model_parallel_cuda_manual_seed,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from labkit.workload import Model, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared_relu": activations.squared_relu,
}


def parallel_groups(workload: Workload, *, seed: int = 1234) -> None:
    """Split the initialised default process group into Megatron's groups and seed its generators."""
    layout = workload.parallelism
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(seed)


def transformer_config(workload: Workload) -> TransformerConfig:
    """Megatron's configuration of the model, its layout, its kernels and its recompute choice."""
    model, layout, kernels = workload.model, workload.parallelism, workload.training.kernels
    make = TransformerConfig if model.multi_latent_attention is None else MLATransformerConfig
    return make(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        normalization=model.normalization,
        qk_layernorm=model.qk_layernorm,
        gated_linear_unit=model.gated_linear_unit,
        mtp_num_layers=model.mtp_num_layers,
        activation_func=ACTIVATIONS[model.activation_func],
        add_bias_linear=model.add_bias_linear,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        **_attention(model),
        **_linear_attention(model),
        **({} if model.mamba is None else model.mamba.model_dump()),
        is_hybrid_model=model.hybrid_layer_pattern is not None,
        **_mixture_of_experts(workload),
        **_pipeline(workload),
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        cp_comm_type=layout.cp_comm_type,
        bf16=True,
        params_dtype=DTYPES[workload.training.precision],
        attention_backend=AttnBackend[kernels.attention_backend],
        bias_activation_fusion=kernels.bias_activation_fusion,
        use_fused_weighted_squared_relu=kernels.use_fused_weighted_squared_relu,
        bias_dropout_fusion=kernels.bias_dropout_fusion,
        apply_rope_fusion=kernels.apply_rope_fusion,
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        cross_entropy_loss_fusion=kernels.cross_entropy_loss_fusion,
        cross_entropy_fusion_impl=kernels.cross_entropy_fusion_impl,
        **_recompute(workload),
    )


def _attention(model: Model) -> dict[str, Any]:
    if model.multi_latent_attention is not None:
        # Only here fields of the configuration; elsewhere arguments of the model.
        rotary = {"rope_type": "rope", "rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
        gate = {"attention_output_gate": model.attention_output_gate}  # which Megatron refuses here
        return {**rotary, **gate, **model.multi_latent_attention.model_dump()}
    return {
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "attention_output_gate": model.attention_output_gate,
        "add_qkv_bias": model.add_qkv_bias,
    }


def _linear_attention(model: Model) -> dict[str, Any]:
    if model.gated_delta_net is None:
        return {}
    fields = model.gated_delta_net.model_dump()
    # The variant wants a frequency even where a hybrid pattern names the layers.
    frequency = model.gated_delta_net.linear_attention_freq or 1
    fields["linear_attention_freq"] = frequency if isinstance(frequency, int) else list(frequency)
    return {"experimental_attention_variant": "gated_delta_net", **fields}


def _mixture_of_experts(workload: Workload) -> dict[str, Any]:
    moe, kernels = workload.model.mixture_of_experts, workload.training.kernels
    if moe is None:
        return {}
    fields = moe.model_dump()
    if not isinstance(moe.moe_layer_freq, int):
        fields["moe_layer_freq"] = list(moe.moe_layer_freq)
    shared = moe.moe_shared_expert_intermediate_size is not None
    return {
        **fields,
        "moe_grouped_gemm": kernels.moe_grouped_gemm,
        "moe_token_dispatcher_type": kernels.moe_token_dispatcher_type,
        "moe_flex_dispatcher_backend": kernels.moe_flex_dispatcher_backend,
        "moe_permute_fusion": kernels.moe_permute_fusion,
        "moe_router_fusion": kernels.moe_router_fusion,
        "moe_shared_expert_overlap": kernels.moe_shared_expert_overlap and shared,
    }


def _pipeline(workload: Workload) -> dict[str, Any]:
    """Stages, and the habits of `megatron.training` (`core_transformer_config_from_args`, `validate_args`)."""
    layout = workload.parallelism
    # Interleaved stages overlap their sends and receives with computation, one by one; others batch them.
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    return {
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "microbatch_group_size_per_vp_stage": layout.microbatch_group_size_per_vp_stage,
        "num_layers_in_first_pipeline_stage": layout.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": layout.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": layout.account_for_loss_in_pipeline_split,
        "pipeline_dtype": DTYPES[workload.training.precision],
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _recompute(workload: Workload) -> dict[str, Any]:
    fields = workload.recompute.model_dump()
    modules = fields.pop("recompute_modules")
    # None stays None: Megatron's own default is then in force.
    return {**fields, "recompute_modules": None if modules is None else list(modules)}


def build_model(workload: Workload) -> list[Float16Module]:
    """The rank's share of the model on the current device, in the training precision: its pipeline chunks in order."""
    config = transformer_config(workload)
    chunks = [_chunk(workload, config, stage) for stage in _virtual_stages(workload)]
    for chunk in chunks:
        chunk.cuda(torch.cuda.current_device())
    return [Float16Module(config, chunk) for chunk in chunks]


def _virtual_stages(workload: Workload) -> list[int | None]:
    chunks = workload.parallelism.virtual_pipeline_model_parallel_size
    return [None] if chunks is None else list(range(chunks))


def _chunk(workload: Workload, config: TransformerConfig, vp_stage: int | None) -> GPTModel | HybridModel:
    """The layers of one (virtual) stage of this rank, with the embedding or the head where they belong to it."""
    arguments: dict[str, Any] = {
        "vocab_size": workload.padded_vocab_size,
        "max_sequence_length": workload.batch.seq_length,
        "share_embeddings_and_output_weights": not workload.model.untie_embeddings_and_output_weights,
        "position_embedding_type": workload.model.position_embedding_type,
        "rotary_base": workload.model.rotary_base,
        "rotary_percent": workload.model.rotary_percent,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "vp_stage": vp_stage,
    }
    pattern = workload.model.hybrid_layer_pattern
    if pattern is None:
        spec = _block_spec(config, vp_stage)
        predictions = None
        if config.mtp_num_layers:
            predictions = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage)
        model = GPTModel(config, spec, mtp_block_spec=predictions, **arguments)
    else:
        model = HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **arguments)
    model.model_type = ModelType.encoder_or_decoder
    for parameter in model.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return model


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    """As `megatron.training.models.gpt.transformer_engine_layer_spec` chooses it."""
    if config.experimental_attention_variant is not None:
        return get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)


def wrap(workload: Workload, chunks: list[Float16Module]) -> list[DistributedDataParallel]:
    """Chunks over contiguous parameter and gradient buffers, made on a stream of their own as `get_model` does."""
    choice = workload.training.data_parallel
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=choice.use_distributed_optimizer,
        grad_reduce_in_fp32=choice.grad_reduce_in_fp32,
        overlap_grad_reduce=choice.overlap_grad_reduce,
        overlap_param_gather=choice.overlap_param_gather,
        average_in_collective=choice.average_in_collective,
        align_param_gather=aligned_param_gather(workload),
        bucket_size=max(
            40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        ),
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Only what comes first is split into buckets: reducing the rest is on nobody's critical path.
        wrapped = [
            DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
    torch.cuda.current_stream().wait_stream(stream)
    return wrapped


def aligned_param_gather(workload: Workload) -> bool:
    """Interleaved stages start gathering parameters together (`--no-align-param-gather` is not given)."""
    interleaved = workload.parallelism.virtual_pipeline_model_parallel_size is not None
    return interleaved and workload.training.data_parallel.overlap_param_gather


def build_optimizer(workload: Workload, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """The optimizer over the chunks' buffers; its moments appear in the first step."""
    choice, data_parallel = workload.training.optimizer, workload.training.data_parallel
    config = OptimizerConfig(
        optimizer=choice.optimizer,
        lr=1e-4,
        bf16=True,
        params_dtype=DTYPES[workload.training.precision],
        use_distributed_optimizer=data_parallel.use_distributed_optimizer,
        overlap_param_gather=data_parallel.overlap_param_gather,
        use_precision_aware_optimizer=choice.use_precision_aware_optimizer,
        main_params_dtype=DTYPES[choice.main_params_dtype],
        main_grads_dtype=DTYPES[choice.main_grads_dtype],
        exp_avg_dtype=DTYPES[choice.exp_avg_dtype],
        exp_avg_sq_dtype=DTYPES[choice.exp_avg_sq_dtype],
        store_param_remainders=choice.store_param_remainders,
        fp8_recipe=choice.fp8_recipe,
    )
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
