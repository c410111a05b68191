"""Two training steps of a pipeline rank, in Megatron's order, for whoever keeps the books of them."""

from collections.abc import Iterable
from typing import Protocol

from labkit.memory.schedule import Boundary, passes
from labkit.memory.script import CALLER, CALLERS
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

    def count_tokens(self, begins: bool) -> None:
        """A schedule begins or returns, which counts tokens in a scalar (`total_num_tokens`)."""

    def keep(self, chunk: Chunk, tensor: Boundary) -> None:
        """Variables of the schedule keep a tensor at an end of the chunk."""

    def free(self, tensor: Boundary) -> None:
        """They let go of it."""

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
        books.enter(iteration, "forward")
        if workload.training.runtime == "megatron":
            books.count_tokens(begins=True)
        for phase, index, microbatch, tensor in passes(workload, stage):
            chunk = model[index]
            if tensor is not None:
                if phase == "keep":
                    books.keep(chunk, tensor)
                else:
                    books.free(tensor)
            elif phase == "forward":
                books.enter(iteration, phase)
                books.forward(chunk, index, microbatch)
            elif phase == "backward":
                books.enter(iteration, phase)
                _backward(chunk, index, microbatch, loss, len(model), books)
                books.caller_lets_go((CALLER,))
            elif workload.training.steps_optimizer:
                books.enter(iteration, phase)
                books.sync_gradients()
        if workload.training.runtime == "megatron":
            books.count_tokens(begins=False)
        books.caller_lets_go()
        if workload.training.steps_optimizer:
            books.enter(iteration, "optimizer")
            books.step()


def _backward(chunk: Chunk, index: int, microbatch: int, loss: Chunk | None, loss_index: int, books: Books) -> None:
    if loss is None:
        books.backward(chunk, index, microbatch)
        return
    books.forward(loss, loss_index, microbatch)
    books.backward(loss, loss_index, microbatch)
    books.backward(chunk, index, microbatch)
    books.caller_lets_go()
