"""What each rank runs (`labkit.drivers.cuda.__main__`).

Builds and steps the workload with the code a trace runs (`labkit.drivers.cell`) and reads the allocator where a phase
begins. Its report is there whole or not at all; a rank that writes none has died without a word.
"""

import argparse
import gc
import json
import math
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from megatron.core import parallel_state
from megatron.training.training import num_floating_point_operations

from labkit.drivers.arguments import megatron_arguments
from labkit.drivers.cell import Cell
from labkit.drivers.contract import Failure, NotFiniteError, PhasePeak
from labkit.drivers.cuda.device import Device
from labkit.drivers.cuda.faults import WorldSizeError, outcome_of, sentence_of
from labkit.drivers.cuda.report import Fault, Report, Request, progress_path
from labkit.drivers.step import TrainingStep
from labkit.drivers.watch import Watch
from labkit.workload import Workload


class Run:
    """One rank's measurement as it proceeds."""

    def __init__(self, folder: Path, device: Device) -> None:
        self.request = Request.read(Request.path(folder))
        self.rank = int(os.environ["RANK"])
        self.workload = Workload.unchecked(json.loads(self.request.workload))
        self._device = device
        self._folder = folder
        self._progress = progress_path(folder, self.rank).open("w", encoding="ascii")
        self._iteration, self._phase = 0, "start"
        self._peaks: dict[tuple[int, str], tuple[int, int]] = {}
        """Allocated and reserved, of each iteration and phase."""
        self._between_steps: int | None = None
        self._cell: Cell | None = None
        self._flops: int | None = None
        self._times: list[float] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._out_of_memory: dict[str, int] = {}

    def measure(self) -> bool:
        """Measure and write the report; returns whether the run passed."""
        fault = None
        try:
            self._measure()
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever it is, it is this run's outcome)
            fault = self._fault(error)
        if self.request.snapshots is not None:
            self._device.snapshot(Path(self.request.snapshots) / f"rank-{self.rank}.pickle")
        self._report(fault).write(Report.path(self._folder, self.rank))
        return fault is None

    def _measure(self) -> None:
        device, workload, request = self._device, self.workload, self.request
        if request.snapshots is not None:
            device.record_history()
        device.on_out_of_memory(self._ran_out)
        self._begin(0, "setup")
        found, wanted = int(os.environ["WORLD_SIZE"]), workload.parallelism.world_size
        if found != wanted:
            raise WorldSizeError(f"the workload has {wanted} ranks and {found} were started")
        device.join(timedelta(seconds=request.collective_seconds))
        arguments = megatron_arguments(workload, num_microbatches=workload.num_microbatches)
        arguments.distributed_timeout_minutes = request.collective_seconds / 60  # of Megatron's own groups
        # A balanced plan can be forced; without a plan the router sends as it does.
        arguments.moe_router_force_load_balancing |= workload.routing is not None
        # As a trace does it, so that what reference cycles hold dies at the same moments.
        gc.disable()
        self._cell = Cell(workload, arguments, Watch())
        self._flops = _flops(arguments, workload)
        step = self._cell.step(self._begin)
        assert isinstance(step, TrainingStep)
        for iteration in range(1, request.warmup + request.steps + 1):
            gc.collect()
            if (
                arguments.cuda_graph_impl == "transformer_engine"
                and step.iteration == arguments.cuda_graph_warmup_steps
            ):
                step.capture()
            self._take(step, timed=iteration > request.warmup)
        self._end()

    def _take(self, step: TrainingStep, *, timed: bool) -> None:
        """One step, and its figures."""
        self._device.synchronize()
        began = time.perf_counter()
        loss = step.run()
        self._device.synchronize()
        if timed:
            self._times.append(time.perf_counter() - began)
        for noted, name, found in ((self._losses, "loss", loss), (self._norms, "gradient norm", step.gradient_norm)):
            if found is not None:
                self._note(noted, name, float(found))

    def _note(self, noted: list[float], name: str, value: float) -> None:
        if not math.isfinite(value):
            raise NotFiniteError(f"the {name} of step {self._iteration} is {value}")
        noted.append(value)

    def _begin(self, iteration: int, phase: str) -> None:
        """A phase begins, and with it the peak of the next one; several micro-batches come back to the same phases."""
        self._end()
        if iteration > self._iteration:
            self._between_steps = self._device.allocated_bytes
        self._iteration, self._phase = iteration, phase
        self._progress.seek(0)
        self._progress.write(f"{iteration} {phase:40}\n")
        self._progress.flush()
        self._device.begin_peak()

    def _end(self) -> None:
        if self._phase == "start":
            return
        key, device = (self._iteration, self._phase), self._device
        before = self._peaks.get(key, (0, 0))
        self._peaks[key] = max(before[0], device.peak_allocated_bytes), max(before[1], device.peak_reserved_bytes)

    def _ran_out(self, requested: int) -> None:
        device = self._device
        self._out_of_memory = {
            "requested_bytes": requested,
            "allocated_bytes": device.allocated_bytes,
            "reserved_bytes": device.reserved_bytes,
            "free_bytes": device.free_bytes,
        }

    def _fault(self, error: BaseException) -> Fault:
        """How the run ended, from what was raised; the phase it was in counts as far as it came."""
        self._end()
        outcome = outcome_of(error)
        details = self._out_of_memory if outcome == "oom" else {}
        failure = Failure(phase=self._phase, message=sentence_of(error), rank=self.rank, **details)
        return Fault(outcome=outcome, failure=failure)

    def _report(self, fault: Fault | None) -> Report:
        cell = self._cell
        return Report(
            rank=self.rank,
            stage=None if cell is None else parallel_state.get_pipeline_model_parallel_rank(),
            parameters=None if cell is None else cell.parameters,
            parameter_bytes=None if cell is None else cell.parameter_bytes,
            phases=tuple(
                PhasePeak(
                    iteration=iteration, phase=phase, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved
                )
                for (iteration, phase), (allocated, reserved) in self._peaks.items()
            ),
            between_steps_bytes=self._between_steps,
            step_seconds=tuple(self._times),
            losses=tuple(self._losses),
            gradient_norms=tuple(self._norms),
            flops=self._flops,
            versions=self._device.versions,
            environment={
                "device": f"{self._device.name}, {self._device.total_bytes / 2**30:.2f} GiB",
                "routing": "forced to be even" if self.workload.routing is not None else "the router's own",
                "garbage collection": "between steps",
                **_variables(),
            },
            fault=fault,
        )


def _flops(arguments: argparse.Namespace, workload: Workload) -> int:
    """Of one step on all ranks, as Megatron-LM's log counts them."""
    known = argparse.Namespace(**{**vars(arguments), "padded_vocab_size": workload.padded_vocab_size})
    return int(num_floating_point_operations(known, arguments.global_batch_size))


def _variables() -> dict[str, str]:
    """Variables that decide memory or speed, as this process has them."""
    telling = re.compile(r"(NVTE|NCCL|CUDA|CUBLAS|TORCH|TORCHINDUCTOR|TRITON|PYTORCH)_\w+")
    return {name: value for name, value in sorted(os.environ.items()) if telling.fullmatch(name)}


def main(folder: Path, device: Callable[[], Device]) -> None:
    """Measure and leave, at once: what Megatron and NCCL take down can hang where ranks have failed."""
    passed = Run(folder, device()).measure()
    os._exit(0 if passed else 1)
