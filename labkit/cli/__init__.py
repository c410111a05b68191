"""The `labkit` command.

Exit codes: 0 done; 1 the work failed; 2 the input is wrong and nothing was written; 130 interrupted. Whatever goes
wrong is one sentence on stderr. `--json` prints one JSON object on stdout and nothing else. Each command imports what
it needs when it runs: an estimate must not wait for torch, polars or charts.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException
from typer.main import get_group

import labkit
from labkit.cli import completion, imports, lab, new, profiles, studies, workloads
from labkit.cli.help import CAUSES, MACHINE, MANY, ONE, START, Commands, examples
from labkit.cli.output import say, warn
from labkit.errors import InputError, LabkitError

_INTERRUPTED = 130
"""What typer makes of Ctrl-C: 128 + SIGINT, as shells have it."""


app = typer.Typer(
    cls=Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="What one rank of a Megatron Core job holds in GPU memory, and what to recompute.",
    epilog=examples(
        "labkit estimate moonlight-16b",
        "labkit new study moonlight-16b -o study.yaml",
        "labkit report study.yaml",
        "labkit plan --help  # every command has examples",
    ),
    add_completion=False,  # typer's scripts evaluate what they read, names of files too
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print labkit's version.")] = False,
    install_completion: Annotated[
        bool, typer.Option("--install-completion", help="Let a shell complete commands, names and files.")
    ] = False,
    show_completion: Annotated[
        bool, typer.Option("--show-completion", help="Print what does that, to put it where you like.")
    ] = False,
    shell: Annotated[
        completion.Shell | None, typer.Option("--shell", help="Which shell.", show_default="the login shell")
    ] = None,
) -> None:
    """What one rank of a Megatron Core job holds in GPU memory, and what to recompute."""
    if version:
        typer.echo(labkit.__version__)
    elif show_completion:
        say(completion.script(shell or completion.shell_of_user()).rstrip("\n"))
    elif install_completion:
        place, then = completion.install(shell or completion.shell_of_user())
        say(place)
        warn(f"new shells complete labkit{f'; {then}' if then else ''}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    if version or show_completion or install_completion:
        raise typer.Exit


_COMMANDS: tuple[tuple[str, Callable[..., None], str], ...] = (
    (START, lab.lab, examples("labkit lab", "labkit lab ~/studies --no-browser --port 9000")),
    (
        ONE,
        workloads.estimate,
        examples("labkit estimate moonlight-16b", "labkit estimate workload.yaml --stage 0 --json"),
    ),
    (
        ONE,
        workloads.plan,
        examples("labkit plan moonlight-16b --budget 40GB", "labkit plan workload.yaml --settings -o study.yaml"),
    ),
    (ONE, workloads.trace, examples("labkit trace moonlight-16b", "labkit trace workload.yaml --ranges --workers 4")),
    (ONE, workloads.compare, examples("labkit compare moonlight-16b", "labkit compare workload.yaml --stage 0 --all")),
    (ONE, workloads.check, examples("labkit check moonlight-16b", "labkit check workload.yaml study.yaml --json")),
    (
        ONE,
        workloads.admit,
        examples(
            "labkit admit qwen3.8-27b-lora requests.json --budget 120GB",
            "echo '[8192, 4096, 512]' | labkit admit qwen3.8-27b-lora -",
        ),
    ),
    (
        MANY,
        studies.report,
        examples("labkit report study.yaml", "labkit report recompute_study -p mine.yaml -o mine.html"),
    ),
    (MANY, studies.index, examples("labkit index", "labkit index shared/reports")),
    (MANY, studies.notebook, examples("labkit notebook recompute_study -p runs.yaml -o runs --workers 2")),
    (
        CAUSES,
        workloads.measure,
        examples("labkit measure workload.yaml", "labkit measure workload.yaml --repetitions 3 --snapshots snapshots"),
    ),
    (
        CAUSES,
        workloads.diagnose,
        examples("labkit diagnose train.log", "labkit diagnose rank0.log snapshot.pickle pretrain.sh --gpu h100-80gb"),
    ),
    (MACHINE, workloads.doctor, examples("labkit doctor", "labkit doctor --json")),
)
_GROUPS = (
    (START, "new", new.new_app, "labkit new study --help"),
    (START, "import", imports.import_app, "labkit import huggingface --help"),
    (MANY, "study", studies.study_app, "labkit study run --help"),
    (CAUSES, "profile", profiles.profile_app, "labkit profile add --help"),
)
for _panel, _name, _group, _example in _GROUPS:
    app.add_typer(_group, name=_name, rich_help_panel=_panel, epilog=examples(f"{_example}  # has examples"))
for _panel, _command, _examples in _COMMANDS:
    _settings = {"ignore_unknown_options": _command is lab.lab}  # jupyter's own options pass
    app.command(rich_help_panel=_panel, epilog=_examples, context_settings=_settings)(_command)


@app.command(rich_help_panel=MACHINE, epilog=examples("labkit version"))
def version() -> None:
    """Print labkit's version."""
    typer.echo(labkit.__version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


def _run(arguments: list[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names may have letters that the terminal's encoding lacks
    line = os.environ.get(completion.LINE)
    try:
        if line is not None:
            for answer in completion.answer(get_group(app), line):  # not even a line where there is none
                typer.echo(answer)
            return 0
        code = app(arguments, prog_name="labkit", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has left
        _write_no_more()
        return 1
    except Exception as error:  # noqa: BLE001 (the last resort: a bug of ours must read as one)
        failed = _fail(error)
        try:
            sys.stdout.flush()
        except OSError:
            _write_no_more()
        return failed
    if code == _INTERRUPTED:
        typer.echo("labkit: interrupted", err=True)
    return code if isinstance(code, int) else 0


def _write_no_more() -> None:
    """What standard output did not take goes nowhere: the interpreter's last flush must not complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
