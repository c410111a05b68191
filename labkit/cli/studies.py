"""Commands that run many: studies, reports, notebooks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli.completion import notebook_names, report_names, study_names
from labkit.cli.help import Commands, examples
from labkit.cli.options import (
    DriverOption,
    JsonOption,
    MemoryLimitOption,
    OnlyOption,
    StoreOption,
    StudyArgument,
    TimeLimitOption,
    WorkersOption,
    limits_of,
    path_of,
)
from labkit.cli.output import check_output, say, show, warn
from labkit.errors import InputError, LabkitError

if TYPE_CHECKING:
    from labkit.study import Study

_FIGURES = Path("figures")
"""Where reports go unless told otherwise."""
study_app = typer.Typer(cls=Commands, help="Run matched studies, and see where they stand.")


@study_app.command(
    "run",
    epilog=examples(
        "labkit study run moonlight-16b",
        "labkit study run study.yaml --only '[moe_act]' --workers 4",
    ),
)
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
    opened = open_study(study, store)
    limits = limits_of(time_limit, memory_limit)
    status = opened.run(only or (), drivers=[driver] if driver else (), force=force, workers=workers, limits=limits)
    show(status, json)
    elsewhere = opened.elsewhere(status)
    for name in elsewhere:
        warn(f"{name} cannot run on this machine (labkit doctor says why); cells made on another can be copied here")
    if status.count("failed") or elsewhere:
        raise typer.Exit(1)


@study_app.command(
    "submit",
    epilog=examples(
        "labkit study submit study.yaml --jobs 8 --wait",
        "labkit study submit study.yaml --local --jobs 2  # without Slurm",
    ),
)
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

    opened = open_study(study, store)
    submitted = submit(
        opened,
        only or (),
        drivers=[driver] if driver else (),
        jobs=jobs,
        workers=workers,
        limits=limits_of(time_limit, memory_limit),
        local=local,
        wait=wait,
    )
    show(opened.status() if wait else submitted, json)
    if wait and (opened.missing(only or (), [driver] if driver else ())):
        raise typer.Exit(1)


@study_app.command(
    "status",
    epilog=examples(
        "labkit study status moonlight-16b",
        "labkit study status study.yaml --json",
    ),
)
def study_status(study: StudyArgument, store: StoreOption = None, json: JsonOption = False) -> None:
    """Say which results of a study are done, missing, damaged or made by other versions."""
    show(open_study(study, store).status(), json)


@study_app.command(
    "export",
    epilog=examples(
        "labkit study export moonlight-16b -o moonlight.parquet",
        "labkit study export results/mine -o mine.parquet",
    ),
)
def study_export(
    study: Annotated[Path, typer.Argument(metavar="STUDY.yaml|DIR", show_default=False, autocompletion=study_names)],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.parquet", parser=path_of, help="Where the frame goes.")
    ],
    store: StoreOption = None,
) -> None:
    """Write every result of a study's store, or of a folder of results, as one table (parquet)."""
    from labkit.study.export import write
    from labkit.study.store import Store
    from labkit.workload.files import files_of

    check_output(output, *(study.glob("*.zip") if study.is_dir() else files_of(study)))
    folder = Store(study) if study.is_dir() else open_study(study, store).store
    frame = write(folder, output, lambda damage: warn(str(damage)))
    say(f"{output}: {len(frame)} results")


def report(
    source: Annotated[
        Path, typer.Argument(metavar="STUDY.yaml|NOTEBOOK", show_default=False, autocompletion=report_names)
    ],
    *,
    parameters: Annotated[
        Path | None,
        typer.Option(
            "--parameters",
            "-p",
            metavar="FILE.yaml",
            parser=path_of,
            show_default=False,
            help="A mapping of the notebook's parameters.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            parser=path_of,
            show_default="figures/NAME.html",
            help="Where the report goes.",
        ),
    ] = None,
) -> None:
    """Run what is missing of a study, or a notebook, and write its report: one self-contained HTML file.

    In the default place, `figures/index.html` is then a page over all reports there.
    """
    from labkit.files import shipped

    if output is not None:
        check_output(output, source, parameters)
    study = source if source.exists() else shipped("studies").get(str(source), source)
    if study.suffix in (".yaml", ".yml"):
        if parameters is not None:
            raise InputError(f"{source}: a study takes no parameters; give a notebook with them")
        _report_study(study, output)
    else:
        _report_notebook(source, parameters, output)


def _report_study(study: Path, output: Path | None) -> None:
    from labkit.report.files import check_output as check_report

    opened = open_study(study, None)
    place = output or _FIGURES / f"{opened.name}.html"
    check_report(place)
    status = opened.run()
    from labkit.report.document import study_report

    say(f"{study_report(study, place)}: {status.sentence}")
    if output is None:
        _list_reports()
    if status.count("failed"):
        raise typer.Exit(1)


def _report_notebook(notebook: Path, parameters: Path | None, output: Path | None) -> None:
    from labkit.report.document import write_report
    from labkit.report.headless import load_parameters
    from labkit.report.notebooks import find_notebook

    source = find_notebook(notebook)
    runs = [{}] if parameters is None else load_parameters(parameters)
    if len(runs) > 1:
        raise InputError(f"{parameters}: lists {len(runs)} runs; a report is of one (labkit notebook runs them all)")
    name = source.stem if parameters is None else f"{source.stem}-{parameters.stem}"
    say(write_report(source, runs[0], output or _FIGURES / f"{name}.html"))
    if output is None:
        _list_reports()


def _list_reports() -> None:
    """Renew the index of the default place; one that is somebody else's page stays, and the report is made anyway."""
    from labkit.report.index import write_index

    try:
        say(write_index(_FIGURES))
    except LabkitError as error:
        warn(str(error))


def index(
    folder: Annotated[Path, typer.Argument(metavar="DIR", parser=path_of, help="Where the reports are.")] = _FIGURES,
) -> None:
    """Write a page over the reports in a folder: what each is, when it was made, and its key facts."""
    from labkit.report.index import write_index

    say(write_index(folder))


def notebook(
    source: Annotated[Path, typer.Argument(metavar="NOTEBOOK", show_default=False, autocompletion=notebook_names)],
    *,
    parameters: Annotated[
        Path,
        typer.Option(
            "--parameters",
            "-p",
            "-f",
            metavar="FILE.yaml",
            parser=path_of,
            help="A mapping of parameters, or a list of them.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", parser=path_of, help="Folder of the executed notebooks.")
    ],
    workers: Annotated[int, typer.Option("--workers", min=1, max=1000, help="Runs at once.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Also run again what is done.")] = False,
    json: JsonOption = False,
) -> None:
    """Run a notebook headless, once for each of its parameters. Stop it as you like: what is done is kept."""
    from labkit.report.headless import load_parameters, run_all

    runs = run_all(source, load_parameters(parameters), output, workers=workers, force=force, say=warn)
    show(runs, json)
    if not runs.done:
        raise typer.Exit(1)


def open_study(study: Path, store: Path | None) -> "Study":
    """A study with its results."""
    from labkit.study import Study

    return Study.load(study, store)
