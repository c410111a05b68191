"""A trace in this process: real Megatron Core and Transformer Engine steps over meta tensors, every storage booked."""

import gc
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from labkit.allocator import Simulated, simulate_training
from labkit.drivers.contract import Failure, Measurement, PhasePeak, RankRecord
from labkit.drivers.environment import variables
from labkit.drivers.trace import (
    compiled,
    compiled_layers,
    cuda_surface,
    flex_shapes,
    gradients,
    graphs,
    megatron_patches,
    offloading,
)
from labkit.drivers.trace.cublas import CublasWorkspaces
from labkit.drivers.trace.dispatchers import Dispatchers
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.host_values import HostValues
from labkit.drivers.trace.origin import Origin, tensor_paths
from labkit.drivers.trace.patches import installed
from labkit.drivers.trace.rows import Name, rows
from labkit.drivers.trace.surface import fake_cuda
from labkit.drivers.trace.tracker import StorageTracker
from labkit.drivers.trace.versions import trace_versions
from labkit.drivers.trace.work import WorkCounter, counted_by
from labkit.drivers.watch import Watch
from labkit.errors import WorkError
from labkit.ledger import Ledger
from labkit.workload import Routing, Workload
from labkit.workload.gpu import GIB, GPUS, MIB
from labkit.workload.training import Training

PhaseCallback = Callable[[int, str], None]

_STEPS_WITH_GRAPHS = 2
"""What the first one leaves is what later ones begin with."""
_calls = itertools.count()


class _Built(NamedTuple):
    """What is known of a rank when it has been built."""

    stage: int
    parameters: int
    """Elements."""
    parameter_bytes: int
    names: dict[int, Name]
    """Of allocations, by their serial."""
    passes_for_each: float
    """A step's micro-batches for each that was run."""


def trace_here(
    workload: Workload, rank: int = 0, iterations: int = 2, on_phase: PhaseCallback = lambda iteration, phase: None
) -> Trace:
    """Trace `iterations` steps of one rank in this process (see `fake_cuda` for what that leaves behind).

    Once a process: libraries keep workspaces and caches as long as it lives, and a second trace would miss them.

    Raises:
        InputError: Megatron refuses the workload.
        WorkError: this process has traced before, or has used the real Transformer Engine.
    """
    if next(_calls):
        raise WorkError("this process has traced before and holds its caches; use TraceServer, which forks for each")
    started = time.monotonic()
    gpu = GPUS[workload.training.gpu]
    workspaces, dispatchers = CublasWorkspaces(workload.training.workspaces.cublas), Dispatchers(workload)
    host_values = HostValues(lambda: tracker)
    mended: set[str] = set()
    origin = Origin(stream=graphs.Capture.stream)
    tracker = StorageTracker(
        origin,
        before=lambda operator: workspaces.before_operator(tracker, operator),
        instead={
            torch.ops.aten.add.Tensor: gradients.adder(host_values.computing(torch.ops.aten.add.Tensor)),
            **gradients.into_zeros(),
            **dispatchers.operators,
            **host_values.operators,
        },
        work=WorkCounter(origin, gpu, iteration=iterations),
    )

    def phase(iteration: int, name: str) -> None:
        on_phase(iteration, name)
        tracker.phase(iteration, name)

    with ExitStack() as stack:
        enter = stack.enter_context
        enter(fake_cuda(gpu))
        enter(installed(megatron_patches.stated_versions(workload.training.software)))
        if workload.training.runtime == "lora":
            enter(installed(flex_shapes.replacements()))
        if workload.training.compiles_layers:
            enter(installed(compiled_layers.replacements()))
        enter(installed(megatron_patches.sharing_storage(tracker.share)))
        enter(installed(dispatchers.replacements()))
        enter(installed(offloading.replacements(workload, mended)))
        enter(installed(graphs.replacements(tracker)))
        enter(installed(tracker.work.replacements()))
        enter(installed(megatron_patches.shared_expert_gates(tracker.origin)))
        enter(_process_group(workload, rank))
        enter(_manual_garbage_collection())
        enter(cuda_surface.CudaAsMeta())
        enter(tracker)
        enter(compiled.watched_by(tracker.fused))
        enter(counted_by(tracker.work))
        built = _run(workload, tracker, iterations, phase)
        # Before Megatron takes its groups and buffers down, which is no part of a step.
        return _trace(workload, rank, tracker, built, mended, time.monotonic() - started)


def check_here(workload: Workload) -> None:
    """Let Megatron's parser, validator and configuration look at what the workload says; builds nothing.

    Raises:
        InputError: they refuse it.
    """
    with fake_cuda(GPUS[workload.training.gpu]), _process_group(workload, 0):
        from labkit.drivers import build
        from labkit.drivers.arguments import megatron_arguments
        from labkit.drivers.options import refused, refusing

        arguments = megatron_arguments(workload, num_microbatches=workload.distinct_microbatches)
        with refusing(refused(workload)):
            build.transformer_config(workload, arguments)


@contextmanager
def _process_group(workload: Workload, rank: int) -> Iterator[None]:
    """A world of which only `rank` exists: collectives return at once."""
    world_size = workload.parallelism.world_size
    # Megatron asks the environment for the ranks of a node, and writes its choice of attention kernel there.
    environment, deterministic = dict(os.environ), torch.are_deterministic_algorithms_enabled()
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank), LOCAL_RANK="0", **variables(workload))
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        from megatron.training.training import destroy_global_state

        destroy_global_state()
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic)
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _manual_garbage_collection() -> Iterator[None]:
    """Tensors in reference cycles die when the collector runs: here, so that two traces are alike."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Naming(Watch):
    """Says of each part who made it, and gives the tensors of a built model their names."""

    def __init__(self, tracker: StorageTracker, fsdp: bool) -> None:
        self.names: dict[int, Name] = {}
        """Of allocations, by their serial."""
        self.paths: dict[torch.Tensor, str] = {}
        self._tracker = tracker
        self._fsdp = fsdp

    def inside(self, part: str) -> AbstractContextManager[object]:
        return self._tracker.origin.inside(part)

    def has_model(self, modules: list[torch.nn.Module]) -> None:
        for tensor, path in (named for module in modules for named in tensor_paths(module)):
            self.name(tensor, "parameters", path)
            if isinstance(tensor, torch.nn.Parameter):
                self.paths[tensor] = path  # a module may let go of a buffer

    def has_buffers(self, chunks: list[Any]) -> None:
        # Megatron-FSDP has other buffers, and optimizer state of sharded tensors.
        for path, buffer in () if self._fsdp else _buffers(chunks):
            if buffer.param_data is not None:
                self.name(buffer.param_data, "parameters", f"{path}.param_data")
            self.name(buffer.grad_data, "gradients", f"{path}.grad_data")

    def name(self, tensor: torch.Tensor, kind: str, path: str) -> None:
        """Name the allocations of a tensor, of each of its parts where it has parts."""
        if hasattr(tensor, "__tensor_flatten__"):
            for part in tensor.__tensor_flatten__()[0]:
                self.name(getattr(tensor, part), kind, f"{path}{part}")
            return
        allocation = self._tracker.allocation_of(tensor)
        if allocation is not None:
            module, _, attribute = path.rpartition(".")
            self.names[allocation.serial] = Name(kind, module, attribute)


def _run(workload: Workload, tracker: StorageTracker, iterations: int, phase: PhaseCallback) -> _Built:
    """Build and step."""
    from megatron.core import parallel_state

    from labkit.drivers.arguments import megatron_arguments
    from labkit.drivers.cell import Cell
    from labkit.drivers.trace.state_names import optimizer_tensors

    # As many micro-batches as show all that a step holds.
    microbatches = workload.distinct_microbatches
    arguments = megatron_arguments(workload, num_microbatches=microbatches)
    if arguments.cuda_graph_impl == "full_iteration":
        # A graph of a whole step has inputs of each (`StaticBufferLoader`).
        microbatches = workload.num_microbatches
        arguments = megatron_arguments(workload, num_microbatches=microbatches)
    if arguments.cuda_graph_impl == "full_iteration" or arguments.optimizer_cuda_graph:
        # Megatron counts the steps before it captures one.
        arguments.cuda_graph_warmup_steps = min(iterations, arguments.cuda_graph_warmup_steps)
    phase(0, "setup")
    naming = _Naming(tracker, arguments.use_megatron_fsdp)
    cell = Cell(workload, arguments, naming)
    with tracker.origin.watching(*cell.modules):
        _take(cell.step(phase), iterations, tracker)
    if cell.optimizer is not None and not arguments.use_megatron_fsdp:
        for path, tensor in optimizer_tensors(cell.optimizer, naming.paths):
            naming.name(tensor, "optimizer", path)
    return _Built(
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        parameters=cell.parameters,
        parameter_bytes=cell.parameter_bytes,
        names=naming.names,
        passes_for_each=workload.num_microbatches / microbatches,
    )


def _take(step: Any, iterations: int, tracker: StorageTracker) -> None:
    """Take the steps; where CUDA graphs are captured, those before it and then as many as show all with graphs.

    A replay starts no operators: the work is that of the last step before.
    """
    graphs_by, warmup = step.arguments.cuda_graph_impl, step.arguments.cuda_graph_warmup_steps
    captures = graphs_by != "none" or step.arguments.optimizer_cuda_graph
    if captures:
        # Megatron Core's own are captured in the first step.
        iterations = 1 if graphs_by == "local" else min(iterations, warmup)
        tracker.work.iteration = max(iterations, 1)
    for _ in range(iterations):
        gc.collect()
        step.run()
    if graphs_by == "transformer_engine":
        step.capture()
    for _ in range(_STEPS_WITH_GRAPHS if captures else 0):
        step.run()


def _buffers(wrapped: list[Any]) -> Iterator[tuple[str, Any]]:
    """Each contiguous buffer of the chunks and its path."""
    for number, chunk in enumerate(wrapped):
        for group in ("buffers", "expert_parallel_buffers"):
            for index, buffer in enumerate(getattr(chunk, group)):
                path = f"{group}.{index}"
                yield path if len(wrapped) == 1 else f"model_chunk{number}.{path}", buffer


def _trace(
    workload: Workload, rank: int, tracker: StorageTracker, built: _Built, mended: set[str], seconds: float
) -> Trace:
    streams = [allocation.maker.stream for allocation in tracker.allocations]
    simulated = simulate_training(tracker.events, streams, workload.training)
    ledger = Ledger(rows(workload, tracker.allocations, tracker.moments, built.names, simulated, rank), tracker.moments)
    phases = [
        PhasePeak(
            iteration=peak.iteration,
            phase=peak.phase,
            peak_allocated_bytes=peak.bytes,
            peak_reserved_bytes=_reserved_by(simulated, ledger.end(peak.iteration, peak.phase)),
        )
        for peak in ledger.phase_peaks()
    ]
    fragmentation = simulated.fragmentation(lambda event: tracker.allocations[tracker.events[event][0] - 1].phase)
    measurement = Measurement(
        driver="trace",
        workload=workload,
        outcome="ok",
        ranks=(
            RankRecord(
                rank=rank,
                stages=(built.stage,),
                parameters=built.parameters,
                parameter_bytes=built.parameter_bytes,
                phases=tuple(phases),
                between_steps_bytes=ledger.between_steps().total(),
                retained_bytes=ledger.retained().total(),
                work=tracker.work.rows(built.passes_for_each),
                out_of_memory=_out_of_memory(simulated, tracker, workload.training, rank),
            ),
        ),
        steady_iterations=ledger.steady_iteration() - 1,
        versions=trace_versions(),
        environment={
            "device": f"simulated {GPUS[workload.training.gpu].name}, tensors without data",
            "allocator": f"CUDACachingAllocator simulated, {workload.training.allocator.label}",
            "routing": (workload.routing or Routing()).kind,
            **({"mended": "; ".join(sorted(mended))} if mended else {}),
            **({"fragmentation": fragmentation} if fragmentation else {}),
        },
        source="Megatron Core and Transformer Engine run on tensors without data, every allocation booked",
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        wall_seconds=round(seconds, 3),
    )
    return Trace(
        workload, ledger, rank=rank, peak_reserved_bytes=_reserved_by(simulated, None), measurement=measurement
    )


def _out_of_memory(simulated: Simulated, tracker: StorageTracker, training: Training, rank: int) -> Failure | None:
    """What the rank's allocator asks for and the simulated GPU has not."""
    if simulated.out_of_memory is None:
        return None
    event, failed = simulated.out_of_memory
    asked, gpu_bytes = tracker.allocations[tracker.events[event][0] - 1], GPUS[training.gpu].total_memory_bytes
    requested, allocated, reserved = failed.requested_bytes, failed.allocated_bytes, failed.reserved_bytes
    may_have = training.allocator.per_process_memory_fraction * gpu_bytes
    return Failure(
        phase=asked.phase,
        message=(
            f"rank {rank} would run out of memory in {asked.phase} of iteration {asked.iteration}: it asks for "
            f"{requested / MIB:,.0f} MiB with {allocated / GIB:.2f} GiB allocated and {reserved / GIB:.2f} GiB "
            f"reserved of {may_have / GIB:.2f} GiB"
        ),
        rank=rank,
        requested_bytes=requested,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        free_bytes=gpu_bytes - reserved,
    )


def _reserved_by(simulated: Simulated, clock: int | None) -> int:
    """Reserved bytes just before `clock`, or in the end: they never shrink."""
    known = simulated.reserved if clock is None else [grown for grown in simulated.reserved if grown[0] < clock]
    return known[-1][1] if known else 0
