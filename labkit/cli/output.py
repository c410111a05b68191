"""What commands print, and where they may write."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from labkit.errors import InputError

if TYPE_CHECKING:
    from labkit.workload.base import Part


def check_output(path: Path, *inputs: Path | str | None) -> None:
    """Refuse a place for a file where something else stands, before the work is done.

    Args:
        path: Where the file is to go.
        inputs: What the command reads, where that is files.

    Raises:
        InputError: it is a folder, a device, a pipe or a link, or one of the inputs by whatever name.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        kind = "a folder" if path.is_dir() else "a link" if path.is_symlink() else "no regular file"
        raise InputError(f"{path}: is {kind}; give the file another name")
    for each in inputs:
        if each is not None and path.exists() and Path(each).exists() and path.samefile(each):
            raise InputError(f"{path}: is what the command reads; give the output another name")


_LONGEST_WORD = 400
"""Characters of a name that a sentence repeats: its beginning and end tell which it was."""


def warn(sentence: str) -> None:
    """A sentence on stderr."""
    from labkit.console import printable

    half = _LONGEST_WORD // 2
    words = (word if len(word) <= _LONGEST_WORD else f"{word[:half]}…{word[-half:]}" for word in sentence.split())
    typer.echo(f"labkit: {printable(' '.join(words))}", err=True)


def say(text: object) -> None:
    """A line on stdout."""
    from labkit.console import printable

    typer.echo(printable(str(text)))


def show(value: "Part", json: bool) -> None:
    """A result on stdout, for people or as JSON."""
    if json:
        from json import dumps

        # In ASCII: no control character of a file's name, nor bytes of it that are no text, reach a terminal or a pipe.
        typer.echo(dumps(value.model_dump(mode="json"), separators=(",", ":")))
        return
    from labkit.console import Terminal

    Terminal().print(value)
