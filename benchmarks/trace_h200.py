"""Trace the cells measured on H200, beside the estimate.

`python benchmarks/trace_h200.py [--only TEXT] [--keep FILE.csv] [--json]`

labkit's own LoRA wrappers (`labkit/drivers/lora`) run in Megatron Core's model over tensors without data; what each
phase takes above the baseline is read off the trace as off the estimate (`labkit/calibration/accuracy.py`). `tensors`
is how far the two sides' retained tensors are from each other: what else they differ in is where the allocator puts
them. Cells with context parallelism are not traced. Traces of the shipped cells are kept in `data/traced`, of others
in the file that `--keep` names.
"""

import json
import signal
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.running import Parser, at_least_one, traced_each
from labkit.calibration.accuracy import MANY_ROWS, Levels, increments
from labkit.calibration.cells import DEFAULT_CELLS, Cell, read
from labkit.calibration.kept import CELLS, KEPT_CELLS, keep
from labkit.console import Terminal, printable
from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.server import TraceServer
from labkit.errors import LabkitError
from labkit.memory.estimate import estimate


@dataclass(frozen=True)
class Traced:
    """One phase of one cell; errors are relative and signed, above zero where too high."""

    case: str
    group: str
    rows: int
    phase: str
    measured_bytes: int
    estimate_error: float
    traced_error: float
    tensors: float
    """The estimate's retained tensors against the trace's."""
    traced_bytes: int


@dataclass(frozen=True)
class Untraced:
    """A cell that could not be traced."""

    case: str
    reason: str


def both_sides(cell: Cell, server: TraceServer) -> list[Traced] | Untraced:
    """A cell's measured phases beside what is estimated and traced of them."""
    try:
        trace = server.run(cell.workload)
    except Unfinished as error:
        return Untraced(cell.case, str(error))
    estimated = estimate(cell.workload)
    ours, theirs = (increments(cell, Levels.of(each)) for each in (estimated, trace))
    return [
        Traced(
            cell.case,
            cell.group,
            cell.rows,
            phase,
            measured,
            estimate_error=round(ours[phase].raw / measured - 1, 6),
            traced_error=round(theirs[phase].raw / measured - 1, 6),
            tensors=round(estimated.retained_bytes / trace.retained_bytes - 1, 6),
            traced_bytes=theirs[phase].raw,
        )
        for phase, measured in cell.measured_bytes.items()
    ]


def _said(result: list[Traced] | Untraced) -> str:
    if isinstance(result, Untraced):
        return f"{result.case}: not traced"
    errors = (f"{each.phase} {each.estimate_error:+.2%} estimated, {each.traced_error:+.2%} traced" for each in result)
    return f"{result[0].case}: {'; '.join(errors)}"


def summary(found: Sequence[Traced]) -> Iterator[tuple[str, int, float, float]]:
    """(group, figures, mean absolute error of the estimate, of the trace)."""
    groups: dict[str, list[Traced]] = {}
    for each in found:
        kind = "mixture of experts" if each.group.startswith("moe") else "dense and hybrid"
        size = f"{MANY_ROWS}+ rows" if each.rows >= MANY_ROWS else f"below {MANY_ROWS} rows"
        phases = "second repetition" if each.phase == "repeat_forward" else "all phases"
        for group in {kind, each.group}:
            groups.setdefault(f"{group}, {size}, {phases}", []).append(each)
    for name, members in sorted(groups.items()):
        ours = statistics.mean(abs(each.estimate_error) for each in members)
        theirs = statistics.mean(abs(each.traced_error) for each in members)
        yield name, len(members), round(ours, 6), round(theirs, 6)


def show(found: Sequence[Traced], untraced: Sequence[Untraced], console: Console) -> None:
    """Tables for people."""
    cells = Table(title="Bytes above the baseline (MB = 1e6; errors against the measured)", title_justify="left")
    for heading in ("case", "group", "phase"):
        cells.add_column(heading)
    for heading in ("rows", "measured", "estimate", "trace", "tensors"):
        cells.add_column(heading, justify="right")
    for each in found:
        errors = (each.estimate_error, each.traced_error, each.tensors)
        shown = (f"{error:+.2%}" for error in errors)
        cells.add_row(each.case, each.group, each.phase, str(each.rows), f"{each.measured_bytes / 1e6:.1f}", *shown)
    console.print(cells)
    table = Table(title="Mean absolute error", title_justify="left")
    table.add_column("group")
    for heading in ("figures", "estimate", "trace"):
        table.add_column(heading, justify="right")
    for name, count, estimated, traced in summary(found):
        table.add_row(name, str(count), f"{estimated:.2%}", f"{traced:.2%}")
    console.print(table)
    for cell in untraced:
        console.print(f"{cell.case}: {printable(cell.reason)}")


def _keep(path: Path | None, cells: Sequence[Cell], result: list[Traced] | Untraced) -> None:
    """Keep what came of a cell; no path, no file."""
    if path is not None:
        works = {cell.case: cell.work_hash for cell in cells}
        figures = [result] if isinstance(result, Untraced) else result
        keep(path, CELLS, [asdict(each) | {"work_hash": works[each.case]} for each in figures])


def main() -> None:
    """Prints every cell's errors and those of each group."""
    parser = Parser(description="Trace the cells measured on H200, beside the estimate.")
    parser.add_argument("--cells", type=Path, default=DEFAULT_CELLS, help="CSV of measured cells")
    parser.add_argument("--only", default="", help="cells whose name or group contains this")
    parser.add_argument("--workers", type=at_least_one, default=1, help="traces at once")
    parser.add_argument("--keep", type=Path, metavar="FILE.csv", help="where to keep the traced bytes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    try:
        cells = [cell for cell in read(options.cells, DEFAULT_CELLS) if options.only in f"{cell.case} {cell.group}"]
        with TraceServer(options.workers) as server:
            results = traced_each(
                lambda cell: both_sides(cell, server),
                cells,
                options.workers,
                said=_said,
                kept=partial(_keep, options.keep or (KEPT_CELLS if options.cells == DEFAULT_CELLS else None), cells),
            )
    except LabkitError as error:
        parser.error(str(error))
    untraced = [each for each in results if isinstance(each, Untraced)]
    found = [row for each in results if not isinstance(each, Untraced) for row in each]
    if options.json:
        groups = {name: {"figures": n, "estimate": e, "trace": t} for name, n, e, t in summary(found)}
        rows = {"cells": [asdict(each) for each in found], "untraced": [asdict(each) for each in untraced]}
        print(json.dumps(rows | {"summary": groups}, indent=2))
    else:
        show(found, untraced, Terminal(markup=False))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may leave early
    main()
