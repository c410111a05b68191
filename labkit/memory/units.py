"""A rank's model as units in order: each a script, shared by all units of its kind, and the layer it begins at."""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import NamedTuple

from labkit.memory.layers.decoder import (
    Place,
    record_back,
    record_front,
    record_layers,
    record_loss,
    record_received,
    record_received_by_last,
    record_sent,
)
from labkit.memory.layers.sizes import Sizes
from labkit.memory.player import play
from labkit.memory.recompute import RULES, Region, checkpoints, regions
from labkit.memory.script import Script
from labkit.memory.stages import stage_layers
from labkit.memory.tape import Parameter, Tape
from labkit.workload import Recompute, Workload
from labkit.workload.routing import busiest_share


class Unit(NamedTuple):
    """A stretch of the rank's model."""

    script: Script
    tape: Tape
    regions: tuple[Region, ...]
    first_layer: int
    """Decoder layer that its layer 0 is."""


_LONGEST_STRETCH = 16
"""Units looked at for repetition: layer patterns are shorter."""


class Chunk:
    """One model chunk: its units in forward order."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.units = tuple(units)

    @cached_property
    def stretches(self) -> list[tuple[tuple[Unit, ...], int]]:
        """Repeated stretches, in order: (units, times). Units of one script count as equal."""
        numbers: dict[int, int] = {}
        kinds = tuple([numbers.setdefault(id(unit.script), len(numbers)) for unit in self.units])
        return [(self.units[start : start + length], times) for start, length, times in _repetitions(kinds)]


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
    rest = workload.model, workload.parallelism, workload.batch, workload.training, workload.routing
    return _recorder(_Recorded(rest, workload)).chunks(workload.recompute, stage)


@dataclass(frozen=True)
class _Recorded:
    """What decides a recording, of a whole model all of a workload but its recompute choice; and what to make it of."""

    rest: tuple[Hashable, ...]
    workload: Workload = field(compare=False)


@lru_cache(maxsize=32)
def _recorder(key: _Recorded) -> "Recorder":
    return Recorder(key.workload, Sizes.of(key.workload))


class Recorder:
    """Records each kind of unit of a workload once, and plays it once for the labels that concern it."""

    def __init__(self, workload: Workload, sizes: Sizes) -> None:
        """`sizes` may be those of many lengths (`Sizes.over`); then so are the bytes of the scripts."""
        self._workload = workload
        self._sizes = sizes
        self._shares: dict[int | None, Fraction] = {}
        self._tapes: dict[object, Tape] = {}
        self._labels: dict[int, frozenset[str]] = {}
        """Labels that make regions of a tape."""
        self._scripts: dict[tuple[int, frozenset[str], bool, bool], tuple[Script, tuple[Region, ...]]] = {}

    def chunks(self, recompute: Recompute, stage: int) -> list[Chunk]:
        """The model chunks of a pipeline rank under a recompute choice."""
        layers = stage_layers(self._workload, stage)
        last = stage == self._workload.parallelism.pp - 1
        return [
            self._chunk(recompute, each, front=stage == index == 0, back=last and index == len(layers) - 1)
            for index, each in enumerate(layers)
        ]

    def _chunk(self, recompute: Recompute, layers: range, *, front: bool, back: bool) -> Chunk:
        received = record_received_by_last if back and self._workload.model.mtp_num_layers else record_received
        begin, end = record_front if front else received, record_back if back else record_sent
        plan: list[tuple[Tape, bool, int]] = [(self._once(begin), False, 0)]
        first, labels = layers.start, recompute.modules
        if recompute.recompute_granularity == "full" and recompute.recompute_method == "uniform":
            labels = frozenset(("full",))
        for count, checkpointed in checkpoints(recompute, len(layers)):
            plan += [(tape, checkpointed, first) for tape in self._stretch(first, count, together=checkpointed)]
            first += count
        plan.append((self._once(end), False, 0))
        units: list[Unit] = []
        held = False
        for tape, checkpointed, first in reversed(plan):
            script, found = self._play(tape, labels, checkpointed=checkpointed, gradient_held=held)
            held = script.gradient_in_held
            units.append(Unit(script, tape, found, first))
        return Chunk(reversed(units))

    def _once(self, record: Callable[[Workload, Sizes], Tape]) -> Tape:
        if record not in self._tapes:
            self._tapes[record] = record(self._workload, self._sizes)
        return self._tapes[record]

    def _stretch(self, first: int, count: int, *, together: bool) -> list[Tape]:
        """Tapes of layers from `first` on: one of all of them, or one of each half."""
        kinds = self._workload.model.layers[first : first + count]
        places = [
            Place(layer, half, self._share(first + layer) if half == "moe" else None)
            for layer, kind in enumerate(kinds)
            for half in kind
            if half is not None
        ]
        return [self._layers(tuple(places))] if together else [self._layers((place,)) for place in places]

    def _share(self, layer: int) -> Fraction:
        """The busiest rank's part of a layer's rows; only a histogram for each layer tells layers apart."""
        routing = self._workload.routing
        key = layer if routing is not None and len(routing.rows_per_expert or ()) > 1 else None
        if key not in self._shares:
            self._shares[key] = busiest_share(self._workload, layer)
        return self._shares[key]

    def _layers(self, places: tuple[Place, ...]) -> Tape:
        if places not in self._tapes:
            self._tapes[places] = record_layers(self._workload, self._sizes, places)
        return self._tapes[places]

    def _play(
        self, tape: Tape, labels: frozenset[str], *, checkpointed: bool, gradient_held: bool
    ) -> tuple[Script, tuple[Region, ...]]:
        if id(tape) not in self._labels:
            self._labels[id(tape)] = frozenset(region.label for region in regions(tape, RULES))
        key = id(tape), labels & self._labels[id(tape)], checkpointed, gradient_held
        if key not in self._scripts:
            found = regions(tape, labels, checkpointed=checkpointed)
            training = self._workload.training
            fused = training.kernels.gradient_accumulation_fusion and training.runtime == "megatron"
            script = play(
                tape,
                found,
                fused_weight_gradients=fused,
                gradient_held=gradient_held,
                differentiates=training.differentiates,
            )
            self._scripts[key] = script, tuple(found)
        return self._scripts[key]


def loss_chunk(workload: Workload) -> Chunk | None:
    """What the caller does with the model's outputs, where the model does not end in its own loss (`lora` runtime)."""
    if workload.training.runtime == "megatron":
        return None
    rest = workload.model, workload.parallelism, workload.batch, workload.training.precision, workload.training.lora
    return _loss_chunk(_Recorded(rest, workload))


@lru_cache(maxsize=8)
def _loss_chunk(key: _Recorded) -> Chunk:
    workload = key.workload
    tape = record_loss(workload, Sizes.of(workload))
    script = play(tape, [], fused_weight_gradients=False, differentiates=workload.training.differentiates)
    return Chunk([Unit(script, tape, (), 0)])


def parameters(chunk: Chunk) -> list[Parameter]:
    """All weights of a model chunk, in the order Megatron registers them."""
    return [parameter.at_layer(unit.first_layer) for unit in chunk.units for parameter in unit.script.parameters]
