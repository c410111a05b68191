"""The order of a pipeline rank's forward and backward passes (Megatron Core `pipeline_parallel/schedules.py`)."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from labkit.workload import Workload


class Pass(NamedTuple):
    """One pass of one model chunk; `prefetch` only receives the input of its forward.

    The rest is what variables of the schedule keep. Without chunks: `keep last input` what the last backward's graph
    began with, until the next forward returns. With them: `keep output` what the chunk has sent, `keep gradient`
    what is received ahead of the chunk's backward, until `free ...`; `keep input` an input and its gradient until the
    schedule returns. `free last gradient`: what the last backward received goes.
    """

    phase: Literal[
        "forward",
        "backward",
        "prefetch",
        "keep output",
        "free output",
        "keep input",
        "keep gradient",
        "free gradient",
        "free last gradient",
        "keep last input",
        "free last input",
    ]
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
    if last:
        yield from _interleaved(workload, stage, table, warmup)
        return
    for position, (microbatch, chunk) in enumerate(table):
        yield Pass("forward", chunk, microbatch)
        if position > warmup and stage:
            yield Pass("free last input", chunk, microbatch)
        if position >= warmup:
            yield next(backwards)
            if stage and position + 1 < len(table):
                # `output_tensor` still names the output of the backward that is over, until `forward_step` returns.
                yield Pass("keep last input", chunk, microbatch)
    yield from backwards


def _interleaved(workload: Workload, stage: int, table: list[tuple[int, int]], warmup: int) -> Iterator[Pass]:
    """The passes where model chunks interleave, with `overlap_p2p_comm`."""
    chunks, ends_here = workload.parallelism.vpp, stage == workload.parallelism.pp - 1
    waiting = _input_of_warmup(stage, table, warmup)
    backwards = [Pass("backward", chunks - 1 - chunk, microbatch) for microbatch, chunk in table]
    for position in range(len(table) + warmup):
        sent = None
        if position < len(table):
            microbatch, chunk = table[position]
            yield Pass("forward", chunk, microbatch)
            if position >= warmup and not (ends_here and chunk == chunks - 1):
                # Freed before the next forward, or when no forward is left (`pp_pre_forward`).
                sent = Pass("keep output", chunk, microbatch)
                yield sent
            yield from _prefetch(stage, table[position + 1 : position + 2])
        if position >= warmup:
            yield from _backward(backwards[position - warmup :], last_chunk=chunks - 1 if ends_here else None)
        if sent is not None:
            yield sent._replace(phase="free output")
        if waiting is not None and position == waiting[0]:
            yield waiting[1]


def _prefetch(stage: int, following: list[tuple[int, int]]) -> Iterator[Pass]:
    """The next input is asked for before the backward; the model's first chunk receives none."""
    for microbatch, chunk in following:
        if (stage, chunk) != (0, 0):
            yield Pass("prefetch", chunk, microbatch)


def _backward(left: list[Pass], last_chunk: int | None) -> Iterator[Pass]:
    """The first of the backwards `left`, and the gradient it asks for ahead of the next (`pp_post_backward`).

    `last_chunk` is the model's last one, where it is on this stage: it receives no gradient.
    """
    now, *later = left
    yield now._replace(phase="free gradient")
    yield now
    for following in later[:1]:
        if following.chunk != last_chunk:
            yield following._replace(phase="keep gradient")
    yield now._replace(phase="free last gradient")


def _input_of_warmup(stage: int, table: list[tuple[int, int]], warmup: int) -> tuple[int, Pass] | None:
    """When what the last warm-up forward received is kept by its variable alone, and the note of it.

    `input_tensor` is not assigned again: it keeps the input, and so its gradient. Until then the pass or, until the
    chunk's next forward, the module keeps them too.
    """
    if warmup >= len(table) or (stage, table[warmup][1]) == (0, 0):
        return None
    microbatch, chunk = table[warmup]
    later = [position for position in range(warmup + 1, len(table)) if table[position][1] == chunk]
    if not later:
        return None
    last = max(of_chunk for _, of_chunk in table)
    backward = next(at for at, each in enumerate(table) if each == (microbatch, last - chunk)) + warmup
    return max(later[0], backward), Pass("keep input", chunk, microbatch)


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
