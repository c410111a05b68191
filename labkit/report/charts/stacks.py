"""Bars of what holds memory, by category: of a study's choices, of an estimate's parts, stages or lengths."""

import altair as alt
import polars as pl

from labkit.report.encodings import (
    candidate_axis,
    category_colour_scale,
    chart_rows,
    guides,
    layered,
    problem,
    problem_marks,
    room_for,
    rows_data,
    rows_height,
    source_offset,
)
from labkit.report.figure import Figure
from labkit.report.theme import STACK, category_colour, category_number, text_on
from labkit.workload.gpu import GIB


def stacks(
    breakdown: pl.DataFrame,
    name: str,
    caption: str,
    title: str,
    *,
    row: str,
    limits: pl.DataFrame | None = None,
    cells: pl.DataFrame | None = None,
) -> Figure:
    """Bars stacked from zero, one for each candidate and source, in the order of the frame.

    Args:
        breakdown: candidate, source, category (`labkit.report.theme.STACK`), bytes.
        name: of the figure.
        caption: of the figure.
        title: of the chart.
        row: what a candidate is, for tooltips.
        limits: label, bytes: GPUs' memories, drawn as rules across the bars.
        cells: candidate, source, outcome, failure: those that did not pass are shown by their outcomes.
    """
    every, names = chart_rows(_with_unfinished(breakdown, cells), "category", "bytes", "outcome", "failure")
    rows = every.filter(pl.col("category").is_not_null()).drop("outcome", "failure")
    problems = every.filter(pl.col("category").is_null()).with_columns(
        problem().alias("problem"), pl.col("failure").str.slice(0, 300)
    )
    present = [each for each in STACK if each in rows["category"].to_list()]
    rows = rows.with_columns(
        (pl.col("bytes") / GIB).alias("gib"),
        pl.col("category").replace_strict({each: str(category_number(each)) for each in present}).alias("number"),
        pl.col("category").replace_strict({each: i for i, each in enumerate(present)}).alias("place"),
        pl.col("category").replace_strict({each: text_on(category_colour(each)) for each in present}).alias("ink"),
    )
    totals = rows.group_by("candidate", "source", maintain_order=True).agg(pl.col("gib").sum())
    # As they are stacked, whatever order the frame has them in.
    rows = rows.with_row_index("row").sort("place", maintain_order=True)
    middle = (pl.col("gib").cum_sum() - pl.col("gib") / 2).over("candidate", "source")
    rows = rows.with_columns(middle=middle).sort("row").drop("row")
    highlighted = alt.selection_point(name=f"{name}_category", fields=["category"], bind="legend")
    y, offset = candidate_axis(names), source_offset(every)
    sources = rows["source"].unique().to_list()
    alone = len(sources) == 1
    x_title = f"allocated at the peak{f', {sources[0]}' if alone else ''} (GiB)"
    widest = float(totals["gib"].max() or 0)  # type: ignore[arg-type]
    top = max([widest, *(() if limits is None else limits["bytes"] / GIB)])
    # Labels stand at the ends of bars: they need room of their own where those reach the end of the scale.
    needed = 44 if alone else 104
    room = needed if top < widest * 1.5 else 12
    scale = alt.Scale(domain=[0, top or 1], nice=False, range=room_for(room))
    bars = (
        alt.Chart()
        .mark_bar(style="segment", height={"band": 0.9})
        .encode(
            y=y,
            yOffset=offset,
            x=alt.X("gib:Q", title=x_title, stack="zero", scale=scale, axis=alt.Axis(tickCount=8)),
            color=category_colour_scale(present),
            order=alt.Order("place:Q"),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
            tooltip=[
                alt.Tooltip("candidate:N", title=row),
                alt.Tooltip("source:N", title="source"),
                alt.Tooltip("category:N", title="held by"),
                alt.Tooltip("gib:Q", title="GiB", format=".3f"),
                alt.Tooltip("bytes:Q", title="bytes", format=","),
            ],
        )
        .add_params(highlighted)
    )
    numbers = (
        alt.Chart()
        .transform_filter(f"datum.gib * width > {(top or 1) * 16}")
        .mark_text(fontSize=9.5, tooltip=None)
        .encode(
            y=y,
            yOffset=offset,
            x=alt.X("middle:Q", title=x_title, scale=scale),
            text="number:N",
            color=alt.Color("ink:N", scale=None),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
        )
    )
    labels = (
        alt.Chart(rows_data(totals))
        .transform_calculate(text=f"{'' if alone else "datum.source + ' ' + "}format(datum.gib, '.2f')")
        .mark_text(style="note", align="left", dx=6)
        .encode(y=y, yOffset=offset, x=alt.X("gib:Q", title=x_title, scale=scale), text="text:N")
        .properties(name="note_totals")
    )
    rules = [] if limits is None else guides(limits.select("label", gib=pl.col("bytes") / GIB), "gib", "label")
    failed = [] if problems.is_empty() else [problem_marks(alt.Chart(rows_data(problems)).encode(y=y, yOffset=offset))]
    chart = layered([bars, numbers, labels, *rules, *failed], rows, title, rows_height(every))
    return Figure(name, caption, chart)


_UNFINISHED = {"candidate": pl.String, "source": pl.String, "outcome": pl.String, "failure": pl.String}


def _with_unfinished(breakdown: pl.DataFrame, cells: pl.DataFrame | None) -> pl.DataFrame:
    """The breakdown with a row for each cell that did not pass, which has no category, candidates in study order."""
    known = pl.DataFrame(schema=_UNFINISHED) if cells is None else cells
    unfinished = known.filter(pl.col("outcome") != "ok").select(*_UNFINISHED)
    order = pl.concat([known["candidate"], breakdown["candidate"]]).unique(maintain_order=True).to_frame()
    both = pl.concat([breakdown, unfinished], how="diagonal")
    return order.join(both, on="candidate", maintain_order="left_right")
