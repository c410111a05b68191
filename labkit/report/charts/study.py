"""The five charts of a matched study, from the study's frames (columns: `labkit.study.frames`).

Every chart is one layered view (it can be as wide as its reader's window), keeps to Vega-Lite 5 features, and names
source and unit in its caption, its axis and its tooltips. Bytes become GiB (2**30) here and nowhere earlier.
"""

import altair as alt
import polars as pl

from labkit.report.charts.stacks import stacks
from labkit.report.charts.timeline import timeline
from labkit.report.charts.tradeoff import tradeoff
from labkit.report.encodings import (
    SIDES,
    candidate_axis,
    chart_rows,
    layered,
    problem,
    problem_marks,
    room_for,
    rows_height,
    source_colour,
    source_offset,
    source_shape,
    sources_in_words,
)
from labkit.report.figure import Figure
from labkit.workload.gpu import GIB, MIB

__all__ = ["differences", "holdings", "peaks", "timeline", "tradeoff"]


def peaks(cells: pl.DataFrame) -> Figure:
    """Each candidate's peak by estimate, trace and publication, as points on a scale that need not start at 0.

    Args:
        cells: one row per candidate and source: candidate, source, outcome, failure, peak_allocated_bytes,
            peak_phase, error_vs_published. A row without a peak shows its outcome instead.
    """
    error = pl.col("error_vs_published")
    rows, names = chart_rows(cells, "peak_allocated_bytes", "peak_phase", "outcome", "failure", "error_vs_published")
    rows = rows.with_columns(
        (pl.col("peak_allocated_bytes") / GIB).alias("peak_gib"),
        problem().alias("problem"),
        pl.col("failure").str.slice(0, 300),
        pl.col("peak_phase").fill_null("not stated"),
        pl.format("{}{}%", pl.when(error > 0).then(pl.lit("+")).otherwise(pl.lit("")), (error * 100).round(2))
        .fill_null("–")
        .alias("distance"),
    )
    base = alt.Chart().encode(y=candidate_axis(names), yOffset=source_offset(rows))
    tooltip = [
        alt.Tooltip("candidate:N", title="recompute"),
        alt.Tooltip("source:N", title="source"),
        alt.Tooltip("peak_gib:Q", title="peak allocated (GiB)", format=".3f"),
        alt.Tooltip("peak_allocated_bytes:Q", title="peak allocated (bytes)", format=","),
        alt.Tooltip("peak_phase:N", title="peak in phase"),
        alt.Tooltip("distance:N", title="against published"),
    ]
    x = alt.X(
        "peak_gib:Q",
        title="peak allocated (GiB)",
        scale=alt.Scale(zero=False, nice=True, padding=40),
        axis=alt.Axis(tickCount=6),
    )
    points = (
        base.transform_filter("isValid(datum.peak_gib)")
        .mark_point(filled=True, size=80, opacity=1)
        .encode(x=x, color=source_colour(rows), shape=source_shape(rows), tooltip=tooltip)
    )
    values = (
        base.transform_filter("isValid(datum.peak_gib)")
        .mark_text(style="note", align="left", dx=9)
        .encode(x=x, text=alt.Text("peak_gib:Q", format=".3f"), tooltip=tooltip)
        .properties(name="note_values")
    )
    return Figure(
        "peaks",
        f"Peak allocated memory of one rank under each recompute choice, in GiB: {sources_in_words(rows)}. "
        "The scale does not start at zero.",
        layered([points, values, problem_marks(base)], rows, "Peak of each choice, by source", rows_height(rows)),
    )


def differences(cells: pl.DataFrame) -> Figure:
    """What each candidate saves against the control of the same source, as bars from zero.

    Args:
        cells: as for `peaks`, with is_control and saved_bytes (negative where the candidate holds more).
    """
    shown = ("saved_bytes", "peak_allocated_bytes", "outcome", "failure")
    rows, names = chart_rows(cells.filter(~pl.col("is_control")), *shown)
    uncompared = pl.when(pl.col("saved_bytes").is_null()).then(pl.lit("no peak of the control to compare with"))
    rows = rows.with_columns(
        (pl.col("saved_bytes") / GIB).alias("saved_gib"),
        (pl.col("saved_bytes") / MIB).alias("saved_mib"),
        pl.coalesce(problem(), uncompared).alias("problem"),
        pl.col("failure").str.slice(0, 300),
    )
    base = alt.Chart().encode(
        y=candidate_axis(names),
        yOffset=source_offset(rows),
        tooltip=[
            alt.Tooltip("candidate:N", title="recompute"),
            alt.Tooltip("source:N", title="source"),
            alt.Tooltip("saved_mib:Q", title="saved against the control (MiB)", format=",.1f"),
            alt.Tooltip("saved_bytes:Q", title="saved against the control (bytes)", format=","),
        ],
    )
    low, high = _range(rows["saved_gib"].drop_nulls().to_list())
    x = alt.X(
        "saved_gib:Q",
        title="saved against the control (GiB)",
        scale=alt.Scale(domain=[low, high], nice=False, range=room_for(48)),
        axis=alt.Axis(tickCount=6),
    )
    compared = base.transform_filter("isValid(datum.saved_gib)")
    stems = compared.mark_rule(strokeWidth=3).encode(x=x, x2=alt.datum(0), color=source_colour(rows))
    ends = compared.mark_point(filled=True, size=80, opacity=1).encode(
        x=x, color=source_colour(rows), shape=source_shape(rows)
    )
    values = [
        base.transform_filter(f"isValid(datum.saved_gib) && datum.saved_gib {relation} 0")
        .mark_text(style="note", align=align, dx=shift)
        .encode(x=x, text=alt.Text("saved_gib:Q", format=".3f"))
        .properties(name=f"note_{align}")
        for relation, (align, shift) in zip((">=", "<"), SIDES, strict=True)
    ]
    return Figure(
        "differences",
        "Peak memory each recompute choice saves against the control, in GiB, each source against its own control: "
        f"{sources_in_words(rows)}.",
        layered([stems, ends, *values, problem_marks(base)], rows, "Saved against the control", rows_height(rows)),
    )


def holdings(breakdown: pl.DataFrame, cells: pl.DataFrame | None = None) -> Figure:
    """What holds each candidate's peak, stacked from zero, one bar per source.

    Args:
        breakdown: one row per candidate, source and category (`labkit.summary.CATEGORIES`), with bytes.
        cells: as for `peaks`; those that did not pass are shown by their outcomes.
    """
    return stacks(
        breakdown,
        "holdings",
        f"What holds the peak under each recompute choice, in GiB: {sources_in_words(breakdown)}, by category where "
        "the source has them. Numbers in the bars are those of the legend.",
        "Memory at the peak, by what holds it",
        row="recompute",
        cells=cells,
    )


def _range(values: list[float]) -> tuple[float, float]:
    """A scale from zero over all values; room on the left for the labels of negative ones."""
    low, high = min([0.0, *values]), max([0.0, *values])
    room = (high - low or 1.0) * 0.15
    return (low - room if low < 0 else 0.0), high or room
