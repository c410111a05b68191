"""Runs the code of a document and holds what it prints against what the document shows.

`python -m tests.docs.blocks` runs every document of `PAGES` and writes what was printed into it. In a document

- a block with a `title` is a file of that name, which later blocks find;
- in a `console` block every line that begins with `$ ` is a command (it goes on where a line ends in a backslash), and
  the lines below are what a terminal of 96 columns shows; a line `...` stands for any lines;
- a `python` block sees the names of those before it, and a `text` block behind it is what it prints;
- a `console` block with a command that traces takes half a minute, and `make pages` alone runs it;
- a `sh` block needs what a test has not (a cluster, a browser) and is looked at, not run: see `words`.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

from labkit.cli import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = (DOCS / "tutorial.md", *sorted((DOCS / "howto").glob("*.md")), DOCS / "memory_model.md")

TERMINAL = {"TERM": "dumb", "COLUMNS": "96", "LINES": "50", "TTY_COMPATIBLE": "1", "MPLBACKEND": "agg"}
"""A terminal without colours, as rich understands it."""

_TRACES: Final = "$ labkit trace "

_BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$', re.DOTALL | re.MULTILINE
)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.MULTILINE)
ANY = "..."


class Block(NamedTuple):
    """A fenced block of a document."""

    language: str
    title: str | None
    body: str
    start: int
    """Where the body begins in the document."""


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document, in order."""
    for match in _BLOCK.finditer(text):
        yield Block(match["language"], match["title"], match["body"], match.start("body"))


def run(text: str, *, traces: bool = True) -> Iterator[tuple[Block, str]]:
    """Each block that shows what something prints, and what it prints; in the current folder.

    Blocks that trace are left out without `traces`.
    """
    names: dict[str, Any] = {}
    printed: str | None = None
    for block in blocks(text):
        before, printed = printed, None
        if block.title:
            Path(block.title).write_text(block.body)
        elif block.language == "console":
            if not traces and _TRACES in block.body:
                continue
            yield block, "".join(f"$ {command}\n{_said(command)}" for command in _COMMAND.findall(block.body))
        elif block.language == "python":
            printed = _output(lambda block=block: exec(block.body, names))  # noqa: S102
        elif block.language == "text":
            assert before is not None, "a text block shows what the python block before it prints"
            yield block, before
        else:
            assert block.language == "sh", f"nobody runs a block of {block.language}"


def _said(command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] == "labkit":
        return _output(lambda: main(words[1:]))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _output(act: Any) -> str:
    """What an act prints, standard error too, without blanks at the ends of lines."""
    stream = io.StringIO()
    with (
        mock.patch.dict(os.environ, TERMINAL),
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        contextlib.suppress(SystemExit),
    ):
        act()
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


def agrees(shown: str, printed: str) -> bool:
    """Whether a block shows what was printed, where a line `...` stands for any lines."""
    pattern = "".join(r"(?:.*\n)*?" if line == ANY else f"{re.escape(line)}\n" for line in shown.splitlines())
    return re.fullmatch(pattern, printed) is not None


def written(text: str) -> str:
    """A document with what its blocks print now."""
    for block, printed in reversed(list(run(text))):
        if not agrees(block.body, printed):
            text = text[: block.start] + printed + text[block.start + len(block.body) :]
    return text


if __name__ == "__main__":
    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            page.write_text(written(page.read_text()))
