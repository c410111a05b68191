"""The chart of what memory costs: saved GiB against replayed milliseconds."""

import altair as alt
import polars as pl

from labkit.report.data import OUTCOMES, clean, display_labels, relabelled
from labkit.report.encodings import SIDES, layered, menu
from labkit.report.figure import Figure
from labkit.report.prose import Prose, note
from labkit.workload.gpu import GIB

_CHOSEN = "datum.setting === tradeoff_setting"
_MOST_NAMED = 5


def tradeoff(frame: pl.DataFrame) -> Figure | Prose:
    """Every choice by what it saves and what its replay costs; those that nothing beats stand out and are joined.

    Where no choice has both figures, a sentence says so.

    Args:
        frame: a study's `tradeoff` frame: candidate, setting, is_control, outcome, evidence, replay_source,
            saved_bytes, replay_seconds, rank, unbeaten (null where a figure is missing).
    """
    labels = display_labels(frame["candidate"])
    evidence, clock = (frame[name][0] for name in ("evidence", "replay_source"))
    # The setting is chosen below the chart.
    suffix = pl.when(pl.col("setting") != "").then(pl.format(" at {}", "setting")).otherwise(pl.lit(""))
    named = relabelled(frame, labels).with_columns(pl.col("candidate").str.strip_suffix(suffix))
    placed = named.filter(pl.col("unbeaten").is_not_null()).with_columns(
        (pl.col("saved_bytes") / GIB).alias("saved_gib"),
        (pl.col("replay_seconds") * 1e3).alias("replay_ms"),
        pl.when("is_control").then(pl.lit("control")).when(pl.col("rank") == 1).then(pl.lit("try first")).alias("role"),
    )
    placed = placed.sort("replay_ms", "saved_gib", maintain_order=True).with_columns(
        pl.when(pl.col("unbeaten").cast(pl.Int64).cum_sum(reverse=True).over("setting") % 2 == 1)
        .then(pl.lit("above"))
        .when(pl.col("saved_gib") > 0.15 * pl.col("saved_gib").max().over("setting"))
        .then(pl.lit("below"))
        .otherwise(pl.lit("over"))
        .alias("tier"),
        (pl.col("replay_ms") > 0.6 * pl.col("replay_ms").max()).over("setting").alias("late"),
    )
    if placed.is_empty():
        return note((f"No choice has both figures yet.{_left_out(relabelled(frame, labels))}",))
    columns = ("candidate", "setting", "role", "saved_gib", "saved_bytes", "replay_ms", "unbeaten", "tier", "late")
    rows = clean(placed, columns)
    settings = frame["setting"].unique(maintain_order=True).to_list()
    base = alt.Chart().transform_filter(_CHOSEN)
    x = alt.X(
        "replay_ms:Q",
        title=f"replayed each step (ms, {clock}, lower bound)",
        axis=alt.Axis(tickCount=8),
        scale=_scale(rows["replay_ms"]),
    )
    y = alt.Y("saved_gib:Q", title=f"saved (GiB, {evidence})", scale=_scale(rows["saved_gib"]))
    tooltip = [
        alt.Tooltip("candidate:N", title="recompute"),
        alt.Tooltip("saved_gib:Q", title=f"saved (GiB, {evidence})", format=".3f"),
        alt.Tooltip("saved_bytes:Q", title="saved (bytes)", format=","),
        alt.Tooltip("replay_ms:Q", title=f"replayed (ms, {clock})", format=".3f"),
        alt.Tooltip("standing:N", title="standing"),
    ]
    standing = "datum.role ? datum.role : datum.unbeaten ? 'nothing beats it' : 'another saves as much for less'"
    points = base.transform_calculate(standing=standing)
    beaten = points.transform_filter("!datum.unbeaten").mark_point(style="note", size=70, strokeWidth=1.5, opacity=1)
    best = points.transform_filter("datum.unbeaten").mark_point(style="marker", size=90, filled=True, opacity=1)
    line = base.transform_filter("datum.unbeaten").mark_line(
        style="guide", interpolate="step-after", strokeDash=[4, 3], strokeWidth=1.2
    )
    chosen = menu("tradeoff_setting", settings, "Setting")
    layers = [
        line.encode(x=x, y=y, order=alt.Order("replay_ms:Q")),
        beaten.encode(x=x, y=y, tooltip=tooltip),
        best.encode(x=x, y=y, tooltip=tooltip),
        *_names(points, x, y),
    ]
    return Figure(
        "tradeoff",
        f"What each recompute choice saves of the {evidence} peak, in GiB, against what backward replays for it each "
        f"step, in ms ({clock}, a lower bound). Filled and joined: nothing saves as much for less. Hollow: something "
        f"does.{_left_out(relabelled(frame, labels))}",
        layered(layers, rows, "Memory saved against time replayed", 320).add_params(chosen),
    )


def _scale(values: pl.Series) -> alt.Scale:
    """From zero, or below it where something is: also where nothing is drawn, which has no extent of its own."""
    low, high = (float(each) for each in (min([0.0, *values]), max([0.0, *values])))
    room = (high - low or 1.0) * 0.06
    return alt.Scale(domain=[low - room if low < 0 else 0.0, high + room], nice=True)


def _names(points: alt.Chart, x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """At each choice that nothing beats its name, above and below in turn; on a phone the first to try alone.

    What lies to the right saves more: a name below its point keeps clear of its neighbour's. Near zero, where the
    axis is below, it stands farther above instead.
    """
    said = points.transform_filter("datum.unbeaten && (width > 420 || datum.role)").transform_calculate(
        text="datum.role === 'control' ? 'control' : datum.role ? datum.candidate + ' (' + datum.role + ')' : "
        "datum.candidate"
    )
    return [
        said.transform_filter(f"datum.late === {late} && datum.tier === '{tier}'")
        .mark_text(style="note", align=align, dx=dx, dy=dy, limit=260)
        .encode(x=x, y=y, text="text:N")
        .properties(name=f"note_{align}_{tier}")
        for late, (align, dx) in zip(("false", "true"), SIDES, strict=True)
        for tier, dy in (("above", -11), ("below", 23), ("over", -25))
    ]


def _left_out(named: pl.DataFrame) -> str:
    """What has no place in the chart, and why."""
    without = named.filter(pl.col("unbeaten").is_null()).with_columns(
        pl.when(pl.col("outcome") == "ok")
        .then(pl.lit("not both figures"))
        .otherwise(pl.col("outcome").replace(OUTCOMES))
        .alias("why")
    )
    said = [f"{row['candidate']} ({row['why']})" for row in without.head(_MOST_NAMED).iter_rows(named=True)]
    more = len(without) - len(said)
    return f" Without a place: {', '.join(said)}{f' and {more} more' if more > 0 else ''}." if said else ""
