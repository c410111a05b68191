"""A workload as Megatron-LM's arguments: what `pretrain_gpt.py` would parse and validate for it.

The inverse of `labkit.importers.fields`. Source: `megatron.training.arguments`, Megatron Core 0.19.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.spec_utils import import_module
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import parse_args, validate_args

from labkit.drivers.options import check_values, groups, refused, refusing
from labkit.errors import InputError
from labkit.workload import Model, Workload
from labkit.workload.launch_rules import launch_findings
from labkit.workload.training import Training

_LAYERS = "megatron.core."
"""Where layers of `--spec` come from: any other module would be code of the workload's author."""


def megatron_arguments(workload: Workload, *, num_microbatches: int) -> argparse.Namespace:
    """The validated arguments of the rank that the environment names (`RANK`, `WORLD_SIZE`).

    `num_microbatches` a step, which may be fewer than the workload's where memory alone counts.

    Raises:
        InputError: an option of `launch` does not exist or has a wrong value, a field of the workload expresses it,
            or Megatron's validator refuses the workload.
    """
    namespace = stated_arguments(workload, num_microbatches=num_microbatches)
    with refusing(refused(workload)):
        validate(namespace)
    return namespace


def stated_arguments(workload: Workload, *, num_microbatches: int) -> argparse.Namespace:
    """The same before Megatron's validator has seen them.

    Raises:
        InputError: an option of `launch` does not exist or has a wrong value, or a field of the workload expresses it.
    """
    for finding in launch_findings(workload):
        raise InputError(str(finding))
    words = [] if workload.launch is None else workload.launch.words
    launched: dict[str, str] = {}

    def find(parser: argparse.ArgumentParser) -> list[str]:
        options, names = parser._option_string_actions, [word.partition("=")[0] for word in words]
        launched.update((options[name].dest, name) for name in names if name in options)
        for group in groups(words):
            if (action := options.get(group[0].partition("=")[0])) is not None:
                try:
                    check_values(action, group)
                except InputError as error:
                    raise InputError(f"launch.arguments: {error}") from None
        return words

    namespace = parse(find, lambda message: f"launch.arguments: {message[:300]}")
    if "spec" in launched and namespace.spec and not _layers(namespace.spec):
        raise InputError(
            f"launch.arguments: --spec names no layers of {_LAYERS}*, which alone are traced; leave it out"
        )
    for name, value in arguments_of(workload, num_microbatches=num_microbatches).items():
        if name not in launched:
            setattr(namespace, name, value)
    if namespace.fp16:
        namespace.bf16 = False
    return namespace


def _layers(spec: list[str]) -> Any:
    """What `--spec` names, as Megatron imports it; nothing if that is none of Megatron Core's."""
    try:
        return spec[0].startswith(_LAYERS) and import_module(tuple(spec))
    except (KeyError, ValueError):
        return None


def parse(find: Callable[[argparse.ArgumentParser], list[str]], sentence: Callable[[str], str]) -> argparse.Namespace:
    """What Megatron-LM's parser makes of the words that `find` gives it.

    Raises:
        InputError: it refuses them: the `sentence` for its message.
    """

    def prepare(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sys.argv = ["megatron", *find(parser)]
        return parser

    def refuse(_parser: argparse.ArgumentParser, message: str) -> None:
        raise InputError(sentence(message))

    # `parse_args` reads `sys.argv`, leaves the process where it refuses, and parses the sources of Megatron's
    # configurations for a help that nobody sees, which takes longer than all else.
    argv, error, helped = sys.argv, argparse.ArgumentParser.error, ArgumentGroupFactory._get_field_docstrings
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign,assignment]
    ArgumentGroupFactory._get_field_docstrings = lambda *_: {}
    try:
        namespace: argparse.Namespace = parse_args(prepare)
        return namespace
    finally:
        sys.argv = argv
        argparse.ArgumentParser.error = error  # type: ignore[method-assign]
        ArgumentGroupFactory._get_field_docstrings = helped


def validate(namespace: argparse.Namespace) -> None:
    """Megatron's validator, which completes the arguments in place; it raises what it likes."""
    if namespace.use_megatron_fsdp:
        namespace.ckpt_format = "fsdp_dtensor"  # which it asks for; checkpoints decide no memory
    validate_args(namespace)


def arguments_of(workload: Workload, *, num_microbatches: int) -> dict[str, Any]:
    """What the fields of a workload say, by name of the argument (`dest`)."""
    model, batch, training = workload.model, workload.batch, workload.training
    data_parallel, optimizer = training.data_parallel, training.optimizer
    return {
        **_model(model),
        **_mixture_of_experts(workload),
        **_parallelism(workload),
        "seq_length": batch.seq_length,
        "max_position_embeddings": batch.seq_length,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.micro_batch_size * workload.parallelism.dp * num_microbatches,
        "create_attention_mask_in_dataloader": batch.create_attention_mask_in_dataloader,
        "sft": batch.packed is not None,
        **_recompute(workload),
        **_kernels(workload.training),
        "bf16": training.precision == "bf16",
        "use_distributed_optimizer": data_parallel.use_distributed_optimizer,
        "accumulate_allreduce_grads_in_fp32": data_parallel.grad_reduce_in_fp32,
        "grad_reduce_in_bf16": not data_parallel.grad_reduce_in_fp32,
        "overlap_grad_reduce": data_parallel.overlap_grad_reduce,
        "overlap_param_gather": data_parallel.overlap_param_gather,
        "ddp_average_in_collective": data_parallel.average_in_collective,
        "num_distributed_optimizer_instances": data_parallel.num_distributed_optimizer_instances,
        **optimizer.model_dump(exclude={"fp8_recipe"}),
        **({} if optimizer.fp8_recipe is None else {"fp8_recipe": optimizer.fp8_recipe}),
        "use_gloo_process_groups": False,
        "train_iters": 10,
        "lr": 1e-4,
    }


def _model(model: Model) -> dict[str, Any]:
    fields = model.model_dump(
        include={
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "qk_layernorm",
            "normalization",
            "add_bias_linear",
            "hidden_dropout",
            "attention_dropout",
            "untie_embeddings_and_output_weights",
            "position_embedding_type",
            "rotary_base",
            "rotary_percent",
            "mtp_num_layers",
            "hybrid_layer_pattern",
            "kv_channels",
            "add_qkv_bias",
            "attention_output_gate",
        }
    )
    fields |= {
        # For every other pair of function and gate see `build.transformer_config`.
        "swiglu": model.gated_linear_unit,
        "squared_relu": model.activation_func == "squared_relu" and not model.gated_linear_unit,
        # Megatron refuses groups beside latent attention, where they would do nothing.
        "group_query_attention": model.num_query_groups is not None and model.multi_latent_attention is None,
        "num_query_groups": model.num_query_groups or 1,
        "multi_latent_attention": model.multi_latent_attention is not None,
    }
    if model.multi_latent_attention is not None:
        fields |= model.multi_latent_attention.model_dump()
        fields["original_max_position_embeddings"] = model.original_max_position_embeddings
    elif model.position_embedding_type == "yarn":
        fields["yarn_original_max_position_embeddings"] = model.original_max_position_embeddings
    if model.gated_delta_net is not None:
        fields |= _linear_attention(model)
    if model.mamba is not None:
        fields |= model.mamba.model_dump()
    return fields


def _linear_attention(model: Model) -> dict[str, Any]:
    assert model.gated_delta_net is not None
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
    fields["num_experts"] = fields.pop("num_moe_experts")
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


def _parallelism(workload: Workload) -> dict[str, Any]:
    layout = workload.parallelism
    # A hybrid pattern or a layout says itself how many virtual stages there are.
    marked = workload.model.hybrid_layer_pattern or layout.pipeline_model_parallel_layout
    chunks = None if marked else layout.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "sequence_parallel": layout.sequence_parallel,
        "cp_comm_type": [layout.cp_comm_type],
        "num_virtual_stages_per_pipeline_rank": chunks,
        "microbatch_group_size_per_vp_stage": layout.microbatch_group_size_per_vp_stage,
        "pipeline_model_parallel_layout": layout.pipeline_model_parallel_layout,
        "decoder_first_pipeline_num_layers": layout.num_layers_in_first_pipeline_stage,
        "decoder_last_pipeline_num_layers": layout.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": layout.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": layout.account_for_loss_in_pipeline_split,
    }


def _recompute(workload: Workload) -> dict[str, Any]:
    fields = workload.recompute.model_dump()
    modules = fields["recompute_modules"]
    # None stays None: Megatron's own default is then in force.
    return {**fields, "recompute_modules": None if modules is None else list(modules)}


def _kernels(training: Training) -> dict[str, Any]:
    kernels, fuses = training.kernels, training.fuses_activation
    own = {
        "masked_softmax_fusion": kernels.masked_softmax_fusion,
        "attention_softmax_in_fp32": kernels.attention_softmax_in_fp32,
        "apply_query_key_layer_scaling": kernels.apply_query_key_layer_scaling,
        "no_persist_layer_norm": not kernels.persist_layer_norm,
    }
    return {
        "transformer_impl": kernels.transformer_impl,
        **(own if kernels.local else {}),
        "attention_backend": AttnBackend[kernels.attention_backend],
        "deterministic_mode": kernels.deterministic_mode,
        "bias_gelu_fusion": fuses,
        "bias_swiglu_fusion": fuses,
        "use_fused_weighted_squared_relu": kernels.use_fused_weighted_squared_relu,
        "bias_dropout_fusion": kernels.bias_dropout_fusion,
        "apply_rope_fusion": kernels.apply_rope_fusion,
        "gradient_accumulation_fusion": kernels.gradient_accumulation_fusion,
        # Megatron-LM 0.19 refuses Transformer Engine's, which Megatron Core has: see `build.transformer_config`.
        "cross_entropy_loss_fusion": kernels.cross_entropy_loss_fusion and kernels.cross_entropy_fusion_impl != "te",
        "cross_entropy_fusion_impl": kernels.cross_entropy_fusion_impl,
    }
