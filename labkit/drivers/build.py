"""A workload as Megatron-LM builds it: process groups, configuration, model, gradient buffers, optimizer.

The same code serves every driver; nothing here knows what the device is. The steps are separate functions because a
driver accounts for each of them. Source: `megatron.training.training.pretrain` and `setup_model_and_optimizer`,
whose functions these call, Megatron Core 0.19.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import activations
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import global_vars, initialize, training
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    hybrid_config_from_args,
)
from megatron.training.checkpointing import _build_sharded_state_dict_metadata
from megatron.training.models import gpt
from megatron.training.models.dist_utils import prepare_existing_model_chunks_for_distributed_training

from labkit.drivers.options import refused, refusing
from labkit.workload import Workload

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "squared_relu": activations.squared_relu,
}


def initialize_megatron(arguments: argparse.Namespace) -> None:
    """Make the arguments Megatron-LM's global ones, split the ranks into groups and seed the generators.

    A default process group that exists already is taken as it is. Nothing is compiled: what data sets would need, no
    step reads, and a wheel has not. Source: `initialize_megatron`.
    """
    global_vars.set_global_variables(arguments, build_tokenizer=False)
    compile_dependencies, initialize._compile_dependencies = initialize._compile_dependencies, _compile_nothing
    try:
        initialize.initialize_megatron()
    finally:
        initialize._compile_dependencies = compile_dependencies


def _compile_nothing() -> None:
    pass


def transformer_config(workload: Workload, arguments: argparse.Namespace) -> TransformerConfig:
    """Megatron's configuration of the model, its layout, its kernels and its recompute choice, as it is stated.

    What breaks a rule of `TransformerConfig` is for it to say: nothing is mended on the way (`make differential`).

    Raises:
        AssertionError, ValueError, NotImplementedError: `TransformerConfig` refuses it.
    """
    model, kernels, layout = workload.model, workload.training.kernels, workload.parallelism
    stated = argparse.Namespace(**vars(arguments))
    stated.swiglu = stated.squared_relu = False
    if not stated.quick_geglu:
        # Megatron-LM has no arguments for every pair of function and gate that Megatron Core has.
        stated.activation_func = ACTIVATIONS[model.activation_func]
        stated.gated_linear_unit = model.gated_linear_unit
        stated.bias_gelu_fusion = workload.training.fuses_activation
    stated.cross_entropy_loss_fusion = kernels.cross_entropy_loss_fusion
    stated.cross_entropy_fusion_impl = kernels.cross_entropy_fusion_impl
    # Megatron-LM's validator changes these where they do not fit, or works them out from others.
    stated.sequence_parallel = layout.sequence_parallel
    stated.apply_rope_fusion = kernels.apply_rope_fusion
    if model.mixture_of_experts is not None:
        stated.moe_shared_expert_overlap = kernels.moe_shared_expert_overlap
    if layout.pipeline_model_parallel_layout is not None and layout.virtual_pipeline_model_parallel_size is not None:
        stated.virtual_pipeline_model_parallel_size = layout.virtual_pipeline_model_parallel_size
    config: TransformerConfig = core_transformer_config_from_args(stated)
    return config


def build_model(workload: Workload, arguments: argparse.Namespace) -> list[Any]:
    """The rank's share of the model on the current device, in the training precision: its pipeline chunks in order.

    Raises:
        InputError: Megatron Core's configuration or layers refuse the workload.
    """
    with refusing(refused(workload), (AssertionError, ValueError, NotImplementedError)), _predicting_after_any_layer():
        config = transformer_config(workload, arguments)
        hybrid = workload.model.hybrid_layer_pattern is not None
        described = (hybrid_config_from_args if hybrid else gpt_config_from_args)(arguments, config)
        builder = described.get_builder_cls()(described)
        chunks: list[Any] = builder.build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(), wrap_with_ddp=False
        )
    if arguments.freeze_all_layers:
        _freeze(chunks)
    return chunks


def _freeze(chunks: list[Any]) -> None:
    """`--freeze-all-layers`, as `megatron.training.training.get_model` does it."""
    for chunk in chunks:
        chunk.requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True


@contextmanager
def _predicting_after_any_layer() -> Iterator[None]:
    """Megatron-LM's builder refuses to predict several tokens after layers that only Megatron Core puts together."""
    original = gpt.mtp_block_spec

    def mtp_block_spec(config: Any, layers: Any, vp_stage: int | None = None) -> Any:
        if config.transformer.experimental_attention_variant is None or config.transformer.mtp_num_layers is None:
            return original(config, layers, vp_stage=vp_stage)
        return get_gpt_mtp_block_spec(config.transformer, layers, use_transformer_engine=True, vp_stage=vp_stage)

    gpt.mtp_block_spec = mtp_block_spec
    try:
        yield
    finally:
        gpt.mtp_block_spec = original


def unwrapped(chunk: Any) -> Any:
    """A chunk's own module: in bf16 it has a wrapper that converts inputs and outputs (`Float16Module`)."""
    return getattr(chunk, "module", chunk)


def wrap(arguments: argparse.Namespace, chunks: list[Any]) -> list[Any]:
    """Chunks over contiguous parameter and gradient buffers, made on a stream of their own."""
    wrapped: list[Any] = prepare_existing_model_chunks_for_distributed_training(
        chunks,
        chunks[0].config,
        ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=training.get_megatron_ddp_config(arguments),
        overlap_param_gather_with_optimizer_step=arguments.overlap_param_gather_with_optimizer_step,
        use_megatron_fsdp=arguments.use_megatron_fsdp,
        use_torch_fsdp2=arguments.use_torch_fsdp2,
        data_parallel_random_init=arguments.data_parallel_random_init,
        mixed_precision_wrapper=None,  # they are converted
    )
    return wrapped


def build_optimizer(arguments: argparse.Namespace, chunks: list[Any]) -> MegatronOptimizer:
    """The optimizer over the chunks' buffers; its moments appear in the first step."""
    config, overrides = training.get_megatron_optimizer_config(arguments)
    return get_megatron_optimizer(
        config, chunks, config_overrides=overrides, use_gloo_process_groups=arguments.use_gloo_process_groups
    )


def look_for_checkpoint(arguments: argparse.Namespace, optimizer: MegatronOptimizer) -> None:
    """What `--load` leaves behind before the first step though nothing is there to load.

    `load_checkpoint` of Megatron-FSDP (format `fsdp_dtensor`) describes the state it wants before it looks for a
    checkpoint, and makes the optimizer's with a step over gradients of zero.
    """
    if arguments.use_megatron_fsdp and arguments.load and not (arguments.finetune or arguments.no_load_optim):
        optimizer.sharded_state_dict({}, is_loading=True, metadata=_build_sharded_state_dict_metadata(arguments))
