"""What a study's charts share: rows, axes, scales and legends, so that they read and merge alike."""

from typing import Any, Final, Literal

import altair as alt
import polars as pl

from labkit.report.data import clean, display_labels, relabelled
from labkit.report.figure import csv_data
from labkit.report.theme import SOURCES, category_colour, category_number

_WIDTH: Final = 680
_ROW: Final = 17
"""Height of one source's row, in pixels."""

SIDES: Final[tuple[tuple[Literal["left", "right"], int], ...]] = (("left", 9), ("right", -9))
"""A label on the right of its mark is aligned left, 9 pixels off, and the other way round."""


def chart_rows(frame: pl.DataFrame, *columns: str) -> tuple[pl.DataFrame, list[str]]:
    """The columns a chart shows, sources in their order, candidates by display label; and those labels in order."""
    labels = display_labels(frame["candidate"])
    rows = clean(relabelled(frame, labels), ["candidate", "source", *columns])
    order = pl.col("source").replace_strict({name: place for place, name in enumerate(SOURCES)}, return_dtype=pl.Int64)
    return rows.with_columns(order.alias("_place")).sort("_place", maintain_order=True).drop("_place"), list(
        labels.values()
    )


def candidate_axis(names: list[str]) -> alt.Y:
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8)
    scale = alt.Scale(paddingInner=0.28, paddingOuter=0.14)
    return alt.Y("candidate:N", title=None, sort=names, axis=axis, scale=scale)


def _sources(rows: pl.DataFrame) -> list[str]:
    return [name for name in SOURCES if name in rows["source"].to_list()]


def source_offset(rows: pl.DataFrame) -> alt.YOffset:
    return alt.YOffset("source:N", sort=_sources(rows), scale=alt.Scale(domain=_sources(rows)))


def source_colour(rows: pl.DataFrame) -> alt.Color:
    scale = alt.Scale(domain=_sources(rows), range=[SOURCES[name].colour for name in _sources(rows)])
    return alt.Color("source:N", title="source", scale=scale, legend=alt.Legend(orient="top", title=None))


def source_shape(rows: pl.DataFrame) -> alt.Shape:
    scale = alt.Scale(domain=_sources(rows), range=[SOURCES[name].shape for name in _sources(rows)])
    return alt.Shape("source:N", title="source", scale=scale, legend=alt.Legend(orient="top", title=None))


def category_colour_scale(present: list[str]) -> alt.Color:
    numbers = literal({name: category_number(name) for name in present})
    return alt.Color(
        "category:N",
        title=None,
        scale=alt.Scale(domain=present, range=[category_colour(name) for name in present]),
        legend=alt.Legend(
            orient="bottom",
            columns=3,
            symbolType="square",
            labelExpr=f"{numbers}[datum.label] + '  ' + datum.label",
            clipHeight=16,
        ),
    )


def literal(value: object) -> str:
    """A Vega expression literal of labkit's own names (never of a user's text)."""
    return repr(value)


def rows_height(rows: pl.DataFrame) -> int:
    return max(1, rows["candidate"].n_unique()) * (max(1, len(_sources(rows))) * _ROW + 14)


def layered(layers: list[Any], data: pl.DataFrame, title: str, height: int) -> alt.LayerChart:
    layered: alt.LayerChart = alt.layer(*layers, data=csv_data(data))
    return layered.properties(title=title, width=_WIDTH, height=height)
