"""What a recompute choice costs: the work backward does again, and a roofline of its time."""

from collections.abc import Iterable
from typing import NamedTuple

from labkit.memory.tape import Op
from labkit.memory.units import Chunk
from labkit.workload import Workload
from labkit.workload.gpu import GPUS


class Replay(NamedTuple):
    """Work replayed per step on one rank."""

    flops: int
    hbm_bytes: int
    """Read and written: every input, output and weight once."""
    communicated_bytes: int
    """Received from other ranks."""
    seconds: float
    """Lower bound: each operation at the slowest of compute, memory and NVLink, all at their data-sheet speeds."""


def replay(model: Iterable[Chunk], workload: Workload) -> Replay:
    """Cost of replaying the regions of a rank's model chunks once per micro-batch.

    A region inside another counts with the outer one alone.
    """
    gpu = GPUS[workload.training.gpu]
    flops = hbm = communicated = 0
    seconds = 0.0
    for unit in (unit for chunk in model for unit in chunk.units):
        for index in {index for region in unit.regions for index in range(region.first, region.last + 1)}:
            op = unit.tape.ops[index]
            traffic = _traffic(op)
            flops += op.flops
            hbm += traffic
            communicated += op.communicated_bytes
            seconds += max(
                op.flops / gpu.products.of(_operands(op), tf32=op.library != "aten_matmul") if op.flops else 0.0,
                traffic / gpu.hbm_bytes_per_second,
                op.communicated_bytes / gpu.nvlink_bytes_per_second,
            )
    times = workload.num_microbatches
    return Replay(flops * times, hbm * times, communicated * times, seconds * times)


def _operands(op: Op) -> str:
    """What its product runs in: not what it returns, but where the router's casts to fp64 are part of it."""
    return "fp64" if op.outputs[0].dtype == "fp64" else op.inputs[0].dtype


def _traffic(op: Op) -> int:
    """Bytes read and written: inputs, outputs and weights once each; none where all outputs are views of the inputs."""
    if all(value.base is not None for value in op.outputs) and not op.aliases:
        return 0
    tensors = sum(value.bytes for value in (*op.inputs, *op.outputs))
    weights = 0 if op.weight_gradient is None else op.weight_gradient.bytes * op.weights
    return tensors + weights
