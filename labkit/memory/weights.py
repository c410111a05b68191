"""A rank's weights as blocks that repeat: thousands of parameters are laid out, sharded and summed up in one go."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, cast

from labkit.errors import InputError
from labkit.ledger import Lifetime
from labkit.memory.tape import Parameter, Shape
from labkit.memory.units import Chunk

_MOST_ELEMENTS = 2**56
"""Their bytes, with gradients and optimizer state, fit integers of 64 bits."""


class Alike(NamedTuple):
    """Tensors of equal size in a row, each of one weight."""

    parameter: Parameter
    numbers: range
    """Of the weights among those of `parameter`."""
    numel: int
    """Elements of each."""
    first_layer: int
    """Decoder layer that layer 0 of the parameter's unit is."""

    @property
    def sizes(self) -> dict[int, int]:
        """See `Block.sizes`."""
        return {self.numel: len(self.numbers)}

    def of(self, wanted: Callable[[Parameter], bool]) -> "tuple[Alike, ...]":
        """See `Block.of`."""
        return (self,) if wanted(self.parameter) else ()

    def tensors(self, layers: int, numbers: int) -> Iterator[tuple[Parameter, int]]:
        """See `Block.tensors`."""
        for number in self.numbers:
            yield self.parameter.one(number + numbers, self.first_layer + layers), self.numel


@dataclass(frozen=True)
class Block:
    """Tensors in a row, and the same ones of other layers, or of the weights so many numbers on."""

    parts: "tuple[Alike | Block, ...]"
    repeats: range = range(1)
    layers: int = 0
    """From a repetition to the next one."""
    numbers: int = 0

    @property
    def flat(self) -> tuple[Alike, ...]:
        """Its parts, where none is a block itself."""
        return cast(tuple[Alike, ...], self.parts)

    @cached_property
    def sizes(self) -> dict[int, int]:
        """How many tensors have so many elements."""
        times = len(self.repeats)
        return {numel: times * count for numel, count in sizes(self.parts).items()}

    def of(self, wanted: Callable[[Parameter], bool]) -> "tuple[Block, ...]":
        """It with some parameters alone; nothing if it has none of them."""
        parts = those(self.parts, wanted)
        if not parts:
            return ()
        return (self,) if parts == self.parts else (Block(parts, self.repeats, self.layers, self.numbers),)

    def tensors(self, layers: int = 0, numbers: int = 0) -> Iterator[tuple[Parameter, int]]:
        """Each weight and the elements of its tensor, so many layers and numbers on."""
        for repeat in self.repeats:
            for part in self.parts:
                yield from part.tensors(layers + repeat * self.layers, numbers + repeat * self.numbers)


def those[Part: Alike | Block](parts: Iterable[Part], wanted: Callable[[Parameter], bool]) -> tuple[Part, ...]:
    """What there is of some parameters."""
    return cast(tuple[Part, ...], tuple([found for part in parts for found in part.of(wanted)]))


def sizes(parts: Iterable[Alike | Block]) -> dict[int, int]:
    """How many tensors have so many elements."""
    found: dict[int, int] = {}
    for part in parts:
        for numel, count in part.sizes.items():
            found[numel] = found.get(numel, 0) + count
    return found


def weights(chunk: Chunk) -> list[Block]:
    """Those of a model chunk, in the order Megatron registers them."""
    found = []
    for _, group in groupby(chunk.stretches, lambda each: (each.layers, [id(unit.tape) for unit in each.units])):
        (units, times, layers), *others = group
        parts = [
            Alike(parameter, range(parameter.copies or 1), parameter.numel, unit.first_layer)
            for unit in units
            for parameter in unit.tape.parameters
        ]
        found.append(Block(tuple(parts), range(times + sum([other.times for other in others])), layers))
    return found


def elements(blocks: Iterable[Block]) -> int:
    """Of all tensors.

    Raises:
        InputError: they are more than an integer of 64 bits can count.
    """
    found = sum([numel * count for numel, count in sizes(blocks).items()])
    if found > _MOST_ELEMENTS:
        raise InputError(f"{found} weights on a rank are more than labkit counts ({_MOST_ELEMENTS}); use smaller sizes")
    return found


class Act(NamedTuple):
    """What is done to each of some tensors in turn."""

    verb: Literal["open", "close"]
    name: str
    dtype: str
    lifetime: Lifetime = "transient"


class About(NamedTuple):
    """What a ledger says of a tensor."""

    tensor: str
    shape: Shape
    module: str
    kind: str
    layer: int | None
    lifetime: Lifetime


@dataclass(frozen=True)
class Tensors:
    """Tensors of one kind, each of one weight."""

    blocks: Sequence[Block]
    about: Callable[[Parameter, int, Act], About]
    """Of the tensor of a weight, with so many elements, that an act opens."""

    @cached_property
    def sizes(self) -> dict[int, int]:
        """How many have so many elements."""
        return sizes(self.blocks)

    @cached_property
    def each(self) -> list[tuple[Parameter, int]]:
        """Each weight and the elements of its tensor: steps go through them again and again."""
        return [each for block in self.blocks for each in block.tensors()]
