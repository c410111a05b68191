"""A rank's model as units in order: each a script, shared by all units of its kind, and the layer it begins at."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from labkit.memory.layers.decoder import (
    Place,
    record_back,
    record_back_alone,
    record_front,
    record_layers,
    record_loss,
    record_normed_and_sent,
    record_passed_on,
    record_received,
    record_received_by_last,
    record_sent,
)
from labkit.memory.layers.sizes import Sizes
from labkit.memory.player import holds_output, play
from labkit.memory.recompute import Region, regions, whole
from labkit.memory.script import Script
from labkit.memory.tape import Tape
from labkit.workload import Recompute, Workload
from labkit.workload.routing import busiest_share
from labkit.workload.stages import stage_layers


class Unit(NamedTuple):
    """A stretch of the rank's model."""

    script: Script
    tape: Tape
    regions: tuple[Region, ...]
    first_layer: int
    """Decoder layer that its layer 0 is."""


class Run(NamedTuple):
    """Equal layers in a row, or a unit outside the layers."""

    units: tuple[Unit, ...]
    """Of the first."""
    times: int
    layers: int
    """Decoder layers of each."""

    def each(self) -> Iterator[Unit]:
        """Its units, of all of the layers."""
        for layer in range(0, self.times * (self.layers or 1), self.layers or 1):
            for unit in self.units:
                yield unit._replace(first_layer=unit.first_layer + layer) if layer else unit


class Stretch(NamedTuple):
    """Units in a row, and the same ones of later layers."""

    units: tuple[Unit, ...]
    times: int
    layers: int
    """From one repetition to the next."""


type _Record = Callable[[Workload, Sizes], Tape]

_LONGEST_STRETCH = 16
"""Runs looked at for repetition: layer patterns are shorter."""


class Chunk:
    """One model chunk: its runs in forward order."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = tuple(runs)

    @property
    def ends(self) -> tuple[Unit, ...]:
        """Its first unit and, if there are several, its last (or one like it)."""
        first, last = self.runs[0].units[0], self.runs[-1].units[-1]
        return (first,) if first is last else (first, last)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All of them."""
        return tuple(unit for run in self.runs for unit in run.each())

    @cached_property
    def scripts_with_attributes(self) -> list[Script]:
        """The scripts, each once, whose modules keep something beyond a pass."""
        scripts = {id(unit.script): unit.script for run in self.runs for unit in run.units}
        return [script for script in scripts.values() if script.has_attributes]

    @cached_property
    def graphs(self) -> int:
        """How many of its units hold something as `GRAPH`."""
        return sum([unit.script.has_graph for stretch in self.stretches for unit in stretch.units * stretch.times])

    @cached_property
    def last_graph(self) -> tuple[int, int]:
        """Number of the last stretch that has one, and its place there; -1 where none has."""
        places = [
            (number, place)
            for number, stretch in enumerate(self.stretches)
            for place, unit in enumerate(stretch.units)
            if unit.script.has_graph
        ]
        return max(places, default=(-1, -1))

    @cached_property
    def keepers(self) -> dict[int, list[frozenset[str]]]:
        """For each unit of a stretch, by its number, the tensors of the batch that its backward is the last to need.

        That is where the chunk's first unit to keep them stands, in a repeated stretch in the first repetition.
        """
        left, found = set(self.ends[0].script.reads), {}
        for number, stretch in enumerate(self.stretches):
            names = []
            for unit in stretch.units:
                names.append(unit.script.keeps & left)
                left -= unit.script.keeps
            if any(names):
                found[number] = names
        return found

    @cached_property
    def passing(self) -> list[int]:
        """Slots of its first unit: the tensors of the batch that no backward needs."""
        kept = {name for names in self.keepers.values() for each in names for name in each}
        return [slot for name, slot in self.ends[0].script.reads.items() if name not in kept]

    @cached_property
    def stretches(self) -> list[Stretch]:
        """Repeated stretches, in order. Units of one tape and one script count as equal."""
        numbers: dict[tuple[int, ...], int] = {}
        keys = [
            (run.times, *(part for unit in run.units for part in (id(unit.tape), id(unit.script)))) for run in self.runs
        ]
        kinds = tuple([numbers.setdefault(key, len(numbers)) for key in keys])
        found = []
        for start, length, times in _repetitions(kinds):
            if length == 1:
                run = self.runs[start]
                found.append(Stretch(run.units, run.times * times, run.layers))
            else:
                runs = self.runs[start : start + length]
                units = tuple([unit for run in runs for unit in run.each()])
                found.append(Stretch(units, times, sum([run.times * run.layers for run in runs])))
        return found


@lru_cache(maxsize=256)
def _repetitions(kinds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(start, length, times) of the repeated stretches of a sequence."""
    found, start = [], 0
    while start < len(kinds):
        times, length = 1, 1
        for each in range(1, _LONGEST_STRETCH + 1):
            repeats = _repeats(kinds, start, each)
            if repeats > 1 and each * repeats > length * times:
                times, length = repeats, each
        found.append((start, length, times))
        start += length * times
    return found


def _repeats(kinds: tuple[int, ...], start: int, length: int) -> int:
    """How often the stretch of `length` from `start` comes in a row."""
    stretch, times = kinds[start : start + length], 1
    while kinds[start + times * length : start + (times + 1) * length] == stretch:
        times += 1
    return times


def chunks(workload: Workload, stage: int = 0) -> list[Chunk]:
    """The model chunks of a pipeline rank: one, or several under an interleaved schedule."""
    return recorder(workload).chunks(workload.recompute, stage)


def recorder(workload: Workload) -> "Recorder":
    """What has recorded a workload, for any recompute choice."""
    return _recorder(_recorded(workload))


@dataclass(frozen=True)
class _Recorded:
    """What decides a recording, of a whole model all of a workload but its recompute choice; and what to make it of."""

    rest: tuple[Hashable, ...]
    workload: Workload = field(compare=False)


def _recorded(workload: Workload) -> _Recorded:
    rest = workload.model, workload.parallelism, workload.batch, workload.training, workload.routing
    return _Recorded(rest, workload)


@lru_cache(maxsize=32)
def _recorder(key: _Recorded) -> "Recorder":
    workload, layout = key.workload, key.workload.parallelism
    fields = "world_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
    without_experts, plain = None, (layout.tp * layout.cp * layout.pp, 1, None)
    if tuple(getattr(layout, name) for name in fields) != plain:
        one_replica = layout.model_copy(update=dict(zip(fields, plain, strict=True)))
        without_experts = _recorder(_recorded(workload.model_copy(update={"parallelism": one_replica})))
    return Recorder(workload, Sizes.of(workload), without_experts)


class Recorder:
    """Records each kind of unit of a workload once, and plays it once for the labels that concern it."""

    def __init__(self, workload: Workload, sizes: Sizes, without_experts: "Recorder | None" = None) -> None:
        """Of a workload.

        Args:
            workload: what is recorded.
            sizes: its sizes, maybe those of many lengths (`labkit.memory.sweep`); then so are the bytes on the tapes.
            without_experts: has what does not depend on how experts and data-parallel ranks are laid out.
        """
        self._without_experts = without_experts
        self._workload = workload
        self._sizes = sizes
        routing = workload.routing
        self._by_layer = routing is not None and routing.differs_by_layer
        self._shares: dict[int | None, Fraction] = {}
        self._tapes: dict[object, Tape] = {}
        training = workload.training
        self._fused = training.kernels.gradient_accumulation_fusion and training.runtime == "megatron"
        self._differentiates = training.differentiates
        self._workspaces = training.workspaces
        self._plays: dict[int, _Plays] = {}
        self._headless: Recorder | None = None
        """Records the layers of ranks without output head, where those differ."""

    def chunks(self, recompute: Recompute, stage: int) -> list[Chunk]:
        """The model chunks of a pipeline rank under a recompute choice."""
        layers = stage_layers(self._workload, stage)
        last = stage == self._workload.parallelism.pp - 1
        if not last and self._sizes.head and self._workload.training.kernels.moe_token_dispatcher_type == "allgather":
            if self._headless is None:
                self._headless = Recorder(self._workload, replace(self._sizes, head=False), self._without_experts)
            return self._headless.chunks(recompute, stage)
        return [
            self._chunk(recompute, each, front=stage == index == 0, back=last and index == len(layers) - 1)
            for index, each in enumerate(layers)
        ]

    def _chunk(self, recompute: Recompute, layers: range, *, front: bool, back: bool) -> Chunk:
        begin, end = self._ends(layers, front=front, back=back)
        labels = recompute.modules
        if recompute.recompute_granularity == "full" and recompute.recompute_method == "uniform":
            labels = frozenset(("full",))
        plan = [
            _Plan([self._once(begin)], False, 0, 1, 0),
            *self._plan(recompute, layers),
            _Plan([self._once(end)], False, 0, 1, 0),
        ]
        runs: list[Run] = []
        outputs_held = [self._holds_output(each.tapes[-1], labels, each.checkpointed) for each in plan]
        gradient = False, False
        for position in reversed(range(len(plan))):
            # From the back: the gradient that a unit gets may be held by the one behind it, or be a view.
            tapes, checkpointed, first, left, count = plan[position]
            input_held, inner_held = position > 0 and outputs_held[position - 1], outputs_held[position]
            while left:
                behind, units = gradient, []
                holds = [inner_held if left > 1 else input_held]
                holds += [self._holds_output(tape, labels, checkpointed) for tape in tapes[:-1]]
                for tape, held in zip(reversed(tapes), reversed(holds), strict=True):
                    script, found = self._play(tape, labels, checkpointed, gradient, held)
                    gradient = script.gradient_in_held, script.gradient_in_viewed
                    units.append(Unit(script, tape, found, first))
                alike = 1
                if gradient == behind:
                    alike = left if left == 1 or inner_held == input_held else left - 1
                left -= alike
                here = first + left * count
                runs.append(Run(tuple(unit._replace(first_layer=here) for unit in reversed(units)), alike, count))
        return Chunk(reversed(runs))

    def _ends(self, layers: range, *, front: bool, back: bool) -> tuple[_Record, _Record]:
        """What stands before and after a chunk's layers."""
        received = record_received_by_last if back else record_received
        model, empty = self._workload.model, not layers and not front
        # A hybrid model has its final norm where its head is.
        norms = model.mtp_num_layers is not None and model.hybrid_layer_pattern is None
        if back:
            end = record_back_alone if empty and norms else record_back
        elif norms and layers and layers.stop == model.num_layers:
            end = record_normed_and_sent
        else:
            end = record_passed_on if empty else record_sent
        return record_front if front else received, end

    def _holds_output(self, tape: Tape, labels: frozenset[str], checkpointed: bool) -> bool:
        plays, chosen, found = self._choose(tape, labels, checkpointed)
        key = chosen, self._differentiates
        if key not in plays.holding:
            plays.holding[key] = holds_output(
                tape,
                found,
                workspaces=self._workspaces,
                fused_weight_gradients=self._fused,
                differentiates=self._differentiates,
            )
        return plays.holding[key]

    def _plan(self, recompute: Recompute, layers: range) -> Iterator["_Plan"]:
        """Runs of layers that are recorded alike and checkpointed alike.

        Source: `TransformerBlock._checkpointed_forward`: full recompute by the uniform method puts one checkpoint
        around so many layers each, by the block method around each of the first ones.
        """
        number = 0 if recompute.recompute_granularity != "full" else recompute.recompute_num_layers or 1
        if number and recompute.recompute_method == "uniform":
            counts = [min(number, layers.stop - first) for first in layers[::number]]
            tapes = [self._together(first, count) for first, count in zip(layers[::number], counts, strict=True)]
            for position, alike in _alike([id(tape) for tape in tapes]):
                yield _Plan([tapes[position]], True, layers[position * number], alike, counts[position])
            return
        for part, checkpointed in ((layers[:number], True), (layers[number:], False)):
            for position, alike in _alike([self._kind(layer) for layer in part]):
                first = part[position]
                whole = checkpointed or not self._differentiates
                tapes = [self._together(first, 1)] if whole else self._halves(first)
                yield _Plan(tapes, checkpointed, first, alike, 1)

    def _once(self, record: _Record) -> Tape:
        if self._without_experts is not None and record not in (record_back, record_back_alone):
            return self._without_experts._once(record)
        if record not in self._tapes:
            self._tapes[record] = record(self._workload, self._sizes)
        return self._tapes[record]

    def _halves(self, layer: int) -> list[Tape]:
        """Tapes of the halves of a layer that stands alone."""
        return [self._layers((place,)) for place in self._places(layer, 1)]

    def _together(self, first: int, count: int) -> Tape:
        """One tape of layers from `first` on."""
        return self._layers(tuple(self._places(first, count)))

    def _places(self, first: int, count: int) -> list[Place]:
        kinds = self._workload.model.layers[first : first + count]
        return [
            Place(layer, half, self._share(first + layer) if half == "moe" else None)
            for layer, kind in enumerate(kinds)
            for half in kind
            if half is not None
        ]

    def _kind(self, layer: int) -> Hashable:
        """Equal for layers that hold the same bytes: a histogram for each layer tells them apart."""
        kind = self._workload.model.layers[layer]
        return (kind, layer) if self._by_layer else kind

    def _share(self, layer: int) -> Fraction:
        """The busiest rank's part of a layer's rows."""
        key = layer if self._by_layer else None
        if key not in self._shares:
            self._shares[key] = busiest_share(self._workload, layer)
        return self._shares[key]

    def _layers(self, places: tuple[Place, ...]) -> Tape:
        if self._without_experts is not None and all(place.half != "moe" for place in places):
            return self._without_experts._layers(places)
        if places not in self._tapes:
            self._tapes[places] = record_layers(self._workload, self._sizes, places)
        return self._tapes[places]

    def _play(
        self,
        tape: Tape,
        labels: frozenset[str],
        checkpointed: bool,
        gradient: tuple[bool, bool] = (False, False),
        input_held: bool = False,
    ) -> tuple[Script, tuple[Region, ...]]:
        plays, chosen, found = self._choose(tape, labels, checkpointed)
        key = chosen, self._workspaces, self._fused, gradient, input_held, self._differentiates
        if key not in plays.scripts:
            script = play(
                tape,
                found,
                workspaces=self._workspaces,
                fused_weight_gradients=self._fused,
                gradient_held=gradient[0],
                gradient_viewed=gradient[1],
                input_held=input_held,
                differentiates=self._differentiates,
            )
            plays.scripts[key] = script, tuple(found)
        return plays.scripts[key]

    def _choose(
        self, tape: Tape, labels: frozenset[str], checkpointed: bool
    ) -> tuple["_Plays", frozenset[str], list[Region]]:
        """How tapes of its form play, the labels that concern them, and the regions that those make of it."""
        if id(tape) not in self._plays:
            weights = () if self._fused else tuple([op.weights for op in tape.ops])
            self._plays[id(tape)] = _plays(_Form((tape.form, weights), tape))
        plays = self._plays[id(tape)]
        if checkpointed:
            return plays, frozenset(("checkpoint",)), [whole(tape)]
        chosen = labels & plays.labels
        return plays, chosen, [region for region in plays.regions if region.label in chosen]


@dataclass(frozen=True)
class _Form:
    """What decides how a tape plays, and a tape of it."""

    form: tuple[object, ...]
    tape: Tape = field(compare=False)


class _Plays:
    """How tapes of one form play."""

    def __init__(self, tape: Tape) -> None:
        self.regions = regions(tape)
        """All that labels could make of them."""
        self.labels = frozenset(region.label for region in self.regions)
        self.scripts: dict[Hashable, tuple[Script, tuple[Region, ...]]] = {}
        self.holding: dict[Hashable, bool] = {}
        """Whether their output is held (`holds_output`)."""


@lru_cache(maxsize=512)
def _plays(form: _Form) -> _Plays:
    return _Plays(form.tape)


class _Plan(NamedTuple):
    """Layers to play, or a unit outside the layers."""

    tapes: list[Tape]
    """Of each."""
    checkpointed: bool
    first: int
    """Decoder layer that the first begins at."""
    times: int
    layers: int
    """Decoder layers of each."""


def _alike(kinds: Iterable[Hashable]) -> Iterator[tuple[int, int]]:
    """(position, how many) of equal kinds in a row."""
    position = 0
    for _, group in groupby(kinds):
        count = sum(1 for _ in group)
        yield position, count
        position += count


def loss_chunk(workload: Workload) -> Chunk | None:
    """What the caller does with the model's outputs, where the model does not end in its own loss (`lora` runtime)."""
    if workload.training.runtime == "megatron":
        return None
    training = workload.training
    rest = workload.model, workload.parallelism, workload.batch, training.precision, training.lora, training.workspaces
    return _loss_chunk(_Recorded(rest, workload))


@lru_cache(maxsize=8)
def _loss_chunk(key: _Recorded) -> Chunk:
    return recorded_loss(key.workload, Sizes.of(key.workload))


def recorded_loss(workload: Workload, sizes: Sizes) -> Chunk:
    """The same of the `lora` runtime, with sizes that may be those of many lengths (see `Recorder`)."""
    training, tape = workload.training, record_loss(workload, sizes)
    script = play(
        tape,
        [],
        workspaces=training.workspaces,
        fused_weight_gradients=False,
        differentiates=training.differentiates,
    )
    return Chunk([Run((Unit(script, tape, (), 0),), 1, 0)])
