"""The charts of a calibration: errors against measured figures, how they are spread, and what the margin covers.

Frames are `labkit.workbench.calibration`'s. Errors are percent of the measured figure, on a scale that is even around
zero and logarithmic beyond (symlog), since hundredths and tens of a percent both matter.
"""

from collections.abc import Mapping
from typing import Any, Final

import altair as alt
import polars as pl

from labkit.report.data import clean, display_labels, relabelled
from labkit.report.encodings import layered, literal, room_for, rows_data, source_colour, source_shape
from labkit.report.figure import Figure
from labkit.report.theme import SOURCES
from labkit.workload.gpu import GIB

DRAWN: Final = ("estimated", "traced")
"""Sources that are compared with the measured."""
BASES: Final = ("held out", "calibrated")
_LEAST: Final = 0.001
"""Percent; smaller errors are drawn there."""
_TICKS: Final = [0.1, 0.3, 1, 3, 10, 30, 100]
_PLACE: Final = "0.15 + datum.number * 0.618034 % 1 * 0.7"
"""Where in its row's line a point lies, from 0 to 1. Multiples of the golden section, without their whole part, lie
evenly and look random: points do not hide each other."""
_WHICH: Final = (
    alt.Tooltip("candidate:N", title="case"),
    alt.Tooltip("phase:N", title="figure"),
    alt.Tooltip("split:N", title="layout"),
)
_WHO: Final = (*_WHICH, alt.Tooltip("source:N", title="source"), alt.Tooltip("basis:N", title="basis"))
_ERROR: Final = "error, % of the measured"
_SOURCES: Final = pl.DataFrame({"source": DRAWN})
_ROW_AXIS: Final = alt.Axis(ticks=False, domain=False, labelPadding=8)
_GROUP: Final = alt.Y("group:N", title=None, axis=_ROW_AXIS)


def errors(figures: pl.DataFrame, name: str, title: str, facets: Mapping[str, str]) -> Figure:
    """Every figure's error by group, estimated and traced; the reader picks what the groups are.

    Args:
        figures: case, basis, phase, split, measured_bytes, estimated_bytes, traced_bytes, and the columns of `facets`.
        name: of the figure.
        title: over the chart.
        facets: columns to group by, in words; the first is what is shown first.
    """
    known = figures.filter(pl.any_horizontal(pl.col(f"{source}_bytes").is_not_null() for source in DRAWN))
    rows = _labelled(known).with_columns(*(_off(source) for source in DRAWN), _measured())
    columns = ["candidate", "basis", "phase", "split", "measured_gib", *DRAWN, *facets]
    rows = clean(rows, list(dict.fromkeys(columns)))
    chosen = alt.param(
        name=f"{name}_by",
        value=next(iter(facets)),
        bind=alt.binding_select(options=list(facets), labels=list(facets.values()), name="Group by "),
    )
    most = max([1, *(rows[column].n_unique() for column in facets)])
    places = literal({source: place for place, source in enumerate(DRAWN)})
    base = (
        alt.Chart()
        .transform_fold(list(DRAWN), as_=["source", "percent"])
        .transform_calculate(
            group=f"datum[{name}_by]",
            gib="datum.measured_gib * (1 + datum.percent / 100)",
        )
        .transform_window(number="row_number()", frame=[None, None])
        .transform_calculate(line=f"{places}[datum.source] + {_PLACE}")
        .transform_filter("isValid(datum.group) && isValid(datum.percent)")
        .encode(
            y=_GROUP,
            yOffset=alt.YOffset("line:Q", scale=alt.Scale(domain=[0, len(DRAWN)])),
            x=_percent(pl.concat([rows[source] for source in DRAWN]), _ERROR),
            color=source_colour(_SOURCES),
            shape=source_shape(_SOURCES),
            tooltip=[
                *_WHO,
                alt.Tooltip("percent:Q", title="error (%)", format="+.3f"),
                alt.Tooltip("gib:Q", title="estimated or traced (GiB)", format=".3f"),
                alt.Tooltip("measured_gib:Q", title="measured (GiB)", format=".3f"),
            ],
        )
    )
    return Figure(
        name,
        "Signed error of every figure, estimated and traced, in % of the measured one; the scale is even around zero "
        "and logarithmic beyond. Above zero labkit is too high. Filled marks: held out; hollow ones: a choice was "
        "made in view of the case.",
        layered([_zero(), *_marks(base, 46)], rows, title, 40 + most * 44).add_params(chosen),
    )


def distribution(figures: pl.DataFrame, name: str, title: str) -> Figure:
    """How many figures are within which error: a rising line for each source, held out and calibrated apart.

    Args:
        figures: as for `errors`.
        name: of the figure.
        title: over the chart.
    """
    rows = _labelled(figures).with_columns(_off(source) for source in DRAWN)
    rows = clean(rows, ["candidate", "basis", "phase", "split", *DRAWN])
    base = (
        alt.Chart()
        .transform_fold(list(DRAWN), as_=["source", "percent"])
        .transform_filter("isValid(datum.percent)")
        .transform_calculate(size=f"max(abs(datum.percent), {_LEAST})")
        .transform_window(
            part="cume_dist()", sort=[alt.SortField("size")], groupby=["source", "basis"], frame=[None, None]
        )
        .transform_calculate(share="datum.part * 100")
    )
    most = max([1.0, *(_highest(rows[source].abs()) for source in DRAWN)])
    x = alt.X(
        "size:Q",
        title="absolute error of at most, %",
        scale=alt.Scale(type="log", domain=[_LEAST, most], nice=False),
        axis=alt.Axis(values=[_LEAST, 0.01, *_TICKS], format="~g"),
    )
    y = alt.Y("share:Q", title="share of the figures (%)", scale=alt.Scale(domain=[0, 100]))
    dash = alt.StrokeDash(
        "basis:N",
        scale=alt.Scale(domain=list(BASES), range=[[1, 0], [4, 3]]),
        legend=alt.Legend(orient="top", title=None, symbolType="stroke"),
    )
    lines = base.mark_line(interpolate="step-after", strokeWidth=1.6).encode(
        x=x, y=y, color=source_colour(_SOURCES), strokeDash=dash
    )
    points = base.encode(
        x=x,
        y=y,
        color=source_colour(_SOURCES),
        shape=source_shape(_SOURCES),
        tooltip=[
            *_WHO,
            alt.Tooltip("percent:Q", title="error (%)", format="+.3f"),
            alt.Tooltip("share:Q", title="figures within it (%)", format=".0f"),
        ],
    )
    return Figure(
        name,
        "Share of the figures whose absolute error is at most so large, in % of the measured, on a logarithmic scale: "
        "estimated and traced; solid lines and filled marks are held out, dashed lines and hollow marks calibrated.",
        layered([lines, *_marks(points, 26)], rows, title, 260),
    )


def coverage(figures: pl.DataFrame, name: str, title: str) -> Figure:
    """What the estimate with its margin has above every measured figure; left of zero it would not have been enough.

    Args:
        figures: case, basis, phase, split, group, measured_bytes, covering_bytes; rows without the last are left out.
        name: of the figure.
        title: over the chart.
    """
    percent = (pl.col("covering_bytes") / pl.col("measured_bytes") - 1) * 100
    rows = _labelled(figures).with_columns(_measured(), percent.round(3).alias("percent"))
    rows = clean(
        rows.filter(pl.col("percent").is_not_null()),
        ["candidate", "phase", "split", "group", "measured_gib", "percent"],
    )
    groups = rows["group"].unique(maintain_order=True).to_list()
    counts = rows.group_by("group", maintain_order=True).agg(
        pl.format("{} of {}", (pl.col("percent") >= 0).sum(), pl.len()).alias("text")
    )
    y = alt.Y("group:N", title=None, sort=groups, axis=_ROW_AXIS)
    x = _percent(rows["percent"], "with margin, % above the measured", room_for(64))
    states = ["covered", "not covered"]
    points = (
        alt.Chart()
        .transform_calculate(
            covered=f"datum.percent >= 0 ? '{states[0]}' : '{states[1]}'",
            gib="datum.measured_gib * (1 + datum.percent / 100)",
        )
        .transform_window(number="row_number()", frame=[None, None])
        .transform_calculate(line=_PLACE)
        .mark_point(size=46, strokeWidth=1.3, opacity=0.8)
        .encode(
            y=y,
            yOffset=alt.YOffset("line:Q", scale=alt.Scale(domain=[0, 1])),
            x=x,
            color=alt.Color(
                "covered:N",
                scale=alt.Scale(domain=states, range=[SOURCES["estimated"].colour, SOURCES["recorded"].colour]),
                legend=alt.Legend(orient="top", title=None),
            ),
            shape=alt.Shape(
                "covered:N",
                scale=alt.Scale(domain=states, range=[SOURCES["estimated"].shape, SOURCES["recorded"].shape]),
                legend=alt.Legend(orient="top", title=None),
            ),
            tooltip=[
                *_WHICH,
                alt.Tooltip("percent:Q", title="headroom (%)", format="+.2f"),
                alt.Tooltip("gib:Q", title="estimate with margin (GiB)", format=".3f"),
                alt.Tooltip("measured_gib:Q", title="measured (GiB)", format=".3f"),
            ],
        )
    )
    labels = (
        alt.Chart(rows_data(counts))
        .mark_text(style="note", align="right", dx=-2)
        .encode(y=y, x=alt.value("width"), text="text:N")
        .properties(name="note_counts")
    )
    return Figure(
        name,
        "What the estimate with its margin has above each measured figure, in %; on the right how many of the group it "
        "covers. A cross left of zero is a figure that it does not cover. Estimated against measured.",
        layered([_zero(), points, labels], rows, title, 40 + max(1, len(groups)) * 40),
    )


def _labelled(figures: pl.DataFrame) -> pl.DataFrame:
    return relabelled(figures.rename({"case": "candidate"}), display_labels(figures["case"]))


def _off(source: str) -> pl.Expr:
    """How far off a source is, in percent."""
    return ((pl.col(f"{source}_bytes") / pl.col("measured_bytes") - 1) * 100).round(3).alias(source)


def _measured() -> pl.Expr:
    return (pl.col("measured_bytes") / GIB).round(3).alias("measured_gib")


def _percent(values: pl.Series, title: str, reach: Any = alt.Undefined) -> alt.X:
    """Percent on a scale that is even around zero and logarithmic beyond."""
    most = max(0.3, _highest(values.abs())) * 1.15
    low = -most if (values < 0).any() else -0.1
    high = most if (values > 0).any() else 0.1
    ticks = [value for each in _TICKS for value in (-each, each)]
    return alt.X(
        "percent:Q",
        title=title,
        scale=alt.Scale(type="symlog", constant=0.1, domain=[low, high], nice=False, range=reach),
        axis=alt.Axis(
            values=[each for each in sorted([0, *ticks]) if low <= each <= high],
            labelExpr="datum.value ? format(datum.value, '+~g') : '0'",
        ),
    )


def _highest(values: pl.Series) -> float:
    return max([0.0, *(float(value) for value in values if value is not None)])


def _marks(base: alt.Chart, size: int) -> list[alt.Chart]:
    """Held out by filled marks, calibrated by hollow ones."""
    return [
        base.transform_filter(f"datum.basis === '{basis}'").mark_point(
            size=size, filled=filled, strokeWidth=1.3, opacity=0.75 if filled else 1
        )
        for basis, filled in zip(BASES, (True, False), strict=True)
    ]


def _zero() -> alt.Chart:
    rule: alt.Chart = alt.Chart(rows_data([{"zero": 0}])).mark_rule(style="guide").encode(x="zero:Q")
    return rule
