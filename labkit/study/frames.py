"""A study's results as polars frames: all that reports and notebooks read.

Bytes are integers; nothing here knows GiB, colours or HTML. `source` is `estimated`, `traced`, `measured` (on GPUs) or
`published`. Repeated cells of a candidate are one row: the largest peak, the median step.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

import polars as pl

from labkit.drivers.contract import DriverName, Measurement
from labkit.ledger import Ledger
from labkit.study.status import reason
from labkit.summary import CATEGORIES, Result, category, spans
from labkit.work import WorkRow, replay, total

if TYPE_CHECKING:
    from labkit.study.results import CandidateResult, CellResult, Results

CELLS = {
    "candidate": pl.String,
    "setting": pl.String,
    "is_control": pl.Boolean,
    "source": pl.String,
    "repetitions": pl.Int64,
    "outcome": pl.String,
    "failure": pl.String,
    "peak_allocated_bytes": pl.Int64,
    "peak_tensor_bytes": pl.Int64,
    "peak_phase": pl.String,
    "between_steps_bytes": pl.Int64,
    "retained_bytes": pl.Int64,
    "peak_reserved_bytes": pl.Int64,
    "step_time_ms": pl.Float64,
    "step_time_low_ms": pl.Float64,
    "step_time_high_ms": pl.Float64,
    "tflops_per_gpu": pl.Float64,
    "replay_flops": pl.Int64,
    "replay_hbm_bytes": pl.Int64,
    "replay_seconds": pl.Float64,
    "replay_checkpoints": pl.Int64,
    "step_seconds": pl.Float64,
    "changes": pl.String,
    "differs_in": pl.String,
    "warnings": pl.String,
    "saved_bytes": pl.Int64,
    "error_vs_published": pl.Float64,
}
"""`replay_...`: what backward runs again each step; a trace has counted it (`labkit.work`), an estimate adds it up.
`step_seconds`: of all that the step does, a lower bound like `replay_seconds`; of a trace both are those of the slowest
pipeline stage. `setting`: of a sweep, which one; each has a control of its own. `repetitions`: results behind a row;
null where nothing was run. `step_time_low_ms` and `..._high_ms`: of all steady steps. `changes`: the choices in which a
candidate differs from its control; `differs_in`: the same where they are several, so that it is not matched, else null.
`warnings`: why some of its choices do nothing. `saved_bytes`: the control's peak less
its own, both of one source.
`error_vs_published`: (own peak - published peak) / published peak."""

BREAKDOWN = {"candidate": pl.String, "source": pl.String, "category": pl.String, "bytes": pl.Int64}
TIMELINE = {
    "candidate": pl.String,
    "source": pl.String,
    "position": pl.Float64,
    "clock": pl.Int64,
    "phase": pl.String,
    "category": pl.String,
    "bytes": pl.Int64,
}
PEAKS = {"candidate": pl.String, "source": pl.String, "position": pl.Float64, "phase": pl.String, "bytes": pl.Int64}
RANKS = {
    "candidate": pl.String,
    "source": pl.String,
    "rank": pl.Int64,
    "stages": pl.String,
    "parameters": pl.Int64,
    "between_steps_bytes": pl.Int64,
    "first_step_peak_bytes": pl.Int64,
    "steady_peak_bytes": pl.Int64,
    "peak_allocated_bytes": pl.Int64,
    "peak_phase": pl.String,
    "peak_reserved_bytes": pl.Int64,
}
TRADEOFF = {
    "candidate": pl.String,
    "setting": pl.String,
    "is_control": pl.Boolean,
    "outcome": pl.String,
    "evidence": pl.String,
    "replay_source": pl.String,
    "saved_bytes": pl.Int64,
    "replay_seconds": pl.Float64,
    "rank": pl.Int64,
    "unbeaten": pl.Boolean,
}
"""`unbeaten`: nothing of its setting saves as much for less replay, or more for the same; null without both figures."""
CONTRACT = {
    "candidate": pl.String,
    "source": pl.String,
    "outcome": pl.String,
    "origin": pl.String,
    "created_at": pl.String,
    "wall_seconds": pl.Float64,
    "steady_iterations": pl.Int64,
    "versions": pl.String,
    "environment": pl.String,
    "contract_recorded": pl.Int64,
    "contract_fields": pl.Int64,
    "contract_lacking": pl.String,
}
"""`contract_...`: of the fields that a run on GPUs records (`labkit.drivers.contract`), how many are there, how many
there are, and the names of those that are not."""


def cells(results: "Results") -> pl.DataFrame:
    """One row per candidate and source, columns `CELLS`; recorded and published rows only where there are some."""
    rows: list[dict[str, Any]] = []
    for result in results.candidates:
        candidate = result.candidate
        idle = [finding.reason for finding in candidate.workload.findings if finding.severity == "warning"]
        common = {
            "candidate": candidate.label,
            "setting": candidate.setting,
            "is_control": candidate.is_control,
            "changes": ", ".join(candidate.changes) or None,
            "differs_in": ", ".join(candidate.differs_in) or None,
            "warnings": "; ".join(idle) or None,
        }
        rows.append({**common, "source": "estimated", "outcome": "ok", **_held(result.estimate), **_replay(result)})
        if traced := result.by("trace"):
            rows.append({**common, "source": "traced", **_traced(traced[0])})
        if measured := result.by("cuda"):
            rows.append({**common, "source": "measured", **_measured(measured)})
        for recorded in (result.recorded, result.published):
            if recorded is not None:
                rows.append({**common, "source": recorded.driver, **_recorded(recorded)})
    raw = pl.DataFrame(rows, schema={name: kind for name, kind in CELLS.items() if name not in _COMPARED})
    control = raw.filter("is_control").select("setting", "source", control_bytes="peak_allocated_bytes")
    published = raw.filter(pl.col("source") == "published").select("candidate", published_bytes="peak_allocated_bytes")
    peak = pl.col("peak_allocated_bytes")
    return (
        raw.join(control, on=["setting", "source"], how="left", maintain_order="left")
        .join(published, on="candidate", how="left", maintain_order="left")
        .with_columns(
            saved_bytes=pl.col("control_bytes") - peak,
            error_vs_published=pl.when(pl.col("source") != "published").then(peak / pl.col("published_bytes") - 1),
        )
        .select(*CELLS)
    )


_COMPARED = ("saved_bytes", "error_vs_published")
_SOURCES: dict[DriverName, str] = {
    "trace": "traced",
    "cuda": "measured",
    "recorded": "recorded",
    "published": "published",
}


def _held(result: Result) -> dict[str, Any]:
    summary = result.summary
    return {
        "peak_allocated_bytes": summary.peak_allocated_bytes,
        "peak_tensor_bytes": max(phase.peak_tensor_bytes for phase in summary.phases),
        "peak_phase": summary.peak_phase,
        "between_steps_bytes": summary.between_steps_bytes,
        "retained_bytes": summary.retained_bytes,
        "peak_reserved_bytes": summary.peak_reserved_bytes,
    }


def _replay(result: "CandidateResult") -> dict[str, Any]:
    guessed = result.estimate.replay
    return {
        "replay_flops": guessed.flops,
        "replay_hbm_bytes": guessed.hbm_bytes,
        "replay_seconds": guessed.seconds,
    }


def _worked(works: Sequence[Sequence[WorkRow]]) -> dict[str, Any]:
    """Of the pipeline stage whose step takes longest: the others wait for it."""
    rows = max(works, key=lambda rows: total(rows).seconds)
    if not rows:
        return {}
    again = replay(rows)
    return {
        "replay_flops": again.flops,
        "replay_hbm_bytes": again.hbm_bytes,
        "replay_seconds": again.seconds,
        "replay_checkpoints": again.checkpoints,
        "step_seconds": total(rows).seconds,
    }


def _traced(run: "CellResult") -> dict[str, Any]:
    if run.traced is not None:
        short = None if run.measurement is None else run.measurement.out_of_memory
        failure = None if short is None else short.message
        found = {"outcome": "ok", "failure": failure, "repetitions": 1}
        return {**found, **_held(run.traced), **_worked(run.traced.works)}
    return _unfinished([run])


def _measured(runs: "Sequence[CellResult]") -> dict[str, Any]:
    """Of all repetitions; one that did not pass makes the whole no result, since the next may end like it."""
    made = [run.measurement for run in runs if run.measurement is not None]
    if not made or any(each.outcome != "ok" for each in made):
        return _unfinished(runs)
    worst = max((rank for each in made for rank in each.ranks), key=lambda rank: rank.peak.peak_allocated_bytes)
    steps = [time for each in made for time in each.step_times_ms]
    rates = [each.tflops_per_gpu for each in made if each.tflops_per_gpu is not None]
    return {
        "outcome": "ok",
        "repetitions": len(made),
        "peak_allocated_bytes": worst.peak.peak_allocated_bytes,
        "peak_phase": worst.peak.phase,
        "between_steps_bytes": worst.between_steps_bytes,
        "retained_bytes": worst.retained_bytes,
        "peak_reserved_bytes": max(rank.peak_reserved_bytes or 0 for each in made for rank in each.ranks) or None,
        "step_time_ms": median(steps) if steps else None,
        "step_time_low_ms": min(steps, default=None),
        "step_time_high_ms": max(steps, default=None),
        "tflops_per_gpu": median(rates) if rates else None,
    }


def _unfinished(runs: "Sequence[CellResult]") -> dict[str, Any]:
    """Of cells of which one did not pass, or none was made."""
    made = [run.measurement for run in runs if run.measurement is not None]
    failed = next((each for each in made if each.failure is not None), None)
    if failed is None or failed.failure is None:
        return {"outcome": "missing", "failure": next((run.status.detail for run in runs if run.status.detail), None)}
    why = reason(failed.failure)
    several = f"{sum(each.outcome != 'ok' for each in made)} of {len(made)} repetitions: " if len(made) > 1 else ""
    return {"outcome": failed.outcome, "repetitions": len(made), "failure": several + why}


def _recorded(measurement: Measurement) -> dict[str, Any]:
    worst = measurement.worst_rank
    return {
        "outcome": measurement.outcome,
        "failure": None if measurement.failure is None else reason(measurement.failure),
        "peak_allocated_bytes": measurement.peak_allocated_bytes,
        "peak_phase": None if worst is None else worst.peak.phase,
        "peak_reserved_bytes": None if worst is None else worst.peak_reserved_bytes,
        "step_time_ms": measurement.step_time_ms,
        "tflops_per_gpu": measurement.tflops_per_gpu,
    }


def breakdown(results: "Results") -> pl.DataFrame:
    """What holds each peak, columns `BREAKDOWN`; a candidate's categories of one source sum to its peak."""
    rows: list[tuple[str, str, str, int]] = []
    for result in results.candidates:
        label = result.candidate.label
        for held in (result.estimate, result.traced):
            if held is not None:
                rows += [(label, held.certainty, share.category, share.bytes) for share in held.summary.breakdown]
        if result.published is not None and result.published.peak_allocated_bytes is not None:
            rows.append((label, "published", "published total", result.published.peak_allocated_bytes))
    return pl.DataFrame(rows, schema=BREAKDOWN, orient="row")


def timeline(results: "Results", moments: int = 400) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Allocated bytes through the steady step of each candidate (`timelines`), a trace before an estimate."""
    held = ((result.candidate.label, (result.traced, result.estimate)) for result in results.candidates)
    return timelines(((label, [each for each in both if each is not None]) for label, both in held), moments)


def timelines(held: Iterable[tuple[str, Sequence[Result]]], moments: int = 400) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Allocated bytes through the steady step, columns `TIMELINE`, and one peak each, columns `PEAKS`.

    A step has thousands of events; about `moments` of them are kept: the start and the peak of each phase, and the
    highest and the lowest of each of equal stretches between. `position` runs from 0 to 1 over the step's clock, which
    counts events, not time; the phases of a candidate's later results are laid over those of its first.

    Args:
        held: candidates with their results.
        moments: how many to keep of each.
    """
    lines: list[tuple[Any, ...]] = []
    peaks: list[tuple[Any, ...]] = []
    for label, results in held:
        bounds: tuple[float, ...] = ()
        for result in results:
            name = (label, result.certainty)
            profile = _Profile(result.ledger)
            bounds = profile.lay_over(bounds)
            for clock in profile.thinned(moments):
                where = (profile.position(clock), clock, profile.phase(clock))
                lines += [(*name, *where, kind, nbytes) for kind, nbytes in profile.held(clock)]
            clock, nbytes = profile.peak
            peaks.append((*name, profile.position(clock), profile.phase(clock), nbytes))
    return pl.DataFrame(lines, schema=TIMELINE, orient="row"), pl.DataFrame(peaks, schema=PEAKS, orient="row")


class _Profile:
    """Allocated bytes per category through a ledger's steady iteration."""

    def __init__(self, ledger: Ledger) -> None:
        steady = ledger.steady_iteration()
        self._phases = [moment for moment in ledger.moments if moment.iteration == steady]
        first = self._phases[0].clock
        changes: dict[int, Counter[str]] = {moment.clock: Counter() for moment in self._phases}
        for row in ledger.rows:
            if row.dies is not None and row.dies <= first:
                continue
            kind, remainder = category(row), row.block_bytes - row.bytes
            for clock, sign in ((max(row.born, first), 1), (row.dies, -1)):
                if clock is not None:
                    change = changes.setdefault(clock, Counter())
                    change[kind] += sign * row.bytes
                    change["allocator remainders"] += sign * remainder
        self.clocks = sorted(changes)
        self._totals: list[int] = []
        self._holdings: list[tuple[int, ...]] = []
        held: Counter[str] = Counter()
        for clock in self.clocks:
            held.update(changes[clock])
            self._holdings.append(tuple(held[kind] for kind in CATEGORIES))
            self._totals.append(sum(self._holdings[-1]))
        self._index = {clock: index for index, clock in enumerate(self.clocks)}
        self._starts = [moment.clock for moment in self._phases] + [max(self.clocks[-1], self._phases[-1].clock)]
        span = (self._starts[-1] - self._starts[0]) or 1
        self._bounds = tuple((start - self._starts[0]) / span for start in self._starts)

    def lay_over(self, bounds: tuple[float, ...]) -> tuple[float, ...]:
        """Take another profile's positions of phase starts and of the end, where its phases are as many."""
        if len(bounds) == len(self._bounds):
            self._bounds = bounds
        return self._bounds

    @property
    def peak(self) -> tuple[int, int]:
        """(clock, bytes) of the largest total, the first of equals."""
        index = max(range(len(self.clocks)), key=self._totals.__getitem__)
        return self.clocks[index], self._totals[index]

    def held(self, clock: int) -> list[tuple[str, int]]:
        """Bytes of every category that is ever held, so that stacked areas have no gaps."""
        return list(zip(CATEGORIES, self._holdings[self._index[clock]], strict=True))

    def phase(self, clock: int) -> str:
        """The phase a clock is in."""
        return next(moment.phase for moment in reversed(self._phases) if moment.clock <= clock)

    def position(self, clock: int) -> float:
        """0 at the step's first event, 1 at its last."""
        phase = bisect_right(self._starts, clock, hi=len(self._phases)) - 1
        start, end = self._starts[phase], self._starts[phase + 1]
        within = (clock - start) / (end - start) if end > start else 0.0
        return self._bounds[phase] + within * (self._bounds[phase + 1] - self._bounds[phase])

    def thinned(self, moments: int) -> list[int]:
        """About `moments` clocks that keep the outline."""
        count = len(self.clocks)
        edges = sorted({0, count, *(round(count * n / (moments // 2)) for n in range(moments // 2))})
        starts = [self._first_at_or_after(moment.clock) for moment in self._phases]
        kept = {0, count - 1, *(start for start in starts if start < count)}
        for stretch in (*pairwise(edges), *pairwise([*starts, count])):
            if stretch[0] < stretch[1]:
                kept.add(max(range(*stretch), key=self._totals.__getitem__))
        for stretch in pairwise(edges):
            kept.add(min(range(*stretch), key=self._totals.__getitem__))
        return [self.clocks[index] for index in sorted(kept)]

    def _first_at_or_after(self, clock: int) -> int:
        return next((index for index, at in enumerate(self.clocks) if at >= clock), len(self.clocks))


def tradeoff(decision: pl.DataFrame) -> pl.DataFrame:
    """What each choice saves and what its replay costs, columns `TRADEOFF`, of a `decision` frame."""
    rows = decision.to_dicts()
    for row in rows:
        rivals = [each for each in rows if each["setting"] == row["setting"] and _is_priced(each)]
        row["unbeaten"] = not any(_beats(each, row) for each in rivals) if _is_priced(row) else None
    return pl.DataFrame(rows, schema_overrides=TRADEOFF, infer_schema_length=None).select(
        pl.col(name).cast(kind) for name, kind in TRADEOFF.items()
    )


def _is_priced(row: dict[str, Any]) -> bool:
    return row["saved_bytes"] is not None and row["replay_seconds"] is not None


def _beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    better = one["saved_bytes"] >= other["saved_bytes"] and one["replay_seconds"] <= other["replay_seconds"]
    alike = one["saved_bytes"] == other["saved_bytes"] and one["replay_seconds"] == other["replay_seconds"]
    return better and not alike


def ranks(results: "Results") -> pl.DataFrame:
    """What each rank holds that was traced or measured, columns `RANKS`; `stages`: pipeline stages it stands for."""
    rows = [
        (
            result.candidate.label,
            _SOURCES[run.measurement.driver],
            record.rank,
            spans(record.stages),
            record.parameters,
            record.between_steps_bytes,
            record.first_step_peak_bytes,
            record.steady_peak_bytes,
            record.peak.peak_allocated_bytes,
            record.peak.phase,
            record.peak_reserved_bytes,
        )
        for result in results.candidates
        for run in result.runs
        if run.measurement is not None and run.measurement.outcome == "ok"
        for record in run.measurement.ranks
    ]
    return pl.DataFrame(rows, schema=RANKS, orient="row")


def contract(results: "Results") -> pl.DataFrame:
    """How each measured figure came about, columns `CONTRACT`; one row per candidate and measured source."""
    rows = []
    for result in results.candidates:
        for measurement in result.measurements:
            rows.append(
                (
                    result.candidate.label,
                    _SOURCES[measurement.driver],
                    measurement.outcome,
                    measurement.source,
                    measurement.created_at,
                    measurement.wall_seconds,
                    measurement.steady_iterations,
                    _listed(measurement.versions),
                    _listed(measurement.environment),
                    len(measurement.contract) - len(measurement.lacking),
                    len(measurement.contract),
                    ", ".join(measurement.lacking),
                )
            )
    return pl.DataFrame(rows, schema=CONTRACT, orient="row")


def _listed(pairs: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs.items())
