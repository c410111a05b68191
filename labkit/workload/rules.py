"""Which workloads can run at all, and which choices do nothing: each rule with its reason and its remedy.

Megatron Core's own validators are the authority (`TransformerConfig.__post_init__`, `parallel_state`); a rule
that is theirs names the field they reject.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.attention_rules import attention_findings
from labkit.workload.behaviour import (
    KNOWN,
    MEGATRON_FSDP_SINCE,
    discards_gated_norms,
    overlaps_shared_experts_with_flex,
    spreads_delta_nets_over_contexts,
    version_tuple,
)
from labkit.workload.caching import allocator_findings
from labkit.workload.expert_rules import expert_findings
from labkit.workload.finding import Authority, Finding, divides, refuse
from labkit.workload.graph_rules import graph_findings
from labkit.workload.launch_rules import launch_findings
from labkit.workload.launched import launched
from labkit.workload.launched_rules import launched_findings
from labkit.workload.layout_rules import layout_findings
from labkit.workload.local_rules import local_findings
from labkit.workload.lora_rules import lora_findings
from labkit.workload.mixer_rules import mixer_findings, pattern_symbols
from labkit.workload.offload_rules import offload_findings
from labkit.workload.overlap_rules import overlap_findings
from labkit.workload.packing_rules import packing_findings
from labkit.workload.pipeline_rules import pipeline_findings
from labkit.workload.prediction_rules import prediction_findings
from labkit.workload.quantization_rules import quantization_findings
from labkit.workload.recompute_rules import recompute_findings

if TYPE_CHECKING:
    from labkit.workload.workload import Workload


def findings(workload: "Workload") -> list[Finding]:
    """Every rule `workload` breaks, errors first."""
    if unknown := list(pattern_symbols(workload)):
        return unknown
    found = [
        *_not_priced(workload),
        *_sizes(workload),
        *layout_findings(workload),
        *recompute_findings(workload),
        *_software(workload),
    ]
    found += _older(workload)
    found += [*_determinism(workload), *_half_precision(workload), *_megatron_fsdp(workload)]
    found += [*_megatron_sizes(workload), *_optimizer(workload), *expert_findings(workload)]
    found += [*mixer_findings(workload), *attention_findings(workload), *lora_findings(workload)]
    found += [*_activation(workload), *pipeline_findings(workload), *prediction_findings(workload)]
    found += [*packing_findings(workload), *local_findings(workload), *allocator_findings(workload)]
    if workload.launch is not None:
        found += [*launch_findings(workload), *launched_findings(workload), *graph_findings(workload)]
        found += [*overlap_findings(workload), *offload_findings(workload), *quantization_findings(workload)]
    return sorted(found, key=lambda finding: finding.severity)


def _not_priced(workload: "Workload") -> Iterator[Finding]:
    """What Megatron Core can run and labkit has no rows for yet.

    The `lora` runtime has a list of its own (`labkit.workload.lora_rules`).
    """
    if workload.training.runtime == "lora":
        return
    model = workload.model
    refused = {
        "training.kernels.use_fused_weighted_squared_relu": (
            workload.training.kernels.use_fused_weighted_squared_relu and model.gated_linear_unit,
            "the fused squared ReLU of a gated MLP",
        ),
    }
    for field, (broken, what) in refused.items():
        if broken:
            yield Finding(
                "error",
                field,
                f"{what} is not supported by this version of labkit",
                "use the default",
                Authority.LABKIT,
            )
    remedy = "trace the workload, which runs it"
    if workload.launch is not None and workload.launch.not_priced:
        reason = f"an estimate does not price {', '.join(workload.launch.not_priced)}"
        yield Finding("warning", "launch.arguments", reason, remedy, Authority.LABKIT)


def _determinism(workload: "Workload") -> Iterator[Finding]:
    """`megatron.training.determinism`; Megatron Core's own branches."""
    kernels, at = workload.training.kernels, "training.kernels.deterministic_mode"
    if not kernels.deterministic_mode:
        return
    if kernels.cross_entropy_loss_fusion:
        remedy = "set training.kernels.cross_entropy_loss_fusion: false"
        yield Finding("error", at, "the fused cross entropy is not deterministic", remedy, Authority.DETERMINISM)
    if any(layer.mixer == "gdn" for layer in workload.model.kinds):
        reason = "the gated delta rule without its kernel is not supported by this version of labkit"
        yield Finding("error", at, reason, "leave it off", Authority.LABKIT)


def _half_precision(workload: "Workload") -> Iterator[Finding]:
    """`--fp16`, which has no field: bf16's sizes and a loss scaler; `transformer_engine.pytorch.cross_entropy`."""
    training = workload.training
    if workload.launch is None or "--fp16" not in workload.launch.words:
        return
    if training.precision != "bf16":
        reason = "--fp16 in launch.arguments trains in 16 bits"
        yield Finding(
            "error", "training.precision", reason, "set bf16, whose tensors have the sizes of fp16's", Authority.LABKIT
        )
    kernels = training.kernels
    if kernels.cross_entropy_loss_fusion and kernels.cross_entropy_fusion_impl == "te":
        at, reason = "training.kernels.cross_entropy_fusion_impl", "Transformer Engine's cross entropy takes no fp16"
        yield Finding("error", at, reason, "set native", Authority.TE_LOSS)


def _megatron_fsdp(workload: "Workload") -> Iterator[Finding]:
    """`MegatronFSDP._init_fsdp_param_and_grad_buffer`: averages in proportion to a group that experts alone have."""
    sharded = workload.launch is not None and "--use-megatron-fsdp" in workload.launch.words
    if sharded and workload.training.data_parallel.average_in_collective and workload.model.mixture_of_experts is None:
        at = "training.data_parallel.average_in_collective"
        yield Finding(
            "error",
            at,
            "Megatron-FSDP averages in collectives of models with experts alone",
            "set it to false",
            Authority.FSDP,
        )


def _software(workload: "Workload") -> Iterator[Finding]:
    sharded = workload.launch is not None and "--use-megatron-fsdp" in workload.launch.words
    for name, (since, last) in KNOWN.items():
        stated = getattr(workload.training.software, name)
        first = MEGATRON_FSDP_SINCE if name == "megatron_core" and sharded else since
        if not first <= version_tuple(stated)[:2] <= last:
            known = " to ".join(dict.fromkeys(".".join(map(str, version)) for version in (first, last)))
            yield Finding(
                "error",
                f"training.software.{name}",
                f"what version {stated!r} keeps in memory is not known here",
                f"use one of {known}",
                Authority.LABKIT,
            )


def _older(workload: "Workload") -> Iterator[Finding]:
    """What Megatron Core refuses before 0.19, which is known with Megatron-FSDP (`labkit.workload.behaviour`)."""
    software, kernels, model = workload.training.software, workload.training.kernels, workload.model
    remedy = "set training.software.megatron_core: 0.19.2 or"
    yield from refuse(
        "gdn_norm_out" in workload.recompute.modules and not discards_gated_norms(software),
        "recompute.recompute_modules",
        f"Megatron Core {software.megatron_core} has no label gdn_norm_out",
        f"{remedy} remove it",
        Authority.CONFIG,
    )
    spread = model.gated_delta_net is not None and workload.parallelism.cp > 1
    yield from refuse(
        spread and not spreads_delta_nets_over_contexts(software),
        "parallelism.context_parallel_size",
        f"gated delta net of Megatron Core {software.megatron_core} has no context parallelism",
        f"{remedy} use 1",
        Authority.CONFIG,
    )
    moe, flex = model.mixture_of_experts, kernels.moe_token_dispatcher_type == "flex"
    shared = moe is not None and moe.moe_shared_expert_intermediate_size is not None
    yield from refuse(
        shared and flex and kernels.moe_shared_expert_overlap and not overlaps_shared_experts_with_flex(software),
        "training.kernels.moe_shared_expert_overlap",
        f"shared experts of Megatron Core {software.megatron_core} overlap with the alltoall dispatcher alone",
        f"{remedy} set it to false",
        Authority.CONFIG,
    )


def _sizes(workload: "Workload") -> Iterator[Finding]:
    model, moe = workload.model, workload.model.mixture_of_experts
    if moe is not None:
        if moe.moe_router_topk > moe.num_moe_experts:
            yield Finding(
                "error",
                "model.mixture_of_experts.moe_router_topk",
                f"{moe.moe_router_topk} experts a token is more than the {moe.num_moe_experts} there are",
                f"use at most {moe.num_moe_experts}",
                Authority.ROUTER,
            )
        frequency = moe.moe_layer_freq
        if not isinstance(frequency, int) and len(frequency) != model.num_layers:
            yield Finding(
                "error",
                "model.mixture_of_experts.moe_layer_freq",
                f"it names {len(frequency)} layers but num_layers is {model.num_layers}",
                f"give {model.num_layers} entries",
                Authority.SPECS,
            )


def _megatron_sizes(workload: "Workload") -> Iterator[Finding]:
    """Sizes `TransformerConfig.__post_init__` and the layers themselves refuse."""
    model, moe, tp = workload.model, workload.model.mixture_of_experts, workload.parallelism.tp
    heads, width = model.num_attention_heads, model.hidden_size
    if width % heads and model.kv_channels is None:
        reason = f"hidden_size ({width}) is no multiple of {heads} heads"
        yield Finding(
            "error", "model.num_attention_heads", reason, "use a divisor or give kv_channels", Authority.ARGUMENTS
        )
    shared = model.key_value_heads if model.multi_latent_attention is None else heads
    if shared % tp and tp % shared and model.num_query_groups is not None:
        reason = f"{shared} key-value heads are neither a multiple nor a divisor of tensor_model_parallel_size ({tp})"
        remedy = f"use a multiple or a divisor of {tp}"
        yield Finding("error", "model.num_query_groups", reason, remedy, Authority.CONFIG)
    if moe is None:
        return
    topk, groups, group_topk = moe.moe_router_topk, moe.moe_router_num_groups, moe.moe_router_group_topk
    at = "model.mixture_of_experts."
    softmax = moe.moe_router_score_function == "softmax"
    sinkhorn = launched(workload.launch).moe_router_load_balancing_type == ("sinkhorn",)
    if topk == 1 and softmax and not moe.moe_router_pre_softmax and not sinkhorn:
        remedy = "set moe_router_pre_softmax: true"
        yield Finding(
            "error",
            f"{at}moe_router_topk",
            "one expert a token needs softmax before the selection",
            remedy,
            Authority.CONFIG,
        )
    if moe.moe_router_enable_expert_bias and softmax:
        remedy = "set moe_router_score_function: sigmoid or remove it"
        yield Finding(
            "error", f"{at}moe_router_enable_expert_bias", "expert bias needs sigmoid scores", remedy, Authority.CONFIG
        )
    if group_topk is not None and groups is None:
        yield Finding(
            "error",
            f"{at}moe_router_group_topk",
            "there are no groups to choose",
            "set moe_router_num_groups",
            Authority.CONFIG,
        )
    if groups is None or group_topk is None:
        return  # groups that nothing chooses from do nothing
    field = f"{at}moe_router_num_groups"
    yield from divides(groups, moe.num_moe_experts, field, "num_moe_experts", Authority.CONFIG)
    if group_topk > groups:
        reason = f"{group_topk} groups cannot be chosen out of {groups}"
        yield Finding("error", f"{at}moe_router_group_topk", reason, f"use at most {groups}", Authority.CONFIG)
    elif topk // group_topk > moe.num_moe_experts // groups:
        reason = f"{topk} experts a token cannot be spread over {group_topk} of {groups} groups"
        yield Finding(
            "error",
            f"{at}moe_router_group_topk",
            reason,
            "choose more groups or fewer experts a token",
            Authority.ROUTER,
        )


def _activation(workload: "Workload") -> Iterator[Finding]:
    """Which activations have a compiled kernel (`TransformerConfig.__post_init__`, `MLP.forward`)."""
    model, kernels = workload.model, workload.training.kernels
    name, gated = model.activation_func, model.gated_linear_unit
    if not kernels.bias_activation_fusion or launched(workload.launch).quick_geglu:
        return
    remedy = "set training.kernels.bias_activation_fusion: false"
    if name == "squared_relu":
        yield Finding(
            "error",
            "model.activation_func",
            "bias_activation_fusion has no kernel for squared_relu",
            remedy,
            Authority.CONFIG,
        )
    elif name == "silu" and not gated:
        reason = "bias_activation_fusion has a kernel for silu in a gated unit alone"
        yield Finding("error", "model.gated_linear_unit", reason, remedy, Authority.MLP)
    elif name == "gelu" and not gated and not model.add_bias_linear:
        reason = "bias_activation_fusion has a kernel for gelu without gate only where there is a bias"
        yield Finding("error", "model.add_bias_linear", reason, f"set it to true or {remedy}", Authority.CONFIG)


def _optimizer(workload: "Workload") -> Iterator[Finding]:
    """`OptimizerConfig.__post_init__`, `DistributedOptimizer.__init__`, `megatron.training.arguments.validate_args`."""
    optimizer, data_parallel = workload.training.optimizer, workload.training.data_parallel
    aware = optimizer.use_precision_aware_optimizer
    for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(optimizer, name) != "fp32" and not aware:
            yield Finding(
                "error",
                f"training.optimizer.{name}",
                f"{getattr(optimizer, name)} needs the precision-aware optimizer",
                "set training.optimizer.use_precision_aware_optimizer: true",
                Authority.OPTIMIZER,
            )
    if aware and workload.training.precision == "fp32":
        field = "training.optimizer.use_precision_aware_optimizer"
        yield Finding(
            "error", field, "parameters in fp32 are their own main parameters", "leave it off", Authority.OPTIMIZER
        )
    if aware and optimizer.optimizer != "adam":
        field = "training.optimizer.use_precision_aware_optimizer"
        yield Finding(
            "error",
            field,
            f"{optimizer.optimizer} has no precision-aware form",
            "use adam or leave it off",
            Authority.OPTIMIZER,
        )
    at = "training.data_parallel."
    if aware and optimizer.main_grads_dtype != "fp32" and data_parallel.grad_reduce_in_fp32:
        reason = f"gradients reduced in fp32 are not kept in {optimizer.main_grads_dtype}"
        yield Finding(
            "error",
            "training.optimizer.main_grads_dtype",
            reason,
            f"use fp32 or {at}grad_reduce_in_fp32: false",
            Authority.ARGUMENTS,
        )
    if optimizer.optimizer == "sgd" and data_parallel.use_distributed_optimizer:
        reason = "Megatron Core distributes no momentum of sgd"
        yield Finding(
            "error",
            f"{at}use_distributed_optimizer",
            reason,
            "set it and overlap_param_gather to false",
            Authority.DISTRIBUTED,
        )
    if not data_parallel.use_distributed_optimizer:
        if aware:
            reason = "the precision-aware optimizer is a distributed one"
            yield Finding("error", f"{at}use_distributed_optimizer", reason, "set it to true", Authority.OPTIMIZER)
        if data_parallel.overlap_param_gather:
            reason = "only a distributed optimizer gathers parameters"
            yield Finding("error", f"{at}overlap_param_gather", reason, "set it to false", Authority.ARGUMENTS)
    if data_parallel.overlap_param_gather and not data_parallel.overlap_grad_reduce:
        reason = "parameters are gathered in the background only where gradients are reduced there"
        yield Finding(
            "error",
            f"{at}overlap_param_gather",
            reason,
            "set it to false or overlap_grad_reduce to true",
            Authority.ARGUMENTS,
        )
