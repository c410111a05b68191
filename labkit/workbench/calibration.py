"""What the notebook `calibration` shows: estimates and traces beside what machines measured, and how far off they are.

Errors are fractions of the measured figure, above zero where labkit is too high. Estimates of the H200 cells and of the
published studies are made on the spot; traces, and whatever there is of the CI jobs, are kept ones (`data/traced`): one
that was made of other work than today's is stale, and no figure of it is shown. Of an H200 cell that is the workload
labkit makes of it; of a CI job the job as it was published, since only Megatron's own parser makes a workload of one.
Traces of the published studies are those of the studies' own results, where these are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import polars as pl

from labkit.calibration.accuracy import MANY_ROWS, Comparison, compared, shipped
from labkit.calibration.cells import CHOSEN_FROM, DEFAULT_CELLS, WARM, Cell, read
from labkit.calibration.jobs import DEFAULT_JOBS, Row, read_rows
from labkit.calibration.kept import CELLS, JOBS, KEPT_CELLS, KEPT_JOBS, read_kept
from labkit.calibration.known import Known
from labkit.drivers.trace.versions import trace_versions
from labkit.memory.estimate import BlockPeaks
from labkit.memory.margin import margin_over
from labkit.study import Study
from labkit.workload.files import data_directory

OWN, H200, JOB, STUDY = "your cells", "H200 cells", "CI jobs", "published studies"
COLLECTIONS: Final = (OWN, H200, JOB, STUDY)
"""Where measured figures come from."""
HELD_OUT, CALIBRATED = "held out", "calibrated"
BASES: Final = (HELD_OUT, CALIBRATED)
"""Whether a choice that no source decides was made in view of the case."""
STUDIES: Final = ("moonlight-16b", "nemotron-3-nano")

FIGURES: Final = {
    "collection": pl.String,
    "case": pl.String,
    "basis": pl.String,
    "models": pl.String,
    "phase": pl.String,
    "layout": pl.String,
    "start": pl.String,
    "size": pl.String,
    "machine": pl.String,
    "goldens": pl.String,
    "counted": pl.Boolean,
    "split": pl.String,
    "rows": pl.Int64,
    "measured_bytes": pl.Int64,
    "estimated_bytes": pl.Int64,
    "covering_bytes": pl.Int64,
    "traced_bytes": pl.Int64,
    "trace": pl.String,
    "why": pl.String,
    "known": pl.String,
}
"""A measured figure and what labkit says of it. `layout`: which kind of split decides; `split`: the sizes; `start`: the
first run of its process, or a warm one; `goldens`: of CI jobs. `counted`: part of the headline (a warm repetition is a
figure of its own, as are older golden values and jobs that resume). `covering_bytes`: the estimate with its margin.
`trace`: ok, stale, not traced, or how the trace ended; `why`: the reason where it is not ok. `known`: why the case is
off."""

FACETS: Final[Mapping[str, Mapping[str, str]]] = {
    H200: {
        "models": "models and routing",
        "phase": "phase",
        "layout": "parallel layout",
        "start": "state of the process",
        "size": "rows a rank",
    },
    JOB: {
        "models": "models",
        "machine": "GPU",
        "phase": "figure",
        "layout": "parallel layout",
        "goldens": "golden values",
    },
}
"""Columns of `FIGURES` that figures are grouped by."""
FACETS_OF: Final = {**FACETS, OWN: FACETS[H200], STUDY: {"models": "study"}}

_MODELS = {"moe": "experts, routing even", "moe concentrated": "experts, concentrated"}
_PHASES = {
    "retained": "retained",
    "forward": "forward",
    "forward_backward": "forward, backward",
    "repeat_forward": "second forward",
}
_STATES = {"unsupported": "not supported", "failed": "failed"}
_GOLDENS = {"current": "July 2026 and later", "older": "older", "resumed": "resumed from a checkpoint"}
_SHORT = {OWN: "yours", H200: "H200", JOB: "CI", STUDY: "study"}
_AGAIN: Final = {H200: "make cells", JOB: "make jobs"}
"""What traces them."""
_DRIVER: Final = "trace driver"
_SMALL, _LARGE = f"below {MANY_ROWS} rows", f"{MANY_ROWS} rows and more"
_JOB_FIGURES = {"peak": "", "first step": "first_step_", "between steps": "between_steps_"}


@dataclass(frozen=True)
class Calibration:
    """Figures beside measured ones.

    Attributes:
        figures: columns `FIGURES`.
        made: of the kept figures, when and by which versions: source, collection, versions, date, driver.
    """

    figures: pl.DataFrame
    made: pl.DataFrame

    @classmethod
    def of(cls, cells: Path | None = None) -> Self:
        """All shipped measurements, and a file of one's own (columns as in `data/published/h200_lora_peaks.csv`).

        Raises:
            InputError: the file is no such file, or a row of it is wrong.
        """
        own = [(cell, compared(cell)) for cell in read(cells, DEFAULT_CELLS)] if cells else []
        known = Known.load()
        kept_cells, kept_jobs = read_kept(KEPT_CELLS, CELLS), read_kept(KEPT_JOBS, JOBS)
        rows = [
            *_of_cells(OWN, own, kept_cells, None),
            *_of_cells(H200, shipped(), kept_cells, known),
            *_of_jobs(read_rows(DEFAULT_JOBS), kept_jobs, known),
            *_of_studies(),
        ]
        figures = pl.DataFrame([{**dict.fromkeys(FIGURES), **row} for row in rows], schema=FIGURES)
        made = pl.concat(
            [_made("traced", H200, kept_cells), _made("traced", JOB, kept_jobs), _made("estimated", JOB, kept_jobs)]
        )
        return cls(with_errors(figures), made)

    @cached_property
    def answers(self) -> pl.DataFrame:
        """Of each collection, of few rows and many apart, held out and calibrated apart: the statistics of `spread`."""
        return spread(self.figures.filter("counted"), "collection", "size", "basis")

    @cached_property
    def groups(self) -> pl.DataFrame:
        """The same by every facet of each collection: facet (in words), group."""
        found = []
        for collection, facets in FACETS_OF.items():
            mine = self.figures.filter(collection=collection)
            for column, words in facets.items():
                members = _members(mine, column)
                grouped = spread(members, "collection", column, "basis")
                ordered = grouped.rename({column: "group"}).sort("group", "basis", descending=[False, True])
                found.append(ordered.with_columns(facet=pl.lit(words + (", yours" if collection == OWN else ""))))
        return pl.concat(found)

    @cached_property
    def margins(self) -> pl.DataFrame:
        """The figures that an estimate with its margin can be held against, with the `group` each belongs to."""
        where = pl.col("collection").replace_strict(_SHORT, return_dtype=pl.String)
        few = pl.when(pl.col("size") == _SMALL).then(pl.lit(", few rows")).otherwise(pl.lit(""))
        named = pl.concat_str(where, pl.lit(" "), "models", few)
        return self.figures.filter(pl.col("counted"), pl.col("covering_bytes").is_not_null()).with_columns(group=named)

    @property
    def cells(self) -> pl.DataFrame:
        """Figures of H200 cells, your own first."""
        return self.figures.filter(pl.col("collection").is_in([OWN, H200]))

    @property
    def large(self) -> pl.DataFrame:
        """Those of them that the headline counts, of many rows."""
        return self.cells.filter("counted", size=_LARGE)

    @property
    def peaks(self) -> pl.DataFrame:
        """Peaks of CI jobs."""
        return self.figures.filter(collection=JOB, phase="peak")

    @property
    def recent(self) -> pl.DataFrame:
        """Those of them that the headline counts."""
        return self.peaks.filter("counted")

    @property
    def runs(self) -> pl.DataFrame:
        """All figures of published studies, and of the CI jobs that the headline counts."""
        return self.figures.filter((pl.col("collection") == STUDY) | (pl.col("goldens") == _GOLDENS["current"]))

    def groups_of(self, *collections: str) -> pl.DataFrame:
        """Those of `groups` that some collections have."""
        return self.groups.filter(pl.col("collection").is_in(collections))

    def worst(self, *collections: str, most: int = 10) -> pl.DataFrame:
        """The cases that are furthest off, each by its furthest figure, of estimate or trace; columns of `figures`."""
        mine = self.figures.filter(pl.col("collection").is_in(collections), "counted")
        far = pl.max_horizontal(pl.col("estimated_error").abs(), pl.col("traced_error").abs())
        ordered = mine.with_columns(far.alias("furthest")).filter(pl.col("furthest").is_not_null())
        ordered = ordered.sort("furthest", descending=True, maintain_order=True)
        return ordered.unique("case", keep="first", maintain_order=True).head(most).drop("furthest")

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer: held out and calibrated apart, estimate and trace apart, and what coverage is worth."""
        return tuple(_sentences(self))

    @property
    def untraced(self) -> tuple[str, ...]:
        """What has no trace, by reason."""
        missing = self.figures.filter(pl.col("trace") != "ok").unique(["collection", "case"], maintain_order=True)
        alike = missing.group_by("collection", "trace", "why", maintain_order=True).agg("case")
        return tuple(
            f"{row['collection']}, {row['trace']}: {_named(row['case'])}. Why: {row['why']}."
            for row in alike.iter_rows(named=True)
        )

    @property
    def description(self) -> str:
        """What was compared, in a sentence."""
        own = "your own cells, " if not self.figures.filter(collection=OWN).is_empty() else ""
        others = "cells measured on H200, Megatron-LM's CI jobs and published studies"
        return f"labkit's estimates and traces beside {own}{others}."

    @property
    def facts(self) -> dict[str, str]:
        """What was compared with what, for the report's head."""
        cases = self.figures.unique(["collection", "case"]).group_by("collection").len()
        counts = dict(cases.iter_rows())
        return {
            "Measured": "; ".join(f"{name}: {counts[name]}" for name in COLLECTIONS if name in counts),
            "Estimated (cells, studies)": f"labkit {trace_versions()['labkit']}, now",
            **{
                f"{row['source'].capitalize()} ({row['collection']})": f"{row['versions']} on {row['date']}"
                + (f", trace driver {row['driver'][:8]}" if row["source"] == "traced" else "")
                for row in self.made.iter_rows(named=True)
            },
        }


def spread(figures: pl.DataFrame, *by: str) -> pl.DataFrame:
    """Errors by group, in the groups' first order: of each source how many there are, and how large and which way.

    Columns: `by`, figures, covered, headroom (mean), and for `estimated` and `traced` each ..._figures,
    ..._mean (of absolute errors), ..._median, ..._p90, ..._lowest, ..._highest (signed).
    """
    margin = pl.col("headroom")
    columns = [pl.len().alias("figures"), margin.count().alias("with_margin"), (margin >= 0).sum().alias("covered")]
    columns += [margin.mean().alias("headroom"), margin.min().alias("least_headroom")]
    for source in ("estimated", "traced"):
        error = pl.col(f"{source}_error")
        columns += [
            error.count().alias(f"{source}_figures"),
            error.abs().mean().alias(f"{source}_mean"),
            error.abs().median().alias(f"{source}_median"),
            error.abs().quantile(0.9, "higher").alias(f"{source}_p90"),
            error.min().alias(f"{source}_lowest"),
            error.max().alias(f"{source}_highest"),
        ]
    return figures.group_by(*by, maintain_order=True).agg(columns)


def with_errors(figures: pl.DataFrame) -> pl.DataFrame:
    """Figures with estimated_error, traced_error and headroom: fractions of the measured."""
    measured = pl.col("measured_bytes")
    return figures.with_columns(
        estimated_error=pl.col("estimated_bytes") / measured - 1,
        traced_error=pl.col("traced_bytes") / measured - 1,
        headroom=pl.col("covering_bytes") / measured - 1,
    )


def _of_cells(
    collection: str, cells: Iterable[tuple[Cell, Sequence[Comparison]]], kept: pl.DataFrame, known: Known | None
) -> Iterator[dict[str, Any]]:
    traces = _by_case(kept)
    for cell, phases in cells:
        layout = cell.workload.parallelism
        trace, why, traced = _kept_of(traces.get(cell.case), cell.work_hash, _AGAIN[H200])
        for each in phases:
            yield {
                "collection": collection,
                "case": cell.case,
                "basis": CALIBRATED if collection == H200 and cell.case in CHOSEN_FROM else HELD_OUT,
                "models": _MODELS.get(cell.group, cell.group) + (" (yours)" if collection == OWN else ""),
                "phase": _PHASES[each.phase],
                "start": "first of its process" if cell.cold else "warm",
                "size": _LARGE if cell.rows >= MANY_ROWS else _SMALL,
                "machine": "H200" if collection == H200 else None,
                "counted": each.phase not in WARM,
                "rows": cell.rows,
                "measured_bytes": each.measured_bytes,
                "estimated_bytes": each.estimate_raw_bytes,
                "covering_bytes": each.estimate_bytes,
                "traced_bytes": next((row["traced_bytes"] for row in traced if row["phase"] == each.phase), None),
                "trace": trace,
                "why": why,
                "known": known.of(cell.case) if known else None,
                **_split(tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep),
            }


def _of_jobs(rows: Iterable[Row], kept: pl.DataFrame, known: Known) -> Iterator[dict[str, Any]]:
    traces = _by_case(kept)
    for row in rows:
        trace, why, found = _kept_of(traces.get(row.case), row.work_hash, _AGAIN[JOB])
        facts = found[0] if found else {}
        older = "An older golden value, which other versions made." if row.group == "older" else None
        measured = (row.peak_allocated_bytes, row.peak_first_step_bytes, row.allocated_bytes)
        for (words, name), nbytes in zip(_JOB_FIGURES.items(), measured, strict=True):
            if nbytes is None:
                continue
            estimated, margin = facts.get(f"estimated_{name}bytes"), facts.get("margin_bytes")
            yield {
                "collection": JOB,
                "case": row.case,
                "basis": CALIBRATED if row.chosen_from else HELD_OUT,
                "models": row.together,
                "phase": words,
                "machine": row.gpu,
                "goldens": _GOLDENS[row.group],
                "counted": not name and row.group == "current",
                "measured_bytes": nbytes,
                "estimated_bytes": estimated,
                "covering_bytes": None if name or estimated is None or margin is None else estimated + margin,
                "traced_bytes": facts.get(f"traced_{name}bytes"),
                "trace": trace,
                "why": why,
                "known": known.of(row.case) or older,
                **_split(**row.sizes),
            }


def _of_studies() -> Iterator[dict[str, Any]]:
    """The peaks that studies were published with; their traces are those of the studies' own stores."""
    for name in STUDIES:
        path = data_directory() / "studies" / f"{name}.yaml"
        for found in Study.load(path).results().candidates:
            published = None if found.published is None else found.published.peak_allocated_bytes
            if not published:
                continue  # it ran out of memory
            workload, layout = found.candidate.workload, found.candidate.workload.parallelism
            estimated = BlockPeaks(workload, found.estimate.stage)
            yield {
                "collection": STUDY,
                "case": f"{name} {found.candidate.label}",
                "basis": CALIBRATED,
                "models": name,
                "phase": "peak",
                "machine": workload.training.gpu,
                "counted": True,
                "measured_bytes": published,
                "estimated_bytes": estimated.peak.bytes,
                "covering_bytes": estimated.peak.bytes
                + margin_over(workload, estimated.phases, estimated.before_bytes),
                "traced_bytes": None if found.traced is None else found.traced.peak_allocated_bytes,
                "trace": "not traced" if found.traced is None else "ok",
                "why": f"labkit study run data/studies/{name}.yaml traces them" if found.traced is None else None,
                **_split(tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep),
            }


def _split(**sizes: int) -> dict[str, str]:
    """The sizes of a layout, and which of them decides."""
    kinds = {"ep": "expert parallel", "cp": "context parallel", "pp": "pipeline", "tp": "tensor parallel"}
    split = " ".join(f"{name.upper()} {size}" for name, size in sizes.items() if size > 1)
    return {"split": split or "1 GPU", "layout": next((kinds[each] for each in kinds if sizes[each] > 1), "not split")}


def _by_case(kept: pl.DataFrame) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in kept.iter_rows(named=True):
        found.setdefault(row["case"], []).append(row)
    return found


def _kept_of(
    rows: list[dict[str, Any]] | None, work_hash: str, command: str
) -> tuple[str, str | None, list[dict[str, Any]]]:
    """How the trace of a case stands, why, and the kept rows to be shown; none where they are of other work."""
    if rows is None:
        return "not traced", "no trace of it is kept", []
    if any(row["work_hash"] != work_hash for row in rows):
        return "stale", f"it was made of other work than today's; {command} makes it again", []
    if why := rows[0]["reason"]:
        return _STATES.get(rows[0].get("status", ""), "not traced"), " ".join(why.split()), rows
    return "ok", None, rows


def _members(figures: pl.DataFrame, column: str) -> pl.DataFrame:
    """The figures to be grouped by a column: what the headline leaves out is there where it is what is grouped by."""
    if column == "phase":
        members = figures.filter(pl.col("goldens").is_null() | (pl.col("goldens") == _GOLDENS["current"]))
    elif column == "goldens":
        members = figures.filter(phase="peak")
    else:
        members = figures.filter("counted")
    if column != "size":
        members = members.filter(pl.col("size").is_null() | (pl.col("size") == _LARGE))
    return members.filter(pl.col(column).is_not_null())


def _made(source: str, collection: str, kept: pl.DataFrame) -> pl.DataFrame:
    """When kept figures were made and by which versions: source, collection, versions, date, driver."""
    kept = kept.filter(pl.col(f"{source}_bytes").is_not_null())
    names = [name for name in kept.columns if name in ("labkit", "torch", "megatron-core", "transformer-engine")]
    versions = pl.concat_str([pl.format(f"{name} {{}}", pl.col(name)) for name in names], separator=", ")
    if source == "estimated":
        versions = pl.format("labkit {}", "labkit")
    names_of = (pl.lit(source).alias("source"), pl.lit(collection).alias("collection"))
    chosen = kept.select(*names_of, "date", driver=_DRIVER, versions=versions)
    return (
        chosen.unique(maintain_order=True)
        .group_by("source", "collection", "versions", maintain_order=True)
        .agg(pl.col("date").max(), pl.col("driver").last())
    )


def _named(cases: list[str], most: int = 3) -> str:
    more = f" and {len(cases) - most} more" if len(cases) > most else ""
    return ", ".join(case[:100] for case in cases[:most]) + more


def _sentences(found: Calibration) -> Iterator[str]:
    answers = {(row["collection"], row["size"], row["basis"]): row for row in found.answers.iter_rows(named=True)}
    where = f"from {MANY_ROWS} rows a rank"
    for subject, key in (
        (f"Your cells {where}", (OWN, _LARGE, HELD_OUT)),
        (f"Your cells below {MANY_ROWS} rows a rank", (OWN, _SMALL, HELD_OUT)),
        (f"Held-out H200 cells {where}", (H200, _LARGE, HELD_OUT)),
        ("Held-out peaks of Megatron-LM's CI jobs", (JOB, None, HELD_OUT)),
        (f"H200 cells that a choice was made from, {where}", (H200, _LARGE, CALIBRATED)),
        ("CI jobs that a version was chosen from", (JOB, None, CALIBRATED)),
        ("Published studies, with versions and settings inferred from their peaks", (STUDY, None, CALIBRATED)),
        (f"Held-out H200 cells below {MANY_ROWS} rows a rank", (H200, _SMALL, HELD_OUT)),
        (f"H200 cells that a choice was made from, below {MANY_ROWS} rows a rank", (H200, _SMALL, CALIBRATED)),
    ):
        if key in answers:
            yield f"{subject}: {_far(answers[key])}."
        if key == (H200, _LARGE, HELD_OUT):
            yield _left_out(found.figures.filter(collection=H200))
        if key[0] == STUDY and key in answers and not answers[key]["traced_figures"]:
            yield "Their traces are kept in the studies' own results alone, which are not there: labkit study run."
    yield _covered(found.margins)
    yield (
        "Held out means that no choice without a source was made in view of the case. labkit was written with all "
        "these files at hand: only cells of your own (parameter cells) are held out in the strict sense."
    )
    yield from _aged(found.made.filter(source="traced"))


def _left_out(cells: pl.DataFrame) -> str:
    """How far off the H200 figures are that the headline's range is not of."""
    repeats, small = cells.filter(phase=_PHASES["repeat_forward"], size=_LARGE), cells.filter("counted", size=_SMALL)
    said = [_range(figures) for figures in (repeats, small)]
    return (
        f"That range leaves out second forwards of the same cells ({said[0]}) and, calibrated ones too, all cells "
        f"below {MANY_ROWS} rows a rank ({said[1]})."
    )


def _range(figures: pl.DataFrame) -> str:
    (row,) = spread(figures, "collection").iter_rows(named=True)
    return ", ".join(
        f"{source} {_signed(row[f'{source}_lowest'])} to {_signed(row[f'{source}_highest'])} %"
        for source in ("estimated", "traced")
        if row[f"{source}_figures"]
    )


def _aged(made: pl.DataFrame) -> Iterator[str]:
    """What may make traces of today others than the kept ones; `made`: as `Calibration.made`."""
    now = trace_versions()
    for row in made.iter_rows(named=True):
        then = dict(each.split(" ") for each in row["versions"].split(", "))
        others = ", ".join(f"{name} is {now[name]} now" for name in then if then[name] != now[name])
        others = others or (
            "files of labkit that take part have changed since" if row["driver"] != now[_DRIVER] else ""
        )
        if others:
            yield (
                f"Traces of the {row['collection']} were made on {row['date']} with {row['versions']}; {others}, so "
                f"that traces made today may give other figures ({_AGAIN[row['collection']]} tells)."
            )


def _far(row: Mapping[str, Any]) -> str:
    """How far off one row of `spread` is."""
    said = []
    for source in ("estimated", "traced"):
        if count := row[f"{source}_figures"]:
            low, high = (_signed(row[f"{source}_{end}"]) for end in ("lowest", "highest"))
            said.append(
                f"{source} {row[f'{source}_mean'] * 100:.2f} % off on average ({low} to {high} %, {count} figures)"
            )
        else:
            said.append(f"not {source}")
    return ", ".join(said)


def _signed(error: float) -> str:
    text = f"{error * 100:+.1f}"
    return text if float(text) else "0.0"


def _covered(margins: pl.DataFrame) -> str:
    """How often the estimate with its margin was enough, and what that is worth."""
    covers = margins.group_by("collection").agg((pl.col("headroom") >= 0).sum().alias("covered"), pl.len())
    counts = {row["collection"]: f"{row['covered']} of {row['len']}" for row in covers.iter_rows(named=True)}
    said = [f"{counts[OWN]} figures of your cells"] if OWN in counts else []
    said += [f"{counts[H200]} figures of H200 cells, which it was chosen from, so that this is no proof for others"]
    said += [f"{counts[JOB]} peaks of CI jobs, which had no part in it"] if JOB in counts else []
    return f"The estimate with its margin covers {'; '.join(said)}."
