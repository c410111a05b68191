"""What Megatron refuses of a launch's options that no other module of rules has (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `ModelParallelConfig.__post_init__`, `megatron.training.arguments`.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.behaviour import has_single_grouped_parameters
from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.launched import Launched, launched

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_AT = "launch.arguments"
_CONFIG, _ARGUMENTS, _LABKIT = Authority.CONFIG, Authority.ARGUMENTS, Authority.LABKIT


def launched_findings(workload: "Workload") -> Iterator[Finding]:
    """What Megatron refuses of options that no other module of rules has."""
    if workload.launch is None:
        return
    options = launched(workload.launch)
    yield from _experts(workload, options)
    yield from _activation(workload, options)
    yield from _attention(workload, options)
    yield from _replayed(workload, options)
    yield from _sharded(workload, options)
    yield from _only_inference(options)
    yield from refuse(
        options.init_method_xavier_uniform,
        _AT,
        "--init-method-xavier-uniform: Megatron Core 0.19 has no configuration for it",
        "leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.use_mup and options.mup_base_hidden_size is not None and options.mup_base_hidden_size <= 0,
        _AT,
        f"--mup-base-hidden-size {options.mup_base_hidden_size} is no width",
        "use at least 1",
        _CONFIG,
    )
    yield from refuse(
        options.train_iters is not None and options.train_iters < 1,
        _AT,
        f"--train-iters {options.train_iters} is no number of steps",
        "use at least 1, or leave it out",
        Authority.LEARNING_RATE,
    )
    yield from refuse(
        options.fp16_lm_cross_entropy and not options.fp16,
        _AT,
        "--fp16-lm-cross-entropy needs --fp16",
        "leave it out",
        _ARGUMENTS,
    )
    yield from refuse(
        options.fp32_residual_connection and workload.training.precision == "fp32" and not options.fp16,
        _AT,
        "--fp32-residual-connection is for 16 bits",
        "leave it out",
        _ARGUMENTS,
    )


def _experts(workload: "Workload", options: Launched) -> Iterator[Finding]:
    moe, kernels, model = workload.model.mixture_of_experts, workload.training.kernels, workload.model
    flex = moe is not None and kernels.moe_token_dispatcher_type == "flex"
    backend = workload.flex_backend
    single = options.moe_single_grouped_weight or options.moe_single_grouped_bias
    yield from refuse(
        single and not (moe is not None and kernels.moe_grouped_gemm),
        _AT,
        "--moe-single-grouped-weight and --moe-single-grouped-bias need grouped GEMM",
        "set training.kernels.moe_grouped_gemm: true or leave them out",
        _CONFIG,
    )
    yield from refuse(
        single and not has_single_grouped_parameters(workload.training.software),
        _AT,
        "--moe-single-grouped-weight and --moe-single-grouped-bias need Transformer Engine 2.14",
        "set training.software.transformer_engine to it or leave them out",
        _CONFIG,
    )
    other_fp8 = options.fp8 is not None and workload.fp8_recipe != "mxfp8"
    yield from refuse(
        options.moe_single_grouped_weight
        and (other_fp8 or (options.fp4 is not None and options.fp4_recipe != "nvfp4")),
        _AT,
        "--moe-single-grouped-weight goes with bf16, mxfp8 and nvfp4 alone",
        "use another recipe or leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.moe_single_grouped_weight and not options.use_transformer_engine_op_fuser,
        _AT,
        "--moe-single-grouped-weight needs --use-transformer-engine-op-fuser",
        "add it or leave --moe-single-grouped-weight out",
        _CONFIG,
    )
    yield from refuse(
        options.moe_single_grouped_bias and not model.add_bias_linear,
        _AT,
        "--moe-single-grouped-bias needs biases",
        "set model.add_bias_linear: true or leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.moe_enable_deepep and (not flex or workload.stated_flex_backend == "hybridep"),
        _AT,
        "--moe-enable-deepep is the flex dispatcher's backend deepep",
        "use --moe-flex-dispatcher-backend deepep with training.kernels.moe_token_dispatcher_type: flex",
        _CONFIG,
    )
    yield from refuse(
        flex and moe is not None and moe.moe_pad_expert_input_to_capacity and backend == "deepep",
        "model.mixture_of_experts.moe_pad_expert_input_to_capacity",
        "deepep pads no experts",
        "set it to false or use the backend hybridep",
        _CONFIG,
    )
    yield from refuse(
        backend == "ncclep" and not flex,
        _AT,
        "--moe-flex-dispatcher-backend ncclep needs the flex dispatcher",
        "set training.kernels.moe_token_dispatcher_type: flex or leave it out",
        _CONFIG,
    )
    former = {options.moe_deepep_num_sms, options.moe_hybridep_num_sms} - {None}
    yield from refuse(
        len(former) > 1 and options.moe_flex_dispatcher_num_sms is None,
        _AT,
        "--moe-deepep-num-sms and --moe-hybridep-num-sms contradict each other",
        "use --moe-flex-dispatcher-num-sms",
        _CONFIG,
    )
    yield from _balancing(workload, options)
    bounded = options.moe_expert_rank_capacity_factor is not None
    yield from refuse(
        bounded and backend not in ("hybridep", "ncclep"),
        _AT,
        "--moe-expert-rank-capacity-factor is for the backends hybridep and ncclep",
        "leave it out or use one of them",
        _CONFIG,
    )
    yield from refuse(
        bounded and backend == "hybridep" and not options.use_transformer_engine_op_fuser,
        _AT,
        "--moe-expert-rank-capacity-factor with hybridep needs --use-transformer-engine-op-fuser",
        "add it or leave --moe-expert-rank-capacity-factor out",
        _CONFIG,
    )


def _balancing(workload: "Workload", options: Launched) -> Iterator[Finding]:
    kinds, moe = options.moe_router_load_balancing_type or (), workload.model.mixture_of_experts
    yield from refuse(
        len(kinds) > 1,
        _AT,
        "several of --moe-router-load-balancing-type need as many coefficients, and moe_aux_loss_coeff is one",
        "give one",
        _CONFIG,
    )
    others = sorted(set(kinds) - {"aux_loss", "seq_aux_loss", "global_aux_loss", "none"})
    yield from refuse(
        bool(others) and moe is not None and moe.moe_expert_capacity_factor is not None,
        "model.mixture_of_experts.moe_expert_capacity_factor",
        f"a capacity does not go with --moe-router-load-balancing-type {' '.join(others)}",
        "leave one of the two out",
        _CONFIG,
    )


def _activation(workload: "Workload", options: Launched) -> Iterator[Finding]:
    model, fuses = workload.model, workload.fuses_activation
    yield from refuse(
        options.quick_geglu and not (model.activation_func == "gelu" and model.gated_linear_unit),
        "model.activation_func",
        "--quick-geglu is a gated gelu",
        "set gelu, and gated_linear_unit: true, or leave it out",
        _LABKIT,
    )
    yield from refuse(
        options.glu_linear_offset != 0.0 and fuses and not options.quick_geglu,
        _AT,
        "bias_activation_fusion has a kernel for --glu-linear-offset in --quick-geglu alone",
        "set training.kernels.bias_activation_fusion: false or leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.use_te_activation_func and fuses,
        "training.kernels.bias_activation_fusion",
        "--use-te-activation-func is another kernel",
        "set it to false or leave --use-te-activation-func out",
        _CONFIG,
    )
    yield from refuse(
        options.use_te_activation_func and (options.quick_geglu or model.activation_func == "squared_relu"),
        "model.activation_func",
        "--use-te-activation-func has no kernel for it",
        "use silu or gelu, or leave --use-te-activation-func out",
        _CONFIG,
    )
    yield from refuse(
        options.fused_residual_rmsnorm and model.normalization != "RMSNorm",
        "model.normalization",
        "--fused-residual-rmsnorm is for RMSNorm",
        "use it or leave the fusion out",
        _CONFIG,
    )


def _attention(workload: "Workload", options: Launched) -> Iterator[Finding]:
    model, layout, kernels = workload.model, workload.parallelism, workload.training.kernels
    latent = model.is_latent
    yield from refuse(
        options.rotary_interleaved and latent,
        _AT,
        "--rotary-interleaved is not for latent attention",
        "leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.cache_mla_latents and latent and kernels.apply_rope_fusion,
        "training.kernels.apply_rope_fusion",
        "--cache-mla-latents goes without it",
        "set it to false or leave --cache-mla-latents out",
        _CONFIG,
    )
    yield from refuse(
        options.mla_down_proj_fusion and not latent,
        _AT,
        "--mla-down-proj-fusion is for latent attention",
        "leave it out",
        _ARGUMENTS,
    )
    stated = options.cp_comm_type or ()
    yield from refuse(
        layout.cp > 1 and len(stated) > 1 and len(stated) != model.num_layers,
        _AT,
        f"--cp-comm-type names {len(stated)} layers but num_layers is {model.num_layers}",
        f"give one for all or {model.num_layers}",
        _CONFIG,
    )
    parts = options.hierarchical_context_parallel_sizes
    yield from refuse(
        "a2a+p2p" in stated and parts is None,
        _AT,
        "--cp-comm-type a2a+p2p needs the sizes of both levels",
        "give --hierarchical-context-parallel-sizes",
        _ARGUMENTS,
    )
    yield from refuse(
        parts is not None and math.prod(parts) != layout.cp,
        _AT,
        f"the product of --hierarchical-context-parallel-sizes is not context_parallel_size ({layout.cp})",
        "change one of the two",
        _ARGUMENTS,
    )
    frequency = options.no_rope_freq
    if isinstance(frequency, int):
        yield from refuse(
            frequency != 0 and model.num_layers % (frequency or 1) != 0,
            _AT,
            f"--no-rope-freq {frequency} does not divide num_layers ({model.num_layers})",
            "use a divisor or a list with an entry for each layer",
            _CONFIG,
        )
    elif frequency:
        yield from refuse(
            len(frequency) != model.num_layers,
            _AT,
            f"--no-rope-freq names {len(frequency)} layers but num_layers is {model.num_layers}",
            f"give {model.num_layers} entries",
            _CONFIG,
        )
    if options.batch_invariant_mode:
        yield from _batch_invariant(workload, options)


def _batch_invariant(workload: "Workload", options: Launched) -> Iterator[Finding]:
    mode, kernels = "--batch-invariant-mode", workload.training.kernels
    yield from refuse(
        (options.attention_backend or kernels.attention_backend) != "flash",
        "training.kernels.attention_backend",
        f"{mode} is for flash",
        "set flash or leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.flash_attention_version not in (3, 4),
        _AT,
        f"{mode} needs a version of flash-attention with a fixed schedule",
        "give --flash-attention-version 3 or 4",
        _CONFIG,
    )
    yield from refuse(
        workload.parallelism.cp > 1,
        "parallelism.context_parallel_size",
        f"{mode} has no context parallelism",
        "use 1 or leave it out",
        _CONFIG,
    )
    yield from refuse(
        workload.model.attention_dropout != 0.0,
        "model.attention_dropout",
        f"{mode} drops nothing",
        "set it to 0.0 or leave it out",
        _CONFIG,
    )


def _replayed(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """Checkpoints whose inputs are spread over tensor-parallel ranks."""
    if not options.distribute_saved_activations:
        return
    choice, layout, flag = workload.recompute, workload.parallelism, "--distribute-saved-activations"
    yield from refuse(
        choice.recompute_granularity is not None and layout.sequence_parallel,
        _AT,
        f"{flag}: under sequence_parallel each rank keeps its part of them already",
        "leave it out or set parallelism.sequence_parallel: false",
        _CONFIG,
    )
    yield from refuse(
        layout.tp == 1, _AT, f"{flag} spreads them over tensor-parallel ranks", "leave it out", _ARGUMENTS
    )
    yield from refuse(
        choice.recompute_granularity != "full" or choice.recompute_method is None,
        "recompute.recompute_granularity",
        f"{flag} is for full recompute",
        "set full, or leave it out",
        _ARGUMENTS,
    )


def _sharded(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """Weights in more shards than there are tensor-parallel ranks (`resolve_tensor_parallel_weight_shards`)."""
    layout = workload.parallelism
    for option, shards, ranks in (
        ("--tensor-parallel-num-weight-shards", options.tensor_parallel_num_weight_shards, layout.tp),
        ("--expert-tensor-parallel-num-weight-shards", options.expert_tensor_parallel_num_weight_shards, layout.etp),
    ):
        yield from refuse(
            shards is not None and (shards < ranks or shards % ranks != 0),
            _AT,
            f"{option} {shards} is no multiple of {ranks} ranks",
            f"use a multiple of {ranks}",
            _CONFIG,
        )
        yield from refuse(
            shards is not None and shards >= 2 * ranks,
            _AT,
            f"{option} beyond tensor-parallel ranks is not supported by this version of labkit",
            f"use {ranks} or leave it out",
            _LABKIT,
        )


def _only_inference(options: Launched) -> Iterator[Finding]:
    for name in ("inference_fuse_tp_communication", "inference_disable_triton_nvls_kernels"):
        yield from refuse(
            getattr(options, name),
            _AT,
            f"--{name.replace('_', '-')} is for layers of inference",
            "leave it out",
            _CONFIG,
        )
