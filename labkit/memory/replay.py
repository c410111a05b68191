"""What a recompute choice costs: the work backward does again, and a roofline of its time."""

from collections.abc import Iterable
from typing import NamedTuple

from labkit.memory.recompute import Region
from labkit.memory.tape import Op, Tape
from labkit.workload import Workload
from labkit.workload.gpu import GPUS


class Replay(NamedTuple):
    """Work replayed per step on one rank."""

    flops: int
    hbm_bytes: int
    """Read and written: every input and output once."""
    communicated_bytes: int
    seconds: float
    """Lower bound: each operation at the faster of compute and memory limits, communication at NVLink speed."""


def replay(tape: Tape, found: Iterable[Region], workload: Workload) -> Replay:
    """Cost of replaying the regions once per micro-batch.

    A region inside another counts with the outer one alone.
    """
    gpu = GPUS[workload.training.gpu]
    flops = hbm = communicated = 0
    seconds = 0.0
    for index in {index for region in found for index in range(region.first, region.last + 1)}:
        op = tape.ops[index]
        traffic = _traffic(op)
        flops += op.flops
        hbm += traffic
        communicated += op.communicated_bytes
        seconds += max(op.flops / gpu.bf16_flops, traffic / gpu.hbm_bytes_per_second)
        seconds += op.communicated_bytes / gpu.nvlink_bytes_per_second
    times = workload.num_microbatches
    return Replay(flops * times, hbm * times, communicated * times, seconds * times)


def _traffic(op: Op) -> int:
    tensors = sum(value.bytes for value in (*op.inputs, *op.outputs))
    return tensors + sum(buffer.bytes for buffer in op.temporaries)
