"""Rules of mixture-of-experts layers and of the routing a workload states (see `labkit.workload.rules`)."""

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding
from labkit.workload.routing import Routing, busiest_share, largest_share

if TYPE_CHECKING:
    from labkit.workload.model import MixtureOfExperts, Model
    from labkit.workload.training import Kernels
    from labkit.workload.workload import Workload

_AT = "model.mixture_of_experts."


def expert_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks; sizes that do not divide are for `labkit.workload.rules`."""
    moe, routing = workload.model.mixture_of_experts, workload.routing
    if moe is None:
        if routing is not None:
            yield Finding(
                "warning", "routing", "the model has no experts to route to", "leave it out", Authority.LABKIT
            )
        return
    yield from _capacity(moe, workload.training.kernels)
    yield from _overlap(moe, workload.training.kernels)
    if workload.model.add_bias_linear:
        yield from _bias(workload, moe)
    if workload.training.fuses_activation:
        yield from _activation_fusion(workload.model)
    if routing is not None and moe.num_moe_experts % workload.parallelism.ep == 0:
        yield from _routing(workload, moe, routing)


def _capacity(moe: "MixtureOfExperts", kernels: "Kernels") -> Iterator[Finding]:
    if not moe.moe_pad_expert_input_to_capacity:
        return
    field, most = f"{_AT}moe_pad_expert_input_to_capacity", moe.num_moe_experts / moe.moe_router_topk
    if moe.moe_expert_capacity_factor is None:
        yield Finding(
            "error",
            field,
            "without a capacity there is nothing to pad to",
            "set moe_expert_capacity_factor",
            Authority.CONFIG,
        )
    elif moe.moe_expert_capacity_factor > most and not kernels.moe_permute_fusion:
        reason = "an expert's capacity is more than all tokens, and only fused permutation pads beyond them"
        remedy = f"use at most {most:g} or set training.kernels.moe_permute_fusion: true"
        yield Finding("error", f"{_AT}moe_expert_capacity_factor", reason, remedy, Authority.ROUTER)


def _activation_fusion(model: "Model") -> Iterator[Finding]:
    """`TEGroupedMLP.forward`; what no fusion has a kernel for is said elsewhere."""
    if model.activation_func == "gelu" and (model.gated_linear_unit or model.add_bias_linear):
        reason = "experts have a fused kernel for gated silu alone"
        remedy = "set training.kernels.bias_activation_fusion: false"
        yield Finding("error", "model.activation_func", reason, remedy, Authority.EXPERTS)


def _bias(workload: "Workload", moe: "MixtureOfExperts") -> Iterator[Finding]:
    """`TransformerConfig.__post_init__`, `TEGroupedMLP.__init__`, `SharedExpertMLP.__init__`."""
    field, remedy = "model.add_bias_linear", "set it to false"
    if workload.parallelism.etp > 1:
        reason = "experts with bias have no expert tensor parallelism"
        yield Finding("error", field, reason, f"{remedy} or expert_tensor_parallel_size to 1", Authority.CONFIG)
    if workload.training.kernels.bias_dropout_fusion:
        reason = "experts add their biases themselves, without bias_dropout_fusion"
        yield Finding(
            "error", field, reason, f"{remedy} or training.kernels.bias_dropout_fusion to false", Authority.EXPERTS
        )
    if moe.moe_shared_expert_intermediate_size is not None:
        yield Finding(
            "error",
            field,
            "shared experts have no bias",
            f"{remedy} or leave shared experts out",
            Authority.SHARED_EXPERTS,
        )


def _overlap(moe: "MixtureOfExperts", kernels: "Kernels") -> Iterator[Finding]:
    """Shared experts beside the dispatch (`TransformerConfig.__post_init__`, `MoELayer.preprocess`)."""
    if moe.moe_shared_expert_intermediate_size is None or not kernels.moe_shared_expert_overlap:
        return
    field, remedy = "training.kernels.moe_shared_expert_overlap", "set it to false"
    if kernels.moe_token_dispatcher_type == "allgather":
        reason = "shared experts overlap with the alltoall and flex dispatchers alone"
        yield Finding("error", field, reason, f"{remedy} or choose another moe_token_dispatcher_type", Authority.CONFIG)
    if moe.moe_latent_size is not None:
        yield Finding(
            "error", field, "shared experts do not overlap with experts of a latent width", remedy, Authority.MOE
        )


_FIELDS = {
    "imbalance": ("allowance", "skewed"),
    "share": ("concentrated",),
    "shares": ("per_layer",),
    "rows_per_expert": ("measured",),
}
"""Fields of `Routing` and the kinds that take them."""


def _routing(workload: "Workload", moe: "MixtureOfExperts", routing: Routing) -> Iterator[Finding]:
    for field, kinds in _FIELDS.items():
        if getattr(routing, field) is not None and routing.kind not in kinds:
            remedy = f"set routing.kind: {' or '.join(kinds)}, or leave it out"
            yield Finding(
                "error", f"routing.{field}", f"{routing.kind} routing does not use it", remedy, Authority.LABKIT
            )
    if routing.kind == "concentrated":
        yield from _concentrated(workload, moe, routing)
    elif routing.kind == "skewed":
        yield from _skewed(workload, moe, routing)
    elif routing.kind == "per_layer":
        yield from _per_layer(workload, moe, routing)
    elif routing.kind == "measured":
        yield from _measured(workload, moe, routing)


def _concentrated(workload: "Workload", moe: "MixtureOfExperts", routing: Routing) -> Iterator[Finding]:
    if routing.share is None:
        yield Finding(
            "error",
            "routing.share",
            "concentrated routing needs it",
            "give the busiest rank's part of rows",
            Authority.LABKIT,
        )
        return
    ep, share = workload.parallelism.ep, busiest_share(workload, None)
    most = largest_share(moe, ep)
    if share > most:
        reason = f"{routing.share} is more than one rank can get when a token's choices are different experts"
        yield Finding("error", "routing.share", reason, f"use at most {float(most):g}", Authority.LABKIT)
    elif share < Fraction(1, ep):
        reason = f"{routing.share} is below the even share, so another rank is busier"
        yield Finding("error", "routing.share", reason, f"use at least {1 / ep:g}", Authority.LABKIT)


def _skewed(workload: "Workload", moe: "MixtureOfExperts", routing: Routing) -> Iterator[Finding]:
    field, ep = "routing.imbalance", workload.parallelism.ep
    most = float(largest_share(moe, ep) * ep)
    if routing.imbalance is None:
        yield Finding(
            "error",
            field,
            "skewed routing needs it",
            "give the busiest rank's rows over the even share",
            Authority.LABKIT,
        )
    elif routing.imbalance > most:
        reason = f"{routing.imbalance} is more than one rank can get when a token's choices are different experts"
        yield Finding("error", field, reason, f"use at most {most:g}", Authority.LABKIT)


def _per_layer(workload: "Workload", moe: "MixtureOfExperts", routing: Routing) -> Iterator[Finding]:
    field, shares, ep = "routing.shares", routing.shares, workload.parallelism.ep
    layers = sum(layer.mlp == "moe" for layer in workload.model.layers)
    most = largest_share(moe, ep)
    if not shares:
        yield Finding(
            "error",
            field,
            "per-layer routing needs it",
            "give the busiest rank's part of rows in each layer",
            Authority.LABKIT,
        )
    elif len(shares) != layers:
        yield Finding(
            "error", field, f"{len(shares)} shares do not fit {layers} MoE layers", f"give {layers}", Authority.LABKIT
        )
    elif Fraction(str(max(shares))) > most:
        reason = f"{max(shares)} is more than one rank can get when a token's choices are different experts"
        yield Finding("error", field, reason, f"use at most {float(most):g}", Authority.LABKIT)
    elif sum(Fraction(str(share)) for share in shares) < Fraction(layers, ep):
        reason = "over all layers they are below the even share, so another rank is busier"
        yield Finding("error", field, reason, "give the busiest rank's shares", Authority.LABKIT)


def _measured(workload: "Workload", moe: "MixtureOfExperts", routing: Routing) -> Iterator[Finding]:
    field, histograms = "routing.rows_per_expert", routing.rows_per_expert
    layers = sum(layer.mlp == "moe" for layer in workload.model.layers)
    if not histograms:
        yield Finding(
            "error",
            field,
            "measured routing needs it",
            "give the rows of each expert, one list a MoE layer",
            Authority.LABKIT,
        )
    elif len(histograms) not in (1, layers):
        reason = f"{len(histograms)} histograms do not fit {layers} MoE layers"
        yield Finding("error", field, reason, f"give one for all layers or {layers}", Authority.LABKIT)
    elif any(len(histogram) != moe.num_moe_experts for histogram in histograms):
        reason = f"a histogram does not name each of the {moe.num_moe_experts} experts"
        yield Finding("error", field, reason, f"give {moe.num_moe_experts} numbers in each", Authority.LABKIT)
    elif any(not any(histogram) for histogram in histograms):
        yield Finding(
            "error", field, "a histogram has no rows", "leave empty layers out of the measurement", Authority.LABKIT
        )
    elif any(max(histogram) * moe.moe_router_topk > sum(histogram) for histogram in histograms):
        reason = f"an expert has more than 1/{moe.moe_router_topk} of the rows, and a token never goes to it twice"
        yield Finding("error", field, reason, "count each routed row once, at the expert it goes to", Authority.LABKIT)
