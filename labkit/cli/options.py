"""Arguments and options that several commands have, and what their values must be."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from labkit.cli.completion import candidate_labels, gpu_names, study_names, workload_names

if TYPE_CHECKING:
    from labkit.drivers.trace.server import Limits


def named(text: str) -> str:
    """A name from the command line; an empty one would silently mean the current folder, or the control."""
    if not text.strip():
        raise typer.BadParameter("it is empty; give a name")
    return text


def path_of(text: str | Path) -> Path:
    """A path, which is not empty; an option's default is one already."""
    return Path(named(str(text)))


def source_of(text: str) -> str:
    """Who measured a peak, as a profile keeps it."""
    if not 0 < len(text.strip()) <= 1000:
        raise typer.BadParameter("say in 1 to 1000 characters who measured it, on what, when")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise typer.BadParameter("it is not text in UTF-8") from None
    return text.strip()


def limits_of(seconds: int, gib: int) -> "Limits":
    """What `--time-limit` and `--memory-limit` ask for."""
    from labkit.drivers.trace.server import Limits
    from labkit.workload.gpu import GIB

    return Limits(seconds, gib * GIB)


WorkloadArgument = Annotated[
    Path,
    typer.Argument(
        metavar="WORKLOAD.yaml",
        show_default=False,
        help="A file, or the name of one in data/workloads.",
        autocompletion=workload_names,
    ),
]


StudyArgument = Annotated[
    Path,
    typer.Argument(
        metavar="STUDY.yaml",
        show_default=False,
        help="A file, or the name of one in data/studies.",
        autocompletion=study_names,
    ),
]


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


StoreOption = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", parser=path_of, help="Folder of the result files.", show_default="results/NAME"
    ),
]


ProfilesOption = Annotated[Path, typer.Option("--profiles", metavar="DIR", parser=path_of, help="Folder of profiles.")]


StageOption = Annotated[
    int | None,
    typer.Option("--stage", min=0, help="Which pipeline stage.", show_default="the one that holds most"),
]


WorkersOption = Annotated[
    int | None, typer.Option("--workers", min=1, help="Ranks traced at once.", show_default="2, or 1 on one CPU")
]


OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="LABEL",
        parser=named,
        help="Only this candidate or setting; may be repeated.",
        autocompletion=candidate_labels,
    ),
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


GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help="Such as h100-80gb or a100-80gb.", autocompletion=gpu_names, show_default=False
    ),
]
