"""The `labkit` command.

Exit codes: 0 done; 1 the work failed; 2 the input is wrong and nothing was written; 130 interrupted. Whatever goes
wrong is one sentence on stderr. `--json` prints one JSON object on stdout and nothing else. Each command imports what
it needs when it runs: an estimate must not wait for torch, polars or charts.
"""

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

import labkit
from labkit.cli import imports, new, profiles, studies, workloads
from labkit.cli.output import warn
from labkit.errors import InputError, LabkitError

_INTERRUPTED = 130
"""What typer makes of Ctrl-C: 128 + SIGINT, as shells have it."""


app = typer.Typer(
    help="What one rank of a Megatron Core job holds in GPU memory, and what to recompute.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


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


for _command in (
    workloads.estimate,
    workloads.check,
    workloads.trace,
    workloads.plan,
    workloads.diagnose,
    workloads.admit,
    workloads.measure,
    workloads.compare,
    studies.report,
    studies.notebook,
    workloads.doctor,
):
    app.command()(_command)
app.add_typer(studies.study_app, name="study")
app.add_typer(profiles.profile_app, name="profile")
app.add_typer(imports.import_app, name="import")
app.add_typer(new.new_app, name="new")


@app.command()
def version() -> None:
    """Print labkit's version."""
    _print_version(True)


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
            context = getattr(error, "ctx", None)
            command = "labkit" if context is None else context.command_path
            code, sentence = error.exit_code, f"{message} ({command} --help lists what there is)"
        case OSError():
            code, sentence = 1, f"{error.filename or 'output'}: {error.strerror or error}"
        case _:
            code, sentence = 1, f"unexpected {type(error).__name__}: {error} (LABKIT_DEBUG=1 shows the traceback)"
            if os.environ.get("LABKIT_DEBUG"):
                traceback.print_exception(error)
    warn(sentence)
    return code
