"""Trace Megatron-LM's functional-test jobs without a GPU and compare with what NVIDIA's machines measured.

`python benchmarks/accuracy_megatron_ci.py [--cases FILE.jsonl] [--limit N] [--only TEXT] [--group NAME] [--json]`
prints for each job the traced and the measured peak of its last rank, the signed error, and the same for the first
step and for what is alive between steps, or why it did not run; then a summary by family, GPU and date. No figure is
scaled; the versions that rows do not name are stated in `labkit/calibration/jobs.py`. Figures of the shipped jobs are
kept in `data/traced` (`--keep FILE.csv` for another file, and for other jobs), with those of the estimate beside them.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.running import Parser, at_least_one, traced_each
from labkit.calibration.jobs import DEFAULT_JOBS, FAMILIES, Job, Row, read_rows, relative, traced
from labkit.calibration.kept import JOBS, KEPT_JOBS, keep
from labkit.console import Terminal
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.importers.megatron import MegatronReader


def run(rows: Sequence[Row], workers: int, kept: Path | None) -> list[Job]:
    """Every job, in the order of `rows`; each is kept in the file as soon as it is there."""
    with MegatronReader() as reader, TraceServer() as server:
        return traced_each(
            lambda row: traced(row, reader, server), rows, workers, said=_said, kept=partial(_keep, kept, rows)
        )


def _keep(path: Path | None, rows: Sequence[Row], job: Job) -> None:
    if path is not None:
        works = {row.case: row.work_hash for row in rows}
        keep(path, JOBS, [asdict(job) | {"work_hash": works[job.case]}])


def _said(job: Job) -> str:
    return f"{job.case} {job.date}: {job.status if job.error is None else f'peak {_percent(job.error)}'}"


def summary(jobs: Sequence[Job]) -> list[dict[str, object]]:
    """How many jobs of each kind ran, and how large their errors are."""
    return [
        _statistics(name, group, [job for job in jobs if job.group == group and choose(job)])
        for group in ("current", "older", "resumed")
        for name, choose in _kinds(jobs)
        if any(job.group == group and choose(job) for job in jobs)
    ]


def _kinds(jobs: Iterable[Job]) -> list[tuple[str, Callable[[Job], bool]]]:
    """Families that are judged together, and each on its GPUs."""
    pairs = sorted({(_together(job), gpu) for job in jobs for gpu in ("", job.gpu)})
    return [(f"{family} on {gpu}" if gpu else family, partial(_is_one, family, gpu)) for family, gpu in pairs]


def _together(job: Job) -> str:
    return FAMILIES.get(job.family, job.family)


def _is_one(family: str, gpu: str, job: Job) -> bool:
    return _together(job) == family and gpu in ("", job.gpu)


def _statistics(name: str, group: str, jobs: Sequence[Job]) -> dict[str, object]:
    facts: dict[str, object] = {"jobs": name, "group": group, "number": len(jobs)}
    facts["traced"] = sum(job.status == "traced" for job in jobs)
    errors = {
        "peak": [job.error for job in jobs],
        "first_step": [relative(job.traced_first_step_bytes, job.measured_first_step_bytes) for job in jobs],
        "between_steps": [relative(job.traced_between_steps_bytes, job.measured_between_steps_bytes) for job in jobs],
    }
    for what, signed in errors.items():
        known = [error for error in signed if error is not None]
        sizes = sorted(map(abs, known))
        facts[f"{what}_median_absolute_error"] = statistics.median(sizes) if sizes else None
        facts[f"{what}_p90_absolute_error"] = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))] if sizes else None
        facts[f"{what}_median_error"] = statistics.median(known) if known else None
    return facts


def growth(jobs: Iterable[Job]) -> dict[str, object]:
    """Whether later steps peak above the first one, in the trace as in the measurement, and by how much.

    A peak covers the whole job, so that it is never below the first step's: it is larger, or the same.
    """
    pairs = [
        (job.traced_growth_bytes, job.measured_growth_bytes, job.measured_bytes)
        for job in jobs
        if job.traced_growth_bytes is not None and job.measured_growth_bytes is not None
    ]
    misses = sorted(abs(traced - measured) for traced, measured, _ in pairs)
    parts = sorted(abs(traced - measured) / peak for traced, measured, peak in pairs)
    return {
        "jobs": len(pairs),
        "grow_when_measured": sum(measured > 0 for _, measured, _ in pairs),
        "agree": sum((traced > 0) == (measured > 0) for traced, measured, _ in pairs),
        "median_error_bytes": statistics.median(misses) if misses else None,
        "median_error_of_peak": statistics.median(parts) if parts else None,
        "p90_error_of_peak": parts[min(len(parts) - 1, int(0.9 * len(parts)))] if parts else None,
    }


def _growth_sentence(jobs: Iterable[Job]) -> str:
    facts = growth(jobs)
    if not facts["jobs"]:
        return "No job has a first-step peak to compare."
    return (
        f"Later steps peak above the first in {facts['grow_when_measured']} of {facts['jobs']} measured jobs; "
        f"the trace agrees on {facts['agree']}. The difference is off by "
        f"{facts['median_error_of_peak']:.2%} of the peak in the median, {facts['p90_error_of_peak']:.2%} at 90 %."
    )


def _percent(error: object) -> str:
    return f"{error:+.2%}" if isinstance(error, float) else "-"


def show(jobs: Sequence[Job], console: Console) -> None:
    """Jobs, then the summary, for people."""
    table = Table(title="Last rank, traced against measured", title_justify="left")
    for heading in ("job", "date", "measured MiB", "traced MiB", "peak", "step 1", "between", "s"):
        table.add_column(heading, justify="left" if heading in ("job", "date") else "right")
    for job in jobs:
        if job.traced_bytes is None:
            table.add_row(Text(job.case), job.date, f"{job.measured_bytes / 2**20:,.0f}", Text(job.status))
            continue
        table.add_row(
            Text(job.case),
            job.date,
            f"{job.measured_bytes / 2**20:,.0f}",
            f"{job.traced_bytes / 2**20:,.0f}",
            _percent(job.error),
            _percent(relative(job.traced_first_step_bytes, job.measured_first_step_bytes)),
            _percent(relative(job.traced_between_steps_bytes, job.measured_between_steps_bytes)),
            f"{job.seconds:.0f}",
        )
    console.print(table)
    for job in jobs:
        if job.reason is not None:
            console.print(Text(f"{job.status}: {job.case}: {job.reason}"))
    table = Table(title="Absolute errors of the peak, and of what is alive between steps", title_justify="left")
    for heading in ("jobs", "goldens", "traced", "median", "90 %", "bias", "step 1", "between"):
        table.add_column(heading, justify="left" if heading in ("jobs", "goldens") else "right")
    for facts in summary(jobs):
        table.add_row(
            str(facts["jobs"]),
            str(facts["group"]),
            f"{facts['traced']} of {facts['number']}",
            _percent(facts["peak_median_absolute_error"]),
            _percent(facts["peak_p90_absolute_error"]),
            _percent(facts["peak_median_error"]),
            _percent(facts["first_step_median_absolute_error"]),
            _percent(facts["between_steps_median_absolute_error"]),
        )
    console.print(table)
    console.print(Text(_growth_sentence(jobs)))


def main() -> None:
    """Run what was asked for."""
    parser = Parser(description="Trace Megatron-LM's functional-test jobs and compare.")
    parser.add_argument("--cases", type=Path, default=DEFAULT_JOBS, metavar="FILE.jsonl")
    parser.add_argument("--limit", type=at_least_one, help="only the first so many")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name holds the text")
    parser.add_argument("--group", action="append", default=[], choices=["current", "older", "resumed"])
    parser.add_argument("--workers", type=at_least_one, default=2, help="traces at once (2)")
    parser.add_argument("--keep", type=Path, metavar="FILE.csv", help="where to keep the figures")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args()
    began = time.monotonic()
    try:
        rows = list(read_rows(options.cases))
    except InputError as error:
        parser.error(str(error))
    chosen = [
        row
        for row in rows
        if (not options.only or any(text in row.case for text in options.only))
        and (not options.group or row.group in options.group)
    ]
    if not chosen:
        parser.error("no job has that name and group" if rows else f"{options.cases}: there is no job in it")
    kept = options.keep or (KEPT_JOBS if options.cases == DEFAULT_JOBS else None)
    jobs = run(chosen[: options.limit], options.workers, kept)
    if options.json:
        print(
            json.dumps(
                {"jobs": [asdict(job) for job in jobs], "summary": {"groups": summary(jobs), "growth": growth(jobs)}},
                indent=2,
            )
        )
    else:
        show(jobs, Terminal(markup=False))
        print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
