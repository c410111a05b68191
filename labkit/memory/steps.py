"""Two training steps of a pipeline rank, in Megatron's order, for whoever keeps the books of them."""

from typing import Protocol

from labkit.memory.schedule import passes
from labkit.memory.units import Chunk
from labkit.workload import Workload

ITERATIONS = 2
"""The first step lacks optimizer moments and library workspaces; the second is steady."""


class Books(Protocol):
    """What happens in a step; chunks are named by index, micro-batches from 0."""

    def enter(self, iteration: int, phase: str) -> None:
        """A phase of `labkit.ledger.PHASES` begins."""

    def set_up(self) -> None:
        """Model, gradient buffers and optimizer are built."""

    def zero_gradients(self) -> None:
        """A step begins."""

    def prefetch(self, chunk: Chunk) -> None:
        """The input of the next forward, which is this model chunk's, is received ahead of it."""

    def forward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Forward pass of a model chunk."""

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""

    def caller_lets_go(self) -> None:
        """The caller of the model drops what it has kept."""

    def sync_gradients(self) -> None:
        """Gradients are reduced."""

    def step(self) -> None:
        """The optimizer steps."""


def run_steps(workload: Workload, stage: int, model: list[Chunk], loss: Chunk | None, books: Books) -> None:
    """Take `ITERATIONS` steps (`megatron.training.training.train_step`); `loss`: of a caller outside the model."""
    books.enter(0, "setup")
    books.set_up()
    for iteration in range(1, ITERATIONS + 1):
        books.zero_gradients()
        for phase, chunk, microbatch in passes(workload, stage):
            if phase == "prefetch":
                books.prefetch(model[chunk])
                continue
            books.enter(iteration, phase)
            if phase == "forward":
                books.forward(model[chunk], chunk, microbatch)
            elif loss is None:
                books.backward(model[chunk], chunk, microbatch)
            else:
                books.forward(loss, len(model), microbatch)
                books.backward(loss, len(model), microbatch)
                books.backward(model[chunk], chunk, microbatch)
                books.caller_lets_go()
        books.caller_lets_go()
        if workload.training.steps_optimizer:
            books.enter(iteration, "grad_sync")
            books.sync_gradients()
            books.enter(iteration, "optimizer")
            books.step()
