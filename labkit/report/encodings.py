"""What a study's charts share: rows, axes, scales and legends, so that they read and merge alike."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import altair as alt
import polars as pl

from labkit.report.data import OUTCOMES, clean, display_labels, relabelled
from labkit.report.theme import LOOKS, SOURCES, Look, category_colour, category_number
from labkit.workload.gpu import GIB, MIB

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


_LINES: Final = (
    r"length(datum.label) > 26 ? split(replace(datum.label, /(.{8,25}(?:,| at)) /g, '$1\n'), '\n') : datum.label"
)
"""A long label broken behind commas (and before a sweep's setting), as late as each line allows."""


def candidate_axis(names: list[str]) -> alt.Y:
    """One row of the chart for each candidate, in the study's order."""
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8, labelExpr=_LINES)
    scale = alt.Scale(paddingInner=0.28, paddingOuter=0.14)
    return alt.Y("candidate:N", title=None, sort=names, axis=axis, scale=scale)


def _sources(rows: pl.DataFrame) -> list[str]:
    return [name for name in SOURCES if name in rows["source"].to_list()]


def source_offset(rows: pl.DataFrame) -> alt.YOffset:
    """Inside a candidate's row, one line for each source."""
    return alt.YOffset("source:N", sort=_sources(rows), scale=alt.Scale(domain=_sources(rows)))


def source_colour(rows: pl.DataFrame) -> alt.Color:
    """A source by colour; merges with `source_shape` into one legend."""
    scale = alt.Scale(domain=_sources(rows), range=[SOURCES[name].colour for name in _sources(rows)])
    return alt.Color("source:N", title="source", scale=scale, legend=alt.Legend(orient="top", title=None))


def source_shape(rows: pl.DataFrame) -> alt.Shape:
    """A source by shape; merges with `source_colour` into one legend."""
    scale = alt.Scale(domain=_sources(rows), range=[SOURCES[name].shape for name in _sources(rows)])
    return alt.Shape("source:N", title="source", scale=scale, legend=alt.Legend(orient="top", title=None))


def named_offset(field: str, names: Iterable[str]) -> alt.YOffset:
    """Inside a chart's row, one line for each name, in this order."""
    return alt.YOffset(f"{field}:N", sort=list(names), scale=alt.Scale(domain=list(names)))


def named_colour(field: str, names: Iterable[str] | Mapping[str, Look]) -> alt.Color:
    """Names that are no sources by colour, as they look or one after the other; merges with `named_shape`."""
    looks = _looks(names)
    scale = alt.Scale(domain=list(looks), range=[look.colour for look in looks.values()])
    return alt.Color(f"{field}:N", title=None, scale=scale, legend=_NAMES)


def named_shape(field: str, names: Iterable[str] | Mapping[str, Look]) -> alt.Shape:
    """The same by shape."""
    looks = _looks(names)
    scale = alt.Scale(domain=list(looks), range=[look.shape for look in looks.values()])
    return alt.Shape(f"{field}:N", title=None, scale=scale, legend=_NAMES)


def _looks(names: Iterable[str] | Mapping[str, Look]) -> Mapping[str, Look]:
    if isinstance(names, Mapping):
        return names
    return {name: LOOKS[place % len(LOOKS)] for place, name in enumerate(names)}


_NAMES: Final = alt.Legend(orient="top", title=None, labelLimit=330, offset=30)
"""Above the names of guides."""


def guides(values: pl.DataFrame, field: str, label: str) -> list[alt.Chart]:
    """Rules at values of the horizontal axis that are no data, each named at its upper end, each in a line of its own.

    Args:
        values: a row for each rule.
        field: its column of places, of the chart's own horizontal field.
        label: its column of names.
    """
    right = pl.col(field) * 2 > pl.col(field).max()
    placed = values.with_columns(pl.int_range(pl.len()).alias("place"))
    rule: alt.Chart = (
        alt.Chart(rows_data(placed))
        .mark_rule(style="guide", strokeDash=[4, 3], opacity=0.6)
        .encode(x=alt.X(f"{field}:Q"))
    )
    lines = {"expr": f"-3 - 12 * ({values.height - 1} - datum.place)"}
    sides = zip((~right, right), SIDES, strict=True)
    names: list[alt.Chart] = [
        alt.Chart(rows_data(found))
        .mark_text(style="note", align=align, baseline="bottom", dx=shift / 4, dy=lines)
        .encode(x=alt.X(f"{field}:Q"), y=alt.value(0), text=f"{label}:N")
        .properties(name=f"note_guides_{align}")
        for chosen, (align, shift) in sides
        # Vega warns of a scale over no rows at all.
        if not (found := placed.filter(chosen)).is_empty()
    ]
    return [rule, *names]


def category_colour_scale(present: list[str]) -> alt.Color:
    """A category by colour, its legend entry led by its number."""
    numbers = literal({name: category_number(name) for name in present})
    return alt.Color(
        "category:N",
        title="held by (one number in all charts)",
        scale=alt.Scale(domain=present, range=[category_colour(name) for name in present]),
        legend=alt.Legend(
            orient="bottom",
            symbolType="square",
            labelExpr=f"{numbers}[datum.label] + '  ' + datum.label",
            clipHeight=16,
        ),
    )


def literal(value: object) -> str:
    """A Vega expression literal of labkit's own names (never of a user's text)."""
    return repr(value)


def menu(name: str, options: Sequence[str], said: str) -> alt.Parameter:
    """Which of the options a chart shows, the first to begin with; a menu where there are several.

    Args:
        name: the parameter's, in Vega's expressions.
        options: what there is to choose from.
        said: the word beside the menu.
    """
    bound = alt.binding_select(options=list(options), name=f"{said} ") if len(options) > 1 else alt.Undefined
    return alt.param(name=name, value=next(iter(options), None), bind=bound)


def unit_of(largest_bytes: int) -> tuple[str, int]:
    """The unit in which a chart of so many bytes reads well: its name, and its bytes."""
    return ("GiB", GIB) if largest_bytes >= GIB else ("MiB", MIB)


def rows_height(rows: pl.DataFrame) -> int:
    """Height in pixels that gives every source of every candidate its line."""
    return max(1, rows["candidate"].n_unique()) * (max(1, len(_sources(rows))) * _ROW + 14)


def rows_data(rows: pl.DataFrame | list[dict[str, Any]]) -> alt.InlineData:
    """Rows as a chart's data. Not as CSV: Vega's reader of it compiles code, which a report's policy forbids."""
    return alt.InlineData(values=rows.to_dicts() if isinstance(rows, pl.DataFrame) else rows)


def room_for(pixels: int) -> list[Any]:
    """The range of a horizontal scale that leaves room for labels at its right end."""
    return [0, {"expr": f"max(40, width - {pixels})"}]


def in_words(names: Iterable[str]) -> str:
    """`a, b and c`.

    >>> in_words(["estimated", "traced", "published"])
    'estimated, traced and published'
    """
    *most, last = [*names] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def sources_in_words(rows: pl.DataFrame) -> str:
    """Where the figures of these rows come from, as a caption says it."""
    return in_words(_sources(rows))


def problem_marks(base: alt.Chart) -> alt.Chart:
    """In place of a figure that is missing: its source and why (column `problem`; `failure` when pointed at)."""
    layer: alt.Chart = (
        base.transform_filter("datum.problem")
        .transform_calculate(text="datum.source + ': ' + datum.problem")
        .mark_text(style="note", align="left", dx=4)
        .encode(
            x=alt.value(0),
            text="text:N",
            tooltip=[
                alt.Tooltip("candidate:N", title="recompute"),
                alt.Tooltip("text:N", title="outcome"),
                alt.Tooltip("failure:N", title="failure"),
            ],
        )
        .properties(name="note_problems")
    )
    return layer


def problem() -> pl.Expr:
    """Of an `outcome` other than ok, what it means."""
    return pl.when(pl.col("outcome") != "ok").then(pl.col("outcome").replace(OUTCOMES))


def layered(layers: list[Any], data: pl.DataFrame | list[dict[str, Any]], title: str, height: int) -> alt.LayerChart:
    """The chart of several layers that share `data`, which is also what a reader downloads."""
    chart: alt.LayerChart = alt.layer(*layers, data=rows_data(data))  # type: ignore[assignment]
    return chart.properties(title=title, width=_WIDTH, height=height)
