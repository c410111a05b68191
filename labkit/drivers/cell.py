"""A workload put together, ready to step: what the drivers that run Megatron do alike, in Megatron-LM's order.

Which device there is, and what is kept account of, is the driver's; a `Watch` sees each part as it comes.
"""

import argparse
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.optimizer import MegatronOptimizer

from labkit.drivers import build
from labkit.drivers.step import PhaseCallback, TrainingStep
from labkit.drivers.watch import Watch
from labkit.workload import Workload

if TYPE_CHECKING:
    from labkit.drivers.lora.tree import Tree


class Step(Protocol):
    """One training step of a rank, to be taken again and again. Iterations count from 1."""

    arguments: argparse.Namespace
    iteration: int

    def run(self) -> torch.Tensor | None:
        """Take one; returns the mean loss where there is one."""


class Cell:
    """A rank's model, buffers and optimizer, as Megatron-LM builds them of a workload's arguments."""

    def __init__(self, workload: Workload, arguments: argparse.Namespace, watch: Watch) -> None:
        self.workload = workload
        self.arguments = arguments
        self._watch = watch
        with watch.inside("initialize"):
            build.initialize_megatron(arguments)
        with watch.inside("model"):
            self.chunks: list[Any] = build.build_model(workload, arguments)
        self._tree = self._adapted()
        self.modules: list[torch.nn.Module] = [build.unwrapped(chunk) for chunk in self.chunks]
        watch.has_model(self.modules)
        self._wrapped = self.chunks
        self.optimizer: MegatronOptimizer | None = None
        if workload.training.steps_optimizer:
            with watch.inside("gradient_buffers"):
                self._wrapped = build.wrap(arguments, self.chunks)
            watch.has_buffers(self._wrapped)
            with watch.inside("optimizer"):
                self.optimizer = build.build_optimizer(arguments, self._wrapped)
                build.look_for_checkpoint(arguments, self.optimizer)

    def _adapted(self) -> "Tree | None":
        """The `lora` runtime's packed sequences, whose adapters are then in the model; None of another runtime."""
        if self.workload.training.lora is None:
            return None
        from labkit.drivers.lora.model import adapt
        from labkit.drivers.lora.tree import Tree

        with self._watch.inside("batch"):
            tree = Tree(self.workload, torch.device("cuda"))
        with self._watch.inside("model"):
            adapt(build.unwrapped(self.chunks[0]), self.workload.training.lora, tree)
        return tree

    def step(self, phase: PhaseCallback) -> Step:
        """The runtime's step, which tells `phase` where its phases begin."""
        with self._watch.inside("batch"):
            if self._tree is not None:
                from labkit.drivers.lora.step import LoraStep

                return LoraStep(self.workload, self.arguments, self._wrapped[0], self._tree, self.optimizer, phase)
            assert self.optimizer is not None
            return TrainingStep(self.workload, self.arguments, self._wrapped, self.optimizer, phase)

    @property
    def parameters(self) -> int:
        """Elements of the rank's parameters, frozen ones included."""
        return sum(parameter.numel() for parameter in self._parameters())

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the same."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self._parameters())

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]
