"""What a template's passes hold for whatever they are given: prices of many micro-batches at once.

A price is the estimator's (`labkit.memory.faces` for the `lora` runtime, `labkit.memory.tables` for Megatron's own):
never below what `labkit.estimate` says of the micro-batch as a plain workload. To the peak come the estimate's margin
and, apart from both, an allowance for what the caching allocator reserves beyond what it hands out.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.admission.requests import Request
from labkit.errors import InputError
from labkit.memory.estimate import BlockPeaks
from labkit.memory.extent import Extent, Levels, covering
from labkit.memory.faces import Faces
from labkit.memory.layers.gdn import CHUNK
from labkit.memory.margin import FIXED_BYTES, margin_over, relative_margin
from labkit.memory.outline import outline
from labkit.memory.profiles import Observation, Profiles
from labkit.memory.tables import Tables
from labkit.ranges import left_open
from labkit.workload import Recompute, Routing, Workload
from labkit.workload.base import Part
from labkit.workload.batch import Packed
from labkit.workload.gpu import GIB
from labkit.workload.lora_rules import MOST_CHUNKS, MOST_SEQUENCES
from labkit.workload.packing_rules import MOST_TURNED
from labkit.workload.routing import default_imbalance
from labkit.workload.stages import fullest_stages
from labkit.workload.unstated import with_fields

_SIMULATED = 5
"""Sizes at which the allocator is played through, each half of the one before."""


class Load(NamedTuple):
    """A micro-batch: the lengths of its sequences, and what of that its price depends on."""

    lengths: tuple[int, ...]
    shared_prefix: int
    """Tokens at the beginning of all of them that are computed once; 0: none are."""
    sums: "Sums"


class Sums(NamedTuple):
    """What is known of sequences, and adds up."""

    sequences: int
    tokens: int
    """Each padded as the runtime must."""
    padded: int
    """Each padded to whole chunks of a delta net."""
    padded_behind: int
    """The same of what follows the prefix."""
    longest: int

    def __add__(self, other: "Sums") -> "Sums":  # type: ignore[override]
        return Sums(
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.padded + other.padded,
            self.padded_behind + other.padded_behind,
            max(self.longest, other.longest),
        )

    def times(self, count: int) -> "Sums":
        """So many of them."""
        sequences, tokens, padded, behind, longest = self
        return Sums(sequences * count, tokens * count, padded * count, behind * count, longest)


type Way = tuple[Sums, int]
"""Sequences, and how many tokens of a prefix they share."""


class Unstated(Part):
    """A field that the template does not state and that decides the peak."""

    field: str
    taken: str
    cause: str
    """Why it cannot be known, in half a sentence."""
    instead: str | None = None
    """The value with which most would be held, if one holds more."""
    more_bytes: int = 0
    """By how much, at the largest load that fits."""

    @property
    def shown(self) -> str:
        """What is taken, and what more another value would hold."""
        more = (
            ""
            if self.instead is None
            else f"; {self.instead}: {self.more_bytes / GIB:.2f} GiB more at the largest load"
        )
        return f"{self.taken}{more}"


class Prices(NamedTuple):
    """Of loads, an array each."""

    peak: Levels
    """Allocated, at most."""
    covered: Levels
    """With the estimate's margin."""
    reserved: Levels
    """With what is set aside for segments, too."""
    needed: Levels
    """What has to be within the limit: that; infinite where a rule refuses it."""
    phase_of: Callable[[int], tuple[int, str]]


class Pass:
    """A template's pass of one kind, priced for a limit."""

    def __init__(
        self, template: Workload, kind: tuple[bool | None, Any], limit_bytes: int, profiles: Profiles | None
    ) -> None:
        """Raises InputError where the template has no such pass."""
        self.limit = limit_bytes
        self._given, self._kind = (template, limit_bytes, profiles), kind
        self._as_stated = _of_kind(template, kind)
        self.template = _allowing(self._as_stated)
        self._beside = _held_beside(template, self._as_stated)
        self._observations = [] if profiles is None else profiles.observations(self._as_stated)
        layout = self.template.parallelism
        self.packs_trees = self.template.training.runtime == "lora"
        self.packs = self.packs_trees or template.batch.packed is not None
        self._multiple = 2 * layout.cp if layout.cp > 1 and not self.packs_trees else 1

    def prepare(self) -> None:
        """Do now what else the first decision does."""
        self.reserve(np.zeros(1))
        self.least([self.extent(self.sums((1,), 0), 0)])

    def changed(self, template: Workload) -> "Pass":
        """The same of another template, for single prices."""
        return Pass(template, (None, None), self.limit, None)

    def basis(self, load: Load) -> str:
        """Whether the load's price rests on measured peaks."""
        observed = self.observation(load.sums, load.shared_prefix)
        if observed is not None:
            return f"A measured peak holds for it and may only raise its price: {observed}."
        if self._observations:
            return "Peaks of its signature were measured, none of a load that this one is at least as large as."
        if self.template.recompute.recompute_granularity == "full" or not self.template.training.differentiates:
            return "No peak of its signature was measured: it is priced by the estimate."
        return (
            "No peak of its signature was measured, and what forward made is kept: it is priced by the floor, every "
            "tensor that stays, not by experience."
        )

    @property
    def padding(self) -> list[str]:
        """How what is admitted is to be padded for its price to hold, where that is more than anything is."""
        if self._unit == self.least_unit:
            return []
        return [
            f"Rows are priced as padded to multiples of {self._unit}, as kernels of this model decide by lengths what "
            "they allocate: what is admitted is to be run so padded."
        ]

    @cached_property
    def assumptions(self) -> list[str]:
        """What the prices rest on that the template does not state, in sentences."""
        packed, layout = self.template.batch.packed, self.template.parallelism
        said = []
        if layout.cp > 1 and self.packs_trees and (packed is None or packed.busiest_rank_rows is None):
            said.append(
                "Context-parallel ranks are taken to share rows evenly; batch.packed.busiest_rank_rows of the template "
                "states another proportion."
            )
        if self.template is not self._as_stated:
            said.append(
                f"The template does not state routing: the busiest of {layout.ep} expert-parallel ranks is allowed "
                f"{default_imbalance(layout.ep):g} times the even share; state measured routing in its place."
            )
        fields = [f"{each.field} ({each.shown})" for each in self.unstated if each.field != "routing"]
        if fields:
            said.append(f"Figures are with what the template does not state as taken here: {', '.join(fields)}.")
        return said

    @cached_property
    def unstated(self) -> tuple[Unstated, ...]:
        """Fields that the template does not state and that decide the peak, asked at the largest load that fits."""
        load = self._ladder()[0]
        here, found = self.workload(load), []
        base = _peak(here)
        for each in left_open(self._as_stated):
            if each.field == "routing":
                if self.template is not self._as_stated:
                    found.append(Unstated(field=each.field, taken="allowance", cause=each.cause))
                continue
            others = [(choice.value, with_fields(here, choice.fields)) for choice in each.choices[1:]]
            peaks = [(_peak(changed) - base, value) for value, changed in others if changed is not None]
            if any(more for more, _ in peaks):
                more, value = max((0, None), *peaks, key=lambda peak: peak[0])
                taken = each.choices[0].value
                found.append(Unstated(field=each.field, taken=taken, cause=each.cause, instead=value, more_bytes=more))
        return tuple(found)

    @cached_property
    def _unit(self) -> int:
        """Rows are priced padded to a multiple of it."""
        return self.upper.step if isinstance(self.upper, Tables) else self.least_unit

    @property
    def least_unit(self) -> int:
        """Rows are padded to a multiple of it whatever is run."""
        layout = self.template.parallelism
        return lcm(layout.tp * layout.cp, 2 * layout.cp) if layout.cp > 1 else layout.tp

    @cached_property
    def upper(self) -> Faces | Tables:
        """Prices that no estimate is above."""
        return Faces(self.template, upper=True) if self.packs_trees else Tables(self.template, self.limit, upper=True)

    @cached_property
    def lower(self) -> Faces | Tables:
        """Prices that no estimate is below."""
        return Faces(self.template, upper=False) if self.packs_trees else Tables(self.template, self.limit, upper=False)

    @property
    def grows(self) -> bool:
        """More sequences or longer ones never hold less."""
        return self.packs_trees or (isinstance(self.upper, Tables) and self.upper.grows)

    @cached_property
    def most_sequences(self) -> int:
        """More in a micro-batch are refused by a rule."""
        if self.packs_trees:
            return MOST_SEQUENCES
        kernels, model = self.template.training.kernels, self.template.model
        turns = model.turns_positions or model.multi_latent_attention is not None
        return MOST_TURNED if self.packs and turns and not kernels.apply_rope_fusion else 2**14

    @cached_property
    def most_tokens(self) -> int:
        """Logical ones, beyond which a rule refuses a micro-batch."""
        lora = self.template.training.lora
        return MOST_CHUNKS * lora.output_chunk_rows if lora and lora.outputs in ("log_probs", "top_k") else 2**40

    def sums(self, lengths: Sequence[int], prefix: int) -> Sums:
        """Of sequences that begin with so many tokens of a prefix."""
        multiple = self._multiple
        return Sums(
            len(lengths),
            sum([-(-each // multiple) * multiple for each in lengths]),
            sum([-(-each // CHUNK) * CHUNK for each in lengths]),
            sum([-((prefix - each) // CHUNK) * CHUNK for each in lengths]),
            max(lengths),
        )

    def load(self, lengths: Sequence[int], shared_prefix: int = 0) -> Load:
        """Sequences as one micro-batch."""
        return Load(tuple(lengths), shared_prefix, self.sums(lengths, shared_prefix))

    def extent(self, sums: Sums, shared: int, *, by_itself: bool = False) -> Extent:
        """What the price is a function of; `by_itself`: without the padding that prices of many need."""
        count, tokens, padded, behind, longest = sums
        unit = self.least_unit if by_itself else self._unit
        if not self.packs:
            longest = -(-longest // unit) * unit
            return Extent(longest * count, 0, 0, 0, tokens, longest, count)
        computed = tokens - shared * (count - 1) if shared else tokens
        rows = -(-computed // unit) * unit
        if not self.packs_trees:
            return Extent(rows, 0, 0, 0, tokens, longest, count)
        if shared:
            padded = behind - (-shared // CHUNK) * CHUNK
        return Extent(rows, self._busiest(rows), padded, count + bool(shared), tokens, longest, count)

    def _busiest(self, rows: int) -> int:
        """Rows of the busiest context-parallel rank: in the template's proportion, or the even share."""
        batch, layout = self.template.batch, self.template.parallelism
        stated = None if batch.packed is None else batch.packed.busiest_rank_rows
        even = -(-rows // layout.cp)
        if stated is None or layout.cp == 1:
            return even
        share = -(-rows * stated // batch.seq_length)
        return min(rows, -(-share // layout.tp) * layout.tp)

    def workload(self, load: Load, *, by_itself: bool = False) -> Workload:
        """The micro-batch as a plain workload, as `extent` has it."""
        extent = self.extent(load.sums, load.shared_prefix, by_itself=by_itself)
        layout, batch = self.template.parallelism, self.template.batch
        count = len(load.lengths)
        size = 1 if self.packs else count
        update: dict[str, Any] = {
            "micro_batch_size": size,
            "global_batch_size": self.template.num_microbatches * size * layout.dp,
            "seq_length": extent.rows if self.packs else extent.longest,
            "packed": None,
        }
        if self.packs:
            multiple = self._multiple
            lengths = tuple([-(-each // multiple) * multiple for each in load.lengths])
            stated = batch.packed is not None and batch.packed.busiest_rank_rows is not None
            busiest = extent.busiest if self.packs_trees and stated else None
            update["packed"] = Packed(lengths=lengths, shared_prefix=load.shared_prefix, busiest_rank_rows=busiest)
        return self.template.model_copy(update={"batch": batch.model_copy(update=update)})

    def prices(self, ways: Sequence[Way]) -> Prices:
        """At most what they hold."""
        extents = columns([self.extent(*way) for way in ways])
        found = self.upper.peaks(extents)
        peak, cover, increment = found.bytes + self._beside, found.covered_bytes + self._beside, found.increment_bytes
        if self._observations:
            raised = np.maximum(peak, [self.observed(*way) for way in ways])
            more = increment + raised - peak
            margin = more * relative_margin(self.template) + FIXED_BYTES
            cover = np.maximum(cover, np.where(raised > peak, raised + margin, 0))
            peak, increment = raised, more
        peak, cover = np.ceil(peak), np.ceil(cover) + 1
        # Where nothing fits there is no need to know.
        reserved = cover + self.reserve(increment) if (cover <= self.limit).any() else cover
        too_many = (extents.sequences > self.most_sequences) | (extents.logical_rows > self.most_tokens)
        return Prices(peak, cover, reserved, np.where(too_many, np.inf, reserved), found.phase_of)

    def least(self, extents: Sequence[Extent], *, reserved: bool = False) -> Levels:
        """What they hold with the margin, at least; or with what is set aside for segments."""
        found = self.lower.peaks(columns(extents))
        covered = found.covered_bytes
        if reserved:
            increments, gaps = self._gaps
            covered = covered + gaps[np.searchsorted(increments, found.increment_bytes)]
        return covered + self._beside - 1

    def observed(self, sums: Sums, shared: int) -> int:
        """The largest measured peak that such sequences cannot stay below; 0 without one."""
        found = self.observation(sums, shared)
        return 0 if found is None else found.peak_allocated_bytes

    def observation(self, sums: Sums, shared: int) -> Observation | None:
        """That observation."""
        extent = self.extent(sums, shared)
        behind = sums.longest - shared
        seen: tuple[int, ...] = (extent.rows, 1) if self.packs else (extent.longest, extent.sequences)
        if self.packs:
            computed = sums.tokens - shared * max(sums.sequences - 1, 0)
            segments = sums.sequences + bool(shared)
            stated = self.template.batch.packed is not None and self.template.batch.packed.busiest_rank_rows is not None
            busiest = extent.busiest if self.packs_trees and stated else 0
            seen = *seen, computed, sums.tokens, segments, max(behind, shared), busiest
        found = [each for each in self._observations if each.holds_for_lengths(seen)]
        return max(found, key=lambda each: each.peak_allocated_bytes, default=None)

    def reserve(self, increment: Levels) -> Levels:
        """What is set aside for segments that cannot be handed out, by the increment of the peak."""
        found: Levels = self._gaps[1][np.searchsorted(self._gaps[0], increment)]
        return found

    @cached_property
    def _gaps(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Increments, and from each down to the one before what segments take above the peak.

        The allocator is played through at some sizes up to the largest that fits (`labkit.allocator`), within ever less
        memory until it runs out; between two of them the larger gap of both is taken.
        """
        simulated = sorted(self._simulated_gap(load) for load in self._ladder())
        increments = np.array([increment for increment, _ in simulated])
        gaps = [gap for _, gap in simulated]
        gaps = [gaps[0], *(max(pair) for pair in pairwise(gaps)), max(gaps)]
        # More never has less set aside, so that what fits still does in a larger budget, and without one of its parts.
        return increments, np.maximum.accumulate(np.array(gaps, dtype=np.float64))

    def _simulated_gap(self, load: Load) -> tuple[float, float]:
        workload = self.workload(load)
        stages = [BlockPeaks(workload, stage) for stage in fullest_stages(workload)]
        gaps = [(each.segment_bytes - each.peak.bytes, each.peak.bytes - each.before_bytes) for each in stages]
        gap, increment = max(gaps)
        return float(increment), float(gap)

    def _ladder(self) -> list[Load]:
        """Loads up to the largest that would fit if nothing were reserved beyond the peak."""
        tokens = self._most_that_fit()
        return [self._typical(max(tokens >> halvings, 1)) for halvings in range(_SIMULATED)]  # some may be alike

    def _typical(self, tokens: int) -> Load:
        parts = 4 if self.packs and tokens >= 4 * self._unit else 1
        return self.load((-(-tokens // parts // self._unit) * self._unit,) * parts)

    def _most_that_fit(self) -> int:
        def fits(tokens: int) -> bool:
            found = self.upper.peaks(columns([self.extent(self._typical(tokens).sums, 0)]))
            return bool(found.covered_bytes[0] + self._beside <= self.limit)

        low, high = self._unit, 2 * self._unit
        while fits(high) and high < 2**26:
            low, high = high, 2 * high
        while high - low > max(self._unit, low // 64):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def exactly(self, load: Load) -> tuple[int, int, int, tuple[int, str]]:
        """(peak, with its margin, with its segments, where) by the estimate itself: a second."""
        workload = self.workload(load, by_itself=True)
        stages = [BlockPeaks(workload, stage) for stage in fullest_stages(workload)]
        fullest = max(stages, key=lambda each: each.peak.bytes).peak
        peak = max(fullest.bytes + self._beside, self.observed(load.sums, load.shared_prefix))
        more = peak - fullest.bytes
        covered = max(each.peak.bytes + margin_over(workload, each.phases, each.before_bytes) for each in stages) + more
        reserved = covered + max(each.segment_bytes - each.peak.bytes for each in stages)
        return peak, covered, reserved, (fullest.iteration, fullest.phase)

    def runs(self, load: Load) -> tuple[int, int, int] | None:
        """(peak, with its margin, reserved) of what runs within the limit by the estimate itself; else None."""
        workload = self.workload(load, by_itself=True)
        peak = covered = reserved = 0
        for stage in fullest_stages(workload):
            held = BlockPeaks(workload, stage)
            margin = margin_over(workload, held.phases, held.before_bytes) + self._beside
            if held.peak.bytes + margin > self.limit or not held.runs_within(self.limit - margin):
                return None
            peak, covered = max(peak, held.peak.bytes + self._beside), max(covered, held.peak.bytes + margin)
            reserved = max(reserved, min(held.reserved_bytes + margin, self.limit))
        return peak, covered, reserved


def _peak(workload: Workload) -> int:
    return max(outline(workload, stage).peak_bytes for stage in fullest_stages(workload))


def _allowing(template: Workload) -> Workload:
    """The template; where it spreads experts over ranks and leaves routing open, with what is set aside for that."""
    experts = any(layer.mlp == "moe" for layer in template.model.kinds)
    if template.routing is not None or not experts or template.parallelism.ep == 1:
        return template
    return template.model_copy(update={"routing": Routing(kind="allowance")})


def columns(extents: Sequence[Extent]) -> Extent:
    """Extents as one, with an array for each field."""
    return Extent(*np.array(extents, dtype=np.int64).T)


def _of_kind(template: Workload, kind: tuple[bool | None, Any]) -> Workload:
    """The template with a pass of this kind, and as many micro-batches a step as show all that several hold."""
    no_grad, outputs = kind
    training, batch, layout = template.training, template.batch, template.parallelism
    lora = training.lora
    recompute = template.recompute
    if lora is None:
        if no_grad or outputs is not None:
            raise InputError(
                "requests: the megatron runtime trains with its own loss, without no_grad and outputs; leave them out, "
                "or set training.runtime: lora"
            )
    else:
        update: dict[str, Any] = {}
        if no_grad is not None:
            update["no_grad"] = no_grad
        if outputs is not None:
            update |= {"outputs": outputs, "top_k": lora.top_k if outputs == "top_k" else None}
        if no_grad:
            update["optimizer_step"] = False
        training = training.model_copy(update={"lora": lora.model_copy(update=update)})
        if update.get("no_grad", lora.no_grad):
            recompute = Recompute()  # there is no backward to replay in
    several = template.num_microbatches if layout.vpp > 1 else max(template.num_microbatches, layout.pp + 1)
    size = 1 if lora is not None else batch.micro_batch_size
    update = {"micro_batch_size": size, "global_batch_size": several * size * layout.dp}
    return template.model_copy(
        update={"training": training, "recompute": recompute, "batch": batch.model_copy(update=update)}
    ).checked("requests")


def _held_beside(template: Workload, of_kind: Workload) -> int:
    """What the process that trains has between steps more than one that only runs such passes."""
    if template.training.differentiates == of_kind.training.differentiates:
        return 0
    size = covering(template.training.allocator)
    more: int = outline(template, size=size).between_steps_bytes - outline(of_kind).between_steps_bytes
    return max(0, more)


def kinds_of(requests: Sequence[Request]) -> dict[tuple[bool | None, Any], list[int]]:
    """Positions of requests by the pass they need."""
    found: dict[tuple[bool | None, Any], list[int]] = {}
    for at, each in enumerate(requests):
        found.setdefault(each.kind, []).append(at)
    return found
