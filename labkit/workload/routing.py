"""Where tokens go: how many rows of a micro-batch reach the experts of one rank.

Routing is data that no formula knows, so a workload states it, and the estimator and the trace both ask here. All
ranks are taken to send alike, and a rank's rows lie evenly over its experts; what a kind of routing decides is the
share of all rows that the busiest expert-parallel rank gets. That rank is the one priced and traced.
"""

import math
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field, NonNegativeInt

from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from labkit.workload.model import MixtureOfExperts
    from labkit.workload.workload import Workload

RoutingKind = Literal["balanced", "allowance", "skewed", "worst", "concentrated", "per_layer", "measured"]

_IMBALANCE = {1: 1.0, 2: 1.4, 4: 1.6, 8: 2.0}
"""The busiest rank's rows over the even share, by expert-parallel size: what labkit sets aside where routing was not
measured. Above measured shares (1.24, 1.41 and 1.62 over 3.5M tokens at 2, 4 and 8 ranks, 1.95 for one small batch)."""


_MOST_HISTOGRAMS, _MOST_EXPERTS = 2064, 4096
"""As many layers and experts as a model may have."""
_Share = Annotated[float, Field(gt=0.0, le=1.0)]
_Histogram = Annotated[Many[NonNegativeInt], Field(max_length=_MOST_EXPERTS)]


class Routing(Part):
    """How the router spreads tokens over expert-parallel ranks."""

    kind: RoutingKind = "balanced"
    """balanced: evenly; allowance: what is set aside where nobody knows, `imbalance` times the even share on the
    busiest rank; skewed: so many times, as a fact; worst: every token's choices on one rank, as far as it has experts;
    concentrated: the stated `share` there; per_layer: its `shares`, layer by layer; measured: by `rows_per_expert`."""
    imbalance: float | None = Field(default=None, ge=1.0)
    """For skewed, and for allowance; None: `default_imbalance` of the expert-parallel size."""
    share: float | None = Field(default=None, gt=0.0, le=1.0)
    """For concentrated: of all rows, what the experts of one rank get."""
    shares: Annotated[Many[_Share], Field(max_length=_MOST_HISTOGRAMS)] | None = None
    """For per_layer: `share` of each MoE layer, of the rank that is busiest over all of them."""
    rows_per_expert: Annotated[Many[_Histogram], Field(max_length=_MOST_HISTOGRAMS)] | None = None
    """For measured: rows of each expert, one histogram for all MoE layers or one for each of them."""

    @property
    def differs_by_layer(self) -> bool:
        """Whether layers may have different shares."""
        return self.shares is not None or len(self.rows_per_expert or ()) > 1


class ExpertRows(NamedTuple):
    """Rows of one MoE layer and micro-batch; integers, or arrays of them where tokens are."""

    sent: Any
    """Rows one rank sends to all experts."""
    to_busiest: Any
    """Those of them for the experts of the busiest rank."""
    received: Any
    """Rows the experts of the busiest rank get from all ranks."""
    capacity: Any
    """Most rows one rank may send to one expert; None: no limit."""


def expert_rows(workload: "Workload", share: Fraction, tokens: Any) -> ExpertRows:
    """Rows of a layer when each rank has `tokens` before dispatch and the busiest rank gets `share` of all rows.

    Under a capacity factor rows above an expert's capacity are dropped; with padding every expert gets its capacity.
    """
    moe, layout = _experts(workload), workload.parallelism
    senders, experts, local = layout.ep * layout.etp, moe.num_moe_experts, moe.num_moe_experts // layout.ep
    rows = tokens * moe.moe_router_topk
    to_busiest = -(-rows * share.numerator // share.denominator)
    if moe.moe_expert_capacity_factor is None:
        return ExpertRows(rows, to_busiest, to_busiest * senders, None)
    # `moe_utils.get_capacity`, in floating point as there.
    capacity = _ceiling(rows / experts * moe.moe_expert_capacity_factor)
    if moe.moe_pad_expert_input_to_capacity:
        taken = capacity
        if workload.training.kernels.moe_token_dispatcher_type == "flex":
            # `_HybridEPManager.setup_metadata` counts an expert once for each of its tensor ranks.
            taken = _ceiling(rows / (experts * layout.etp) * moe.moe_expert_capacity_factor)
        return ExpertRows(capacity * experts, taken * local, taken * local * senders, capacity)
    elsewhere = _smaller(rows - to_busiest, capacity * (experts - local))
    to_busiest = _smaller(to_busiest, capacity * local)
    return ExpertRows(to_busiest + elsewhere, to_busiest, to_busiest * senders, capacity)


FINEST_SHARE = 10**6
"""Largest denominator of a share: rows times its numerator stay integers of 64 bits, which sweeps count in."""


def busiest_share(workload: "Workload", layer: int | None) -> Fraction:
    """The part of all rows that the experts of the busiest rank get in a decoder layer, or (None) one behind it."""
    return _busiest_share(workload, layer).limit_denominator(FINEST_SHARE)


def _busiest_share(workload: "Workload", layer: int | None) -> Fraction:
    routing, moe, ep = workload.routing or Routing(), _experts(workload), workload.parallelism.ep
    most = largest_share(moe, ep)
    match routing.kind:
        case "balanced":
            return Fraction(1, ep)
        case "allowance" | "skewed":
            imbalance = default_imbalance(ep) if routing.imbalance is None else routing.imbalance
            return min(Fraction(str(imbalance)) / ep, most)
        case "worst":
            return most
        case "concentrated":
            return Fraction(str(routing.share))
        case "per_layer":
            return Fraction(str((routing.shares or ())[_place(workload, layer, len(routing.shares or ()))]))
        case "measured":
            return _measured_share(workload, routing.rows_per_expert or (), layer)


def largest_share(moe: "MixtureOfExperts", ep: int) -> Fraction:
    """What one rank can get at most: a token's choices are different experts."""
    return Fraction(min(moe.moe_router_topk, moe.num_moe_experts // ep), moe.moe_router_topk)


def default_imbalance(ep: int) -> float:
    """The allowance for an expert-parallel size: 1.4, 1.6 and 2.0 at 2, 4 and 8 ranks.

    Between those it is linear in the logarithm of the size; above 8 each doubling adds what the last one did (0.4).
    `busiest_share` keeps it below what top-k allows.
    """
    doublings = math.log2(ep)
    below = min(math.floor(doublings), 2)
    low, high = _IMBALANCE[2**below], _IMBALANCE[2 ** (below + 1)]
    return round(low + (high - low) * (doublings - below), 6)


def _measured_share(workload: "Workload", histograms: tuple[tuple[int, ...], ...], layer: int | None) -> Fraction:
    """The busiest rank is the one with most rows over all layers; each layer's share is that rank's there."""
    by_rank, busiest = _ranked(histograms, workload.parallelism.ep)
    rows = by_rank[_place(workload, layer, len(by_rank))]
    return Fraction(rows[busiest], sum(rows))


def _place(workload: "Workload", layer: int | None, stated: int) -> int:
    """Which of the plans, one for all MoE layers or one for each, a layer has; one behind them has the last one's."""
    layers = [index for index, kind in enumerate(workload.model.layers) if kind.mlp == "moe"]
    return layers.index(layer) if stated > 1 and layer in layers else -1


@lru_cache(maxsize=8)
def _ranked(histograms: tuple[tuple[int, ...], ...], ep: int) -> tuple[list[list[int]], int]:
    """Rows of each rank, layer by layer, and the rank that has most of all of them."""
    by_rank = [_by_rank(histogram, ep) for histogram in histograms]
    totals = [sum(Fraction(rows[rank], sum(rows)) for rows in by_rank) for rank in range(ep)]
    return by_rank, totals.index(max(totals))


def _by_rank(histogram: tuple[int, ...], ep: int) -> list[int]:
    local = len(histogram) // ep
    return [sum(histogram[rank * local : (rank + 1) * local]) for rank in range(ep)]


def _experts(workload: "Workload") -> "MixtureOfExperts":
    if workload.model.mixture_of_experts is None:
        raise ValueError("only a model with mixture_of_experts routes")
    return workload.model.mixture_of_experts


def _smaller(a: Any, b: Any) -> Any:
    """The smaller one, elementwise for arrays."""
    return a - (a - b) * (a > b)


def _ceiling(value: Any) -> Any:
    """The next integer from a float or an array of them."""
    return math.ceil(value) if isinstance(value, float) else (-(-value // 1)).astype("int64")
