"""Where a study stands: the state of each cell's file."""

from collections.abc import Iterable
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from labkit.drivers.contract import DriverName, Failure
from labkit.study.runner import Cell
from labkit.study.store import DamagedCellError, Header, Store, Work, work
from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

State = Literal["done", "failed", "missing", "running", "stale", "damaged"]
"""done: a result that passed. failed: one that did not; the next run tries again. running: another process is making
it. stale: only results of other versions are there. damaged: its file cannot be trusted. All but done are made by the
next run."""

_STYLES: dict[State, str] = {
    "done": "green",
    "failed": "red",
    "damaged": "red",
    "stale": "yellow",
    "running": "cyan",
    "missing": "dim",
}


_COLUMNS = ("candidate", "driver", "state", "detail")


class CellStatus(Part):
    """The state of one cell."""

    candidate: str
    is_control: bool
    driver: DriverName
    repetition: PositiveInt = 1
    state: State
    detail: str
    """Why it is failed, stale or damaged; empty otherwise."""
    file: str
    """Where its result is or will be."""

    @property
    def name(self) -> str:
        """What to call it in a table of cells: `[moe_act]`, `[] (control)`, `[moe_act] #2` of several repetitions."""
        notes = f"{' (control)' if self.is_control else ''}{f' #{self.repetition}' if self.repetition > 1 else ''}"
        return self.candidate + notes


class Refusal(Part):
    """A combination that a sweep asks for and the rules reject."""

    candidate: str
    reason: str


class StudyStatus(Part):
    """The documented `--json` object of `labkit study status` and `labkit study run` (see docs/json.md)."""

    schema_name: Literal["labkit.study-status/1"] = "labkit.study-status/1"
    study: str
    title: str
    store: str
    cells: Many[CellStatus]
    refused: Many[Refusal] = ()
    """Combinations of a sweep that cannot run, with the rule's sentence."""

    def count(self, state: State) -> int:
        """Cells in a state."""
        return sum(cell.state == state for cell in self.cells)

    @property
    def sentence(self) -> str:
        """`4 of 6 cells done, 1 damaged, 1 missing`."""
        others = [f"{self.count(state)} {state}" for state in _STYLES if state != "done" and self.count(state)]
        others += [f"{len(self.refused)} refused"] if self.refused else []
        return ", ".join([f"{self.count('done')} of {len(self.cells)} cells done", *others])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        yield Text.assemble((self.title, "bold"), f"  {self.sentence}")
        table = Table(caption=f"store: {self.store}", caption_justify="left")
        for column in _COLUMNS:
            table.add_column(column)
        for cell in self.cells:
            state = Text(cell.state, style=_STYLES[cell.state])
            table.add_row(Text(cell.name), cell.driver, state, Text(cell.detail))
        yield table
        for each in self.refused:
            yield Text(f"{each.candidate}: refused, {each.reason}", style="yellow")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(cell.name)}</td>"
            f"<td>{escape(cell.driver)}</td><td>{cell.state}</td>"
            f"<td style='text-align:left'>{escape(cell.detail)}</td></tr>"
            for cell in self.cells
        )
        heads = "".join(f"<th scope='col'>{name}</th>" for name in _COLUMNS)
        return (
            f"<div class='labkit-study'><p><strong>{escape(self.title)}</strong>: {escape(self.sentence)}</p>"
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        )


def examine(cells: Iterable[Cell], store: Store) -> tuple[CellStatus, ...]:
    """The state of each cell. Bytes are verified, ledgers are not read: thousands of cells take seconds."""
    examiner = _Examiner(store)
    return tuple(examiner.status(cell) for cell in cells)


class _Examiner:
    """Looks at cells; goes through the whole store once at most, when a result is missing."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @cached_property
    def _by_work(self) -> dict[Work, list[Header]]:
        return self._store.by_work()

    def status(self, cell: Cell) -> CellStatus:
        state, detail = self._state(cell)
        return CellStatus(
            candidate=cell.candidate.label,
            is_control=cell.candidate.is_control,
            driver=cell.key.driver,
            repetition=cell.key.repetition,
            state=state,
            detail=detail,
            file=str(self._store.path(cell.key)),
        )

    def _state(self, cell: Cell) -> tuple[State, str]:
        try:
            header = self._store.header(cell.key)
        except DamagedCellError as damage:
            return "damaged", str(damage)
        failure = None if header is None else header.measurement.failure
        if header is not None and failure is None:
            short = header.measurement.out_of_memory
            return "done", "" if short is None else short.message
        if self._store.is_claimed(cell.key):
            return "running", ""
        if failure is not None:
            return "failed", reason(failure)
        for other in self._by_work.get(work(cell.key), ()):
            ours, theirs = dict(cell.key.versions), dict(other.key.versions)
            changed = sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            made = ", ".join(f"{name} {_short(theirs.get(name))}" for name in changed)
            return "stale", f"made by {made or 'the same versions, before workloads had all of their fields'}"
        return "missing", ""


def reason(failure: Failure) -> str:
    """A failure in words, with the phase it happened in."""
    return failure.message if failure.phase in failure.message else f"{failure.message} (in {failure.phase})"


def _short(version: str | None) -> str:
    return "(not stated)" if version is None else version[:16]
