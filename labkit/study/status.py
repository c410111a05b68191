"""Where a study stands: the state of each cell's file."""

from html import escape
from typing import TYPE_CHECKING, Literal

from labkit.drivers.contract import DriverName, Failure
from labkit.study.runner import Cell
from labkit.study.store import DamagedCellError, Store, Stored
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


class CellStatus(Part):
    """The state of one cell."""

    candidate: str
    is_control: bool
    driver: DriverName
    state: State
    detail: str
    """Why it is failed, stale or damaged; empty otherwise."""
    file: str
    """Where its result is or will be."""


class StudyStatus(Part):
    """The documented `--json` object of `labkit study status` and `labkit study run` (see docs/json.md)."""

    schema_name: Literal["labkit.study-status/1"] = "labkit.study-status/1"
    study: str
    title: str
    store: str
    cells: Many[CellStatus]

    def count(self, state: State) -> int:
        """Cells in a state."""
        return sum(cell.state == state for cell in self.cells)

    @property
    def sentence(self) -> str:
        """`4 of 6 cells done, 1 damaged, 1 missing`."""
        others = [f"{self.count(state)} {state}" for state in _STYLES if state != "done" and self.count(state)]
        return ", ".join([f"{self.count('done')} of {len(self.cells)} cells done", *others])

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        yield Text.assemble((self.title, "bold"), f"  {self.sentence}")
        table = Table(caption=f"store: {self.store}", caption_justify="left")
        for column in ("candidate", "driver", "state", "detail"):
            table.add_column(column)
        for cell in self.cells:
            name = f"{cell.candidate} (control)" if cell.is_control else cell.candidate
            state = Text(cell.state, style=_STYLES[cell.state])
            table.add_row(Text(name), cell.driver, state, Text(cell.detail))
        yield table

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(cell.candidate)}{' (control)' if cell.is_control else ''}</td>"
            f"<td>{escape(cell.driver)}</td><td>{cell.state}</td>"
            f"<td style='text-align:left'>{escape(cell.detail)}</td></tr>"
            for cell in self.cells
        )
        heads = "".join(f"<th scope='col'>{name}</th>" for name in ("candidate", "driver", "state", "detail"))
        return (
            f"<div class='labkit-study'><p><strong>{escape(self.title)}</strong>: {escape(self.sentence)}</p>"
            f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        )


def examine(cell: Cell, store: Store) -> tuple[CellStatus, Stored | None]:
    """The state of one cell, and its result where there is one that can be trusted."""
    state, detail, stored = _state(cell, store)
    status = CellStatus(
        candidate=cell.candidate.label,
        is_control=cell.candidate.is_control,
        driver=cell.key.driver,
        state=state,
        detail=detail,
        file=str(store.path(cell.key)),
    )
    return status, stored


def _state(cell: Cell, store: Store) -> tuple[State, str, Stored | None]:
    try:
        stored = store.read(cell.key)
    except DamagedCellError as damage:
        return "damaged", str(damage), None
    if stored is not None:
        failure = stored.measurement.failure
        if failure is None:
            return "done", "", stored
        return "failed", reason(failure), stored
    if store.is_claimed(cell.key):
        return "running", "", None
    for other in store.others(cell.key):
        ours = dict(cell.key.versions)
        changed = sorted(name for name in {**ours, **other.versions} if ours.get(name) != other.versions.get(name))
        made = ", ".join(f"{name} {_short(other.versions.get(name))}" for name in changed)
        return "stale", f"made by {made}", None
    return "missing", "", None


def reason(failure: Failure) -> str:
    """A failure in words, with the phase it happened in."""
    return failure.message if failure.phase in failure.message else f"{failure.message} (in {failure.phase})"


def _short(version: str | None) -> str:
    return "(not stated)" if version is None else version[:16]
