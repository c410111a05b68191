"""Commands about one workload, and about this machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.options import (
    GpuOption,
    JsonOption,
    MemoryLimitOption,
    StageOption,
    TimeLimitOption,
    WorkersOption,
    WorkloadArgument,
    WorldSizeOption,
    limits_of,
    named,
    path_of,
)
from labkit.cli.output import check_output, show, warn
from labkit.errors import InputError

if TYPE_CHECKING:
    from labkit.drivers.trace.server import Limits, PhaseCallback, TraceServer
    from labkit.workload import Workload


def estimate(
    workload: WorkloadArgument,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", metavar="DIR", parser=path_of, help="Folder of measured peaks that may raise it."),
    ] = None,
    stage: StageOption = None,
    json: JsonOption = False,
) -> None:
    """Estimate the peak memory of one rank, in closed form: no GPU, no torch, well under a second."""
    from labkit.memory.estimate import estimate as estimated
    from labkit.workload import Workload

    checked = Workload.load(workload)
    result = estimated(checked, _existing(stage, checked))
    if profiles is not None:
        from labkit.memory.profiles import Profiles

        known = Profiles(profiles)
        result = known.raised(result)
        for damage in known.damaged:
            warn(damage)
    show(result.ranged, json)


def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE.yaml...", show_default=False, help="Workloads, and studies.")
    ],
    json: JsonOption = False,
) -> None:
    """Apply every rule to workloads and studies: what cannot run and what does nothing, why, and what would work.

    Exit code 0 if everything can run, warnings or not; 2 if something cannot.
    """
    from labkit.check import check as checked

    checks = checked(files)
    show(checks, json)
    for each in checks.files:
        if each.kind == "unreadable" and not json:
            warn(each.problem)
    if not checks.fine:
        raise typer.Exit(2)


def trace(
    workload: WorkloadArgument,
    *,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="This rank alone.")] = None,
    stage: Annotated[
        int | None, typer.Option("--stage", min=0, help="The first rank of this pipeline stage alone.")
    ] = None,
    workers: WorkersOption = None,
    time_limit: TimeLimitOption = 600,
    memory_limit: MemoryLimitOption = 4,
    ranges: Annotated[
        bool, typer.Option("--ranges", help="Also trace the other values of what the workload does not state.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Trace the peak memory: the real Megatron Core code over tensors without data, no GPU.

    One rank of every pipeline stage that can differ is traced; the one that holds most is shown in full.
    """
    from labkit.drivers.trace.ranges import ranged
    from labkit.workload import Workload

    if rank is not None and stage is not None:
        raise InputError("--rank and --stage: give one of them")
    checked = Workload.load(workload)
    if _existing(stage, checked) is not None:
        rank = checked.parallelism.first_rank(stage or 0)
    with _tracing(checked, workers, limits_of(time_limit, memory_limit)) as (server, on_phase):
        traced = server.run_stages(checked, on_phase) if rank is None else server.run(checked, on_phase, rank=rank)
        summary = ranged(traced, server, on_phase) if ranges else traced.summary
    show(summary, json)


def plan(
    workload: WorkloadArgument,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="Such as 80GB, 74.5GiB or h200-141gb.", show_default="its GPU's"),
    ] = None,
    *,
    settings: Annotated[
        bool,
        typer.Option("--settings", help="Also all choices in other layouts of its GPUs and smaller micro-batches."),
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every choice, not only the best.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="STUDY.yaml", parser=path_of, help="Also write the study to confirm it."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which recompute choice to try first: all that can run, priced, and what their replay costs."""
    from labkit.files import write_atomically
    from labkit.plan import Budget, advise
    from labkit.workload import Workload
    from labkit.workload.files import files_of

    if output is not None:
        check_output(output, *files_of(workload))
    checked = Workload.load(workload)
    advice = advise(checked, None if budget is None else Budget.read(budget), settings=settings)
    if output is not None:
        write_atomically(output, advice.study_text)
        warn(f"{output}: the study that would confirm it")
    show(advice.with_all_shown() if everything else advice, json)


def diagnose(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            parser=named,
            show_default=False,
            help="Of one run: logs, out-of-memory messages, memory snapshots, launch arguments; - is standard input.",
        ),
    ],
    *,
    world_size: WorldSizeOption = None,
    gpu: GpuOption = None,
    json: JsonOption = False,
) -> None:
    """Say why a run died: what happened, the line that shows it, how to confirm it, what to try."""
    from labkit.diagnose import diagnose as diagnosed

    if files.count("-") > 1:
        raise InputError("-: standard input can be read once")
    paths = [None if file == "-" else Path(file) for file in files]
    show(diagnosed(paths, world_size=world_size, gpu=gpu), json)


def admit(
    workload: WorkloadArgument,
    requests: Annotated[
        str, typer.Argument(metavar="REQUESTS.json|-", show_default=False, help="A list of lengths or requests.")
    ],
    *,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="Such as 80GB, 74.5GiB or h200-141gb.", show_default="its GPU's"),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(
            "--profiles", metavar="DIR", parser=path_of, help="Folder of measured peaks that may raise prices."
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which requests may run together in a micro-batch: admit, a split, or a refusal with what would work."""
    from labkit.admission import Admission
    from labkit.admission.requests import read_requests
    from labkit.workload import Workload

    template = Workload.load(workload)
    wanted = read_requests(None if requests == "-" else Path(named(requests)), sys.stdin.buffer)
    admission = Admission(template, budget, profiles=profiles)
    decision = admission.decide(wanted)
    show(decision.record, json)
    for damage in admission.damaged:
        warn(damage)
    if decision.outcome == "refuse":
        raise typer.Exit(1)


def measure(
    workload: WorkloadArgument,
    *,
    repetitions: Annotated[
        int, typer.Option("--repetitions", min=1, max=1000, help="Runs, each by fresh processes.")
    ] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=1, max=1000, help="Steps before those that are timed.")] = 3,
    steps: Annotated[int, typer.Option("--steps", min=1, max=10**5, help="Steps that are timed.")] = 10,
    time_limit: Annotated[
        int, typer.Option("--time-limit", min=1, max=10**6, metavar="SECONDS", help="The longest that a run may take.")
    ] = 1800,
    budget: Annotated[
        int | None,
        typer.Option("--budget", min=1, max=10**7, metavar="SECONDS", help="The longest that all may take."),
    ] = None,
    snapshots: Annotated[
        Path | None,
        typer.Option(
            "--snapshots",
            metavar="DIR",
            parser=path_of,
            help="Also write each rank's memory snapshot, at its failure if it fails.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure the peak memory and the step time on this machine's GPUs: the real step, by torchrun."""
    from labkit.drivers.cuda.driver import Plan, measured
    from labkit.drivers.cuda.runs import Runs
    from labkit.workload import Workload

    checked = Workload.load(workload)
    plan = Plan(warmup=warmup, steps=steps, seconds=time_limit, snapshots=snapshots)
    with _watching(checked.model.name, "measuring") as on_phase:
        made = tuple(measured(checked, plan, repetitions=repetitions, budget=budget, on_phase=on_phase))
    runs = Runs(runs=made, estimated_peak_bytes=_estimated_peak(checked))
    show(runs, json)
    if not runs.passed:
        raise typer.Exit(1)


def _estimated_peak(workload: "Workload") -> int | None:
    from labkit.memory.estimate import estimate as estimated

    try:
        return estimated(workload).summary.peak_allocated_bytes
    except InputError:  # what it runs has no price
        return None


def compare(
    workload: WorkloadArgument,
    stage: StageOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Also the rows on which both sides agree.")] = False,
    json: JsonOption = False,
) -> None:
    """Lay estimate and trace side by side, tensor by tensor: between steps, retained, at the peak."""
    from labkit.comparison import Comparison
    from labkit.comparison import compare as compared
    from labkit.memory.estimate import estimate as estimated
    from labkit.workload import Workload

    checked = Workload.load(workload)
    result = estimated(checked, _existing(stage, checked))
    with _tracing(checked) as (server, on_phase):
        traced = server.run(checked, on_phase, rank=result.rank)
    comparison = Comparison(
        workload=f"{checked.model.name}, recompute {checked.recompute.label}, rank {result.rank}",
        workload_hash=checked.content_hash,
        sections=compared(result.ledger, traced.ledger),
    )
    show(comparison if everything else comparison.only_differences(), json)


def doctor(json: JsonOption = False) -> None:
    """Say what this machine can do, and what is missing for the rest."""
    from labkit.drivers.doctor import checkup

    show(checkup(), json)


@contextmanager
def _tracing(
    workload: "Workload", workers: int | None = None, limits: "Limits | None" = None
) -> Iterator[tuple["TraceServer", "PhaseCallback"]]:
    """A server that traces, and what shows its phase on stderr where someone watches."""
    from labkit.drivers.trace.server import TraceServer

    with _watching(workload.model.name, "tracing") as on_phase, TraceServer(workers, limits) as server:
        yield server, on_phase


@contextmanager
def _watching(name: str, doing: str) -> Iterator["PhaseCallback"]:
    """What shows a phase on stderr where someone watches."""
    from rich.markup import escape

    from labkit.console import Terminal

    shown = f"{doing} {escape(name)}"
    with Terminal(stderr=True).status(f"{shown} ...") as line:
        yield lambda iteration, phase: line.update(f"{shown}: iteration {iteration}, {escape(phase)}")


def _existing(stage: int | None, workload: "Workload") -> int | None:
    """`stage`, if the workload's pipeline has it."""
    stages = workload.parallelism.pp
    if stage is not None and stage >= stages:
        there_are = "there is no pipeline; leave it out" if stages == 1 else f"use 0 to {stages - 1}"
        raise InputError(f"--stage {stage}: no such pipeline stage; {there_are}")
    return stage
