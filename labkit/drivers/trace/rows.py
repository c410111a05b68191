"""From the tracker's books to the ledger: what holds each allocation, and for how long it is meant to."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from labkit.allocator import Simulated
from labkit.drivers.trace import cublas
from labkit.drivers.trace.origin import OUTSIDE
from labkit.drivers.trace.tracker import Allocation
from labkit.ledger import Lifetime, Moment, Row
from labkit.workload import Workload
from labkit.workload.model import LayerKind

BATCHES = ("get_batch", "get_batch_on_this_tp_rank")
"""The functions that make a batch (`labkit.drivers.step`, `megatron.core.utils`)."""
RECEIVED, RECEIVED_GRADIENT = "create_tensor_recv_prev", "create_tensor_recv_next"
"""What receives from the neighbouring pipeline stages (`p2p_communication`)."""

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
"""The ledger's names where they are not PyTorch's."""

_OF_THE_PROCESS = {"get_cublas_workspace": "", "get_tensor": "global_memory_buffer"}
"""Producers of what belongs to no module, and the path it has instead."""
_LIBRARIES = {cublas.PRODUCER, "get_dummy_wgrad", *_OF_THE_PROCESS}
"""Producers of what libraries keep for the process: workspaces of PyTorch's cuBLAS and of Transformer Engine's GEMMs
(`cpp_extensions.gemm`), its dummy weight gradients (`module.base`), Megatron's `GlobalMemoryBuffer`."""


class Name(NamedTuple):
    """What an allocation is known to hold: set by the driver for parameters, buffers and their like."""

    kind: str
    module: str
    tensor: str


def rows(
    workload: Workload,
    allocations: list[Allocation],
    moments: list[Moment],
    names: Mapping[int, Name],
    simulated: Simulated,
    rank: int,
) -> Iterator[Row]:
    """The ledger's rows, in order of birth."""
    layers = workload.model.layers
    horizons = _horizons(moments)
    starts = sorted(horizons)
    last = moments[-1].iteration
    first_step = next(moment.clock for moment in moments if moment.iteration == 1)
    steady = next(moment.clock for moment in moments if moment.iteration == last)
    horizon, ahead = None, iter(starts)
    upcoming = next(ahead, None)
    for allocation in allocations:
        while upcoming is not None and upcoming <= allocation.born:
            horizon, upcoming = horizons[upcoming], next(ahead, None)
        library = _of_a_library(allocation)
        known = names.get(allocation.serial)
        if known is None:
            kind = "library" if library else _kind(allocation, layers)
            known = Name(kind, *_place(allocation))
        yield Row(
            rank=rank,
            phase=allocation.phase,
            layer=_layer(known.module),
            kind=known.kind,
            module=known.module,
            tensor=known.tensor,
            shape=allocation.shape,
            dtype=_DTYPES.get(allocation.dtype, allocation.dtype),
            count=1,
            bytes=allocation.bytes,
            block_bytes=simulated.block_bytes[allocation.serial],
            lifetime="workspace" if library else _lifetime(allocation, horizon, first_step, steady, last),
            certainty="exact" if allocation.maker.producer == cublas.PRODUCER else "traced",
            recompute=None,
            born=allocation.born,
            dies=allocation.dies,
        )


def _place(allocation: Allocation) -> tuple[str, str]:
    """Module and tensor name. What a process has once does not belong to the module that needed it first."""
    module, producer = allocation.maker.module, allocation.maker.producer
    if producer in _OF_THE_PROCESS:
        return _OF_THE_PROCESS[producer], producer
    if producer == cublas.PRODUCER:
        return "", f"{producer} ({module})"
    if module == OUTSIDE:
        return allocation.phase if allocation.phase in ("grad_sync", "optimizer") else "", producer
    return module, producer


def _horizons(moments: list[Moment]) -> dict[int, int | None]:
    """Start of each stretch of a phase, and the clock that what it leaves for a later backward outlives, if any.

    That is the end of a stretch of forward. While backward runs, a pipeline stage may receive the input of a forward
    still to come: it outlives the end of that one.
    """
    horizons: dict[int, int | None] = {}
    forward_end: int | None = None
    for moment, following in reversed([*pairwise(moments)]):
        if moment.phase == "forward":
            forward_end = following.clock
        elif moment.phase != "backward":
            forward_end = None
        horizons[moment.clock] = forward_end
    return horizons


def _of_a_library(allocation: Allocation) -> bool:
    maker = allocation.maker
    # `RotaryEmbedding.forward` hides its table of angles in an lru_cache.
    cached_angles = maker.module.endswith(".rotary_pos_emb") and allocation.dies is None
    return maker.producer in _LIBRARIES or cached_angles


def _layer(path: str) -> int | None:
    parts = path.split(".")
    return int(parts[2]) if parts[:2] == ["decoder", "layers"] and len(parts) > 2 else None


_KIND_OF_BUILDING = {
    "initialize": "moe",
    "batch": "input",
    "model": "parameters",
    "gradient_buffers": "gradients",
    "optimizer": "optimizer",
}
"""What the stretches of setup make that has no name of its own (`labkit.drivers.trace.session`): initialising, the
scale of the router's loss."""


def _kind(allocation: Allocation, layers: tuple[LayerKind, ...]) -> str:
    if allocation.phase == "setup":
        return _KIND_OF_BUILDING[allocation.maker.module]
    if allocation.phase == "optimizer":
        return "optimizer"
    if allocation.phase == "grad_sync":
        return "gradients"
    if allocation.maker.module == OUTSIDE:
        if allocation.phase == "capture":
            return "graphs"
        if allocation.maker.producer in (RECEIVED, RECEIVED_GRADIENT):
            return "pipeline"
        return "input" if allocation.maker.producer in BATCHES else "head"
    first, *below = allocation.maker.module.split(".")
    layer = _layer(allocation.maker.module)
    if layer is not None and len(below) > 2:
        if below[2] in ("self_attention", "mixer"):
            return "attention"
        if below[2] == "mlp":
            return "moe" if layers[layer].mlp == "moe" else "mlp"
    # What a layer itself makes is the residual stream between its norms.
    return {"embedding": "embedding", "decoder": "norm"}.get(first, "head")


def _lifetime(allocation: Allocation, horizon: int | None, first_step: int, steady: int, last: int) -> Lifetime:
    born, dies = allocation.born, allocation.dies

    def alive_at(clock: int | None) -> bool:
        # What the first event of a phase frees is alive as it begins.
        return clock is not None and born < clock and (dies is None or dies >= clock)

    if allocation.phase == "setup":
        return "state" if alive_at(first_step) else "transient"
    if allocation.maker.producer == RECEIVED_GRADIENT:
        return "transient"
    if allocation.phase == "forward":
        if dies is None and allocation.iteration < last:
            return "state"
        return "retained" if alive_at(horizon) else "transient"
    if alive_at(steady):
        return "state"
    return "retained" if allocation.phase == "backward" and alive_at(horizon) else "transient"
