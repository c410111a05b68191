"""The logs of one run as a `recorded` measurement, which a study shows beside estimate and trace."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path, PurePath
from statistics import median
from typing import Any

import yaml
from pydantic import ValidationError

import labkit
from labkit.diagnose.case import Case
from labkit.diagnose.facts import Facts, FailureKind, Iteration, MemoryReport
from labkit.diagnose.inputs import read
from labkit.diagnose.launches import resolve
from labkit.diagnose.snapshots import SnapshotReading
from labkit.drivers.contract import Failure, Measurement, Outcome, PhasePeak, RankRecord
from labkit.errors import InputError
from labkit.workload import Workload

_WARM_UP = 2
"""Iterations before those that are timed: the first has no optimizer state, the second still tunes kernels."""
_MOST_STEPS, _MOST_RANKS = 2000, 1000
_LONGEST_MESSAGE = 1000
_OUTCOMES: dict[FailureKind, Outcome] = {
    "device memory": "oom",
    "host memory": "out_of_host_memory",
    "killed": "killed",
    "collective timeout": "collective_timeout",
    "collective error": "rank_died",
    "device error": "cuda_error",
    "not finite": "non_finite",
    "time limit": "timed_out",
    "disk": "failed",
    "crash": "rank_died",
    "error": "failed",
    "rank lost": "rank_died",
}


def read_logs(
    logs: Sequence[Path], workload: Path | None = None, *, world_size: int | None = None, gpu: str | None = None
) -> tuple[Measurement, list[str]]:
    """What the logs of one run recorded, and how launch arguments were taken.

    `workload` says what was run where the logs do not print their arguments, or stands before them.

    Raises:
        InputError: a log cannot be read, nobody says what was run, or the logs say no peak of it.
    """
    readings = [read(path) for path in logs]
    for reading in readings:
        if reading.stated is not None:
            raise InputError(f"{reading.source}: no log, but {reading.kind}; give it as --workload if it is a workload")
        if isinstance(reading, SnapshotReading):
            raise InputError(
                f"{reading.source}: a memory snapshot does not say which steps were done; give the run's log"
            )
    facts = Facts()
    for reading in readings:
        facts.add(reading.facts)
    notes: list[str] = []
    if workload is not None:
        run = Workload.load(workload)
    else:
        stated, notes = resolve(readings, facts, world_size=world_size, gpu=gpu)
        if stated is None:
            why = f" ({notes[0].removeprefix('no estimate: ')})" if notes else ""
            raise InputError(f"{logs[0]}: it does not say what was run; add --workload WORKLOAD.yaml{why}")
        run = stated.workload
    return recorded(facts, run, str(logs[0])), notes


def as_yaml(made: Measurement) -> str:
    """The file for a study's `recorded` (`labkit.drivers.recorded.read_recorded` reads it)."""
    data = made.model_dump(mode="json", exclude_defaults=True, exclude={"workload"})
    return _dumped({**data, "workload": made.workload.model_dump(mode="json", exclude_unset=True)})


def workload_yaml(made: Measurement) -> str:
    """The workload that was run, as a file."""
    return _dumped(made.workload.model_dump(mode="json", exclude_unset=True))


def _dumped(data: dict[str, Any]) -> str:
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def recorded(facts: Facts, workload: Workload, source: str) -> Measurement:
    """The measurement that facts of logs are; `source` names the log in messages.

    Raises:
        InputError: they say no peak of a run that had its optimizer's state, and no failure.
    """
    ranks = tuple(_records(facts, workload))
    failure, outcome = _failure(facts)
    if failure is None and not any(record.steady_peak_bytes for record in ranks):
        said = "says no memory" if not ranks else "says memory of the first step alone, before the optimizer's state"
        raise InputError(
            f"{source}: it {said}; Megatron prints max allocated after the first two steps of a run, "
            "and every N steps with --log-memory-interval N"
        )
    steady = [step for step in facts.iterations if step.number > _WARM_UP][-_MOST_STEPS:]
    try:
        return Measurement(
            driver="recorded",
            workload=workload,
            outcome=outcome,
            failure=failure,
            ranks=ranks,
            steady_iterations=len(steady),
            step_time_ms=_middle([step.milliseconds for step in steady]),
            step_times_ms=tuple(step.milliseconds for step in steady),
            tflops_per_gpu=_middle([step.tflops for step in steady if step.tflops is not None]),
            losses=_losses(list(facts.iterations)[-_MOST_STEPS:]),
            versions={"labkit": labkit.__version__},
            source=f"log {PurePath(source).name}: max allocated and reserved as it prints them",
        )
    except ValidationError as error:
        raise InputError(f"{source}: its figures make no measurement: {error.errors()[0]['msg']}") from None


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _losses(steps: Sequence[Iteration]) -> tuple[float, ...]:
    return tuple(step.loss for step in steps if step.loss is not None and isfinite(step.loss))


def _records(facts: Facts, workload: Workload) -> Iterator[RankRecord]:
    """Each rank that says its peak; a log without ranks is taken for rank 0's."""
    layout = workload.parallelism
    reports = [each for each in facts.memory if each.max_allocated]
    by_rank = groupby(sorted(reports, key=_rank), key=_rank)
    found = [(rank, list(same)) for rank, same in by_rank if rank < layout.world_size]
    found.sort(key=lambda each: -max(report.peak for report in each[1]))
    for rank, same in sorted(found[:_MOST_RANKS], key=lambda each: each[0]):
        readings = {report.iteration or _WARM_UP: report for report in same}
        yield RankRecord(
            rank=rank,
            stages=(rank // (layout.world_size // layout.pp),),
            phases=tuple(
                PhasePeak(
                    iteration=iteration,
                    phase="after optimizer",
                    peak_allocated_bytes=report.peak,
                    peak_reserved_bytes=report.max_reserved,
                )
                for iteration, report in sorted(readings.items())
            ),
        )


def _rank(report: MemoryReport) -> int:
    return report.rank or 0


def _failure(facts: Facts) -> tuple[Failure | None, Outcome]:
    """Why the run ended, if its logs say that it failed."""
    first = Case(facts).first
    if first is not None:
        return (
            Failure(
                phase=first.phase or "a step",
                message=first.evidence.text[:_LONGEST_MESSAGE],
                rank=first.rank,
                requested_bytes=first.requested,
                allocated_bytes=first.allocated,
                reserved_bytes=first.reserved,
                free_bytes=first.free,
            ),
            "oom",
        )
    if not facts.failures:
        return None, "ok"
    # What says more stands before an exception's name.
    worst = min(facts.failures, key=lambda each: list(_OUTCOMES).index(each.kind))
    message = worst.evidence.text[:_LONGEST_MESSAGE]
    return Failure(phase=worst.phase or "a step", message=message, rank=worst.rank), _OUTCOMES[worst.kind]
