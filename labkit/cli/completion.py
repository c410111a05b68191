"""Shell completion: what could stand at the cursor, and the scripts by which shells ask for it.

A script starts labkit with the line up to the cursor in `_LABKIT_COMPLETE_LINE`. The answer has a line for each value:
the value, a tab, what it is. No answer means that the shell knows better, which is: files. Neither torch nor polars is
imported, and of labkit only what a value needs.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from labkit.errors import InputError
from labkit.files import shipped, write_atomically

if TYPE_CHECKING:
    from typer.core import TyperGroup

LINE = "_LABKIT_COMPLETE_LINE"

Shell = Literal["bash", "zsh", "fish"]
_SCRIPTS = Path(__file__).with_name("shells")
_MOST = 1000
"""Values in an answer: a folder may have millions."""
_SHIPPED = "ships with labkit"


def answer(commands: "TyperGroup", line: str) -> Iterator[str]:
    """What could stand at the end of a command line, a line for each value."""
    from typer._click.shell_completion import ShellComplete, split_arg_string

    class Answers(ShellComplete):
        """Finds values; the scripts are `shells/`."""

        name = "labkit"
        source_template = ""

        def source_vars(self) -> dict[str, Any]:
            return {}

        def get_completion_args(self) -> tuple[list[str], str]:
            words = split_arg_string(line)[1:]
            return (words, "") if line[-1:].isspace() or not words else (words[:-1], words[-1])

        def format_completion(self, item: Any) -> str:
            said = " ".join((item.help or "").split())
            return f"{item.value}\t{said}" if said else item.value

    answers = Answers(commands, {}, "labkit", LINE)
    for item in answers.get_completions(*answers.get_completion_args()):
        if item.value.isprintable():  # no line end within a name passes for two names
            yield answers.format_completion(item)


def script(shell: Shell) -> str:
    """What makes a shell complete."""
    return (_SCRIPTS / f"labkit.{shell}").read_text(encoding="utf-8")


def shell_of_user() -> Shell:
    """The login shell.

    Raises:
        InputError: it is none of those.
    """
    name = Path(os.environ.get("SHELL", "")).name
    for known in ("bash", "zsh", "fish"):
        if name == known:
            return known
    raise InputError(f"the login shell is {name or 'not known'}; say --shell bash, zsh or fish")


def install(shell: Shell) -> tuple[Path, str]:
    """Write a shell's script where the shell looks for it.

    Returns:
        Where that is, and what remains to be done.
    """
    home = Path.home()
    if shell == "bash":
        place = _base("XDG_DATA_HOME", home / ".local/share") / "bash-completion/completions/labkit"
        then = f"where bash-completion is not there, add to ~/.bashrc: source '{place}'"
    elif shell == "zsh":
        place = home / ".zfunc/_labkit"
        then = "unless it is there, add to ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit"
    else:
        place, then = _base("XDG_CONFIG_HOME", home / ".config") / "fish/completions/labkit.fish", ""
    write_atomically(place, script(shell))
    return place, then


def _base(variable: str, default: Path) -> Path:
    stated = os.environ.get(variable, "")
    return Path(stated) if stated.startswith("/") else default


def workload_names(incomplete: str) -> list[tuple[str, str]]:
    """Shipped workloads, and files."""
    return [*_shipped("workloads", incomplete), *_files(incomplete, ".yaml", ".yml")]


def study_names(incomplete: str) -> list[tuple[str, str]]:
    """Shipped studies, and files."""
    return [*_shipped("studies", incomplete), *_files(incomplete, ".yaml", ".yml")]


def model_names(incomplete: str) -> list[tuple[str, str]]:
    """Shipped models, and files."""
    return [*_shipped("models", incomplete), *_files(incomplete, ".yaml", ".yml")]


def notebook_names(incomplete: str) -> list[tuple[str, str]]:
    """Shipped notebooks, and files."""
    return [*_shipped("notebooks", incomplete), *_files(incomplete, ".py")]


def report_names(incomplete: str) -> list[tuple[str, str]]:
    """What there may be a report of."""
    return [
        *_shipped("notebooks", incomplete),
        *_shipped("studies", incomplete),
        *_files(incomplete, ".yaml", ".yml", ".py"),
    ]


def gpu_names(incomplete: str) -> list[str]:
    """GPUs that labkit knows."""
    from labkit.workload.gpu import GPUS

    return [name for name in GPUS if name.startswith(incomplete)]


def candidate_labels(context: typer.Context, incomplete: str) -> list[str]:
    """Labels in the study that stands before."""
    from labkit.study.matrix import stated_workloads
    from labkit.workload.files import load_mapping, study_file

    try:
        # Where an option's value is still missing, arguments are among what is not parsed yet.
        path = study_file(Path(context.params.get("study") or next(iter(context.args), "")))
        found = stated_workloads(load_mapping(path), path)
        return [label for label, _ in islice(found, _MOST) if label.startswith(incomplete)]
    except InputError:
        return []


def _shipped(kind: str, incomplete: str) -> Iterator[tuple[str, str]]:
    return ((name, _SHIPPED) for name in shipped(kind) if name.startswith(incomplete))


def _files(incomplete: str, *endings: str) -> list[tuple[str, str]]:
    """Files with one of the endings, and folders, in the folder that is being typed."""
    folder, slash, start = incomplete.rpartition("/")
    found: list[tuple[str, str]] = []
    try:
        with os.scandir(f"{folder}{slash}" or ".") as entries:
            for entry in islice(entries, 100 * _MOST):
                hidden = entry.name.startswith(".") and not start.startswith(".")
                if not hidden and entry.name.startswith(start):
                    if entry.is_dir():
                        found.append((f"{folder}{slash}{entry.name}/", ""))
                    elif entry.name.endswith(endings):
                        found.append((f"{folder}{slash}{entry.name}", ""))
    except OSError:
        return []
    return sorted(found)[:_MOST]
