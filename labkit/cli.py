"""The `labkit` command.

Exit codes: 0 done; 1 the work failed; 2 the input is wrong and nothing was written; 130 interrupted. Whatever goes
wrong is one sentence on stderr. `--json` prints one JSON object on stdout and nothing else. Each command imports what
it needs when it runs: an estimate must not wait for torch, polars or charts.
"""

import io
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer.exceptions import TyperException

import labkit
from labkit.errors import InputError, LabkitError

if TYPE_CHECKING:
    from labkit.drivers.trace.server import Limits, PhaseCallback, TraceServer
    from labkit.importers.imported import Imported
    from labkit.memory.profiles import Observation, Profiles
    from labkit.study import Study
    from labkit.workload import Workload
    from labkit.workload.base import Part

_INTERRUPTED = 130
"""What typer makes of Ctrl-C: 128 + SIGINT, as shells have it."""
_MOST_MEASURED_BYTES = 2**40
"""More than any GPU has."""

app = typer.Typer(
    help="What one rank of a Megatron Core job holds in GPU memory, and what to recompute.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
study_app = typer.Typer(help="Run matched studies, and see where they stand.")
app.add_typer(study_app, name="study")
profile_app = typer.Typer(help="Keep measured peaks: they may raise an estimate, never lower it.")
app.add_typer(profile_app, name="profile")
import_app = typer.Typer(help="Make workloads of what others have.")
app.add_typer(import_app, name="import")

WorkloadArgument = Annotated[Path, typer.Argument(metavar="WORKLOAD.yaml", show_default=False)]
StudyArgument = Annotated[Path, typer.Argument(metavar="STUDY.yaml", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _named(text: str) -> str:
    """A name from the command line; an empty one would silently mean the current folder, or the control."""
    if not text.strip():
        raise typer.BadParameter("it is empty; give a name")
    return text


def _path(text: str) -> Path:
    return Path(_named(text))


def _source(text: str) -> str:
    """Who measured a peak, as a profile keeps it."""
    if not 0 < len(text.strip()) <= 1000:
        raise typer.BadParameter("say in 1 to 1000 characters who measured it, on what, when")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not text in UTF-8") from None
    return text.strip()


StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", parser=_path, help="Folder of the result files.", show_default="results/NAME"
    ),
]
ProfilesOption = Annotated[Path, typer.Option("--profiles", metavar="DIR", parser=_path, help="Folder of profiles.")]
StageOption = Annotated[
    int | None,
    typer.Option("--stage", min=0, help="Which pipeline stage.", show_default="the one that holds most"),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Ranks traced at once.", show_default="2, or 1 on one CPU")
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="LABEL", parser=_named, help="Only this candidate or setting; may be repeated."),
]
DriverOption = Annotated[
    Literal["trace", "cuda"] | None,
    typer.Option("--driver", help="Only the cells of this driver.", show_default="all that can run here"),
]
TimeLimitOption = Annotated[
    int,
    typer.Option(
        "--time-limit", min=1, max=10**6, metavar="SECONDS", help="The longest that the trace of a rank may take."
    ),
]
MemoryLimitOption = Annotated[
    int,
    typer.Option("--memory-limit", min=1, max=10**4, metavar="GIB", help="The most host memory that it may need."),
]
ImportOutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", show_default="standard output", help="Where the workload goes."),
]
WorldSizeOption = Annotated[
    int | None, typer.Option("--world-size", min=1, max=2**20, help="Ranks.", show_default="the launcher's")
]
GpuOption = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="Such as h100-80gb or a100-80gb.")]


@app.command()
def estimate(
    workload: WorkloadArgument,
    profiles: Annotated[
        Path | None,
        typer.Option("--profiles", metavar="DIR", parser=_path, help="Folder of measured peaks that may raise it."),
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
            _warn(damage)
    _show(result.ranged, json)


@app.command()
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
    _show(checks, json)
    for each in checks.files:
        if each.kind == "unreadable" and not json:
            _warn(each.problem)
    if not checks.fine:
        raise typer.Exit(2)


@app.command()
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
    with _tracing(checked, workers, _limits(time_limit, memory_limit)) as (server, on_phase):
        traced = server.run_stages(checked, on_phase) if rank is None else server.run(checked, on_phase, rank=rank)
        summary = ranged(traced, server, on_phase) if ranges else traced.summary
    _show(summary, json)


@app.command()
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
        typer.Option("--output", "-o", metavar="STUDY.yaml", parser=_path, help="Also write the study to confirm it."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which recompute choice to try first: all that can run, priced, and what their replay costs."""
    from labkit.files import write_atomically
    from labkit.plan import Budget, advise
    from labkit.workload import Workload

    if output is not None:
        _check_output(output)
    checked = Workload.load(workload)
    advice = advise(checked, None if budget is None else Budget.read(budget), settings=settings)
    if output is not None:
        write_atomically(output, advice.study_text)
        _warn(f"{output}: the study that would confirm it")
    _show(advice.with_all_shown() if everything else advice, json)


@app.command()
def diagnose(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE...",
            parser=_named,
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
    _show(diagnosed(paths, world_size=world_size, gpu=gpu), json)


@app.command()
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
        typer.Option("--profiles", metavar="DIR", parser=_path, help="Folder of measured peaks that may raise prices."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say which requests may run together in a micro-batch: admit, a split, or a refusal with what would work."""
    from labkit.admission import Admission
    from labkit.admission.requests import read_requests
    from labkit.workload import Workload

    template = Workload.load(workload)
    wanted = read_requests(None if requests == "-" else Path(_named(requests)), sys.stdin.buffer)
    admission = Admission(template, budget, profiles=profiles)
    decision = admission.decide(wanted)
    _show(decision.record, json)
    for damage in admission.damaged:
        _warn(damage)
    if decision.outcome == "refuse":
        raise typer.Exit(1)


@app.command()
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
            parser=_path,
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
    _show(runs, json)
    if not runs.passed:
        raise typer.Exit(1)


def _estimated_peak(workload: "Workload") -> int | None:
    from labkit.memory.estimate import estimate as estimated

    try:
        return estimated(workload).summary.peak_allocated_bytes
    except InputError:  # what it runs has no price
        return None


@app.command()
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
    _show(comparison if everything else comparison.only_differences(), json)


@study_app.command("run")
def study_run(
    study: StudyArgument,
    *,
    only: OnlyOption = None,
    driver: DriverOption = None,
    force: Annotated[bool, typer.Option("--force", help="Also make again what is there.")] = False,
    workers: WorkersOption = None,
    time_limit: TimeLimitOption = 600,
    memory_limit: MemoryLimitOption = 4,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Make the missing results of a study. Stop it as you like: what is finished is kept."""
    opened = _open(study, store)
    limits = _limits(time_limit, memory_limit)
    status = opened.run(only or (), drivers=[driver] if driver else (), force=force, workers=workers, limits=limits)
    _show(status, json)
    elsewhere = opened.elsewhere(status)
    for name in elsewhere:
        _warn(f"{name} cannot run on this machine (labkit doctor says why); cells made on another can be copied here")
    if status.count("failed") or elsewhere:
        raise typer.Exit(1)


@study_app.command("submit")
def study_submit(
    study: StudyArgument,
    *,
    only: OnlyOption = None,
    driver: DriverOption = None,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", min=1, max=10_000, help="Of the array, at most.", show_default="the study file's"),
    ] = None,
    workers: WorkersOption = None,
    time_limit: TimeLimitOption = 600,
    memory_limit: MemoryLimitOption = 4,
    local: Annotated[bool, typer.Option("--local", help="Processes of this machine in Slurm's place.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Come back when all jobs have ended.")] = False,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Make the missing results of a study as a Slurm array, with the resources that its file names."""
    from labkit.study.slurm import submit

    opened = _open(study, store)
    submitted = submit(
        opened,
        only or (),
        drivers=[driver] if driver else (),
        jobs=jobs,
        workers=workers,
        limits=_limits(time_limit, memory_limit),
        local=local,
        wait=wait,
    )
    _show(opened.status() if wait else submitted, json)
    if wait and (opened.missing(only or (), [driver] if driver else ())):
        raise typer.Exit(1)


@study_app.command("status")
def study_status(study: StudyArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Say which results of a study are done, missing, damaged or made by other versions."""
    _show(_open(study, store).status(), json)


@study_app.command("export")
def study_export(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml|DIR", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.parquet", parser=_path, help="Where the frame goes.")
    ],
    store: StoreOption = None,
) -> None:
    """Write every result of a study's store, or of a folder of results, as one table (parquet)."""
    from labkit.study.export import write
    from labkit.study.store import Store

    folder = Store(study) if study.is_dir() else _open(study, store).store
    frame = write(folder, output, lambda damage: _warn(str(damage)))
    _say(f"{output}: {len(frame)} results")


@profile_app.command("add")
def profile_add(
    workload: WorkloadArgument,
    profiles: ProfilesOption,
    peak_allocated_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            max=_MOST_MEASURED_BYTES,
            metavar="BYTES",
            help="torch.cuda.max_memory_allocated, the largest over all ranks.",
        ),
    ],
    source: Annotated[str, typer.Option(metavar="TEXT", parser=_source, help="Who measured it, on what, when.")],
) -> None:
    """Keep a peak that was measured on GPUs."""
    from labkit.memory.profiles import Observation, Profiles
    from labkit.workload import Workload

    observation = Observation(
        workload=Workload.load(workload),
        peak_allocated_bytes=peak_allocated_bytes,
        certainty="measured",
        source=source,
    )
    _learn(Profiles(profiles), observation)


@profile_app.command("learn")
def profile_learn(study: StudyArgument, profiles: ProfilesOption, store: StoreOption = None) -> None:
    """Keep every peak that a study has traced, and those published beside it."""
    from labkit.memory.profiles import Profiles

    known = Profiles(profiles)
    for observation in _open(study, store).results().observations:
        _learn(known, observation)


@import_app.command("megatron-args")
def import_megatron_args(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-", show_default=False, help="Launch script, command line, or arguments as YAML or JSON."
        ),
    ],
    output: ImportOutputOption = None,
    world_size: WorldSizeOption = None,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of Megatron-LM's launch arguments; what it cannot express is named on stderr. Runs no script."""
    from labkit.importers.megatron import import_megatron

    if output is not None:
        _check_output(output)
    imported = import_megatron(None if file == "-" else Path(file), world_size=world_size, gpu=gpu)
    _write_imported(imported, output)


@import_app.command("huggingface")
def import_huggingface(
    file: Annotated[str, typer.Argument(metavar="CONFIG.json|-", show_default=False, help="A model's config.json.")],
    *,
    output: ImportOutputOption = None,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="The model's fields alone, as in data/models, without a workload.")
    ] = False,
    seq_length: Annotated[
        int | None,
        typer.Option("--seq-length", min=1, max=2**30, help="Tokens of a sequence.", show_default="4096"),
    ] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option("--micro-batch-size", min=1, max=2**20, help="Sequences.", show_default="1")
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(
            "--global-batch-size", min=1, max=2**30, help="Sequences.", show_default="one micro-batch a rank and stage"
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, max=2**20, help="Ranks.", show_default="the fewest for the layout"),
    ] = None,
    tensor: Annotated[int, typer.Option("--tp", min=1, max=2**20, help="Tensor-parallel ranks.")] = 1,
    pipeline: Annotated[int, typer.Option("--pp", min=1, max=2**20, help="Pipeline-parallel ranks.")] = 1,
    context: Annotated[int, typer.Option("--cp", min=1, max=2**20, help="Context-parallel ranks.")] = 1,
    expert: Annotated[int, typer.Option("--ep", min=1, max=2**20, help="Expert-parallel ranks.")] = 1,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of a Hugging Face config.json, with its parameters counted; what it cannot express is named."""
    from labkit.importers.huggingface import Layout
    from labkit.importers.huggingface import import_huggingface as imported_from

    if output is not None:
        _check_output(output)
    sizes = (seq_length, micro_batch_size, global_batch_size, world_size, tensor, pipeline, context, expert)
    layout = Layout(*sizes, gpu)
    imported = imported_from(None if file == "-" else Path(file), None if model_only else layout)
    _write_imported(imported, output, model_only=model_only)


@import_app.command("bridge")
def import_bridge(
    file: Annotated[
        str,
        typer.Argument(metavar="RECIPE.yaml|-", show_default=False, help="A recipe, or a run's saved configuration."),
    ],
    *,
    output: ImportOutputOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="CONFIG.json", parser=_path, help="Of the model that the recipe names."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, max=2**20, help="Ranks.", show_default="the fewest for the layout"),
    ] = None,
    gpu: GpuOption = None,
) -> None:
    """Make a workload of a Megatron Bridge recipe in YAML; what it cannot express is named. Runs nothing of it."""
    from labkit.importers.bridge import import_bridge as imported_from

    if output is not None:
        _check_output(output)
    imported = imported_from(None if file == "-" else Path(file), config=config, world_size=world_size, gpu=gpu)
    _write_imported(imported, output)


@import_app.command("log")
def import_log(
    logs: Annotated[
        list[Path],
        typer.Argument(metavar="LOG...", show_default=False, help="Of one run: of all its ranks or of some."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", parser=_path, help="Where the measurement goes.")
    ],
    *,
    workload: Annotated[
        Path | None,
        typer.Option(
            "--workload",
            metavar="WORKLOAD.yaml",
            parser=_path,
            help="What was run.",
            show_default="the arguments that the log prints",
        ),
    ] = None,
    workload_output: Annotated[
        Path | None,
        typer.Option("--write-workload", metavar="FILE.yaml", parser=_path, help="Also write what was run."),
    ] = None,
    world_size: WorldSizeOption = None,
    gpu: GpuOption = None,
) -> None:
    """Make a recorded measurement of a run's logs, which a study shows beside estimate and trace."""
    from labkit.diagnose.recorded import as_yaml, read_logs, workload_yaml
    from labkit.files import write_atomically

    for path in filter(None, (output, workload_output)):
        _check_output(path)
    made, notes = read_logs(logs, workload, world_size=world_size, gpu=gpu)
    write_atomically(output, as_yaml(made))
    if workload_output is not None:
        write_atomically(workload_output, workload_yaml(made))
    for note in notes:
        _warn(note)


@app.command()
def report(
    study: StudyArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            parser=_path,
            show_default="figures/NAME.html",
            help="Where the report goes.",
        ),
    ] = None,
) -> None:
    """Run what is missing of a study and write its report: one self-contained HTML file."""
    opened = _open(study, None)
    output = output or Path("figures") / f"{opened.name}.html"
    from labkit.report.files import check_output

    check_output(output)
    status = opened.run()
    from labkit.report.document import write_report

    written = write_report(study, output)
    _say(f"{written}: {status.sentence}")
    if status.count("failed"):
        raise typer.Exit(1)


@app.command()
def doctor(json: JsonOption = False) -> None:
    """Say what this machine can do, and what is missing for the rest."""
    from labkit.drivers.doctor import checkup

    _show(checkup(), json)


@app.command()
def notebook(
    source: Annotated[Path, typer.Argument(metavar="NOTEBOOK.py", show_default=False)],
    *,
    parameters: Annotated[
        Path,
        typer.Option(
            "--parameters", "-f", metavar="FILE.yaml", parser=_path, help="A mapping of parameters, or a list of them."
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", parser=_path, help="Folder of the executed notebooks.")
    ],
    workers: Annotated[int, typer.Option("--workers", min=1, max=1000, help="Runs at once.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Also run again what is done.")] = False,
    json: JsonOption = False,
) -> None:
    """Run a notebook headless, once for each of its parameters. Stop it as you like: what is done is kept."""
    from labkit.report.headless import load_parameters, run_all

    runs = run_all(source, load_parameters(parameters), output, workers=workers, force=force, say=_warn)
    _show(runs, json)
    if not runs.done:
        raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(labkit.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print labkit's version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """What one rank of a Megatron Core job holds in GPU memory, and what to recompute."""


@app.command()
def version() -> None:
    """Print labkit's version."""
    _print_version(True)


def _check_output(path: Path) -> None:
    """Refuse a place for a file where something else stands, before the work is done.

    Raises:
        InputError: it is a folder, a device, a pipe or a link.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a folder" if path.is_dir() else "a link" if path.is_symlink() else "no regular file"
        raise InputError(f"{path}: is {kind}; give the file another name")


def _write_imported(imported: "Imported", output: Path | None, *, model_only: bool = False) -> None:
    from labkit.files import write_atomically

    text = imported.model_yaml if model_only else imported.yaml
    if output is None:
        _say(text.rstrip("\n"))
    else:
        write_atomically(output, text)
    for note in imported.notes:
        _warn(note)


def _limits(seconds: int, gib: int) -> "Limits":
    from labkit.drivers.trace.server import Limits
    from labkit.workload.gpu import GIB

    return Limits(seconds, gib * GIB)


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


def _open(study: Path, store: Path | None) -> "Study":
    from labkit.study import Study

    return Study.load(study, store)


def _learn(known: "Profiles", observation: "Observation") -> None:
    """Keep a peak, and say so: of what it is, and where it lies."""
    _say(f"{observation}: {known.learn(observation)}")


def _warn(sentence: str) -> None:
    from labkit.console import printable

    typer.echo(f"labkit: {printable(' '.join(sentence.split()))}", err=True)


def _say(text: object) -> None:
    from labkit.console import printable

    typer.echo(printable(str(text)))


def _show(value: "Part", json: bool) -> None:
    if json:
        typer.echo(value.model_dump_json())
        return
    from labkit.console import Terminal

    Terminal().print(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments) or ["--help"]))


def _run(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have letters that the terminal's encoding lacks
    try:
        code = app(arguments, prog_name="labkit", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left: the interpreter's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 (the last resort: a bug of ours must read as one)
        return _fail(error)
    if code == _INTERRUPTED:
        typer.echo("labkit: interrupted", err=True)
    return code if isinstance(code, int) else 0


def _fail(error: Exception) -> int:
    """Say in one sentence what went wrong; returns the exit code it means."""
    match error:
        case LabkitError():
            code, sentence = 2 if isinstance(error, InputError) else 1, str(error)
        case TyperException():
            message = error.format_message().rstrip(".")
            code, sentence = error.exit_code, f"{message} (labkit --help lists what there is)"
        case OSError():
            code, sentence = 1, f"{error.filename or 'output'}: {error.strerror or error}"
        case _:
            code, sentence = 1, f"unexpected {type(error).__name__}: {error} (LABKIT_DEBUG=1 shows the traceback)"
            if os.environ.get("LABKIT_DEBUG"):
                traceback.print_exception(error)
    _warn(sentence)
    return code
