"""Hold the estimate against peaks measured on H200: `python benchmarks/accuracy_h200.py [--cells FILE.csv] [--json]`.

For every measured cell (`data/published/README.md`): retained bytes, forward peak and forward + backward peak above the
baseline, beside what `labkit/calibration/accuracy.py` makes of them.
"""

import json
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.running import Parser
from labkit.calibration.accuracy import Comparison, compared, summary
from labkit.calibration.cells import DEFAULT_CELLS, PHASES, WARM, read
from labkit.console import Terminal
from labkit.errors import LabkitError


def show(found: Sequence[Comparison], groups: dict[str, dict[str, float | int | None]], console: Console) -> None:
    """Both tables for people."""
    cells = Table(title="Bytes above the baseline (MB = 1e6; errors against the measured)", title_justify="left")
    for heading in ("case", "group", "phase"):
        cells.add_column(heading)
    headings = ("rows", "measured", "estimate", "error", "with margin", "worst case", "rule of thumb", "reference")
    for heading in headings:
        cells.add_column(heading, justify="right")
    for each in found:
        others = (each.worst_case_bytes, each.old_heuristic_bytes, each.reference_estimate_bytes)
        cells.add_row(
            each.case,
            each.group,
            each.phase,
            str(each.rows),
            f"{each.measured_bytes / 1e6:.1f}",
            f"{each.estimate_raw_bytes / 1e6:.1f}",
            f"{each.error:+.2%}",
            f"{each.headroom:+.2%}",
            *("" if other is None else f"{other / each.measured_bytes - 1:+.1%}" for other in others),
        )
    console.print(cells)
    table = Table(title="Groups", title_justify="left")
    table.add_column("group")
    for heading in ("cells", "mean |error|", "lowest", "highest", "headroom", "covered", "worst case"):
        table.add_column(heading, justify="right")
    table.add_column("rule of thumb", justify="right")
    table.add_column("reference", justify="right")
    for name, errors in groups.items():
        table.add_row(
            name,
            str(errors["cells"]),
            _percent(errors["mean_absolute_error"], ".2%"),
            _percent(errors["lowest_error"], "+.2%"),
            _percent(errors["highest_error"], "+.2%"),
            _percent(errors["mean_headroom"], "+.1%"),
            f"{errors['covered']}/{errors['cells']}",
            f"{_percent(errors['worst_case_lowest'], '+.1%')} .. {_percent(errors['worst_case_highest'], '+.1%')}",
            _percent(errors["old_heuristic_mean_absolute_error"], ".0%"),
            _percent(errors["reference_mean_absolute_error"], ".1%"),
        )
    console.print(table)


def _percent(value: float | None, shape: str) -> str:
    return "" if value is None else format(value, shape)


def main() -> None:
    """Prints every cell's errors and those of each group."""
    parser = Parser(description="Hold the estimate against peaks measured on H200.")
    parser.add_argument("--cells", type=Path, default=DEFAULT_CELLS, help="CSV of measured cells")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    try:
        compared_cells = [each for cell in read(options.cells, DEFAULT_CELLS) for each in compared(cell)]
    except LabkitError as error:
        parser.error(str(error))
    found = [each for each in compared_cells if each.phase in PHASES]
    repeats = [each for each in compared_cells if each.phase in WARM]
    groups = summary(found, repeats)
    if options.json:
        shown = {"cells": [asdict(each) for each in found], "repeats": [asdict(each) for each in repeats]}
        print(json.dumps(shown | {"summary": groups}, indent=2))
    else:
        show((*found, *repeats), groups, Terminal(markup=False))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` may leave early
    main()
