"""A rank's weights as columns: thousands of parameters are laid out, sharded and summed up in one go."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.errors import InputError
from labkit.ledger import Lifetime
from labkit.memory.tape import Parameter, Shape

_MOST_ELEMENTS = 2**56
"""Their bytes, with gradients and optimizer state, fit integers of 64 bits."""

type Integers = NDArray[np.int64]
type Booleans = NDArray[np.bool_]


class RunWeights(NamedTuple):
    """The parameters of a run of equal layers, or of a unit outside the layers."""

    parameters: list[list[Parameter]]
    """Of the units of each; those of one kind share a list."""
    first_layer: int
    """Decoder layer that layer 0 of the first is."""
    times: int
    layers: int
    """Decoder layers of each."""


class Weights:
    """Parameters of a rank's model chunks, in the order Megatron registers them."""

    def __init__(self, runs: Sequence[RunWeights]) -> None:
        self._runs = runs
        kinds = {id(parameters): parameters for run in runs for parameters in run.parameters}
        listed = [parameter for parameters in kinds.values() for parameter in parameters]
        elements = sum(run.times * sum(each.numel for part in run.parameters for each in part) for run in runs)
        if elements > _MOST_ELEMENTS:
            raise InputError(
                f"{elements} weights on a rank are more than labkit counts ({_MOST_ELEMENTS}); use smaller sizes"
            )
        begin, rows = 0, {}
        for key, parameters in kinds.items():
            rows[key] = np.arange(begin, begin + len(parameters))
            begin += len(parameters)
        index = np.concatenate(
            [np.arange(0), *(rows[id(each)] for run in runs for _ in range(run.times) for each in run.parameters)]
        )
        self.numel: Integers = np.array([each.numel for each in listed], dtype=np.int64)[index]
        self.expert = _column([each.expert for each in listed], index)
        """Reduced over the expert data-parallel group."""
        self.matrix = _column([len(each.shape) > 1 for each in listed], index)
        self.trainable = _column([each.trainable for each in listed], index)
        self.replicated = _column([each.replicated for each in listed], index)
        """Computed on a sequence shard but not sharded itself."""
        self.shared_embedding = _column([each.shared_embedding for each in listed], index)
        """Another pipeline stage has it too."""

    @cached_property
    def parameters(self) -> list[Parameter]:
        """Each by itself."""
        return list(self)

    def __iter__(self) -> Iterator[Parameter]:
        for run in self._runs:
            for number in range(run.times):
                first = run.first_layer + number * run.layers
                for parameters in run.parameters:
                    for parameter in parameters:
                        yield parameter.at_layer(first)


def _column(flags: list[bool], index: Integers) -> Booleans:
    return np.array(flags, dtype=np.bool_)[index]


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


class Tensors(NamedTuple):
    """Tensors of one kind, each of one parameter."""

    numel: Integers
    numbers: Integers
    """Of the parameters."""
    about: Callable[[int, int, Act], About]
    """Of the tensor of a parameter (its number), with so many elements, that an act opens."""
