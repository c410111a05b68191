"""What a recompute choice costs: the work backward does again, and a roofline of its time."""

from collections.abc import Iterable
from typing import NamedTuple

from labkit.memory.tape import Op
from labkit.memory.units import Chunk, Unit
from labkit.workload import Workload
from labkit.workload.gpu import GPUS, Gpu


class Replay(NamedTuple):
    """Work replayed per step on one rank."""

    flops: int
    hbm_bytes: int
    """Read and written: every input, output and weight once."""
    communicated_bytes: int
    """Received from other ranks."""
    seconds: float
    """Lower bound: each operation at the slowest of compute, memory and NVLink, all at their data-sheet speeds."""

    def plus(self, other: "Replay", times: int) -> "Replay":
        """With another one, so many times."""
        return Replay(
            self.flops + other.flops * times,
            self.hbm_bytes + other.hbm_bytes * times,
            self.communicated_bytes + other.communicated_bytes * times,
            self.seconds + other.seconds * times,
        )


_NOTHING = Replay(0, 0, 0, 0.0)


def replay(model: Iterable[Chunk], workload: Workload) -> Replay:
    """Cost of replaying the regions of a rank's model chunks once per micro-batch.

    A region inside another counts with the outer one alone.
    """
    gpu, times = GPUS[workload.training.gpu], workload.num_microbatches
    total = _NOTHING
    for run in (run for chunk in model for run in chunk.runs):
        for unit in run.units:
            if unit.regions:
                total = total.plus(_of_unit(unit, gpu), run.times * times)
    return total


def run_once(model: Iterable[Chunk], workload: Workload) -> Replay:
    """Cost of the forward pass of a rank's model chunks, once per micro-batch."""
    gpu, times = GPUS[workload.training.gpu], workload.num_microbatches
    total = _NOTHING
    for run in (run for chunk in model for run in chunk.runs):
        for unit in run.units:
            for op in unit.tape.ops:
                total = total.plus(_of_operation(op, gpu), run.times * times)
    return total


def replayed_regions(model: Iterable[Chunk]) -> int:
    """How many regions of a rank's model chunks a micro-batch runs again."""
    return sum(len(unit.regions) * run.times for chunk in model for run in chunk.runs for unit in run.units)


def _of_unit(unit: Unit, gpu: Gpu) -> Replay:
    """Cost of a unit's regions, once; its tape keeps it."""
    found: dict[object, Replay] = unit.tape.sums
    key = "replay", unit.regions, gpu.name
    if key not in found:
        inside = {index for region in unit.regions for index in range(region.first, region.last + 1)}
        total = _NOTHING
        for index in sorted(inside):
            total = total.plus(_of_operation(unit.tape.ops[index], gpu), 1)
        found[key] = total
    return found[key]


def _of_operation(op: Op, gpu: Gpu) -> Replay:
    traffic = _traffic(op)
    seconds = max(
        op.flops / gpu.products.of(_operands(op), tf32=op.library != "aten_matmul") if op.flops else 0.0,
        traffic / gpu.hbm_bytes_per_second,
        op.communicated_bytes / gpu.nvlink_bytes_per_second,
    )
    return Replay(op.flops, traffic, op.communicated_bytes, seconds)


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
