"""Two training steps of a pipeline rank, in Megatron's order, for whoever keeps the books of them."""

from collections.abc import Iterable
from typing import Protocol

from labkit.memory.schedule import passes
from labkit.memory.script import CALLER, CALLERS
from labkit.memory.units import Chunk
from labkit.workload import Workload

ITERATIONS = 2
"""The first step lacks optimizer moments and library workspaces; the second is steady."""


PREFETCHED = "prefetched"
"""What a variable of the schedule keeps until a forward takes it: the input received ahead of that forward."""


class Books(Protocol):
    """What happens in a step; chunks are named by index, micro-batches from 0."""

    def enter(self, iteration: int, phase: str) -> None:
        """A phase of `labkit.ledger.PHASES` begins."""

    def set_up(self) -> None:
        """Model, gradient buffers and optimizer are built."""

    def zero_gradients(self) -> None:
        """A step begins."""

    def keep(self, chunk: Chunk, what: str, count: int) -> None:
        """A variable of the schedule keeps `count` tensors of the residual stream at an end of the chunk."""

    def free(self, what: str) -> None:
        """The variable lets go of them, if it kept any."""

    def forward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Forward pass of a model chunk."""

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""

    def caller_lets_go(self, keys: Iterable[str] = CALLERS) -> None:
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
            if phase == "forward":
                books.enter(iteration, phase)
                books.free(PREFETCHED)
                books.forward(model[chunk], chunk, microbatch)
            elif phase == "backward":
                books.enter(iteration, phase)
                _backward(model[chunk], chunk, microbatch, loss, len(model), books)
            else:
                _schedule_keeps(phase, model[chunk], books)
        if workload.training.steps_optimizer:
            books.enter(iteration, "grad_sync")
            # The schedule does it: its variables are still there.
            books.sync_gradients()
        books.free("input")
        books.caller_lets_go()
        if workload.training.steps_optimizer:
            books.enter(iteration, "optimizer")
            books.step()


def _schedule_keeps(what: str, chunk: Chunk, books: Books) -> None:
    match what:
        case "prefetch":
            books.keep(chunk, PREFETCHED, 1)
        case "keep output":
            books.keep(chunk, "output", 1)
        case "free output":
            books.free("output")
        case "keep gradient":
            books.keep(chunk, "gradient", 1)
        case "free gradient":
            books.free("gradient")
        case "free last gradient":
            books.caller_lets_go((CALLER,))
        case "keep input":
            books.keep(chunk, "input", 2)
        case "keep last input":
            books.keep(chunk, "last input", 1)
        case "free last input":
            books.free("last input")


def _backward(chunk: Chunk, index: int, microbatch: int, loss: Chunk | None, loss_index: int, books: Books) -> None:
    if loss is None:
        books.backward(chunk, index, microbatch)
        return
    books.forward(loss, loss_index, microbatch)
    books.backward(loss, loss_index, microbatch)
    books.backward(chunk, index, microbatch)
    books.caller_lets_go()
