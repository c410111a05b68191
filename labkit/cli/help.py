"""How `--help` looks: examples below each command, commands by what they are for."""

import re
from typing import TYPE_CHECKING

from typer.core import TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

ONE, MANY, START, CAUSES, MACHINE = (
    "One workload",
    "Studies, reports, notebooks",
    "To begin with",
    "Runs of your own",
    "This machine",
)
_ORDER = (START, ONE, MANY, CAUSES, MACHINE)


def examples(*lines: str) -> str:
    """What stands below a command's help: each a command line that works, with a comment or without."""
    shown = "\n".join(f"  {line}" for line in lines)
    return f"\b\nExamples:\n{shown}"


class Commands(TyperGroup):
    """A group whose help lists its commands by their panels, each with the first clause of its help."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write them."""
        panels: dict[str, list[tuple[str, str]]] = {name: [] for name in _ORDER}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(panel, []).append((name, first_clause(command.help or "")))
        widest = max(len(name) for rows in panels.values() for name, _ in rows)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl([(name.ljust(widest), said) for name, said in rows])


def first_clause(text: str) -> str:
    """A sentence up to its first colon, semicolon or full stop.

    >>> first_clause("Estimate the peak of one rank, in closed form: no GPU. Fast.")
    'Estimate the peak of one rank, in closed form'
    """
    return re.split(r"[:;.](?=\s|$)", " ".join(text.split()), maxsplit=1)[0]
