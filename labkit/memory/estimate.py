"""`estimate`: what one rank holds, in closed form, explained row by row; no GPU, no torch."""

from functools import cached_property
from typing import Literal

from labkit.allocator import simulate
from labkit.ledger import Ledger
from labkit.memory.book import Book
from labkit.memory.replay import Replay, replay
from labkit.memory.state import State
from labkit.memory.units import chunks, loss_chunk, parameters
from labkit.memory.writer import Writer
from labkit.summary import Result, Summary
from labkit.workload import Workload

ITERATIONS = 2
"""The first step lacks optimizer moments and library workspaces; the second is steady."""


class Estimate(Result):
    """An estimated ledger of rank 0, and what its recompute choice replays."""

    certainty: Literal["estimated"] = "estimated"

    @cached_property
    def replay(self) -> Replay:
        """Work that backward repeats each step."""
        return replay(chunks(self.workload), self.workload)

    @cached_property
    def ranged(self) -> Summary:
        """The summary with the peak's range over what the workload does not state: several more estimates."""
        from labkit.memory.ranges import ranged

        return ranged(self)

    def __rich__(self) -> Summary:
        return self.ranged

    def _repr_html_(self) -> str:
        return self.ranged._repr_html_()


def estimate(workload: Workload) -> Estimate:
    """Estimate what rank 0 of `workload` holds over two training steps, balanced routing assumed.

    Every layer is played forward and backward in Megatron's order (`labkit.memory.units`), and the allocations
    go through the caching allocator's rules (`labkit.allocator`) to count blocks as a GPU would.

    Known limitations: workspaces inside cuDNN kernels and NCCL buffers are not priced; compiled regions
    (`jit_fuser`) are taken to keep no intermediate.

    >>> from labkit.workload import Workload
    >>> round(estimate(Workload.load("data/workloads/moonlight-16b.yaml")).peak_allocated_bytes / 2**30)
    34
    """
    model = chunks(workload)
    loss = loss_chunk(workload) if workload.training.runtime == "lora" else None
    book = Book()
    writer = Writer(book)
    state = State(parameters(model), workload)
    book.enter(0, "setup")
    state.set_up(book)
    for iteration in range(1, ITERATIONS + 1):
        state.zero_gradients(book)
        for _ in range(workload.distinct_microbatches):
            book.enter(iteration, "forward")
            outputs = writer.forward(model[0], 0, 0)
            book.enter(iteration, "backward")
            gradient = -1
            if loss is not None:
                writer.forward(loss, 1, 0, outputs)
                gradient = writer.backward(loss, 1, 0)
            writer.backward(model[0], 0, 0, gradient)
            writer.caller_lets_go(1)
        if workload.training.steps_optimizer:
            book.enter(iteration, "grad_sync")
            state.sync_gradients(book)
            book.enter(iteration, "optimizer")
            state.step(book)
    simulated = simulate(book.events)
    rows = list(book.rows(0, simulated.block_bytes))
    return Estimate(
        workload, Ledger(rows, book.moments), rank=0, peak_reserved_bytes=max(level for _, level in simulated.reserved)
    )
