"""What notebook `estimate` shows: a rank's peak, what holds it down to the tensor, and what recompute would change."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple, Self

import polars as pl

from labkit.errors import InputError
from labkit.ledger import Ledger, Row
from labkit.memory.estimate import Estimate, estimate
from labkit.memory.units import chunks
from labkit.memory.weights import elements, weights
from labkit.plan import Advice, Budget, advise
from labkit.plan.price import EVERY_LAYER
from labkit.study.frames import BREAKDOWN, timelines
from labkit.summary import spans
from labkit.workbench.parts import held_by_part, layer_counts
from labkit.workload import Recompute, Workload
from labkit.workload.gpu import GPUS, Gpu, gib
from labkit.workload.stages import differing_stages, stage_layers, warmup_passes

_MARGIN: Final = "safety margin"
_SHOWN_CHOICES: Final = 8
_SENTENCE_PARTS: Final = 3
_IN_WORDS: Final = {"allowance": "up to the router"}
"""Certainties whose name is also that of a kind of routing, as a sentence has them."""

_MEANINGS: Final = {
    "exact": "follows from the sizes, by the formula of Megatron's or Transformer Engine's code",
    "traced": "seen in a trace of that code",
    "measured": "raised to a peak that was measured",
    "allowance": "rests on how many rows the router sends to the busiest rank's experts",
    _MARGIN: "set aside above the peak: what was not measured, and libraries' own buffers",
}


class Anatomy:
    """What a rank of a workload holds, from its peak down to the tensor; every frame's bytes are integers."""

    def __init__(self, workload: Workload, stage: int | None = None, gpus: Sequence[str] = ()) -> None:
        """`stage`: whose first rank; None: of the stage that holds most. `gpus`: names in `labkit.workload.gpu.GPUS`.

        Raises:
            InputError: there is no such stage.
        """
        if stage is not None and stage >= workload.parallelism.pp:
            raise InputError(f"stage {stage}: the pipeline has stages 0 to {workload.parallelism.pp - 1}")
        self.workload = workload
        self._stage = stage
        self.estimate = estimate(workload, stage)
        self._gpus = gpus or (workload.training.gpu,)
        self._estimates = {workload.recompute: self.estimate}

    @property
    def title(self) -> str:
        """What is asked, the model in it."""
        return f"What one rank of {self.workload.model.name} holds"

    @cached_property
    def advice(self) -> Advice:
        """What to recompute within the memory of the workload's own GPU (`labkit plan`)."""
        return advise(self.workload)

    @cached_property
    def _advices(self) -> dict[str, Advice]:
        own = self.workload.training.gpu
        return {name: self.advice if name == own else advise(self.workload, Budget.of(name)) for name in self._gpus}

    @cached_property
    def held(self) -> Ledger:
        """The ledger's rows that are alive at the peak."""
        ledger = self.estimate.ledger
        return ledger.at(ledger.peak().clock)

    @property
    def covered_bytes(self) -> int:
        """The peak and its margin: what a run should not exceed."""
        return self.estimate.peak_allocated_bytes + self.estimate.summary.margin_bytes

    @property
    def limits(self) -> pl.DataFrame:
        """label, bytes: the memories of the GPUs."""
        gpus = [GPUS[name] for name in self._gpus]
        return pl.DataFrame({"label": [gpu.name for gpu in gpus], "bytes": [gpu.total_memory_bytes for gpu in gpus]})

    @cached_property
    def sentences(self) -> tuple[str, ...]:
        """The answer, then what it rests on."""
        return tuple(filter(None, (self._peak, self._holders, self._how_sure, self._reserved, *self._first)))

    @property
    def _peak(self) -> str:
        summary = self.estimate.summary
        fitting = " and ".join(self._fit(GPUS[name]) for name in self._gpus)
        return (
            f"{self.workload.model.name} at its fullest holds {gib(summary.peak_allocated_bytes)} (estimated: "
            f"{' '.join(summary.place.split())}; {summary.peak_phase} of iteration {summary.peak_iteration}); with a "
            f"margin of {gib(summary.margin_bytes)} it {fitting}."
        )

    def _fit(self, gpu: Gpu) -> str:
        spare = gpu.total_memory_bytes - self.covered_bytes
        return f"fits {gpu.name} with {gib(spare)} to spare" if spare >= 0 else f"lacks {gib(-spare)} on {gpu.name}"

    @property
    def _holders(self) -> str:
        peak, held = self.estimate.peak_allocated_bytes, Counter[str]()
        for part, nbytes in self.parts.select("part", "bytes").iter_rows():
            held[part] += nbytes
        said = ", ".join(
            f"{part} {gib(nbytes)} ({nbytes / peak:.0%})" for part, nbytes in held.most_common(_SENTENCE_PARTS)
        )
        summary = self.estimate.summary
        return (
            f"Most is held by {said}. In tensors {gib(summary.between_steps_bytes)} stay between steps (parameters, "
            f"gradients, optimizer, libraries), and forward keeps {gib(summary.retained_bytes)} for backward."
        )

    @property
    def _how_sure(self) -> str:
        peak = self.estimate.peak_allocated_bytes
        rows = self.certainty.filter(pl.col("certainty") != _MARGIN).select("certainty", "bytes").iter_rows()
        said = ", ".join(f"{nbytes / peak:.1%} {_IN_WORDS.get(certainty, certainty)}" for certainty, nbytes in rows)
        return f"By certainty the peak is {said}. {self._range}".rstrip()

    @property
    def _range(self) -> str:
        """Between which peaks the open fields leave it, and on which GPUs that decides whether it fits."""
        summary = self.estimate.ranged
        span, margin = summary.peak_range, summary.margin_bytes
        if span is None:
            return ""
        gpus = [GPUS[name] for name in self._gpus]
        fit = [[end + margin <= gpu.total_memory_bytes for end in (span.low_bytes, span.high_bytes)] for gpu in gpus]
        decided = " and ".join(gpu.name for gpu, (low, high) in zip(gpus, fit, strict=True) if low != high)
        return (
            f"It lies between {gib(span.low_bytes)} and {gib(span.high_bytes)} by what the workload does not state "
            f"({', '.join(span.causes)}){f', which decides whether it fits {decided}' if decided else ''}.{self._worst}"
        )

    @property
    def _worst(self) -> str:
        """What the range leaves out."""
        beyond = max(self.left_open.filter(pl.col("value") == "worst")["peak_allocated_bytes"].to_list(), default=None)
        if beyond is None:
            return ""
        return f" The worst routing, every row to one rank, is a bound and no part of that range: {gib(beyond)}."

    @property
    def _reserved(self) -> str:
        summary = self.estimate.summary
        reserved = summary.peak_reserved_bytes or 0
        return (
            f"The caching allocator would reserve {gib(reserved)} of segments for it. {summary.fragmentation} CUDA's "
            "context and NCCL's buffers come on top."
        ).replace("  ", " ")

    @property
    def _first(self) -> Iterator[str]:
        yield from self.advice.sentences[:2]
        yield from self.estimate.summary.warnings

    @cached_property
    def fits(self) -> pl.DataFrame:
        """A row for each GPU, columns `_FITS`; `first...`: of the choice to try first there, null where none fits."""
        summary = self.estimate.summary
        rows = []
        for name in self._gpus:
            gpu, first = GPUS[name], self._advices[name].first
            rows.append(
                {
                    "gpu": gpu.name,
                    "memory_bytes": gpu.total_memory_bytes,
                    "peak_allocated_bytes": summary.peak_allocated_bytes,
                    "margin_bytes": summary.margin_bytes,
                    "covered_bytes": self.covered_bytes,
                    "spare_bytes": gpu.total_memory_bytes - self.covered_bytes,
                    "peak_reserved_bytes": summary.peak_reserved_bytes,
                    "fits": self.covered_bytes <= gpu.total_memory_bytes,
                    "first": None if first is None else first.label,
                    "first_covered_bytes": None if first is None else first.covered_bytes,
                    "first_replay_seconds": None if first is None else first.replay_seconds,
                    "first_replay_share": None if first is None else first.replay_share,
                }
            )
        return pl.DataFrame(rows, schema=_FITS)

    @cached_property
    def certainty(self) -> pl.DataFrame:
        """certainty, bytes, share (of the peak), meaning; the margin's row last, above the peak."""
        held: Counter[str] = Counter()
        for row in self.held.rows:
            held[row.certainty] += row.block_bytes
        found = {name: held[name] for name in _MEANINGS if held[name]}
        found[_MARGIN] = self.estimate.summary.margin_bytes
        peak = self.estimate.peak_allocated_bytes
        return pl.DataFrame(
            {
                "certainty": list(found),
                "bytes": list(found.values()),
                "share": [nbytes / peak for nbytes in found.values()],
                "meaning": [_MEANINGS[name] for name in found],
            }
        )

    @cached_property
    def left_open(self) -> pl.DataFrame:
        """The peak with each value of what is not stated, columns `_LEFT_OPEN`; a field's first is what was taken."""
        base = self.estimate.peak_allocated_bytes
        rows = [
            (each.field, case.value, case.peak_allocated_bytes, case.peak_allocated_bytes - base, each.cause)
            for each in self.estimate.ranged.ranges
            for case in each.cases
        ]
        return pl.DataFrame(rows, schema=_LEFT_OPEN, orient="row")

    @cached_property
    def phases(self) -> pl.DataFrame:
        """iteration, phase, peak_allocated_bytes, peak_tensor_bytes of both steps; is_peak."""
        summary = self.estimate.summary
        found = pl.DataFrame([phase.model_dump() for phase in summary.phases])
        here = (pl.col("iteration") == summary.peak_iteration) & (pl.col("phase") == summary.peak_phase)
        return found.with_columns(is_peak=here)

    @cached_property
    def categories(self) -> pl.DataFrame:
        """category, bytes, share of the peak."""
        summary = self.estimate.summary
        shares = summary.breakdown
        return pl.DataFrame(
            {
                "category": [share.category for share in shares],
                "bytes": [share.bytes for share in shares],
                "share": [share.bytes / summary.peak_allocated_bytes for share in shares],
            }
        )

    @cached_property
    def parts(self) -> pl.DataFrame:
        """part (`labkit.workbench.parts.PARTS`), layers (how many have it; null outside layers), category, bytes."""
        counts = layer_counts(self.workload, self.estimate.stage)
        rows = [
            (held.part, counts[held.part] or None, held.category, held.bytes)
            for held in held_by_part(self.workload, self.estimate.stage, self.held)
        ]
        return pl.DataFrame(rows, schema=_PARTS, orient="row")

    @cached_property
    def tensors(self) -> pl.DataFrame:
        """Like tensors of all layers together, the largest first, columns `_TENSORS`; bytes sum to the peak's."""
        grouped: dict[_Alike, list[Row]] = {}
        for row in self.held.rows:
            grouped.setdefault(_Alike.of(row), []).append(row)
        peak = self.estimate.peak_allocated_bytes
        found = []
        for like, rows in grouped.items():
            nbytes = sum(row.block_bytes for row in rows)
            found.append(
                {
                    **like._asdict(),
                    "shape": " x ".join(map(str, like.shape)),
                    "layers": spans(sorted({row.layer for row in rows if row.layer is not None})),
                    "count": sum(row.count for row in rows),
                    "bytes": nbytes,
                    "share": nbytes / peak,
                }
            )
        return pl.DataFrame(found, schema=_TENSORS).sort("bytes", descending=True, maintain_order=True)

    @cached_property
    def stages(self) -> pl.DataFrame:
        """What a rank of each pipeline stage holds, like stages together, columns `_STAGES`."""
        rows = []
        for alike, held in self._stage_estimates:
            summary, layout = held.summary, self.workload.parallelism
            layers = sorted(chain.from_iterable(stage_layers(self.workload, held.stage)))
            counts = layer_counts(self.workload, held.stage)
            rows.append(
                (
                    spans(alike),
                    ", ".join(str(layout.first_rank(stage)) for stage in alike),
                    spans(layers),
                    ", ".join(f"{count} {part}" for part, count in counts.items()),
                    sum(elements(weights(chunk)) for chunk in chunks(self.workload, held.stage)),
                    min(warmup_passes(self.workload, held.stage) + 1, self.workload.num_microbatches * layout.vpp),
                    summary.peak_allocated_bytes,
                    summary.margin_bytes,
                    f"{summary.peak_phase} of iteration {summary.peak_iteration}",
                    summary.between_steps_bytes,
                    summary.retained_bytes,
                    held.stage == self.estimate.stage,
                )
            )
        return pl.DataFrame(rows, schema=_STAGES, orient="row")

    @cached_property
    def _stage_estimates(self) -> list[tuple[tuple[int, ...], Estimate]]:
        """Like stages with the estimate of one of them: the one that is shown, or else the first."""
        shown = self.estimate.stage
        alike = differing_stages(self.workload)
        return [(stages, self.estimate if shown in stages else Estimate(self.workload, stages[0])) for stages in alike]

    @property
    def stage_breakdown(self) -> pl.DataFrame:
        """candidate (`stage 0`), source, category, bytes."""
        found = ((f"stage {spans(alike)}", held) for alike, held in self._stage_estimates)
        return _breakdown(found)

    @property
    def part_breakdown(self) -> pl.DataFrame:
        """candidate (the part and how many layers have it: `MLP x 1`), source, category, bytes."""
        name = pl.format("{}{}", "part", pl.format(" x {}", "layers").fill_null(""))
        return self.parts.select(candidate=name, source=pl.lit("estimated"), category="category", bytes="bytes")

    @cached_property
    def choices(self) -> pl.DataFrame:
        """Every recompute choice that can run, the cheapest first, columns `_CHOICES`."""
        advice = self.advice
        first = advice.first.label if advice.first else None
        rows = [
            (
                each.label,
                each.label == advice.control.label,
                each.label == first,
                each.on_front,
                each.is_exact,
                each.peak_allocated_bytes,
                each.covered_bytes,
                each.saved_bytes,
                each.retained_bytes,
                f"{each.peak_phase} of iteration {each.peak_iteration}",
                each.replay_seconds,
                each.replay_share,
                each.replay_regions,
            )
            for each in advice.options
        ]
        return pl.DataFrame(rows, schema=_CHOICES, orient="row")

    @property
    def best_choices(self) -> pl.DataFrame:
        """Of them the workload's own, the first to try, every layer, and the front (`labkit.plan.ranking`)."""
        front = pl.col("on_front") & (pl.col("on_front").cum_sum() <= _SHOWN_CHOICES)
        every = pl.col("label") == EVERY_LAYER.label
        return self.choices.filter(pl.col("is_control") | pl.col("is_first") | front | every)

    @cached_property
    def labels(self) -> pl.DataFrame:
        """What each label changes alone against no recompute, columns `_LABELS`; `note`: why it is no choice."""
        priced = [
            (each.label, each.peak_saved_bytes, each.retained_saved_bytes, each.replay_seconds, each.replay_regions, "")
            for each in self.advice.alone
        ]
        idle = [(each.label, None, None, None, None, each.reason) for each in self.advice.idle]
        return pl.DataFrame([*priced, *idle], schema=_LABELS, orient="row")

    @cached_property
    def _shown(self) -> list[tuple[str, Estimate]]:
        """The workload as it is, what to try first on each GPU, what holds least, and every layer, each estimated."""
        leanest = min(self.advice.options, key=lambda each: (each.peak_allocated_bytes, each.replay_seconds))
        full = next((each for each in self.advice.options if each.recompute == EVERY_LAYER), None)
        found = [self.advice.first, *(each.first for each in self._advices.values()), leanest, full]
        choices = dict.fromkeys([self.workload.recompute, *(each.recompute for each in found if each is not None)])
        return [(each.label, self._estimated(each)) for each in choices]

    def _estimated(self, choice: Recompute) -> Estimate:
        """The fullest rank under another choice, or that of the stage that was asked for."""
        if choice not in self._estimates:
            changed = self.workload.model_copy(update={"recompute": choice})
            self._estimates[choice] = estimate(changed, self._stage)
        return self._estimates[choice]

    @property
    def choice_breakdown(self) -> pl.DataFrame:
        """candidate (a recompute label), source, category (with the safety margin), bytes: of `_shown`."""
        return _breakdown(self._shown)

    def timeline(self, moments: int = 300) -> tuple[pl.DataFrame, pl.DataFrame]:
        """The steady step under the same choices (`labkit.study.frames.timelines`)."""
        return timelines(((label, [held]) for label, held in self._shown), moments)

    @property
    def head(self) -> pl.DataFrame:
        """The first rows of the ledger at the peak, as the frame has them."""
        return self.held.frame.sort("bytes", descending=True, maintain_order=True).head(8)


class _Alike(NamedTuple):
    """What tensors of like layers and experts have in common."""

    module: str
    """With the numbers of layers and experts left out: `decoder.layers.*.mlp.experts`."""
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    lifetime: str
    certainty: str
    recompute: str | None

    @classmethod
    def of(cls, row: Row) -> Self:
        """That of a ledger's row."""
        module = re.sub(r"(\blayers\.)\d+|(?<=\.weight)\d+", lambda found: f"{found[1] or ''}*", row.module)
        return cls(module, row.tensor, row.shape, row.dtype, row.lifetime, row.certainty, row.recompute)


def _breakdown(held: Iterable[tuple[str, Estimate]]) -> pl.DataFrame:
    """What holds the peaks of estimates, and their margins: candidate, source, category, bytes."""
    rows = []
    for label, result in held:
        summary = result.summary
        rows += [(label, "estimated", share.category, share.bytes) for share in summary.breakdown]
        rows.append((label, "estimated", _MARGIN, summary.margin_bytes))
    return pl.DataFrame(rows, schema=BREAKDOWN, orient="row")


_FITS = {
    "gpu": pl.String,
    "memory_bytes": pl.Int64,
    "peak_allocated_bytes": pl.Int64,
    "margin_bytes": pl.Int64,
    "covered_bytes": pl.Int64,
    "spare_bytes": pl.Int64,
    "peak_reserved_bytes": pl.Int64,
    "fits": pl.Boolean,
    "first": pl.String,
    "first_covered_bytes": pl.Int64,
    "first_replay_seconds": pl.Float64,
    "first_replay_share": pl.Float64,
}
_LEFT_OPEN = {
    "field": pl.String,
    "value": pl.String,
    "peak_allocated_bytes": pl.Int64,
    "change_bytes": pl.Int64,
    "cause": pl.String,
}
_PARTS = {"part": pl.String, "layers": pl.Int64, "category": pl.String, "bytes": pl.Int64}
_TENSORS = {
    "module": pl.String,
    "tensor": pl.String,
    "shape": pl.String,
    "dtype": pl.String,
    "layers": pl.String,
    "count": pl.Int64,
    "bytes": pl.Int64,
    "share": pl.Float64,
    "lifetime": pl.String,
    "certainty": pl.String,
    "recompute": pl.String,
}
_STAGES = {
    "stages": pl.String,
    "ranks": pl.String,
    "layers": pl.String,
    "kinds": pl.String,
    "parameters": pl.Int64,
    "under_way": pl.Int64,
    "peak_allocated_bytes": pl.Int64,
    "margin_bytes": pl.Int64,
    "peak_phase": pl.String,
    "between_steps_bytes": pl.Int64,
    "retained_bytes": pl.Int64,
    "is_shown": pl.Boolean,
}
_CHOICES = {
    "label": pl.String,
    "is_control": pl.Boolean,
    "is_first": pl.Boolean,
    "on_front": pl.Boolean,
    "is_exact": pl.Boolean,
    "peak_allocated_bytes": pl.Int64,
    "covered_bytes": pl.Int64,
    "saved_bytes": pl.Int64,
    "retained_bytes": pl.Int64,
    "peak_phase": pl.String,
    "replay_seconds": pl.Float64,
    "replay_share": pl.Float64,
    "replay_regions": pl.Int64,
}
_LABELS = {
    "label": pl.String,
    "peak_saved_bytes": pl.Int64,
    "retained_saved_bytes": pl.Int64,
    "replay_seconds": pl.Float64,
    "replay_regions": pl.Int64,
    "note": pl.String,
}
