"""How a run shows itself: live in a terminal or a notebook, silent elsewhere but for what the user must know."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from typing import Protocol

from rich.markup import escape as escape_markup
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from labkit.console import Terminal
from labkit.study.runner import Event, EventKind


class _Display(Protocol):
    """Shows where a run stands, and says what must not be lost."""

    def show(self, finished: int, running: dict[str, str]) -> None:
        """`running`: the phase of each cell in progress, by its label."""

    def say(self, line: str) -> None:
        """A damaged file, a failure."""


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[Event], None]]:
    """A listener for the events of a run of `total` cells."""
    finished = 0
    running: dict[str, str] = {}
    with _display(title, total) as display:

        def on_event(event: Event) -> None:
            nonlocal finished
            label = event.cell.candidate.label
            match event.kind:
                case EventKind.STARTED | EventKind.PHASE:
                    running[label] = event.detail
                case EventKind.DAMAGED:
                    display.say(event.detail)
                case EventKind.KEPT | EventKind.DONE | EventKind.FAILED:
                    running.pop(label, None)
                    finished += 1
            if event.kind is EventKind.FAILED:
                display.say(f"{label} failed: {event.detail}")
            display.show(finished, running)

        display.show(0, {})
        yield on_event


@contextmanager
def _display(title: str, total: int) -> Iterator[_Display]:
    console = Terminal(stderr=True)
    if "ipykernel" in sys.modules:
        yield _Notebook(title, total, console)
    else:
        progress = _bars(console) if console.is_terminal else nullcontext()
        with progress as bars:
            yield _Terminal(title, total, console, bars)


def _bars(console: Terminal) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
        console=console,
        transient=True,
    )


class _Terminal:
    """A bar for the run and one for each cell in progress; without bars, where nobody watches, only what is said."""

    def __init__(self, title: str, total: int, console: Terminal, bars: Progress | None) -> None:
        self._console = console
        self._bars = bars
        self._cells: dict[str, TaskID] = {}
        if bars is not None:
            self._run = bars.add_task(escape_markup(title), total=total, detail="")

    def show(self, finished: int, running: dict[str, str]) -> None:
        if self._bars is None:
            return
        self._bars.update(self._run, completed=finished)
        for label in self._cells.keys() - running.keys():
            self._bars.remove_task(self._cells.pop(label))
        for label, phase in running.items():
            if label not in self._cells:
                self._cells[label] = self._bars.add_task(f"  {escape_markup(label)}", total=None, detail="")
            self._bars.update(self._cells[label], detail=phase)

    def say(self, line: str) -> None:
        self._console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)


class _Notebook:
    """One line under the cell, replaced as the run goes on."""

    def __init__(self, title: str, total: int, console: Terminal) -> None:
        from IPython.display import HTML, DisplayHandle

        self._title = title
        self._total = total
        self._console = console
        self._html = HTML
        self._handle = DisplayHandle()
        self._handle.display(HTML(""))

    def show(self, finished: int, running: dict[str, str]) -> None:
        cells = "; ".join(f"{label} ({phase})" if phase else label for label, phase in running.items())
        line = f"{self._title}: {finished} of {self._total} cells made" + (f", now {cells}" if cells else "")
        self._handle.update(self._html(f"<p>{escape(line)}</p>"))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
