"""The charts of notebook `estimate` (frames: `labkit.workbench.estimate`)."""

import altair as alt
import polars as pl

from labkit.report.charts.stacks import stacks
from labkit.report.charts.timeline import timeline
from labkit.report.data import clean, display_labels
from labkit.report.encodings import layered, named_colour, named_shape, rows_data
from labkit.report.figure import Figure
from labkit.workload.gpu import GIB

__all__ = ["choices", "parts", "stages", "timeline", "trade"]

_NEAR = 1.3
"""A GPU's memory is drawn among points up to so many times as high as they are."""


def choices(breakdown: pl.DataFrame, limits: pl.DataFrame) -> Figure:
    """What holds the peak as the workload is and under the choices to compare it with, and the memories of GPUs.

    Args:
        breakdown: candidate (a recompute label), source, category, bytes.
        limits: label, bytes.
    """
    return stacks(
        breakdown,
        "choices",
        "What holds a rank's peak as the workload is and under other recompute choices, in GiB, estimated, with the "
        "safety margin on top; dashed lines are what GPUs have. Numbers in the bars are those of the legend.",
        "The peak by what holds it, with its margin",
        row="recompute",
        limits=limits,
    )


def parts(breakdown: pl.DataFrame) -> Figure:
    """What each part of the model holds at the peak.

    Args:
        breakdown: candidate (a part), source, category, bytes.
    """
    return stacks(
        breakdown,
        "parts",
        "What each part of the model holds at the peak, all its layers together, in GiB, estimated, by category. The "
        "bars sum to the peak. Numbers in the bars are those of the legend.",
        "The peak by part of the model",
        row="part",
    )


def stages(breakdown: pl.DataFrame, limits: pl.DataFrame) -> Figure:
    """What holds the peak of each pipeline stage.

    Args:
        breakdown: candidate (a stage), source, category, bytes.
        limits: label, bytes.
    """
    return stacks(
        breakdown,
        "stages",
        "What holds the peak of a rank of each pipeline stage, in GiB, estimated, by category, with the safety margin; "
        "dashed lines are what GPUs have. Numbers in the bars are those of the legend.",
        "The peak of each pipeline stage",
        row="pipeline stage",
        limits=limits,
    )


def trade(priced: pl.DataFrame, limits: pl.DataFrame) -> Figure:
    """Every choice by its replay and its peak with margin; those that no other one undercuts are joined.

    Args:
        priced: label, is_control, is_first, on_front, covered_bytes, peak_allocated_bytes, replay_seconds,
            replay_share, replay_regions.
        limits: label, bytes.
    """
    kind = (
        pl.when("is_first")
        .then(pl.lit(_FIRST))
        .when("is_control")
        .then(pl.lit(_CONTROL))
        .when("on_front")
        .then(pl.lit(_FRONT))
        .otherwise(pl.lit(_OTHER))
    )
    columns = ["label", "kind", "gib", "peak_gib", "ms", "share", "replay_regions", "on_front"]
    rows = clean(
        priced.with_columns(
            kind=kind,
            label=pl.col("label").replace_strict(display_labels(priced["label"])),
            gib=pl.col("covered_bytes") / GIB,
            peak_gib=pl.col("peak_allocated_bytes") / GIB,
            ms=pl.col("replay_seconds") * 1e3,
            share=pl.col("replay_share"),
        ),
        columns,
    )
    heights = rows["gib"].to_list()
    near = limits.with_columns(gib=pl.col("bytes") / GIB).filter(
        pl.col("gib").is_between(min(heights) / _NEAR, max(heights) * _NEAR)
    )
    present = [name for name in _KINDS if name in rows["kind"]]
    x = alt.X("ms:Q", title="replayed each step, at least (ms)", axis=alt.Axis(tickCount=6))
    y = alt.Y("gib:Q", title="peak with its margin (GiB)", scale=alt.Scale(zero=False, padding=14))
    line = (
        alt.Chart().transform_filter("datum.on_front").mark_line(style="guide", interpolate="step-after", opacity=0.4)
    )
    points = alt.Chart().mark_point(filled=True, size=70)
    faded = alt.condition(f"datum.kind === '{_OTHER}'", alt.value(0.35), alt.value(1))
    names = (
        alt.Chart()
        .transform_filter(f"datum.kind === '{_CONTROL}' || datum.kind === '{_FIRST}'")
        .mark_text(style="note", align="left", dx=9, dy=10)
        .encode(x=x, y=y, text="label:N")
        .properties(name="note_names")
    )
    base = alt.Chart(rows_data(near.select("label", "gib")))
    rules = base.mark_rule(style="guide", strokeDash=[4, 3]).encode(y=y)
    rule_names = (
        base.mark_text(style="note", align="right", baseline="bottom", dy=-3)
        .encode(y=y, x=alt.value("width"), text="label:N")
        .properties(name="note_limits")
    )
    layers = [
        line.encode(x=x, y=y, order=alt.Order("ms:Q")),
        points.encode(
            x=x,
            y=y,
            color=named_colour("kind", present),
            opacity=faded,
            shape=named_shape("kind", present),
            tooltip=[
                alt.Tooltip("label:N", title="recompute"),
                alt.Tooltip("kind:N", title="among the choices"),
                alt.Tooltip("peak_gib:Q", title="peak, estimated (GiB)", format=".3f"),
                alt.Tooltip("gib:Q", title="with its margin (GiB)", format=".3f"),
                alt.Tooltip("ms:Q", title="replayed each step, at least (ms)", format=".2f"),
                alt.Tooltip("share:Q", title="of a step's least time", format=".1%"),
                alt.Tooltip("replay_regions:Q", title="regions of a micro-batch"),
            ],
        ),
        names,
        *([rules, rule_names] if near.height else []),
    ]
    return Figure(
        "trade",
        "Every recompute choice that can run, by what it replays each step (a lower bound in ms) and a rank's peak "
        "with its margin in GiB, both estimated; the line joins those that no other one undercuts in both, where costs "
        "within 1 % of a step are alike and fewer regions win. The memory scale does not start at zero.",
        layered(layers, rows, "Peak against replay", 320),
    )


_FIRST, _CONTROL, _FRONT, _OTHER = _KINDS = "to try first", "as it is", "not undercut", "others"
