"""Rules of the recompute choice, and labels that do nothing (see `labkit.workload.rules`).

Source: `TransformerConfig.__post_init__`. Labels beside CUDA graphs, offloading, FP8 or overlapped communication are
with those.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.attention_backends import attention_backend, keeps_no_scores
from labkit.workload.finding import Authority, Finding, refuse

if TYPE_CHECKING:
    from labkit.workload.workload import Workload


def recompute_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    choice, field = workload.recompute, "recompute.recompute_modules"
    if choice.recompute_granularity == "full":
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(choice, name) is None:
                yield Finding(
                    "error",
                    f"recompute.{name}",
                    "full recompute needs it",
                    "give both recompute_method (uniform or block) and recompute_num_layers",
                    Authority.CONFIG,
                )
        if choice.recompute_modules:
            yield Finding(
                "warning", field, "full recompute supersedes the list", "leave recompute_modules out", Authority.CONFIG
            )
        return
    stated = [name for name in ("recompute_method", "recompute_num_layers") if getattr(choice, name) is not None]
    if choice.recompute_granularity is None:
        for name in choice.without_granularity:
            remedy = f"set recompute_granularity: {'selective' if name == 'recompute_modules' else 'full'}"
            reason = "it does nothing without a granularity: nothing is recomputed"
            yield Finding("warning", f"recompute.{name}", reason, f"{remedy}, or leave it out", Authority.CONFIG)
        return
    for name in stated:
        authority = Authority.CONFIG if name == "recompute_num_layers" else Authority.ARGUMENTS
        remedy = "leave it out or set recompute_granularity: full (now selective)"
        yield Finding("error", f"recompute.{name}", "only full recompute takes it", remedy, authority)
    yield from _labels(workload, choice.modules)


def _labels(workload: "Workload", labels: frozenset[str]) -> Iterator[Finding]:
    """What a selective list may name."""
    model, kernels, field = workload.model, workload.training.kernels, "recompute.recompute_modules"
    moe = model.mixture_of_experts
    if "mlp" in labels and model.add_bias_linear and any(layer.mlp == "dense" for layer in model.kinds):
        # CheckpointFunction returns fc2's bias parameter and so becomes its grad_fn: backward enters it again, forever.
        reason = "mlp cannot be recomputed where it hands on a bias: Megatron Core's checkpoint never ends its backward"
        yield Finding(
            "error",
            field,
            reason,
            "remove mlp, use full recompute or set model.add_bias_linear: false",
            Authority.CHECKPOINT,
        )
    needs = {
        "mla_up_proj needs multi-latent attention, this model has none": "mla_up_proj" in labels
        and not model.is_latent,
        "moe_act needs experts with grouped GEMM, this model has none": (
            "moe_act" in labels and (moe is None or not kernels.moe_grouped_gemm)
        ),
    }
    for reason, broken in needs.items():
        yield from refuse(broken, field, reason, "remove it", Authority.CONFIG)
    shared = moe is not None and moe.moe_shared_expert_intermediate_size is not None
    if "shared_experts" in labels and shared and kernels.moe_shared_expert_overlap:
        yield Finding(
            "error",
            field,
            "shared_experts cannot be recomputed while their computation overlaps the dispatch",
            "remove it or set training.kernels.moe_shared_expert_overlap: false",
            Authority.CONFIG,
        )
    yield from _idle_labels(workload, labels, shared)


def _idle_labels(workload: "Workload", labels: frozenset[str], shared: bool) -> Iterator[Finding]:
    kinds, kernels = {layer.mlp for layer in workload.model.kinds}, workload.training.kernels
    backend = attention_backend(workload)
    # Layers of Transformer Engine have norms of their own where no linear norms its input (`gpt_layer_specs`).
    others = workload.launch is not None and "--spec" in workload.launch.words
    normed = (
        kernels.local or others or any(layer.mixer == "mla" or layer.mlp == "moe" for layer in workload.model.kinds)
    )
    idle = {
        "core_attn": (
            keeps_no_scores(workload),
            f"{backend} attention already keeps no scores, and backward runs it again",
        ),
        "layernorm": (not normed, "the layers' norms are parts of the linears behind them, which it does not reach"),
        "mlp": ("dense" not in kinds, "the model has no dense MLP layer"),
        "moe": ("moe" not in kinds, "the model has no MoE layer"),
        "moe_act": (
            "moe" not in kinds or not kernels.groups_experts,
            "the model has no MoE layer" if "moe" not in kinds else "own layers have experts one after the other",
        ),
        "shared_experts": (not shared, "the model has no shared expert"),
    }
    stated = workload.recompute.recompute_modules is not None
    for label in sorted(labels & idle.keys()):
        inactive, reason = idle[label]
        if inactive:
            yield Finding(
                "warning",
                "recompute.recompute_modules",
                f"{label} saves {'next to ' if label == 'core_attn' else ''}nothing: {reason}",
                f"remove {label}" if stated else "set recompute_modules: []",
                Authority.CONFIG,
            )
