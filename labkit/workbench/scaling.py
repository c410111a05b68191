"""What notebook `scaling` shows: a workload's peak as one size after the other changes, and how long sequences may be.

Curves are outlines in allocator blocks, within 1 or 2 % of the estimate; the longest lengths are decided by the
estimate itself with its margin, and beside them stands whether the caching allocator gets along,
and up to where.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import cycle, islice, pairwise
from math import lcm
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl

from labkit.ledger import MATERIAL
from labkit.memory.estimate import BlockPeaks, Estimate
from labkit.memory.sweep import sweep
from labkit.plan import Budget
from labkit.plan.price import EVERY_LAYER, Priced, Pricer, exact_peaks, exactly_covered
from labkit.plan.space import padded, recompute_choices, resized
from labkit.workload import Recompute, Routing, Workload
from labkit.workload.gpu import gib

LENGTH: Final = "sequence length"
AXES: Final = (LENGTH, "layers", "TP", "CP", "EP", "micro-batch")
"""What is varied, one at a time."""
AS_IT_IS: Final = "as it is"
"""The setting in which no size is changed."""
_FACTORS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
_FAR = 8
"""Times its own length, where activations decide: there lists of labels are compared."""
_LEAST_STEP = 256
"""Tokens between lengths that are tried."""
_FINENESS = 64
"""The longest length is found to within such a part of itself."""
_SIXTEENTHS = 16
"""Parts of the longest length at which it is tried whether the allocator gets along, from the half on."""
_TIE = 0.01
"""Of a step: replay that is not worth telling apart."""


class Choice(NamedTuple):
    """A recompute choice that is followed."""

    name: str
    """Its label, and what it is here."""
    recompute: Recompute


class Setting(NamedTuple):
    """The workload with one size changed."""

    axis: str
    value: int
    label: str
    workload: Workload
    is_base: bool

    @property
    def refusal(self) -> str | None:
        """The first rule it breaks; None where it can run."""
        return next((str(each) for each in self.workload.findings if each.severity == "error"), None)


class Longest(NamedTuple):
    """The longest sequences that fit."""

    tokens: int | None
    """None: not even the shortest that is tried fits."""
    too_long: int | None
    """The next length, which does not fit; None where the search ended before."""
    runs: bool | None
    """The caching allocator gets along there, if need be by giving cached blocks back; fragments may stop it."""


class Scaling:
    """A workload, its sizes changed one at a time; every frame's bytes are integers."""

    def __init__(self, workload: Workload, gpus: Sequence[str], longest: int = 2**20) -> None:
        """`gpus`: names in `labkit.workload.gpu.GPUS`; `longest`: tokens beyond which nothing is looked for."""
        self.workload = workload
        self._budgets = [Budget.of(name) for name in gpus]
        self._longest = longest

    @property
    def title(self) -> str:
        """What is asked, the model in it."""
        return f"How {self.workload.model.name} scales"

    @property
    def limits(self) -> pl.DataFrame:
        """label, bytes: the memories of the GPUs."""
        return pl.DataFrame(self._budgets, schema={"label": pl.String, "bytes": pl.Int64}, orient="row")

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """None, the workload's own, the list that saves most for its replay, the one that holds least, every layer."""
        own = self.workload.recompute
        bare = own.recompute_granularity != "full" and not own.modules
        found = {own if bare else Recompute(): "none"}
        if not bare:
            found[own] = own.label
        found |= {each: each.label for each in self._lists}
        found[EVERY_LAYER] = EVERY_LAYER.label
        return tuple(
            Choice(f"{name} (as it is)" if recompute == own else name, recompute)
            for recompute, name in found.items()
            if self._with(recompute).can_run
        )

    @cached_property
    def _lists(self) -> tuple[Recompute, ...]:
        """Of lists of labels the one that saves most for its replay, and the one that holds least, at a long length."""
        far = with_length(self.workload, min(_FAR * own_length(self.workload), self._longest))
        pricer = Pricer(far if far.can_run else self.workload)
        lists = [each for each in recompute_choices(pricer.workload) if each.modules]
        priced = list(pricer.each(lists))
        if not priced:
            return ()
        nothing = pricer.price(Recompute())
        tie = _TIE * pricer.step_seconds
        worth = max(priced, key=lambda each: (nothing.peak_bytes - each.peak_bytes) / (each.replay.seconds + tie))
        least = min(each.peak_bytes for each in priced)
        lean = [each for each in priced if each.peak_bytes <= least + MATERIAL * nothing.peak_bytes]
        leanest = min(lean, key=lambda each: each.replay.seconds)
        return tuple(each.workload.recompute for each in (worth, leanest))

    def _with(self, recompute: Recompute) -> Workload:
        return self.workload.model_copy(update={"recompute": recompute})

    @cached_property
    def settings(self) -> list[Setting]:
        """Every value of every axis, those that no rule allows among them."""
        return [
            Setting(axis, value, f"{value:,} tokens" if axis == LENGTH else f"{axis} {value}", case, value == base)
            for axis, (base, values, changed) in _axes(self.workload, self._longest).items()
            for value in values
            for case in [changed(self.workload, value)]
        ]

    @cached_property
    def curves(self) -> pl.DataFrame:
        """The peak at every setting under every choice, columns `CURVES`."""
        rows = []
        for setting in self.settings:
            pricer = Pricer(setting.workload) if setting.refusal is None else None
            for choice in self.choices:
                here = setting._replace(workload=setting.workload.model_copy(update={"recompute": choice.recompute}))
                refusal = setting.refusal or here.refusal
                priced = None if refusal or pricer is None else pricer.price(choice.recompute)
                rows.append((*setting[:3], setting.is_base, choice.name, refusal, *_figures(priced, pricer)))
        return pl.DataFrame(rows, schema=CURVES, orient="row")

    @property
    def refused(self) -> pl.DataFrame:
        """setting, choices (those that are refused there), reason."""
        found = self.curves.filter(pl.col("refusal").is_not_null())
        count = len(self.choices)
        said = pl.when(pl.len() == count).then(pl.lit("every choice")).otherwise(pl.col("choice").str.join("; "))
        return (
            found.group_by("label", "refusal", maintain_order=True)
            .agg(said.alias("choices"))
            .select(setting="label", choices="choices", reason="refusal")
        )

    @cached_property
    def layouts(self) -> list[Setting]:
        """The workload as it is, and each size but the length and the layers doubled and halved, where that can run."""
        near = [
            each
            for each in self.settings
            if each.axis not in AXES[:2] and not each.is_base and each.refusal is None and self._is_near(each)
        ]
        found = [Setting("", 0, AS_IT_IS, self.workload, True), *near]
        if self.workload.routing is None and any(kind.mlp == "moe" for kind in self.workload.model.kinds):
            allowed = self.workload.model_copy(update={"routing": Routing(kind="allowance")})
            found.append(Setting("routing", 0, "routing allowance", allowed, False))
        return found

    def _is_near(self, setting: Setting) -> bool:
        base = next(each.value for each in self.settings if each.axis == setting.axis and each.is_base)
        larger = () if setting.axis == "micro-batch" else (2 * base,)
        return setting.value in (base // 2, *larger)

    @cached_property
    def frontier(self) -> pl.DataFrame:
        """The longest sequences that fit each GPU, per layout and choice, columns `FRONTIER`."""
        rows = []
        for setting in self.layouts:
            for choice in self.choices:
                case = setting.workload.model_copy(update={"recompute": choice.recompute})
                if not case.can_run:
                    continue
                price, share = self._priced_at_base(case)
                guide = Guide(case, self._longest)
                for budget in self._budgets:
                    found = longest(guide, budget.bytes)
                    # Of the layout that is asked for alone: a second and a half for each.
                    sound = up_to(guide, budget.bytes, found) if setting.label == AS_IT_IS else None
                    rows.append((setting.label, choice.name, budget.name, *found, sound, price.replay.seconds, share))
        frame = pl.DataFrame(rows, schema=FRONTIER, orient="row")
        bare = frame.filter(pl.col("choice") == self.choices[0].name).select("setting", "gpu", bare="tokens")
        joined = frame.join(bare, on=["setting", "gpu"], how="left", maintain_order="left")
        return joined.with_columns(over_none=pl.col("tokens") / pl.col("bare")).drop("bare")

    @staticmethod
    def _priced_at_base(case: Workload) -> tuple[Priced, float]:
        """A workload's price, and what its replay is of a step."""
        pricer = Pricer(case)
        price = pricer.price(case.recompute)
        return price, price.replay.seconds / pricer.step_seconds

    @cached_property
    def _ends(self) -> list[tuple[Choice, str, int]]:
        """Of each choice the GPU and the length at which it is full, on the smallest GPU that it fits at all."""
        found = []
        for choice in self.choices:
            here = self.frontier.filter(
                pl.col("setting") == AS_IT_IS, pl.col("choice") == choice.name, pl.col("tokens").is_not_null()
            )
            if here.height:
                found.append((choice, here["gpu"][0], int(here["tokens"][0])))
        return found

    @cached_property
    def growth(self) -> pl.DataFrame:
        """What holds the peak at each choice's longest length, and what each more token adds, columns `GROWTH`.

        The slope is that over the second half of the way there.
        """
        rows = []
        for choice, gpu, tokens in self._ends:
            half = _on_grid(self.workload, tokens // 2)
            full, less = (self._holdings(choice, length) for length in (tokens, half))
            for category in dict.fromkeys([*full, *less]):
                grown = (full[category] - less[category]) / max(tokens - half, 1)
                rows.append((choice.name, gpu, tokens, category, full[category], grown))
        return pl.DataFrame(rows, schema=GROWTH, orient="row")

    def _holdings(self, choice: Choice, tokens: int) -> Counter[str]:
        """Bytes by category at the peak of the fullest stage, with the margin."""
        case = with_length(self._with(choice.recompute), tokens)
        summary = Estimate(case, next(iter(exact_peaks(case)))).summary
        return Counter({share.category: share.bytes for share in summary.breakdown}) + Counter(
            {"safety margin": summary.margin_bytes}
        )

    @property
    def holdings(self) -> pl.DataFrame:
        """The same as bars: candidate (a choice at its longest length), source, category, bytes."""
        return self.growth.select(candidate="choice", source=pl.lit("estimated"), category="category", bytes="bytes")

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """What limits the length, what moves it most, and what the figures leave out."""
        said = (
            self._answer,
            *self._moves,
            self._fragments,
            self._sound,
            self._layouts_said,
            *self._slopes,
            self._allowance,
        )
        return tuple(filter(None, said))

    def _found(self, setting: str, choice: str) -> list[dict[str, Any]]:
        here = self.frontier.filter(pl.col("setting") == setting, pl.col("choice") == choice)
        return here.to_dicts()

    @property
    def _own(self) -> Choice:
        return next(each for each in self.choices if each.recompute == self.workload.recompute)

    @property
    def _answer(self) -> str:
        said = " and ".join(_reach(row) for row in self._found(AS_IT_IS, self._own.name))
        return f"As it is ({self._own.recompute.said}), {self.workload.model.name} {said}."

    @property
    def _moves(self) -> Iterator[str]:
        for choice in self.choices:
            if choice != self._own:
                rows = self._found(AS_IT_IS, choice.name)
                said = " and ".join(_reach(row) for row in rows)
                replay = rows[0]["replay_share"]
                length = self.workload.batch.seq_length
                cost = f", for {replay:.1%} of a step run again at {length:,}" if replay else ", with nothing run again"
                yield f"Under {choice.recompute.label} it {said}{cost}."

    @property
    def _layouts_said(self) -> str:
        gpu = self._budgets[0].name
        here = self.frontier.filter(pl.col("choice") == self._own.name, pl.col("gpu") == gpu)
        others = here.filter(~pl.col("setting").is_in([AS_IT_IS, "routing allowance"]), pl.col("tokens") > 0)
        if others.is_empty():
            return ""
        best = others.sort("tokens", descending=True, maintain_order=True).row(0, named=True)
        return (
            f"Of single changes of the layout {best['setting']} reaches furthest on {gpu}: {best['tokens']:,} tokens."
        )

    @property
    def _slopes(self) -> Iterator[str]:
        for (choice, *_), rows in self.growth.group_by("choice", maintain_order=True):
            if choice in (self._own.name, self.choices[-1].name):
                total = round(float(rows["bytes_per_token"].sum()) * 1024)
                largest = rows.sort("bytes_per_token", descending=True).head(2).iter_rows(named=True)
                parts = ", ".join(f"{row['category']} {gib(round(row['bytes_per_token'] * 1024))}" for row in largest)
                yield f"Under {choice} every 1,024 tokens more take {gib(total)} near the end ({parts})."

    @property
    def _allowance(self) -> str:
        rows = self._found("routing allowance", self._own.name)
        if not rows:
            return ""
        said = " and ".join(_reach(row) for row in rows)
        return f"Where the router sends the busiest rank the share that labkit sets aside by default, it {said}."

    @property
    def _fragments(self) -> str:
        found = self.frontier.filter(pl.col("tokens").is_not_null())
        stopped = found.filter(~pl.col("runs")).height
        if not stopped:
            return ""
        return (
            "These are lengths whose blocks fit with their margin, for which expandable segments have room. As it is "
            "set the caching allocator, which holds whole segments, runs out of memory at "
            f"{stopped} of the {found.height} lengths found, and may at shorter ones: its fragments follow no rule."
        )

    @property
    def _sound(self) -> str:
        """Up to which lengths the allocator gets along too, where that is less."""
        said = []
        for choice in self.choices:
            rows = [row for row in self._found(AS_IT_IS, choice.name) if row["tokens"]]
            if any(row["sound"] != row["tokens"] for row in rows):
                reach = " and ".join(
                    f"at none on {row['gpu']}"
                    if row["sound"] is None
                    else f"up to {row['sound']:,} tokens on {row['gpu']}"
                    for row in rows
                )
                said.append(f"under {choice.name} {reach}")
        if not said:
            return ""
        return f"Of their sixteenths, tried from the half on, it gets along {'; '.join(said)}."


def _reach(row: Mapping[str, Any]) -> str:
    """What a row of the frontier says."""
    if row["tokens"] is None:
        return f"does not fit {row['gpu']} at any length"
    more = " or more" if row["too_long"] is None else ""
    return f"fits {row['gpu']} up to {row['tokens']:,} tokens{more}"


class Guide:
    """Where to look for the longest length of a workload: its outlines at many lengths, corrected by what was exact."""

    def __init__(self, case: Workload, most: int) -> None:
        """`most`: tokens beyond which nothing is looked for."""
        self.case = case
        self.unit = step(case)
        self.most = most // self.unit
        counts = sorted({round(2 ** (power / 2)) for power in range(2 * max(self.most, 1).bit_length())} | {self.most})
        cases = [with_length(case, count * self.unit) for count in counts if 0 < count <= self.most]
        cases = [each for each in cases if each.can_run]
        self._lengths = [own_length(each) / self.unit for each in cases]
        self._bytes = sweep(cases)["peak_allocated_bytes"].to_list() if cases else []
        self._ratio = 1.0

    def guess(self, budget_bytes: int) -> int:
        """The last length, in units, that seems to fit, by a line between outlines."""
        found = 0.0
        for (length, nbytes), (after, more) in pairwise([(0.0, 0), *zip(self._lengths, self._bytes, strict=True)]):
            if more * self._ratio > budget_bytes:
                room = budget_bytes / self._ratio - nbytes
                return int(max(found, length + (after - length) * room / (more - nbytes)))
            found = after
        return int(found)

    def learn(self, length: int, covered_bytes: int) -> None:
        """What is needed at a length, by the estimate with its margin."""
        self._ratio = covered_bytes / float(np.interp(length, self._lengths, self._bytes))


def longest(guide: Guide, budget_bytes: int) -> Longest:
    """The longest sequences with which a workload's exact estimate fits with its margin.

    Lengths are tried on a grid (`step`), first where outlines point to, until one that fits and one that does not are
    within a 64th of each other. Peaks rise with the length; fragments do not, so whether the allocator gets along is
    told apart.

    Args:
        guide: of the workload, whose own length does not matter.
        budget_bytes: what a rank may allocate.
    """
    unit, fits, fails = guide.unit, 0, guide.most + 1
    last: dict[int, BlockPeaks] = {}
    while fails - fits > max(1, fits // _FINENESS):
        # Where the guide points to what is known already, the next length that matters.
        count = min(max(guide.guess(budget_bytes), fits + max(1, fits // _FINENESS)), fails - 1)
        case = with_length(guide.case, count * unit)
        if case.can_run:
            peaks = exact_peaks(case)
            covered = exactly_covered(case, peaks)
            guide.learn(count, covered)
            if covered <= budget_bytes:
                fits, last = count, peaks
                continue
        fails = count
    runs = all(each.runs_within(budget_bytes) for each in last.values()) if last else None
    return Longest(fits * unit or None, fails * unit if fails <= guide.most else None, runs)


def up_to(guide: Guide, budget_bytes: int, found: Longest) -> int | None:
    """The longest tried length up to which the allocator, as it is set, gets along too; None: with none that was tried.

    Tried are sixteenths of the longest length whose blocks fit, from its half upwards until one fails, or downwards
    from there until one does not: fragments follow no rule, so nothing is said of lengths between them.
    """
    if found.tokens is None:
        return None
    parts = [found.tokens * part // _SIXTEENTHS // guide.unit * guide.unit for part in range(1, _SIXTEENTHS)]
    lengths = sorted({each for each in parts if each})
    half = len(lengths) // 2
    best = None
    for tokens in lengths[half:]:
        if not _gets_along(guide.case, tokens, budget_bytes):
            break
        best = tokens
    else:
        return found.tokens if found.runs else best
    shorter = (each for each in reversed(lengths[:half]) if _gets_along(guide.case, each, budget_bytes))
    return next(shorter, None) if best is None else best


def _gets_along(case: Workload, tokens: int, budget_bytes: int) -> bool:
    here = with_length(case, tokens)
    return here.can_run and all(each.runs_within(budget_bytes) for each in exact_peaks(here).values())


def step(workload: Workload) -> int:
    """Tokens between the lengths that are tried: whole parts for every rank, 256 or more."""
    layout = workload.parallelism
    unit = lcm(2 * layout.cp if layout.cp > 1 else 1, layout.tp)
    return unit * -(-_LEAST_STEP // unit)


def _on_grid(workload: Workload, tokens: int) -> int:
    """The next lower length that is tried, or the first."""
    return max(tokens // step(workload), 1) * step(workload)


def own_length(workload: Workload) -> int:
    """Tokens of its sequences; where they are packed, of the longest."""
    packed = workload.batch.packed
    return workload.batch.seq_length if packed is None else max(packed.lengths)


def with_length(workload: Workload, tokens: int) -> Workload:
    """The workload with sequences of so many tokens; packed ones all longer or shorter by the same factor."""
    if workload.batch.packed is not None:
        return resized(workload, tokens, own_length(workload)) or workload
    return workload.model_copy(update={"batch": workload.batch.model_copy(update={"seq_length": tokens})})


def with_layers(workload: Workload, count: int) -> Workload:
    """The workload with the first so many layers; beyond its own, those of its second half come again and again."""
    model = workload.model
    update: dict[str, Any] = {"num_layers": count}
    if model.hybrid_layer_pattern is not None:
        decoder, mark, predicted = model.hybrid_layer_pattern.partition("/")
        update["hybrid_layer_pattern"] = "".join(_continued(decoder, count)) + mark + predicted
    moe, net = model.mixture_of_experts, model.gated_delta_net
    if moe is not None and not isinstance(moe.moe_layer_freq, int):
        frequency = tuple(_continued(moe.moe_layer_freq, count))
        update["mixture_of_experts"] = moe.model_copy(update={"moe_layer_freq": frequency})
    if net is not None and net.linear_attention_freq is not None and not isinstance(net.linear_attention_freq, int):
        frequency = tuple(_continued(net.linear_attention_freq, count))
        update["gated_delta_net"] = net.model_copy(update={"linear_attention_freq": frequency})
    return workload.model_copy(update={"model": model.model_copy(update=update)})


def _continued[T](layers: Sequence[T], count: int) -> Iterator[T]:
    yield from layers[:count]
    yield from islice(cycle(layers[len(layers) // 2 :]), max(count - len(layers), 0))


def with_layout(workload: Workload, field: str, size: int) -> Workload:
    """The workload on as many GPUs with another parallel size; each rank has as many micro-batches as before."""
    layout = workload.parallelism
    changed = layout.model_copy(update={field: size})
    if changed.tp != layout.tp:
        # As plans do: where ranks divide a layer, they divide the sequence too.
        parallel = changed.tp > 1 and (
            layout.sequence_parallel or layout.tp == 1 or workload.model.mixture_of_experts is not None
        )
        changed = changed.model_copy(update={"sequence_parallel": parallel})
    batch = workload.batch
    followed = workload.num_microbatches * batch.micro_batch_size * max(changed.dp, 1)
    batch = padded(batch.model_copy(update={"global_batch_size": followed}), changed)
    return workload.model_copy(update={"parallelism": changed, "batch": batch})


def with_micro_batch(workload: Workload, size: int) -> Workload:
    """The workload with another micro-batch, as many of them on each rank as before."""
    followed = workload.num_microbatches * size * workload.parallelism.dp
    update = {"micro_batch_size": size, "global_batch_size": followed}
    return workload.model_copy(update={"batch": workload.batch.model_copy(update=update)})


type _Axis = tuple[int, list[int], Callable[[Workload, int], Workload]]


def _axes(workload: Workload, most: int) -> dict[str, _Axis]:
    """The workload's own value, the values tried, and how one is set, for each of `AXES`."""
    layout, model = workload.parallelism, workload.model
    length, layers = own_length(workload), model.num_layers
    lengths = {_on_grid(workload, int(length * factor)) for factor in _FACTORS} | {length}
    counts = {max(1, layers // 4), max(1, layers // 2), layers, layers * 2}
    experts = 1 if model.mixture_of_experts is None else model.mixture_of_experts.num_moe_experts
    sizes = {"TP": layout.tp, "CP": layout.cp, "EP": layout.ep}
    widest = {"TP": layout.world_size, "CP": layout.world_size, "EP": min(layout.world_size, experts)}
    axes: dict[str, _Axis] = {
        LENGTH: (length, sorted(each for each in lengths if each <= max(most, length)), with_length),
        "layers": (layers, sorted(counts), with_layers),
    }
    for axis, field in _FIELDS.items():
        axes[axis] = sizes[axis], _powers(sizes[axis], widest[axis]), _layout_change(field)
    own = workload.batch.micro_batch_size
    axes["micro-batch"] = own, sorted({max(1, own // 2), own, 2 * own, 4 * own}), with_micro_batch
    return axes


_FIELDS: Final = {
    "TP": "tensor_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}
_MOST_RANKS = 64


def _layout_change(field: str) -> Callable[[Workload, int], Workload]:
    return lambda workload, size: with_layout(workload, field, size)


def _powers(own: int, most: int) -> list[int]:
    """Its own size, and powers of two around it."""
    return sorted({own} | {2**power for power in range(11) if 2**power <= min(most, max(_MOST_RANKS, own))})


def _figures(priced: Priced | None, pricer: Pricer | None) -> tuple[Any, ...]:
    """The last columns of `CURVES`."""
    if priced is None or pricer is None:
        return (None,) * 7
    share = priced.replay.seconds / pricer.step_seconds
    phase = f"{priced.phase} of iteration {priced.iteration}"
    figures = priced.peak_bytes, priced.covered_bytes, priced.retained_bytes
    return (*figures, phase, priced.stage, priced.replay.seconds, share)


CURVES = {
    "axis": pl.String,
    "value": pl.Int64,
    "label": pl.String,
    "is_base": pl.Boolean,
    "choice": pl.String,
    "refusal": pl.String,
    "peak_allocated_bytes": pl.Int64,
    "covered_bytes": pl.Int64,
    "retained_bytes": pl.Int64,
    "peak_phase": pl.String,
    "stage": pl.Int64,
    "replay_seconds": pl.Float64,
    "replay_share": pl.Float64,
}
"""`covered_bytes`: the peak with its margin. `refusal`: why it cannot run; its figures are null then. `replay_share`:
of the least that a step takes there."""
FRONTIER = {
    "setting": pl.String,
    "choice": pl.String,
    "gpu": pl.String,
    "tokens": pl.Int64,
    "too_long": pl.Int64,
    "runs": pl.Boolean,
    "sound": pl.Int64,
    "replay_seconds": pl.Float64,
    "replay_share": pl.Float64,
}
"""`tokens`, `too_long`, `runs`: see `Longest`. `sound`: see `up_to`; null in layouts other than the
workload's own, in which it is not looked for. Replay is that at the workload's own length. A last column `over_none`
is the length over that without recompute in the same setting on the same GPU."""
GROWTH = {
    "choice": pl.String,
    "gpu": pl.String,
    "tokens": pl.Int64,
    "category": pl.String,
    "bytes": pl.Int64,
    "bytes_per_token": pl.Float64,
}
