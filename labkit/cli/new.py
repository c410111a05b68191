"""`labkit new`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from labkit.cli.completion import model_names, workload_names
from labkit.cli.help import Commands, examples
from labkit.cli.options import path_of
from labkit.cli.output import check_output, say, warn
from labkit.errors import InputError

new_app = typer.Typer(cls=Commands, help="Write commented starter files, valid as they stand.")

_WORKLOAD, _MODEL = "moonlight-16b", "moonlight-16b-a3b"

OutputOption = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.yaml|-",
        show_default="named after what it is of, here",
        help="Where it goes; - is standard output.",
    ),
]


@new_app.command(
    "study",
    epilog=examples(
        "labkit new study nemotron-3-nano",
        "labkit new study workload.yaml -o studies/mine.yaml",
    ),
)
def new_study(
    workload: Annotated[Path, typer.Argument(metavar="WORKLOAD.yaml", autocompletion=workload_names)] = Path(_WORKLOAD),
    output: OutputOption = None,
) -> None:
    """Write a study of a workload: the candidates that labkit plan proposes for it, and every option explained."""
    from labkit.starters import starter_name, study_starter
    from labkit.workload import Workload
    from labkit.workload.files import files_of, workload_file

    path = _place(output, starter_name(str(workload), "study"))
    found = workload_file(workload)
    if path is not None:
        check_output(path, *files_of(found))
    base = str(workload) if found != workload else _reference(found, path)
    text = study_starter(Workload.load(found), base, path or Path("STUDY.yaml"))
    _write(text, path, "labkit study run")


@new_app.command(
    "workload",
    epilog=examples(
        "labkit new workload qwen3-30b-a3b",
        "labkit new workload qwen3-8b -o workload.yaml",
    ),
)
def new_workload(
    model: Annotated[str, typer.Argument(metavar="MODEL|MODEL.yaml", autocompletion=model_names)] = _MODEL,
    output: OutputOption = None,
) -> None:
    """Write a workload of a model, on the fewest GPUs that hold it, with every common option explained."""
    from labkit.starters import starter_name, workload_starter

    path = _place(output, starter_name(model, "workload"))
    is_file = model.endswith((".yaml", ".yml"))
    if path is not None and is_file:
        check_output(path, model)
    reference = _reference(Path(model), path) if is_file else model
    _write(workload_starter(model, reference, path or Path("WORKLOAD.yaml")), path, "labkit estimate")


def _place(output: str | None, name: str) -> Path | None:
    """Where the file goes, where nothing is yet; None for standard output."""
    if output == "-":
        return None
    path = Path(f"{name}.yaml") if output is None else path_of(output)
    check_output(path)
    if path.exists():
        raise InputError(f"{path}: is there already; name another file with -o, or - for standard output")
    return path


def _reference(file: Path, path: Path | None) -> str:
    """How a file in the folder of `path` refers to another file."""
    relative = os.path.relpath(file, Path() if path is None else path.parent)
    return relative if relative.startswith("..") else f"./{relative}"


def _write(text: str, path: Path | None, command: str) -> None:
    from labkit.files import write_atomically

    if path is None:
        say(text.rstrip("\n"))
        return
    write_atomically(path, text)
    say(path)
    file = shlex.quote(str(path))
    warn(f"{path}: edit it, then: labkit check {file}; {command} {file}")
