"""`estimate`: what one rank holds, in closed form, explained row by row; no GPU, no torch."""

from functools import cached_property
from typing import Literal

from labkit.allocator import simulate
from labkit.ledger import Ledger
from labkit.memory.layers.decoder import record
from labkit.memory.library import Libraries
from labkit.memory.recompute import regions
from labkit.memory.replay import Replay, replay
from labkit.memory.schedule import Book, Player
from labkit.memory.state import State
from labkit.summary import Result
from labkit.workload import Workload

ITERATIONS = 2
"""The first step lacks optimizer moments and library workspaces; the second is steady."""


class Estimate(Result):
    """An estimated ledger of rank 0, and what its recompute choice replays."""

    certainty: Literal["estimated"] = "estimated"

    @cached_property
    def replay(self) -> Replay:
        """Work that backward repeats each step."""
        tape = record(self.workload)
        return replay(tape, regions(tape, self.workload), self.workload)


def estimate(workload: Workload) -> Estimate:
    """Estimate what rank 0 of `workload` holds over two training steps, balanced routing assumed.

    Every layer is played forward and backward in Megatron's order (`labkit.memory.schedule`), and the allocations
    go through the caching allocator's rules (`labkit.allocator`) to count blocks as a GPU would.

    Known limitations: workspaces inside cuDNN kernels and NCCL buffers are not priced; compiled regions
    (`jit_fuser`) are taken to keep no intermediate.

    >>> from labkit.workload import Workload
    >>> round(estimate(Workload.load("data/workloads/moonlight-16b.yaml")).peak_allocated_bytes / 2**30)
    34
    """
    tape = record(workload)
    book = Book()
    state = State(tape.parameters, workload)
    player = Player(
        tape,
        regions(tape, workload),
        book,
        Libraries(book),
        fused_weight_gradients=workload.training.kernels.gradient_accumulation_fusion,
    )
    book.enter(0, "setup")
    state.set_up(book)
    for iteration in range(1, ITERATIONS + 1):
        state.zero_gradients(book)
        for _ in range(workload.distinct_microbatches):
            book.enter(iteration, "forward")
            player.forward()
            book.enter(iteration, "backward")
            player.backward()
        book.enter(iteration, "grad_sync")
        state.sync_gradients(book)
        book.enter(iteration, "optimizer")
        state.step(book)
    simulated = simulate(book.events)
    rows = list(book.rows(0, simulated.block_bytes))
    return Estimate(
        workload, Ledger(rows, book.moments), rank=0, peak_reserved_bytes=max(level for _, level in simulated.reserved)
    )
