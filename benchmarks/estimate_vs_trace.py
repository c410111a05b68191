"""Hold the estimate against a trace of the real Megatron code, on the whole grid of small workloads: `make grid`.

`python benchmarks/estimate_vs_trace.py [--family NAME] [--only WORDS] [--json]` prints each case's errors in retained
bytes and peak allocated bytes, the worst of each family, and a summary; it ends with exit code 1 if a case misses
0.2 % retained or 1 % peak, or fails. The cases are `tests/memory/grid`; a trace of one takes about a second.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.running import Parser, at_least_one, traced_each
from labkit.console import Terminal
from labkit.drivers.trace.server import TraceServer
from labkit.errors import LabkitError
from tests.memory.grid import FAMILIES, NAMES, workload
from tests.memory.grid.agreement import PEAK_TOLERANCE, RETAINED_TOLERANCE, agreement, stages

PACKAGES = ("labkit", "torch", "megatron-core", "transformer-engine")


@dataclass(frozen=True)
class Case:
    """One workload of the grid; errors are relative and signed, above zero where the estimate is higher."""

    family: str
    name: str
    retained_error: float | None = None
    peak_error: float | None = None
    between_steps_error: float | None = None
    phase_error: float | None = None
    worst_phase: str | None = None
    """The phase whose peak of tensors differs most."""
    rank: int | None = None
    estimated_peak_bytes: int | None = None
    traced_peak_bytes: int | None = None
    estimated_retained_bytes: int | None = None
    traced_retained_bytes: int | None = None
    passes: bool = False
    failure: str | None = None
    """Why there are no figures: the estimate or the trace failed."""


def measured(name: str, server: TraceServer) -> Case:
    """Both sides of the case called `family: name`; of several pipeline stages the one with the largest errors."""
    family, _, short = name.partition(": ")
    try:
        pairs = list(stages(workload(name), server))
    except LabkitError as error:
        return Case(family, short, failure=str(error))
    except Exception as error:  # noqa: BLE001 (whatever it is, the other cases still count)
        return Case(family, short, failure=f"{type(error).__name__}: {error}")
    estimated, traced = max(pairs, key=lambda pair: pair.agreement.severity)
    errors = agreement(estimated, traced)
    return Case(
        family,
        short,
        retained_error=errors.retained,
        peak_error=errors.peak,
        between_steps_error=errors.between_steps,
        phase_error=errors.phase,
        worst_phase=errors.worst_phase,
        rank=traced.rank,
        estimated_peak_bytes=estimated.peak_allocated_bytes,
        traced_peak_bytes=traced.peak_allocated_bytes,
        estimated_retained_bytes=estimated.retained_bytes,
        traced_retained_bytes=traced.retained_bytes,
        passes=errors.holds,
    )


def run(names: Sequence[str], workers: int) -> list[Case]:
    """Every case, in the order of `names`."""
    with TraceServer() as server:
        return traced_each(lambda name: measured(name, server), names, workers, said=_said)


def _said(case: Case) -> str:
    errors = f"retained {_percent(case.retained_error)}, peak {_percent(case.peak_error)}"
    return f"{case.family}: {case.name}: {errors if case.failure is None else 'failed'}"


def worst(cases: Iterable[Case], field: str) -> Case | None:
    """The case with the largest error; None if none has figures."""
    known = (case for case in cases if case.failure is None)
    return max(known, key=lambda case: abs(getattr(case, field)), default=None)


def families(cases: Sequence[Case]) -> list[dict[str, object]]:
    """One summary for each family, in the grid's order."""
    found: list[dict[str, object]] = []
    for family in dict.fromkeys(case.family for case in cases):
        mine = [case for case in cases if case.family == family]
        facts: dict[str, object] = {"family": family, "cases": len(mine), "pass": sum(case.passes for case in mine)}
        for field in ("retained_error", "peak_error"):
            case = worst(mine, field)
            facts |= {f"worst_{field}": None, f"worst_{field}_case": None}
            if case is not None:
                facts |= {f"worst_{field}": getattr(case, field), f"worst_{field}_case": case.name}
        found.append(facts)
    return found


def _percent(error: object) -> str:
    return f"{error:+.3%}" if isinstance(error, float) else "-"


def show(cases: Sequence[Case], console: Console) -> None:
    """Cases, families and a summary, for people."""
    for family in dict.fromkeys(case.family for case in cases):
        table = Table(title=f"{family}: relative error of the estimate", title_justify="left")
        table.add_column("case")
        for heading in ("static", "retained", "peak", "phases"):
            table.add_column(heading, justify="right", no_wrap=True)
        for case in cases:
            if case.family == family:
                errors = (case.between_steps_error, case.retained_error, case.peak_error, case.phase_error)
                table.add_row(Text(case.name), *map(_percent, errors), style="" if case.passes else "red")
        console.print(table)
    worsts = Table(title="Worst of each family", title_justify="left")
    for heading in ("family", "pass", "retained", "in", "peak", "in"):
        worsts.add_column(heading, justify="right" if heading in ("pass", "retained", "peak") else "left")
    for facts in families(cases):
        worsts.add_row(
            str(facts["family"]),
            f"{facts['pass']} of {facts['cases']}",
            _percent(facts["worst_retained_error"]),
            Text(str(facts["worst_retained_error_case"])),
            _percent(facts["worst_peak_error"]),
            Text(str(facts["worst_peak_error_case"])),
        )
    console.print(worsts)
    for case in cases:
        if case.failure is not None:
            console.print(Text(f"{case.family}: {case.name} failed: {case.failure}", style="red"))
    medians = " and ".join(
        f"{_percent(statistics.median(abs(error) for case in cases if (error := getattr(case, field)) is not None))} "
        f"{what}"
        for field, what in (("retained_error", "retained"), ("peak_error", "peak"))
        if any(case.failure is None for case in cases)
    )
    console.print(
        f"{sum(case.passes for case in cases)} of {len(cases)} cases within {RETAINED_TOLERANCE:.1%} retained and "
        f"{PEAK_TOLERANCE:.0%} peak; median error {medians or 'unknown'}"
    )


def chosen(family: Sequence[str], only: Sequence[str]) -> list[str]:
    """Names of the grid in the given families (all by default) that hold one of the given words (any by default)."""
    return [
        name
        for name in NAMES
        if (not family or name.partition(": ")[0] in family) and (not only or any(words in name for words in only))
    ]


def main() -> None:
    """Run what was asked for; exit code 1 if a case misses."""
    parser = Parser(description="Hold the estimate against the trace on the grid of small workloads.")
    parser.add_argument("--family", action="append", default=[], choices=sorted(FAMILIES), help="may be repeated")
    parser.add_argument("--only", action="append", default=[], metavar="WORDS", help="cases whose name holds the words")
    parser.add_argument("--workers", type=at_least_one, default=2, help="traces at once (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    names = chosen(options.family, options.only)
    if not names:
        parser.error("no case has that name")
    began = time.monotonic()
    cases = run(names, options.workers)
    if options.json:
        facts = {
            "versions": {name: version(name) for name in PACKAGES},
            "tolerances": {"retained": RETAINED_TOLERANCE, "peak": PEAK_TOLERANCE},
            "seconds": round(time.monotonic() - began, 1),
            "pass": all(case.passes for case in cases),
            "families": families(cases),
            "cases": [asdict(case) for case in cases],
        }
        print(json.dumps(facts, indent=2))
    else:
        show(cases, Terminal())
        print(f"{time.monotonic() - began:.0f} s")
    sys.exit(0 if all(case.passes for case in cases) else 1)


if __name__ == "__main__":
    main()
