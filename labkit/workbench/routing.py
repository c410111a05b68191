"""What the notebook `expert_routing` shows: how rows lie on experts and ranks, and what that does to a rank's memory.

Rows follow from a workload and a way of routing (`labkit.workload.routing`), bytes are estimated. Histograms come from
a file; without one there are examples, which are called so wherever they are shown.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from labkit.ledger import WITHOUT_ACTIVATIONS
from labkit.memory.estimate import estimate
from labkit.memory.layers.sizes import Sizes
from labkit.memory.outline import block, outline
from labkit.plan.price import EVERY_LAYER, Priced, Pricer, exactly
from labkit.workbench.histograms import EXAMPLE, Histograms, examples, experts_of, read_histograms
from labkit.workload import Recompute, Routing, Workload
from labkit.workload.gpu import GPUS, MIB, gib
from labkit.workload.routing import FINEST_SHARE, busiest_share, expert_rows, largest_share
from labkit.workload.stages import fullest_stages

SHARES: Final = pl.Schema(
    {"ep": pl.Int64, "plan": pl.String, "basis": pl.String, "mean": pl.Float64, "most": pl.Float64}
)
"""One row for each expert-parallel size and plan: the fullest rank's rows over the even share, on average over layers
and in the layer where they are most."""
ROWS: Final = pl.Schema(
    {
        "plan": pl.String,
        "basis": pl.String,
        "layer": pl.Int64,
        "over_even": pl.Float64,
        "sent": pl.Int64,
        "to_busiest": pl.Int64,
        "received": pl.Int64,
        "per_expert": pl.Float64,
    }
)
"""One row for each plan, of the layer where the priced rank gets most: rows of one micro-batch."""
LOADS: Final = pl.Schema(
    {
        "histogram": pl.String,
        "expert": pl.Int64,
        "rank": pl.Int64,
        "mean": pl.Float64,
        "least": pl.Float64,
        "most": pl.Float64,
    }
)
"""One row for each histogram and expert: its rows over the even share, and the range of that over layers."""
STRIP: Final = pl.Schema({"histogram": pl.String, "layer": pl.Int64, "rank": pl.Int64, "over_even": pl.Float64})
"""One row for each histogram, MoE layer and expert-parallel rank: its rows over the even share."""
RANKS: Final = pl.Schema(
    {
        "histogram": pl.String,
        "rank": pl.Int64,
        "mean": pl.Float64,
        "most": pl.Float64,
        "peak_bytes": pl.Int64,
        "busiest": pl.Boolean,
        "fullest": pl.Boolean,
    }
)
"""One row for each histogram and rank; busiest: most rows over all layers; fullest: highest peak."""
PEAKS: Final = pl.Schema(
    {
        "ep": pl.Int64,
        "plan": pl.String,
        "basis": pl.String,
        "over_even": pl.Float64,
        "peak_bytes": pl.Int64,
        "covered_bytes": pl.Int64,
        "phase": pl.String,
        "refused": pl.String,
    }
)
"""One row for each expert-parallel size and plan, and `fits NAME` for each GPU; covered: with the estimate's margin;
refused: why it cannot run."""
LAYERS: Final = pl.Schema(
    {"histogram": pl.String, "layer": pl.Int64, "over_even": pl.Float64, "saved_bytes": pl.Int64, "rank": pl.Int64}
)
"""One row for each histogram and MoE layer; saved: what the peak of forward and backward loses if this layer alone were
balanced, on the rank that holds most."""
OPTIONS: Final = pl.Schema(
    {
        "option": pl.String,
        "plan": pl.String,
        "change_bytes": pl.Int64,
        "dropped": pl.Float64,
        "refused": pl.String,
    }
)
"""One row for each option and plan at the workload's size; change: of the peak (fresh segments alone); dropped: part of
all rows that no expert takes, in the layer where the priced rank gets most."""

_WHERE = {"balanced": "with balanced rows", "allowance": "with the allowance", "worst": "at worst"}
_NOTHING = 5 * MIB
"""Less is no difference to two decimals of a GiB."""
_MOST_PRICED_RANKS = 64
_FACTORS = (1.0, 1.25, 1.5)


class Plan(NamedTuple):
    """A way that rows may lie."""

    name: str
    basis: str
    routing: Routing
    histogram: Histograms | None = None
    rank: int | None = None
    """Of a histogram: whose shares these are."""


class ExpertRouting:
    """A workload of experts under every way of routing."""

    def __init__(
        self, workload: Workload, histograms: Path | None, concentrated: float, seed: int, gpus: Sequence[str]
    ) -> None:
        """Of a workload, whose own routing is one plan among others.

        Args:
            workload: What is run.
            histograms: A file (`read_histograms`); None: those of the workload, or examples.
            concentrated: Of all rows, what the busiest rank gets where routing is concentrated.
            seed: Of the examples.
            gpus: Names in `labkit.workload.gpu.GPUS`.

        Raises:
            InputError: the model has no experts, or a histogram does not fit it.
        """
        self.moe, self.ep = experts_of(workload), workload.parallelism.ep
        self._stated, self._concentrated = workload.routing, concentrated
        self._gpus = [GPUS[name] for name in gpus]
        self.workload = workload.model_copy(update={"routing": None})
        self.layers = [index for index, kind in enumerate(workload.model.layers) if kind.mlp == "moe"]
        self.histograms = self._histograms(histograms, seed)
        for each in self.histograms:
            _with(self.workload, _measured(each.rows)).checked(each.name)
        self._prices: dict[tuple[int, tuple[Fraction, ...]], Priced] = {}
        self._plans: dict[int, list[Plan]] = {}

    @property
    def limits(self) -> pl.DataFrame:
        """label, bytes: the memories of the GPUs."""
        sizes = [gpu.total_memory_bytes for gpu in self._gpus]
        return pl.DataFrame({"label": [gpu.name for gpu in self._gpus], "bytes": sizes})

    @property
    def rows_from(self) -> str:
        """What the histograms are, in a few words."""
        return "; ".join(each.name for each in self.histograms)

    @property
    def source(self) -> list[str]:
        """Where the histograms are from."""
        if self.histograms[0].basis != EXAMPLE:
            return [f"Rows as they were counted ({each.name})." for each in self.histograms]
        return [
            "Nobody counted these rows: both histograms are examples. Zipf-like: an expert's load falls with the root "
            "of its place among all experts, once in an order that all layers share and once in one of the layer's "
            "own. Uniform: each row goes to any expert alike, so that only chance makes loads differ. Give a file of "
            "counted rows (parameter histograms) to see your own."
        ]

    @property
    def answer(self) -> list[str]:
        """What a reader should take away."""
        own = {row["plan"]: row for row in self.peaks.filter(pl.col("ep") == self.ep).iter_rows(named=True)}
        balanced, allowance, worst = (own[name] for name in ("balanced", "allowance", "worst"))
        said = [
            f"At EP {self.ep} the fullest rank of {self.workload.model.name} peaks at {_peak(balanced)} if rows are "
            f"balanced, at {_peak(allowance)} with the allowance ({allowance['over_even']:g} times the even share), at "
            f"{_peak(worst)} at worst."
        ]
        for each in self.histograms:
            more = own[each.name]["peak_bytes"] - balanced["peak_bytes"]
            compared = f"{gib(more)} more than" if more > _NOTHING else "no more than"
            most = float(self._shares(each, self.ep).max()) * self.ep
            said.append(
                f"{each.name}: {_peak(own[each.name])}, {compared} balanced; a rank gets up to {most:.2f} times the "
                "even share in a layer."
            )
        return [*said, *self._fitting()]

    def _fitting(self) -> Iterator[str]:
        """For each GPU the sizes that fit."""
        ran = self.peaks.filter(pl.col("refused").is_null())
        for gpu in self._gpus:
            fits = {plan: self._sizes(ran, plan, gpu.name) for plan in ("balanced", "allowance", "worst")}
            if len(set(fits.values())) == 1:
                yield f"{gpu.name}: what fits is {fits['balanced']}, however rows lie."
            else:
                said = ", ".join(f"{sizes} {_WHERE[plan]}" for plan, sizes in fits.items())
                yield f"{gpu.name}: what fits is {said}."

    def _sizes(self, ran: pl.DataFrame, plan: str, device: str) -> str:
        chosen = ran.filter((pl.col("plan") == plan) & pl.col(f"fits {device}"))
        return f"EP {', '.join(map(str, chosen['ep'].unique().sort()))}" if chosen.height else "no size"

    def _histograms(self, path: Path | None, seed: int) -> tuple[Histograms, ...]:
        if path is not None:
            return (Histograms(f"measured: {path.name}", read_histograms(path), "measured"),)
        if self._stated is not None and self._stated.rows_per_expert:
            return (Histograms("measured: as the workload states", self._stated.rows_per_expert, "measured"),)
        return examples(self.workload, seed)

    @cached_property
    def sizes(self) -> dict[int, Workload | str]:
        """Expert-parallel sizes that divide the experts and the world: the workload there, or why it cannot run."""
        layout, found = self.workload.parallelism, dict[int, Workload | str]()
        for ep in range(1, layout.world_size + 1):
            if self.moe.num_moe_experts % ep or layout.world_size % (ep * layout.etp * layout.pp):
                continue
            moved = layout.model_copy(update={"expert_model_parallel_size": ep})
            found[ep] = _runnable(self.workload.model_copy(update={"parallelism": moved}))
        return found

    def plans(self, ep: int) -> list[Plan]:
        """Every way of routing at a size."""
        if ep not in self._plans:
            self._plans[ep] = self._made_plans(ep)
        return self._plans[ep]

    def _made_plans(self, ep: int) -> list[Plan]:
        most = float(largest_share(self.moe, ep))
        share = min(max(self._concentrated, 1 / ep), most)
        found = [
            Plan("balanced", "assumed", Routing(kind="balanced")),
            Plan("allowance", "allowance", Routing(kind="allowance")),
            *(plan for each in self.histograms for plan in self._fullest(each, ep)),
            Plan(f"concentrated {self._concentrated:.0%}", "assumed", Routing(kind="concentrated", share=share)),
            Plan("worst", "assumed", Routing(kind="worst")),
        ]
        if self._stated is not None and ep == self.ep and not self._stated.rows_per_expert:
            found.insert(2, Plan(f"stated: {self._stated.kind}", "stated", self._stated))
        return found

    def _fullest(self, histogram: Histograms, ep: int) -> Iterator[Plan]:
        """A histogram's rank with the highest peak."""
        case = self.sizes.get(ep)
        if isinstance(case, Workload):
            rank = self._fullest_rank(case, histogram)
            yield Plan(histogram.name, histogram.basis, _of_rank(self._shares(histogram, ep), rank), histogram, rank)

    def _fullest_rank(self, case: Workload, histogram: Histograms) -> int:
        """Where what decides is no rows at all, the one with most of them."""
        shares, peaks = self._shares(histogram, case.parallelism.ep), self._rank_peaks(case, histogram)
        return max(peaks, key=lambda rank: (peaks[rank], float(shares[:, rank].sum())))

    def _shares(self, histogram: Histograms, ep: int) -> NDArray[np.float64]:
        """Each rank's part of the rows of each MoE layer: layers x ranks."""
        counts = np.array(histogram.rows, dtype=np.float64)
        by_rank = counts.reshape(len(counts), ep, -1).sum(axis=2)
        shares = by_rank / by_rank.sum(axis=1, keepdims=True)
        return np.repeat(shares, len(self.layers), axis=0) if len(shares) == 1 else shares

    def _rank_peaks(self, case: Workload, histogram: Histograms) -> dict[int, int]:
        """Peaks in blocks of fresh segments, of the ranks with most rows over all layers or in one."""
        shares = self._shares(histogram, case.parallelism.ep)
        first = sorted(range(shares.shape[1]), key=lambda rank: (-shares[:, rank].sum(), rank))
        most = sorted(range(shares.shape[1]), key=lambda rank: (-shares[:, rank].max(), rank))
        chosen = sorted({*first[: _MOST_PRICED_RANKS // 2], *most[: _MOST_PRICED_RANKS // 2]})
        return {rank: _outline(_with(case, _of_rank(shares, rank))) for rank in chosen}

    @cached_property
    def shares(self) -> pl.DataFrame:
        """What each plan means at each size; columns `SHARES`."""
        rows = []
        for ep, case in self.sizes.items():
            if not isinstance(case, Workload):
                continue
            for plan in self.plans(ep):
                shares = self._over_layers(case, plan)
                mean = float(sum(shares) / len(shares) * ep)
                rows.append((ep, plan.name, plan.basis, mean, float(max(shares) * ep)))
        return pl.DataFrame(rows, schema=SHARES, orient="row")

    def _over_layers(self, case: Workload, plan: Plan) -> list[Fraction]:
        routed = _with(case, plan.routing)
        return [busiest_share(routed, layer) for layer in self.layers]

    @cached_property
    def rows(self) -> pl.DataFrame:
        """Rows of one micro-batch at the workload's own size; columns `ROWS`."""
        case, found = _running(self.sizes[self.ep]), []
        tokens = Sizes.of(case).shard
        for plan in self.plans(self.ep):
            shares = self._over_layers(case, plan)
            at = max(range(len(shares)), key=shares.__getitem__)
            held = expert_rows(case, shares[at], tokens)
            per_expert = held.received * self.ep / self.moe.num_moe_experts
            layer = self.layers[at] if len(set(shares)) > 1 else None
            over = float(shares[at] * self.ep)
            found.append((plan.name, plan.basis, layer, over, held.sent, held.to_busiest, held.received, per_expert))
        return pl.DataFrame(found, schema=ROWS, orient="row")

    @cached_property
    def loads(self) -> pl.DataFrame:
        """Rows of each expert over the even share; columns `LOADS`."""
        rows, local = [], self.moe.num_moe_experts // self.ep
        for each in self.histograms:
            counts = np.array(each.rows, dtype=np.float64)
            loads = counts / counts.mean(axis=1, keepdims=True)
            for expert, (mean, least, most) in enumerate(
                zip(loads.mean(axis=0), loads.min(axis=0), loads.max(axis=0), strict=True)
            ):
                rows.append((each.name, expert, expert // local, float(mean), float(least), float(most)))
        return pl.DataFrame(rows, schema=LOADS, orient="row")

    @cached_property
    def strip(self) -> pl.DataFrame:
        """Rows of each rank in each layer over the even share; columns `STRIP`."""
        rows = [
            (each.name, layer, rank, float(share * self.ep))
            for each in self.histograms
            for layer, shares in zip(self.layers, self._shares(each, self.ep), strict=True)
            for rank, share in enumerate(shares)
        ]
        return pl.DataFrame(rows, schema=STRIP, orient="row")

    @cached_property
    def ranks(self) -> pl.DataFrame:
        """What each rank of the workload's size gets and holds; columns `RANKS`."""
        case, rows = _running(self.sizes[self.ep]), []
        for each in self.histograms:
            shares, peaks = self._shares(each, self.ep) * self.ep, self._rank_peaks(case, each)
            busiest, fullest = int(shares.sum(axis=0).argmax()), self._fullest_rank(case, each)
            for rank in range(self.ep):
                over = shares[:, rank]
                held = peaks.get(rank)
                rows.append(
                    (each.name, rank, float(over.mean()), float(over.max()), held, rank == busiest, rank == fullest)
                )
        return pl.DataFrame(rows, schema=RANKS, orient="row")

    @cached_property
    def peaks(self) -> pl.DataFrame:
        """The fullest rank's peak at every size under every plan; columns `PEAKS`."""
        rows: list[tuple[Any, ...]] = []
        for ep, case in self.sizes.items():
            if not isinstance(case, Workload):
                rows.append((ep, *[None] * 6, case, *[None] * len(self._gpus)))
                continue
            for plan in self.plans(ep):
                held, most = self._exactly(case, plan), max(self._over_layers(case, plan))
                fits = [held.covered_bytes <= gpu.total_memory_bytes for gpu in self._gpus]
                sizes = held.peak_bytes, held.covered_bytes, held.phase
                rows.append((ep, plan.name, plan.basis, float(most * ep), *sizes, None, *fits))
        fitting = {f"fits {gpu.name}": pl.Boolean for gpu in self._gpus}
        return pl.DataFrame(rows, schema={**PEAKS, **fitting}, orient="row")

    @cached_property
    def by_layer(self) -> pl.DataFrame:
        """What the skew of each layer costs; columns `LAYERS`."""
        case, rows = _running(self.sizes[self.ep]), []
        for plan in (plan for plan in self.plans(self.ep) if plan.histogram is not None):
            shares = plan.routing.shares or ()
            skewed = _of_passes(_with(case, plan.routing))
            for at, layer in enumerate(self.layers):
                mended = Routing(kind="per_layer", shares=(*shares[:at], 1 / self.ep, *shares[at + 1 :]))
                saved = skewed - _of_passes(_with(case, mended))
                rows.append((plan.name, layer, shares[at] * self.ep, saved, plan.rank))
        return pl.DataFrame(rows, schema=LAYERS, orient="row")

    @property
    def deciding(self) -> list[str]:
        """Which layers decide the peak of the passes, in words: one sentence for each histogram."""
        said = []
        peaks = {row["plan"]: row for row in self.peaks.filter(pl.col("ep") == self.ep).iter_rows(named=True)}
        for (name,), rows in self.by_layer.group_by("histogram", maintain_order=True):
            first = rows.sort("saved_bytes", descending=True, maintain_order=True).row(0, named=True)
            costly = rows.filter(pl.col("saved_bytes") > 0)
            total = int(costly["saved_bytes"].sum())
            if not total:
                said.append(f"{name}: no layer's skew raises what the passes of rank {first['rank']} hold.")
                continue
            phase = peaks[str(name)]["phase"]
            elsewhere = "" if phase in ("forward", "backward") else f" (the step's peak is above it, in {phase})"
            part = first["saved_bytes"] / total
            said.append(
                f"{name}: on rank {first['rank']} layer {first['layer']} decides most: balanced, it alone would take "
                f"{gib(first['saved_bytes'])} off the peak of forward and backward{elsewhere}, {part:.0%} of what all "
                f"{len(costly)} layers that raise it would by themselves."
            )
        return said

    @cached_property
    def options(self) -> pl.DataFrame:
        """What recompute, capacities and padding change at the workload's size; columns `OPTIONS`."""
        base, rows = _running(self.sizes[self.ep]), list[tuple[Any, ...]]()
        plans = self.plans(self.ep)
        before = {plan.name: _outline(_with(base, plan.routing)) for plan in plans}
        for name, case in self._options(base):
            changed = _runnable(case)
            for plan in plans:
                if isinstance(changed, str):
                    rows.append((name, plan.name, None, None, changed))
                    continue
                routed = _with(changed, plan.routing)
                change = _outline(routed) - before[plan.name]
                rows.append((name, plan.name, change, self._dropped(routed, plan), None))
        return pl.DataFrame(rows, schema=OPTIONS, orient="row")

    def _options(self, base: Workload) -> Iterator[tuple[str, Workload]]:
        """Name and workload of each."""
        labels = base.recompute.modules
        for more in ({"moe_act"}, {"moe"}):
            listed = {"recompute_granularity": "selective", "recompute_modules": sorted({*labels, *more})}
            chosen = Recompute.model_validate(listed)
            if base.recompute.recompute_granularity != "full" and not more <= labels:
                yield chosen.label, base.model_copy(update={"recompute": chosen})
        if base.recompute != EVERY_LAYER:
            yield "full recompute", base.model_copy(update={"recompute": EVERY_LAYER})
        for padded, factor in product((False, True), _FACTORS):
            limits = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": padded}
            name = f"capacity {factor:g}{', padded' if padded else ''}"
            yield name, _of_experts(base, limits)

    def _dropped(self, routed: Workload, plan: Plan) -> float:
        """By a histogram's own experts; otherwise by experts of a rank that are alike, as the estimate has them."""
        moe = experts_of(routed)
        factor = moe.moe_expert_capacity_factor
        if factor is None:
            return 0.0
        shares = self._over_layers(routed, plan)
        at = max(range(len(shares)), key=shares.__getitem__)
        if plan.histogram is not None:
            counts = np.array(plan.histogram.rows[at if len(plan.histogram.rows) > 1 else 0], dtype=np.float64)
            return float(np.maximum(counts / counts.sum() - factor / len(counts), 0).sum())
        unpadded = _of_experts(routed, {"moe_pad_expert_input_to_capacity": False})
        tokens = Sizes.of(routed).shard
        wanted = tokens * moe.moe_router_topk
        return float(max(wanted - expert_rows(unpadded, shares[at], tokens).sent, 0) / wanted)

    @property
    def certainty(self) -> list[str]:
        """How much of the peak rests on what about routing, and what no recompute choice lowers, in sentences."""
        case = _running(self.sizes[self.ep])
        allowance = next(plan for plan in self.plans(self.ep) if plan.name == "allowance")
        ledger = estimate(_with(case, allowance.routing)).ledger
        peak = ledger.peak()
        assumed = sum(row.block_bytes for row in ledger.at(peak.clock).rows if row.certainty == "allowance")
        floor = Pricer(_with(case, allowance.routing)).price(case.recompute).floor_bytes
        return [
            f"Of the peak with the allowance {gib(assumed)} are rows that rest on the allowance, which nobody measured "
            "(the ledger tags them so); the rest follows from sizes. Balanced, concentrated and worst are exact for "
            "what they assume.",
            f"About {gib(floor)} (within 1 or 2 %) are held whatever the router does and whatever is recomputed: the "
            "fullest of the phases without activations.",
        ]

    def _exactly(self, case: Workload, plan: Plan) -> Priced:
        """The estimate's own price; at small sizes many plans are one."""
        key = case.parallelism.ep, tuple(self._over_layers(case, plan))
        if key not in self._prices:
            self._prices[key] = exactly(Pricer(_with(case, plan.routing)).price(case.recompute)).priced
        return self._prices[key]


def _measured(rows: tuple[tuple[int, ...], ...]) -> Routing:
    return Routing(kind="measured", rows_per_expert=rows)


def _of_rank(shares: NDArray[np.float64], rank: int) -> Routing:
    """A rank's own shares; one without any rows has the least that can be stated."""
    own = [max(float(share), 1 / FINEST_SHARE) for share in shares[:, rank]]
    return Routing(kind="per_layer", shares=tuple(own))


def _with(case: Workload, routing: Routing) -> Workload:
    return case.model_copy(update={"routing": routing})


def _outline(case: Workload) -> int:
    """A peak in blocks of fresh segments, in milliseconds."""
    return Pricer(case).price(case.recompute).peak_bytes


def _of_passes(case: Workload) -> int:
    """The same of forward and backward alone."""
    phases = (phase for stage in fullest_stages(case) for phase in outline(case, stage, block).phases)
    return int(max(phase.bytes for phase in phases if phase.phase not in WITHOUT_ACTIVATIONS))


def _peak(row: dict[str, Any]) -> str:
    """A peak and its phase, in words."""
    return f"{gib(row['peak_bytes'])} ({row['phase']})"


def _runnable(case: Workload) -> Workload | str:
    """The workload, or the first rule that it breaks."""
    errors = [str(each) for each in case.findings if each.severity == "error"]
    return errors[0] if errors else case


def _running(case: Workload | str) -> Workload:
    assert isinstance(case, Workload), "a workload that was checked runs at its own size"
    return case


def _of_experts(case: Workload, changes: dict[str, Any]) -> Workload:
    moe = experts_of(case).model_copy(update=changes)
    return case.model_copy(update={"model": case.model.model_copy(update={"mixture_of_experts": moe})})
