"""The driver's own side: starts a cell's ranks, waits, and makes one measurement of their reports. Imports no torch."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import ValidationError

from labkit.drivers.contract import Failure, Measurement, Outcome, RankRecord, Unfinished
from labkit.drivers.cuda.machine import allocated_nodes, cuda_versions, installed_gpus
from labkit.drivers.cuda.report import Exits, Fault, Report, Request, progress_path
from labkit.drivers.environment import variables
from labkit.drivers.process import own_module
from labkit.errors import WorkError
from labkit.files import temporary_folder
from labkit.workload import Workload

PhaseCallback = Callable[[int, str], None]

_POLL_SECONDS = 0.1
_PORT = 29400
"""Where ranks of several nodes meet on the first: torchrun's own default."""
_TERA = 1e12
_LAST_BYTES = 2**16
_MOST_TELLING: tuple[Outcome, ...] = (
    "oom",
    "cuda_error",
    "non_finite",
    "wrong_world_size",
    "unsupported",
    "rank_died",
    "failed",
    "collective_timeout",
)
"""How one rank may end, the cause first: where it fails, the others lose it or wait for it."""


class Measured(NamedTuple):
    """What a run on GPUs comes to; which tensors were held is not known."""

    measurement: Measurement
    ledger: None = None


@dataclass(frozen=True)
class Plan:
    """How a cell is measured."""

    warmup: int = 3
    """Steps that are not timed."""
    steps: int = 10
    """Steps that are."""
    seconds: float = 1800.0
    """The longest that a cell may take, its start included."""
    collective_seconds: int = 300
    """The longest that a rank waits for the others."""
    snapshots: Path | None = None
    """Folder for memory snapshots: written after the last step, or where a rank failed."""


class CudaDriver:
    """Measures workloads on this machine's GPUs, one at a time, each by processes of its own.

    measurement = CudaDriver().run(workload).measurement
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        gpus: int | None = None,
        module: str = "labkit.drivers.cuda",
    ) -> None:
        """`gpus` are the machine's, unless said; `module` is what each rank runs."""
        self._plan = plan or Plan()
        self._gpus = len(installed_gpus()) if gpus is None else gpus
        self._nodes = allocated_nodes() or [""]
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, workload: Workload, on_phase: PhaseCallback | None = None) -> Measured:
        """Measure `workload`; a run that does not pass is a measurement too.

        Raises:
            Unfinished: this machine cannot run it: no GPU, another number of them, a workload that no trainer has.
        """
        self._check(workload)
        began = time.monotonic()
        several = workload.parallelism.world_size > self._gpus
        with temporary_folder("labkit-cuda-", Path.cwd() if several else None) as folder:
            ended = self._ranks(workload, folder, on_phase)
            return Measured(_measurement(workload, folder, ended, time.monotonic() - began))

    def close(self) -> None:
        """End what runs: `run` in another thread then returns what came of it."""
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGKILL)

    def _check(self, workload: Workload) -> None:
        world_size = workload.parallelism.world_size
        if not self._gpus:
            raise Unfinished(
                "this machine has no NVIDIA GPU; `labkit trace` shows the same workload without one",
                "unsupported",
                "start",
            )
        if world_size not in (self._gpus * nodes for nodes in range(1, len(self._nodes) + 1)):
            has = f"{self._gpus} GPUs" + (f" on each of {len(self._nodes)} nodes" if len(self._nodes) > 1 else "")
            fewer = (
                f"set CUDA_VISIBLE_DEVICES to {world_size} of them" if world_size < self._gpus else "trace it instead"
            )
            raise Unfinished(
                f"the workload has {world_size} ranks and this machine has {has}; {fewer}", "wrong_world_size", "start"
            )
        if workload.training.lora is not None:
            raise Unfinished(
                "runtime: lora is traced and priced, not measured; measure a workload of runtime: megatron",
                "unsupported",
                "start",
            )
        if workload.routing is not None and workload.routing.kind != "balanced":
            raise Unfinished(
                f"routing: a real router cannot be told to be {workload.routing.kind}; leave routing out, or balanced",
                "unsupported",
                "start",
            )

    def _ranks(self, workload: Workload, folder: Path, on_phase: PhaseCallback | None) -> Fault | None:
        """Run the ranks to their end; returns how they were ended if they were."""
        plan = self._plan
        if plan.snapshots is not None:
            plan.snapshots.mkdir(parents=True, exist_ok=True)
        Request(
            workload=workload.model_dump_json(exclude_unset=True),
            warmup=plan.warmup,
            steps=plan.steps,
            collective_seconds=plan.collective_seconds,
            snapshots=None if plan.snapshots is None else str(plan.snapshots.resolve()),
        ).write(Request.path(folder))
        command, environment = own_module("labkit.drivers.cuda.launch")
        nodes = workload.parallelism.world_size // self._gpus
        if nodes > 1:
            each = ["--nodes", str(nodes), "--ntasks", str(nodes), "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
            command = ["srun", *each, *command]
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
            environment.pop(name, None)  # the workload says these
        settings = workload.training.allocator.label
        with (folder / "launch.log").open("wb") as log:
            # A group of its own: Ctrl-C in a terminal reaches the user's process alone, which then ends it in order.
            self._process = subprocess.Popen(
                [*command, str(folder), self._module, str(self._gpus), str(nodes), f"{self._nodes[0]}:{_PORT}"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={
                    **environment,
                    **variables(workload),
                    **({} if settings == "default settings" else {"PYTORCH_CUDA_ALLOC_CONF": settings}),
                },
            )
        with self._process as process:
            try:
                return self._wait(process, folder, on_phase)
            finally:
                process.kill()  # its ranks leave with it

    def _wait(self, process: "subprocess.Popen[bytes]", folder: Path, on_phase: PhaseCallback | None) -> Fault | None:
        deadline = time.monotonic() + self._plan.seconds
        told = (0, "start")
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
            reached = _reached(folder, 0)
            if on_phase is not None and reached != told:
                on_phase(*reached)
            told = reached
            if process.returncode is not None:
                if process.returncode < 0:
                    name = _signal_name(-process.returncode)
                    return _fault("killed", told[1], f"its processes were ended from outside ({name})")
                return None
            if time.monotonic() > deadline:
                reason = f"it took more than {self._plan.seconds:g} s; give it a longer time limit"
                return _fault("timed_out", told[1], reason)


def measured(
    workload: Workload,
    plan: Plan,
    *,
    repetitions: int = 1,
    budget: float | None = None,
    on_phase: PhaseCallback | None = None,
) -> Iterator[Measurement]:
    """Measurements of `workload` on this machine's GPUs, until there are enough or `budget` seconds are over.

    The run that reaches the budget is ended there, as one that reaches its own limit is.

    Raises:
        Unfinished: see `CudaDriver.run`.
    """
    deadline = None if budget is None else time.monotonic() + budget
    for number in range(1, repetitions + 1):
        left = plan.seconds if deadline is None else min(plan.seconds, deadline - time.monotonic())
        if left <= 0:
            return
        snapshots = plan.snapshots
        if snapshots is not None and repetitions > 1:
            snapshots /= f"run-{number}"
        driver = CudaDriver(replace(plan, seconds=left, snapshots=snapshots))
        try:
            yield driver.run(workload, on_phase).measurement
        finally:
            driver.close()


def _fault(outcome: Outcome, phase: str, message: str, rank: int | None = None) -> Fault:
    return Fault(outcome=outcome, failure=Failure(phase=phase, message=message, rank=rank))


def _reached(folder: Path, rank: int) -> tuple[int, str]:
    """The iteration and phase that a rank noted last."""
    try:
        iteration, phase = progress_path(folder, rank).read_text(encoding="ascii").split()
        return int(iteration), phase
    except (OSError, ValueError):  # none yet, or half of one
        return 0, "start"


def _measurement(workload: Workload, folder: Path, ended: Fault | None, seconds: float) -> Measurement:
    """One measurement of all ranks' reports."""
    reports, faults = _reports(folder, workload.parallelism.world_size)
    fault = ended or min(faults, key=lambda fault: _MOST_TELLING.index(fault.outcome), default=None)
    record = _record(workload, reports, round(seconds, 3))
    if fault is None:
        try:
            return Measurement(outcome="ok", **record)
        except ValidationError as error:
            fault = _fault("failed", "report", error.errors()[0]["msg"])
    return Measurement(outcome=fault.outcome, failure=fault.failure, **record)


def _record(workload: Workload, reports: list[Report], seconds: float) -> dict[str, Any]:
    """What a measurement says, as far as the ranks came."""
    slowest = [max(times) for times in zip(*(report.step_seconds for report in reports), strict=False)]
    first = reports[0] if reports else None
    flops = first.flops if first is not None else None
    typical = median(slowest) if slowest else None
    devices = sorted({report.environment["device"] for report in reports if "device" in report.environment})
    return {
        "driver": "cuda",
        "workload": workload,
        "ranks": tuple(_rank(report) for report in reports if report.phases),
        "steady_iterations": len(slowest),
        "step_time_ms": None if typical is None else typical * 1e3,
        "step_times_ms": tuple(each * 1e3 for each in slowest),
        "tflops_per_gpu": None
        if not typical or not flops
        else flops / typical / workload.parallelism.world_size / _TERA,
        # Of the last stage's ranks, which have averaged theirs; norms are of all ranks together.
        "losses": next((report.losses for report in reports if report.losses), ()),
        "gradient_norms": next((report.gradient_norms for report in reports if report.gradient_norms), ()),
        "versions": {**cuda_versions(), **({} if first is None else first.versions)},
        "environment": {
            **({} if first is None else first.environment),
            "device": " and ".join(devices) or "none reached",
            "allocator": workload.training.allocator.label,
        },
        "source": "Megatron Core run on GPUs, PyTorch's allocator asked where each phase ends",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_seconds": seconds,
    }


def _rank(report: Report) -> RankRecord:
    return RankRecord(
        rank=report.rank,
        stages=() if report.stage is None else (report.stage,),
        parameters=report.parameters,
        parameter_bytes=report.parameter_bytes,
        phases=report.phases,
        between_steps_bytes=report.between_steps_bytes,
    )


def _reports(folder: Path, world_size: int) -> tuple[list[Report], list[Fault]]:
    """What the ranks said, and what went wrong, said or not."""
    reports: list[Report] = []
    faults: list[Fault] = []
    silent: list[int] = []
    for rank in range(world_size):
        try:
            report = Report.read(Report.path(folder, rank))
        except FileNotFoundError:
            silent.append(rank)
        except (OSError, WorkError) as error:
            faults.append(_fault("failed", _reached(folder, rank)[1], f"its report cannot be read: {error}", rank))
        else:
            if report.rank != rank or (report.fault is not None and report.fault.outcome not in _MOST_TELLING):
                other = "its report is of another rank, or of an end that no rank has"
                faults.append(_fault("failed", _reached(folder, rank)[1], other, rank))
                continue
            reports.append(report)
            faults += [] if report.fault is None else [report.fault]
    codes = {rank: code for rank, code in _exit_codes(folder).items() if rank in silent}
    if faults or set(codes.values()) > {-signal.SIGTERM}:
        # With this torchrun ends those that are left when one has failed.
        codes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM}
    died = [_died(folder, rank, code) for rank, code in codes.items()]
    if silent and not died and all(fault.outcome == "rank_died" for fault in faults):
        died = [_died(folder, silent[0], None)]
    # Of what ranks say that lost another: it is the other's fault.
    return reports, [*died, *(fault for fault in faults if not died or fault.outcome != "rank_died")]


def _exit_codes(folder: Path) -> dict[int, int]:
    codes: dict[int, int] = {}
    for path in sorted(folder.glob("exits-*.json")):
        with suppress(OSError, WorkError):  # a damaged one says nothing
            codes |= Exits.read(path).codes
    return codes


def _signal_name(number: int) -> str:
    """`SIGKILL`; of those without a name, as most real-time signals, the number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _died(folder: Path, rank: int, code: int | None) -> Fault:
    """A rank that wrote no report."""
    said = _last_words(folder, rank)
    phase = _reached(folder, rank)[1]
    if any("collective operation timeout" in line for line in said):  # `ProcessGroupNCCL`'s watchdog, which aborts
        return _fault("collective_timeout", phase, "a collective took longer than ranks may wait for each other", rank)
    how = "ended without a word"
    if code is not None:
        how = f"was killed ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
    last = f": {said[-1]}" if said and code != -signal.SIGKILL else ""
    return _fault("rank_died", phase, f"the process of rank {rank} {how}{last}"[:1000], rank)


def _last_words(folder: Path, rank: int) -> list[str]:
    """The last lines of a rank's standard error, or of torchrun's where no rank came to any."""
    logs = [*folder.glob(f"logs/*/attempt_*/{rank}/stderr.log"), folder / "launch.log"]
    for path in logs:
        try:
            text = path.read_bytes()[-_LAST_BYTES:].decode(errors="replace")
        except OSError:
            continue
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if lines:
            return lines
    return []
