"""The order of a pipeline rank's forward and backward passes (Megatron Core `pipeline_parallel/schedules.py`)."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from labkit.workload import Workload


class Pass(NamedTuple):
    """One pass of one model chunk; `prefetch` only receives the input of its forward."""

    phase: Literal["forward", "backward", "prefetch"]
    chunk: int
    microbatch: int


def passes(workload: Workload, stage: int) -> Iterator[Pass]:
    """The passes of one step of pipeline rank `stage`, over `Workload.distinct_microbatches` micro-batches.

    Warm-up forwards, then one forward and one backward in turn, then the backwards that are left (1F1B); with model
    chunks in the order of `get_schedule_table`.
    """
    table = _table(workload)
    warmup = min(_warmup(workload, stage), len(table))
    last = workload.parallelism.vpp - 1
    backwards = (Pass("backward", last - chunk, microbatch) for microbatch, chunk in table)
    for position, (microbatch, chunk) in enumerate(table):
        yield Pass("forward", chunk, microbatch)
        if last and position + 1 < len(table) and (stage, table[position + 1][1]) != (0, 0):
            # `overlap_p2p_comm`: with model chunks the next input is asked for before the backward.
            following, of_chunk = table[position + 1]
            yield Pass("prefetch", of_chunk, following)
        if position >= warmup:
            yield next(backwards)
    yield from backwards


def _warmup(workload: Workload, stage: int) -> int:
    """Forwards before the first backward, less one (`get_pp_rank_microbatches`)."""
    layout = workload.parallelism
    behind = layout.pp - stage - 1
    return behind if layout.vpp == 1 else behind * 2 + (layout.vpp - 1) * layout.microbatch_group


def _table(workload: Workload) -> list[tuple[int, int]]:
    """(micro-batch, model chunk) of each forward, in order (`get_schedule_table`)."""
    layout, microbatches = workload.parallelism, workload.distinct_microbatches
    group = layout.microbatch_group
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(layout.vpp)
        for microbatch in range(first, min(first + group, microbatches))
    ]
