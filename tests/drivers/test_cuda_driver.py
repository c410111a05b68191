"""The GPU driver on CPUs: torchrun, two processes, gloo, Megatron's own layers; all but the calls of `torch.cuda`."""

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from labkit.drivers.contract import Failure, Measurement, NotFiniteError, PhasePeak, Unfinished
from labkit.drivers.cuda import driver as cuda_driver
from labkit.drivers.cuda import machine
from labkit.drivers.cuda.driver import CudaDriver, Plan
from labkit.drivers.cuda.faults import WorldSizeError, outcome_of, sentence_of
from labkit.drivers.cuda.report import Exits, Fault, Report
from labkit.drivers.cuda.runs import Runs
from labkit.errors import InputError
from tests.drivers.test_real_cpu import RANKS, workload
from tests.small import selective

pytestmark = pytest.mark.slow

ONCE = workload(1, selective())
CELL = ONCE.model_copy(
    update={"batch": ONCE.batch.model_copy(update={"global_batch_size": 4 * ONCE.batch.micro_batch_size})}
)
"""Two data-parallel ranks, two micro-batches each."""
H200, A100 = "NVIDIA H200", "NVIDIA A100"
PHASES = ("forward", "backward", "grad_sync", "optimizer")
BEGUN = ("forward", "backward", *PHASES)
"""What begins in a step of two micro-batches, in order."""
WARMUP, STEPS = 1, 2


def driver(**plan: Any) -> CudaDriver:
    """Measures on this machine's CPUs as if they were GPUs."""
    stated: dict[str, Any] = {"warmup": WARMUP, "steps": STEPS, "seconds": 240.0, **plan}
    return CudaDriver(Plan(**stated), gpus=RANKS, module="tests.drivers.cpu_rank")


def failing(
    monkeypatch: pytest.MonkeyPatch, does: str, iteration: int = 2, phase: str = "backward", **plan: Any
) -> Measurement:
    """What is measured where rank 1 fails as a phase begins."""
    at = 1 + (iteration - 1) * len(BEGUN) + BEGUN.index(phase)
    monkeypatch.setenv("LABKIT_TEST_FAULT", json.dumps({"rank": 1, "at": at, "does": does}))
    return driver(**plan).run(CELL).measurement


def test_a_run_that_passes_fills_the_contract(tmp_path: Path) -> None:
    told: list[tuple[int, str]] = []
    measured = driver(snapshots=tmp_path).run(CELL, lambda *phase: told.append(phase))
    measurement = measured.measurement
    assert measurement.outcome == "ok", measurement.failure
    assert [record.rank for record in measurement.ranks] == [0, 1]
    for record in measurement.ranks:
        phases = [(phase.iteration, phase.phase) for phase in record.phases]
        assert phases == [(0, "setup"), *((step, name) for step in range(1, WARMUP + STEPS + 1) for name in PHASES)]
        assert record.parameters == 2 * 128 * 64 + 32 * 64 + 2 * 37_600 + 2 * 64, "both embeddings, layers, last norm"
        assert all(phase.peak_reserved_bytes == phase.peak_allocated_bytes + 2**20 for phase in record.phases)
    between = {record.rank: record.between_steps_bytes for record in measurement.ranks}
    assert between == {0: 962_504, 1: 962_488}, "with nothing of the micro-batches that follow"
    assert measurement.steady_iterations == len(measurement.step_times_ms) == STEPS
    assert measurement.step_time_ms == pytest.approx(sum(measurement.step_times_ms) / STEPS)
    assert len(measurement.losses) == len(measurement.gradient_norms) == WARMUP + STEPS
    assert all(0.5 * math.log(128) < loss < 1.5 * math.log(128) for loss in measurement.losses)
    assert Measurement.model_validate_json(measurement.model_dump_json(), strict=False) == measurement
    assert told, "progress is told"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.pickle", "rank-1.pickle"]


@pytest.mark.long
def test_out_of_memory_says_where_and_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = failing(monkeypatch, "oom")
    failure = measurement.failure
    assert failure is not None
    assert (measurement.outcome, failure.rank, failure.phase) == ("oom", 1, "backward")
    assert failure.message == "CUDA out of memory. Tried to allocate more than there is."
    assert failure.requested_bytes
    assert failure.allocated_bytes
    assert (failure.free_bytes, failure.reserved_bytes) == (8 * 2**30, failure.allocated_bytes + 2**20)
    assert measurement.peak_allocated_bytes is None, "how far it came is no peak"
    (evidence,) = [record for record in measurement.ranks if record.rank == 1]
    assert (evidence.phases[-1].iteration, evidence.phases[-1].phase) == (2, "backward")


@pytest.mark.faults
def test_a_rank_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = failing(monkeypatch, "killed")
    assert measurement.outcome == "rank_died"
    assert measurement.failure is not None
    assert (measurement.failure.rank, measurement.failure.phase) == (1, "backward")
    assert "rank 1" in measurement.failure.message


@pytest.mark.faults
@pytest.mark.parametrize(
    ("does", "outcome", "says"),
    [
        ("cuda_error", "cuda_error", "an illegal memory access was encountered"),
        ("not finite", "non_finite", "its loss or its gradients are not finite"),
        ("exits", "rank_died", "exit code 3: a library gave up"),
        ("hangs", "collective_timeout", "imed out"),
    ],
)
def test_each_end_is_an_outcome(monkeypatch: pytest.MonkeyPatch, does: str, outcome: str, says: str) -> None:
    measurement = failing(monkeypatch, does, phase="forward", collective_seconds=8)
    assert measurement.failure is not None
    assert (measurement.outcome, says in measurement.failure.message) == (outcome, True), measurement.failure


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["tests.drivers.cpu_rank", "labkit.drivers.cuda.launch"], ids=["rank", "torchrun"])
def test_whatever_is_killed_at_whatever_moment_is_an_outcome(monkeypatch: pytest.MonkeyPatch, victim: str) -> None:
    monkeypatch.setenv("LABKIT_TEST_RUN", victim)
    moments = random.Random(victim)  # noqa: S311 (moments, no secrets)
    outcomes: Counter[str] = Counter()
    typical = 15.0
    for _ in range(25):
        delay = moments.uniform(0, typical)
        killer = threading.Timer(delay, _kill_one, (victim, moments))
        killer.start()
        began = time.monotonic()
        measurement = driver().run(CELL).measurement
        killer.join()
        outcomes[measurement.outcome] += 1
        assert _gone(victim)
        if measurement.outcome == "ok":  # it was over, or there was nothing yet to kill
            typical = time.monotonic() - began
            continue
        assert measurement.failure is not None
        expected = "rank_died" if victim == "tests.drivers.cpu_rank" else "killed"
        assert measurement.outcome == expected, measurement.failure
    assert outcomes["ok"] < 20, outcomes


def _kill_one(victim: str, moments: random.Random) -> None:
    with suppress(IndexError, ProcessLookupError):
        os.kill(moments.choice(_processes(victim, victim)), signal.SIGKILL)


@pytest.mark.faults
def test_ranks_of_several_nodes_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(_SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cuda_driver, "allocated_nodes", lambda: ["localhost", "elsewhere"])
    plan = Plan(warmup=WARMUP, steps=STEPS, seconds=240.0)
    measurement = CudaDriver(plan, gpus=1, module="tests.drivers.cpu_rank").run(CELL).measurement
    assert measurement.outcome == "ok", measurement.failure
    assert [record.rank for record in measurement.ranks] == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["srun"]


_SRUN = """#!/bin/bash
# Both nodes are this one.
[ "$*" = "--nodes 2 --ntasks 2 --ntasks-per-node 1 --kill-on-bad-exit=1 ${*:8}" ] || exit 9
SLURM_NODEID=1 "${@:8}" <&0 & SLURM_NODEID=0 "${@:8}" <&0 & wait -n && wait -n
"""


@pytest.mark.faults
def test_a_cell_that_hangs_is_ended_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TEST_RUN", "hangs")
    measurement = failing(monkeypatch, "hangs", seconds=60.0)
    assert measurement.outcome == "timed_out"
    assert measurement.failure is not None
    assert measurement.failure.phase in PHASES
    assert _gone("hangs")


@pytest.mark.faults
def test_ranks_leave_with_their_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LABKIT_TEST_FAULT", json.dumps({"rank": 1, "at": 2, "does": "hangs"}))
    monkeypatch.setenv("LABKIT_TEST_RUN", "orphans")
    runner = subprocess.Popen([sys.executable, "-c", _RUNNER])
    while len(_ranks("orphans")) < RANKS:
        time.sleep(0.2)
    time.sleep(2)
    runner.kill()
    runner.wait()
    assert _gone("orphans")


_RUNNER = """
from tests.drivers.test_cuda_driver import CELL, driver
driver().run(CELL)
"""


def _ranks(run: str) -> list[int]:
    """The numbers of rank processes of a run."""
    return _processes("tests.drivers.cpu_rank", run)


def _processes(module: str, run: str) -> list[int]:
    """The numbers of the processes of a run that run a module."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = ((path / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        except OSError:
            continue
        if words[2:4] == [b"-m", module.encode()]:
            found += [int(path.name)] if f"LABKIT_TEST_RUN={run}".encode() in variables else []
    return found


def _gone(run: str) -> bool:
    """Whether all processes of a run end, soon."""
    deadline = time.monotonic() + 60
    while _ranks(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not _ranks(run)


@pytest.mark.parametrize(
    ("gpus", "outcome", "says"),
    [(0, "unsupported", "no NVIDIA GPU; `labkit trace`"), (8, "wrong_world_size", "2 ranks and this machine has 8")],
)
def test_what_cannot_run_is_said_before_anything_starts(gpus: int, outcome: str, says: str) -> None:
    with pytest.raises(Unfinished, match=says) as caught:
        CudaDriver(gpus=gpus).run(CELL)
    assert caught.value.outcome == outcome


@pytest.mark.parametrize(
    ("error", "outcome", "sentence"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to.\nSee"), "oom", "CUDA out of memory. Tried to."),
        (
            RuntimeError("CUDA error: misaligned address\nFor debugging"),
            "cuda_error",
            "RuntimeError: CUDA error: misaligned address",
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "cuda_error", None),
        (torch.distributed.DistBackendError("NCCL error\nncclInternalError: timed out"), "collective_timeout", None),
        (torch.distributed.DistBackendError("NCCL error: unhandled cuda error"), "failed", None),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:28901"),
            "rank_died",
            None,
        ),
        (RuntimeError("Rank 0, step 1: found Inf in local grad norm"), "non_finite", None),
        (NotFiniteError("the loss of step 3 is nan"), "non_finite", "the loss of step 3 is nan"),
        (WorldSizeError("2 and 8"), "wrong_world_size", "2 and 8"),
        (InputError("launch.arguments: no"), "unsupported", "launch.arguments: no"),
        (AssertionError(), "failed", "AssertionError"),
        (ValueError("x\ny"), "failed", "ValueError: y"),
    ],
)
def test_what_an_error_means(error: Exception, outcome: str, sentence: str | None) -> None:
    assert outcome_of(error) == outcome
    assert sentence is None or sentence_of(error) == sentence


def report(rank: int, fault: Fault | None = None) -> Report:
    """What a rank of `CELL` says that took two steps."""
    peaks = [(0, "setup"), *((step, name) for step in (1, 2) for name in PHASES)]
    return Report(
        rank=rank,
        stage=0,
        parameters=10,
        parameter_bytes=20,
        phases=tuple(
            PhasePeak(iteration=step, phase=name, peak_allocated_bytes=100 + rank, peak_reserved_bytes=200)
            for step, name in peaks
        ),
        between_steps_bytes=50,
        step_seconds=(0.5 + rank / 10,),
        losses=(4.8, 4.7) if rank else (),
        gradient_norms=(1.0, 1.0),
        flops=10**12,
        versions={"CUDA": "13.0"},
        environment={"device": f"GPU {rank}", "routing": "even"},
        fault=fault,
    )


def measured(folder: Path) -> Measurement:
    """What the driver makes of a folder of reports."""
    return cuda_driver._measurement(CELL, folder, None, 1.0)


def test_reports_become_one_measurement(tmp_path: Path) -> None:
    for rank in range(RANKS):
        report(rank).write(Report.path(tmp_path, rank))
    measurement = measured(tmp_path)
    assert measurement.outcome == "ok"
    assert measurement.peak_allocated_bytes == 101, "the fullest rank's"
    assert measurement.step_time_ms == pytest.approx(600.0), "the slowest rank's"
    assert measurement.tflops_per_gpu == pytest.approx(1 / 0.6 / RANKS)
    assert measurement.losses == (4.8, 4.7), "the last stage's"
    assert measurement.environment["device"] == "GPU 0 and GPU 1"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"rank": 1, "phases": "x"}'])
def test_a_damaged_report_fails_the_cell_and_no_reader(tmp_path: Path, content: bytes) -> None:
    report(0).write(Report.path(tmp_path, 0))
    Report.path(tmp_path, 1).write_bytes(content)
    measurement = measured(tmp_path)
    assert measurement.outcome == "failed"
    assert measurement.failure is not None
    assert measurement.failure.message.startswith("its report cannot be read: rank-1.json")


def test_a_report_that_lacks_part_of_the_contract_fails_the_cell(tmp_path: Path) -> None:
    for rank in range(RANKS):
        report(rank).model_copy(update={"losses": (), "step_seconds": ()}).write(Report.path(tmp_path, rank))
    measurement = measured(tmp_path)
    assert measurement.outcome == "failed"
    assert measurement.failure is not None
    for lacking in ("step_time_ms", "losses", "a steady iteration"):
        assert lacking in measurement.failure.message


def test_the_cause_is_told_from_what_follows(tmp_path: Path) -> None:
    lost = cuda_driver._fault("rank_died", "backward", "connection closed by peer", 0)
    report(0, lost).write(Report.path(tmp_path, 0))
    assert "rank 1 ended without a word" in measured(tmp_path).failure.message  # type: ignore[union-attr]
    Exits(codes={0: -signal.SIGTERM, 1: -signal.SIGKILL}).write(Exits.path(tmp_path, 0))
    assert "rank 1 was killed (SIGKILL)" in measured(tmp_path).failure.message  # type: ignore[union-attr]
    report(1, cuda_driver._fault("oom", "forward", "out of memory", 1)).write(Report.path(tmp_path, 1))
    assert measured(tmp_path).outcome == "oom"


@pytest.mark.parametrize("content", [b"", b"[", b'{"codes": {"x": 1}}'])
def test_damaged_exit_codes_say_nothing(tmp_path: Path, content: bytes) -> None:
    report(0).write(Report.path(tmp_path, 0))
    Exits.path(tmp_path, 0).write_bytes(content)
    assert "rank 1 ended without a word" in measured(tmp_path).failure.message  # type: ignore[union-attr]


def test_a_signal_without_a_name_is_a_number(tmp_path: Path) -> None:
    report(0).write(Report.path(tmp_path, 0))
    Exits(codes={1: -40}).write(Exits.path(tmp_path, 0))
    assert "rank 1 was killed (signal 40)" in measured(tmp_path).failure.message  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "lie",
    [
        {"rank": 0},
        {"fault": {"outcome": "ok", "failure": {"phase": "forward", "message": "fine"}}},
        {"fault": {"outcome": "refused", "failure": {"phase": "forward", "message": "no"}}},
        {"environment": {}},
        {"step_seconds": [1e308]},
        {"flops": 10**400},
        {"between_steps_bytes": 10**400},
    ],
)
def test_a_report_that_lies_is_an_outcome_that_can_be_shown(tmp_path: Path, lie: dict[str, Any]) -> None:
    report(0).write(Report.path(tmp_path, 0))
    content = json.loads(report(1).model_dump_json()) | lie
    Report.path(tmp_path, 1).write_text(json.dumps(content))
    measurement = measured(tmp_path)
    Console(file=io.StringIO()).print(Runs(runs=(measurement,), estimated_peak_bytes=1))
    assert (measurement.outcome == "ok") == ("environment" in lie)


def test_the_watchdogs_abort_is_a_timeout(tmp_path: Path) -> None:
    report(0).write(Report.path(tmp_path, 0))
    Exits(codes={1: -signal.SIGABRT}).write(Exits.path(tmp_path, 0))
    log = tmp_path / "logs" / "run" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)\nterminate called\n")
    assert measured(tmp_path).outcome == "collective_timeout"


def test_a_person_reads_how_runs_ended(tmp_path: Path) -> None:
    for rank in range(RANKS):
        report(rank).write(Report.path(tmp_path, rank))
    passed = measured(tmp_path)
    failure = Failure(
        phase="backward", message="CUDA out of memory.", rank=1, requested_bytes=3 * 2**29, free_bytes=2**30
    )
    report(1, Fault(outcome="oom", failure=failure)).write(Report.path(tmp_path, 1))
    console = Console(file=io.StringIO(), width=200)
    console.print(Runs(runs=(passed, measured(tmp_path)), estimated_peak_bytes=102))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "run 1 of 2: peak 0.00 GiB allocated, 0.00 reserved, rank 1 in setup of step 0; 600.0 ms a step" in text
    said = "run 2 of 2: oom in backward of rank 1: CUDA out of memory. (1.50 GiB requested, 1.00 GiB free on the GPU)"
    assert said in text
    assert "as far as each rank came" in text
    assert "estimated: 0.00 GiB (+0.99% of the measured peak)" in text


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, [H200, A100]),
        ("1", [A100]),
        ("GPU-a, 1", [H200, A100]),
        ("", []),
        ("1,7,0", [A100]),
        ("-1,0", []),
        ("0,0", []),
        ("0,GPU-a", []),
        ("GPU-b", [A100]),
        ("GPU-", []),
    ],
)
def test_gpus_are_those_that_cuda_would_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, names: list[str]
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncat <<'END'\n0, GPU-a, NVIDIA H200, 143771, 580.159\n1, GPU-b, NVIDIA A100, 81920, 580.159\nEND\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = machine.installed_gpus.__wrapped__()
    assert [gpu.name for gpu in gpus] == names
    assert all(gpu.total_bytes in (143771 * 2**20, 81920 * 2**20) for gpu in gpus)


@pytest.mark.parametrize(
    "says",
    [r"\\261\\377\\n", "0, GPU-a, NVIDIA, \N{SUPERSCRIPT TWO}, 5", f"0, GPU-a, NVIDIA, {'9' * 5000}, 5", "[N/A]"],
)
def test_garbage_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{says}\\n'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert machine.installed_gpus.__wrapped__() == ()
