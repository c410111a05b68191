"""A rank's model as units in order: each a script, shared by all units of its kind, and the layer it begins at."""

from collections.abc import Sequence
from typing import NamedTuple

from labkit.memory.layers.decoder import Place, record_back, record_front, record_layers, record_loss
from labkit.memory.layers.sizes import Sizes
from labkit.memory.player import play
from labkit.memory.recompute import Region, checkpoints, regions
from labkit.memory.script import Script
from labkit.memory.stages import stage_layers
from labkit.memory.tape import Parameter, Tape
from labkit.workload import Workload
from labkit.workload.routing import busiest_share


class Unit(NamedTuple):
    """A stretch of the rank's model."""

    script: Script
    tape: Tape
    regions: tuple[Region, ...]
    first_layer: int
    """Decoder layer that its layer 0 is."""


type Chunk = list[Unit]
"""Units of one model chunk, in forward order."""


def chunks(workload: Workload, stage: int = 0) -> list[Chunk]:
    """The model chunks of a pipeline rank: one, or several under an interleaved schedule."""
    layout = workload.parallelism
    recorder = _Recorder(workload)
    layers = stage_layers(workload, stage)
    return [
        recorder.chunk(
            each,
            front=stage == 0 and index == 0,
            back=stage == layout.pp - 1 and index == len(layers) - 1,
        )
        for index, each in enumerate(layers)
    ]


class _Recorder:
    """Records and plays each kind of unit once."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._sizes = Sizes.of(workload)
        self._tapes: dict[tuple[Place, ...], Tape] = {}
        self._scripts: dict[tuple[int, bool, bool], tuple[Script, tuple[Region, ...]]] = {}

    def chunk(self, layers: range, *, front: bool, back: bool) -> Chunk:
        """Units of a stretch of layers, with what stands before or after it on this rank."""
        plan: list[tuple[Tape, bool, int]] = []
        if front:
            plan.append((record_front(self._workload, self._sizes), False, 0))
        first = layers.start
        for count, checkpointed in checkpoints(self._workload, len(layers)):
            plan += [(tape, checkpointed, first) for tape in self._stretch(first, count, together=checkpointed)]
            first += count
        if back:
            plan.append((record_back(self._workload, self._sizes), False, 0))
        units: Chunk = []
        held = False
        for tape, checkpointed, first in reversed(plan):
            script, found = self._play(tape, checkpointed=checkpointed, gradient_held=held)
            held = script.gradient_in_held
            units.append(Unit(script, tape, found, first))
        return units[::-1]

    def _stretch(self, first: int, count: int, *, together: bool) -> list[Tape]:
        kinds = self._workload.model.layers[first : first + count]
        places = [
            Place(layer, half, busiest_share(self._workload, first + layer) if half == "moe" else None)
            for layer, kind in enumerate(kinds)
            for half in kind
            if half is not None
        ]
        return [self._tape(tuple(places))] if together else [self._tape((place,)) for place in places]

    def _tape(self, places: tuple[Place, ...]) -> Tape:
        if places not in self._tapes:
            self._tapes[places] = record_layers(self._workload, self._sizes, places)
        return self._tapes[places]

    def _play(self, tape: Tape, *, checkpointed: bool, gradient_held: bool) -> tuple[Script, tuple[Region, ...]]:
        key = (id(tape), checkpointed, gradient_held)
        if key not in self._scripts:
            found = regions(tape, self._workload.recompute.modules, checkpointed=checkpointed)
            training = self._workload.training
            fused = training.kernels.gradient_accumulation_fusion and training.runtime == "megatron"
            script = play(tape, found, fused_weight_gradients=fused, gradient_held=gradient_held)
            self._scripts[key] = script, tuple(found)
        return self._scripts[key]


def loss_chunk(workload: Workload) -> Chunk:
    """The caller's loss over the model's outputs, where the model does not end in its own (`lora` runtime)."""
    tape = record_loss(workload, Sizes.of(workload))
    return [Unit(play(tape, [], fused_weight_gradients=False), tape, (), 0)]


def parameters(model: Sequence[Chunk]) -> list[Parameter]:
    """All weights of a rank's model chunks, in the order Megatron registers them."""
    units = [unit for chunk in model for unit in chunk]
    return [parameter.at_layer(unit.first_layer) for unit in units for parameter in unit.script.parameters]
