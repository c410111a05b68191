"""The charts of notebook `scaling` (frames: `labkit.workbench.scaling`); bytes become GiB (2**30) here."""

import altair as alt
import polars as pl

from labkit.report.charts.stacks import stacks
from labkit.report.data import clean, display_labels
from labkit.report.encodings import guides, layered, named_colour, named_shape, room_for, rows_data
from labkit.report.figure import Figure
from labkit.report.prose import Prose, note
from labkit.workload.gpu import GIB

_ABOVE = 1.15
"""Of the largest memory is shown; curves go on beyond."""
_BESIDE = 1.12
"""Room at both ends of a logarithmic axis."""
_ROW = 36
"""Two lines of words."""


def curve(curves: pl.DataFrame, axis: str, limits: pl.DataFrame) -> Figure | Prose:
    """The peak with its margin along one axis under every choice; a sentence where there is nothing to compare.

    Args:
        curves: axis, value, label, is_base, choice, refusal, peak_allocated_bytes, covered_bytes, peak_phase,
            replay_share.
        axis: which.
        limits: label, bytes: the memories of GPUs.
    """
    here = curves.filter(pl.col("axis") == axis)
    if here.filter(pl.col("refusal").is_null())["value"].n_unique() < 2:
        return note((f"No other {axis} can run here.",))
    names = display_labels(here["choice"])
    rows = clean(
        here.with_columns(
            choice=pl.col("choice").replace_strict(names),
            gib=pl.col("covered_bytes") / GIB,
            peak_gib=pl.col("peak_allocated_bytes") / GIB,
            refusal=pl.col("refusal").str.slice(0, 300),
        ),
        ["value", "label", "choice", "refusal", "gib", "peak_gib", "peak_phase", "replay_share"],
    )
    present, values = list(names.values()), sorted(rows["value"].unique().to_list())
    top = max(float(limits["bytes"].max() or 1) / GIB * _ABOVE, 1.0)  # type: ignore[arg-type]
    x = alt.X(
        "value:Q",
        title=axis,
        scale=alt.Scale(type="log", base=2, nice=False, domain=[values[0] / _BESIDE, values[-1] * _BESIDE]),
        axis=alt.Axis(values=values, format=",d", labelOverlap="greedy"),
    )
    y = alt.Y("gib:Q", title="peak with its margin, estimated (GiB)", scale=alt.Scale(domain=[0, top], nice=False))
    tooltip = [
        alt.Tooltip("label:N", title="setting"),
        alt.Tooltip("choice:N", title="recompute"),
        alt.Tooltip("peak_gib:Q", title="peak, estimated (GiB)", format=".2f"),
        alt.Tooltip("gib:Q", title="with its margin (GiB)", format=".2f"),
        alt.Tooltip("peak_phase:N", title="peak in"),
        alt.Tooltip("replay_share:Q", title="replay, of a step's least time", format=".1%"),
    ]
    drawn = alt.Chart().transform_filter("isValid(datum.gib)")
    colour, shape = named_colour("choice", present), named_shape("choice", present)
    lines = drawn.mark_line(clip=True, strokeWidth=1.6).encode(x=x, y=y, color=colour)
    points = drawn.mark_point(clip=True, filled=True, size=55, opacity=1).encode(
        x=x, y=y, color=colour, shape=shape, tooltip=tooltip
    )
    refused = (
        alt.Chart()
        .transform_filter("datum.refusal")
        .mark_text(style="note", baseline="bottom", dy=-2, text="×", fontSize=16)
        .encode(
            x=x,
            y=alt.value("height"),
            tooltip=[
                alt.Tooltip("label:N", title="setting"),
                alt.Tooltip("choice:N", title="recompute"),
                alt.Tooltip("refusal:N", title="refused"),
            ],
        )
        .properties(name="note_refused")
    )
    base = here.filter("is_base").select("value", label=pl.lit("as it is")).head(1)
    return Figure(
        f"curve-{axis.replace(' ', '-').lower()}",
        f"A rank's peak with its margin by {axis}, in GiB, estimated from outlines (within 1 or 2 %), under each "
        "recompute choice. Dashed lines: what GPUs have, and the workload as it is. Crosses: refused by a rule.",
        layered(
            [*_memories(limits, y), *guides(base, "value", "label"), lines, points, refused],
            rows,
            f"Peak by {axis}",
            260,
        ),
    )


def _memories(limits: pl.DataFrame, y: alt.Y) -> list[alt.Chart]:
    """A line across the chart for each GPU, its name above its right end."""
    base = alt.Chart(rows_data(limits.select("label", gib=pl.col("bytes") / GIB)))
    rules: alt.Chart = base.mark_rule(style="guide", strokeDash=[4, 3], opacity=0.6).encode(y=y)
    names: alt.Chart = (
        base.mark_text(style="note", align="right", baseline="bottom", dy=-3)
        .encode(y=y, x=alt.value("width"), text="label:N")
        .properties(name="note_memories")
    )
    return [rules, names]


def frontier(frame: pl.DataFrame) -> Figure:
    """The longest sequences that fit, by layout and GPU, under each choice.

    Args:
        frame: setting, choice, gpu, tokens, too_long, runs, sound, replay_share, over_none.
    """
    names = display_labels(frame["choice"])
    rows = clean(
        frame.with_columns(
            row=pl.format("{}, {}", "setting", "gpu"),
            choice=pl.col("choice").replace_strict(names),
            allocator=pl.when("runs").then(pl.lit("gets along")).otherwise(pl.lit("may run out: fragments")),
        ),
        ["row", "setting", "gpu", "choice", "tokens", "too_long", "allocator", "sound", "replay_share", "over_none"],
    )
    order = rows["row"].unique(maintain_order=True).to_list()
    present = list(names.values())
    y = alt.Y(
        "row:N",
        title=None,
        sort=order,
        axis=alt.Axis(ticks=False, domain=False, labelPadding=8, labelExpr="split(datum.label, ', ')"),
    )
    x = alt.X(
        "tokens:Q",
        title="longest sequence that fits (tokens)",
        scale=alt.Scale(type="log", base=2, nice=True, range=room_for(12)),
        axis=alt.Axis(format=",d", tickCount=7),
    )
    points = (
        alt.Chart()
        .transform_filter("isValid(datum.tokens)")
        .mark_point(filled=True, size=80, opacity=0.9)
        .encode(
            y=y,
            x=x,
            color=named_colour("choice", present),
            shape=named_shape("choice", present),
            tooltip=[
                alt.Tooltip("setting:N", title="layout"),
                alt.Tooltip("gpu:N", title="GPU"),
                alt.Tooltip("choice:N", title="recompute"),
                alt.Tooltip("tokens:Q", title="longest that fits (tokens)", format=","),
                alt.Tooltip("too_long:Q", title="too long (tokens)", format=","),
                alt.Tooltip("over_none:Q", title="times that without recompute", format=".2f"),
                alt.Tooltip("replay_share:Q", title="replay, of a step's least time", format=".1%"),
                alt.Tooltip("allocator:N", title="caching allocator"),
                alt.Tooltip("sound:Q", title="it gets along up to (tokens)", format=","),
            ],
        )
    )
    sound = (
        alt.Chart()
        .transform_filter("isValid(datum.sound) && datum.sound < datum.tokens")
        .mark_tick(thickness=3, size=16)
        .encode(
            y=y,
            x=alt.X("sound:Q", title="longest sequence that fits (tokens)"),
            color=named_colour("choice", present),
            tooltip=[
                alt.Tooltip("choice:N", title="recompute"),
                alt.Tooltip("sound:Q", title="the allocator gets along up to (tokens)", format=","),
            ],
        )
    )
    nothing = (
        alt.Chart()
        .transform_filter("!isValid(datum.tokens)")
        .mark_text(style="note", align="left", dx=4, text="×")
        .encode(y=y, x=alt.value(0), tooltip=[alt.Tooltip("choice:N", title="fits at no length")])
        .properties(name="note_nothing")
    )
    return Figure(
        "frontier",
        "The longest sequence whose estimated peak and margin fit a GPU, in tokens on a logarithmic scale, by layout "
        "and recompute choice. A bar: the longest tried up to which the caching allocator, as it is set, gets along "
        "too. A cross: not even the shortest fits.",
        layered([points, sound, nothing], rows, "How long sequences may be", len(order) * _ROW),
    )


def holdings(breakdown: pl.DataFrame, limits: pl.DataFrame) -> Figure:
    """What holds the peak where a GPU is full.

    Args:
        breakdown: candidate (a choice), source, category, bytes.
        limits: label, bytes.
    """
    return stacks(
        breakdown,
        "full",
        "What holds a rank's peak at the longest length that fits, in GiB, estimated, by category, with the safety "
        "margin; dashed lines are what GPUs have. Numbers in the bars are those of the legend.",
        "What fills the GPU at the longest length",
        row="recompute",
        limits=limits,
    )
