"""`--help`: every command has examples that parse, within 80 columns, and is listed under what it is for."""

import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from typer._click import Command
from typer.core import TyperGroup
from typer.exceptions import Exit
from typer.main import get_group

from labkit.cli import app
from labkit.cli.help import first_clause

COMMANDS = get_group(app)


def every(group: TyperGroup, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Every command with the words that name it, groups too."""
    yield path, group
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from every(command, (*path, name))
        else:
            yield (*path, name), command


EVERY = dict(every(COMMANDS))


def examples(path: tuple[str, ...]) -> list[list[str]]:
    """The words of each example, a pipe's last command."""
    lines = re.split(r"\n  (?=\S)", (EVERY[path].epilog or "").replace("\\\n", " "))[1:]
    return [shlex.split(line.split("| ")[-1], comments=True) for line in lines]


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_help_fits_80_columns_and_shows_one_to_four_examples(
    path: tuple[str, ...], labkit: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answer = labkit(*path, "--help")
    assert answer.returncode == 0
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert 1 <= len(examples(path)) <= 4
    for words in examples(path):
        assert words[: len(path) + 1] == ["labkit", *path], "an example of this command"
        assert " ".join(words[:2]) in answer.stdout


def test_the_short_form_is_the_same(labkit: Callable) -> None:
    for path in ((), ("study", "run")):
        assert labkit(*path, "-h").stdout == labkit(*path, "--help").stdout


@pytest.mark.parametrize("path", EVERY, ids=" ".join)
def test_examples_parse(path: tuple[str, ...]) -> None:
    for words in examples(path):
        command: Command = COMMANDS
        rest = words[1:]
        while isinstance(command, TyperGroup):
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(" ".join(words), rest)
        except Exit:
            assert "--help" in words


@pytest.mark.parametrize(
    "path",
    [("estimate",), ("check",), ("new", "study"), ("new", "workload"), ("study", "status"), ("doctor",), ("version",)],
    ids=" ".join,
)
def test_the_first_example_works_anywhere(path: tuple[str, ...], labkit: Callable) -> None:
    answer = labkit(*examples(path)[0][1:])
    assert answer.returncode == 0
    assert answer.stdout


def test_labkit_alone_shows_the_help(labkit: Callable) -> None:
    assert labkit().stdout == labkit("--help").stdout
    assert labkit().returncode == 0


def test_commands_are_listed_under_what_they_are_for(labkit: Callable) -> None:
    shown = labkit("--help").stdout
    panels = re.findall(r"^(\S.*):$", shown, flags=re.MULTILINE)
    assert panels == [
        "Options",
        "To begin with",
        "One workload",
        "Studies, reports, notebooks",
        "Runs of your own",
        "This machine",
    ]
    assert set(re.findall(r"^  ([a-z]+)  ", shown, flags=re.MULTILINE)) == set(COMMANDS.commands)
    assert "..." not in shown.replace("[ARGS]...", ""), "nothing is cut"


def test_a_clause_ends_where_the_next_begins() -> None:
    assert first_clause("Say why: because.") == "Say why"
    assert first_clause("Where .py files are\nnotebooks. They lie") == "Where .py files are notebooks"
