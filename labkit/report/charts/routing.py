"""The charts of expert routing, from the frames of `labkit.workbench.routing`; bytes become GiB (2**30) here."""

import altair as alt
import polars as pl

from labkit.report.data import clean, display_labels
from labkit.report.encodings import (
    SIDES,
    guides,
    layered,
    menu,
    named_colour,
    named_offset,
    named_shape,
    room_for,
    rows_data,
)
from labkit.report.figure import Figure
from labkit.report.theme import DIVERGING
from labkit.workload.gpu import GIB, MIB

_ROW, _STRIP_ROW = 16, 15


def peaks(frame: pl.DataFrame, limits: pl.DataFrame) -> Figure:
    """The fullest rank's peak at every expert-parallel size under every plan, beside what GPUs have.

    Args:
        frame: `labkit.workbench.routing.PEAKS`.
        limits: label, bytes: what GPUs have.
    """
    rows, plans = _labelled(
        frame, "plan", "ep", "basis", "over_even", "peak_bytes", "covered_bytes", "phase", "refused"
    )
    rows = rows.with_columns(
        (pl.col("peak_bytes") / GIB).alias("peak_gib"),
        (pl.col("covered_bytes") / GIB).alias("covered_gib"),
        pl.format("EP {}", "ep").alias("size"),
        pl.col("refused").str.slice(0, 300),
    )
    sizes = rows["size"].unique(maintain_order=True).to_list()
    base = alt.Chart().encode(
        y=alt.Y("size:N", title=None, sort=sizes, axis=alt.Axis(ticks=False, domain=False)),
    )
    tooltip = [
        alt.Tooltip("size:N", title="expert-parallel size"),
        alt.Tooltip("plan:N", title="rows"),
        alt.Tooltip("basis:N", title="these are"),
        alt.Tooltip("over_even:Q", title="times the even share, at most", format=".2f"),
        alt.Tooltip("peak_gib:Q", title="estimated peak (GiB)", format=".3f"),
        alt.Tooltip("covered_gib:Q", title="with its margin (GiB)", format=".3f"),
        alt.Tooltip("peak_bytes:Q", title="estimated peak (bytes)", format=","),
        alt.Tooltip("phase:N", title="peak in phase"),
    ]
    x = alt.X(
        "peak_gib:Q",
        title="estimated peak of the fullest rank (GiB)",
        scale=alt.Scale(zero=True, nice=False, range=room_for(52)),
        axis=alt.Axis(tickCount=6),
    )
    drawn = base.transform_filter("isValid(datum.peak_gib)").encode(yOffset=named_offset("plan", plans))
    points = drawn.mark_point(filled=True, size=70, opacity=1).encode(
        x=x, color=named_colour("plan", plans), shape=named_shape("plan", plans), tooltip=tooltip
    )
    values = (
        drawn.mark_text(style="note", align="left", dx=9)
        .encode(x=x, text=alt.Text("peak_gib:Q", format=".2f"), tooltip=tooltip)
        .properties(name="note_values")
    )
    problems = (
        base.transform_filter("datum.refused")
        .mark_text(style="note", align="left", dx=4)
        .encode(x=alt.value(0), text=alt.datum("cannot run"), tooltip=alt.Tooltip("refused:N", title="refused"))
        .properties(name="note_problems")
    )
    rules = guides(limits.select("label", (pl.col("bytes") / GIB).alias("peak_gib")), "peak_gib", "label")
    return Figure(
        "routing-peaks",
        "Estimated peak of the fullest rank at every expert-parallel size that these ranks allow, in GiB, for each way "
        "that rows may lie. Dashed: what GPUs have, of which the CUDA context and NCCL take a part.",
        layered(
            [*rules, points, values, problems],
            rows,
            "Peak by expert-parallel size",
            len(sizes) * (len(plans) * _ROW + 14),
        ),
    )


def loads(frame: pl.DataFrame) -> Figure:
    """How many rows each expert gets, one histogram at a time.

    Args:
        frame: `labkit.workbench.routing.LOADS`.
    """
    rows, names = _labelled(frame, "histogram", "expert", "rank", "mean", "least", "most")
    rows = rows.with_columns(pl.col("mean", "least", "most").round(3))
    ranks = (
        rows.group_by("rank", maintain_order=True)
        .agg(pl.col("expert").min().alias("first"), pl.col("expert").max().alias("last") + 1)
        .with_columns(((pl.col("first") + pl.col("last")) / 2).alias("middle"))
    )
    experts, count = int(rows["expert"].max()) + 1, ranks.height  # type: ignore[arg-type]
    x_scale = alt.Scale(domain=[0, experts], nice=False)
    x = alt.X("from:Q", title="expert, in the order of ranks", scale=x_scale, axis=alt.Axis(tickMinStep=1))
    top = max(2.0, float(rows["most"].max() or 0) * 1.05)  # type: ignore[arg-type]
    y_scale = alt.Scale(domain=[0, top], nice=False)
    y = alt.Y("mean:Q", title="rows over the even share", scale=y_scale)
    chosen = menu("loads_histogram", names, "Histogram")
    bands = (
        alt.Chart(rows_data(ranks.filter(pl.col("rank") % 2 == 1)))
        .mark_rect(style="band")
        .encode(x=alt.X("first:Q", scale=x_scale), x2="last:Q", y=alt.value(0), y2=alt.value("height"))
    )
    numbers = (
        alt.Chart(rows_data(ranks))
        .transform_filter(f"width > {count * 16}")
        .mark_text(style="note", baseline="top", dy=3)
        .encode(x=alt.X("middle:Q", scale=x_scale), y=alt.value(0), text="rank:N")
        .properties(name="note_ranks")
    )
    base = (
        alt.Chart()
        .transform_filter("datum.histogram === loads_histogram")
        .transform_calculate("from", "datum.expert")
        .transform_calculate(to="datum.expert + 1", middle="datum.expert + 0.5")
    )
    tooltip = [
        alt.Tooltip("histogram:N", title="histogram"),
        alt.Tooltip("expert:Q", title="expert"),
        alt.Tooltip("rank:Q", title="on rank"),
        alt.Tooltip("mean:Q", title="rows over the even share, mean of layers", format=".3f"),
        alt.Tooltip("least:Q", title="in the layer with fewest", format=".3f"),
        alt.Tooltip("most:Q", title="in the layer with most", format=".3f"),
    ]
    bars = base.mark_bar(style="load").encode(x=x, x2="to:Q", y=y, y2=alt.datum(0), tooltip=tooltip)
    span = base.mark_rule(style="guide", strokeWidth=1).encode(
        x=alt.X("middle:Q", scale=x_scale), y=alt.Y("least:Q", scale=y_scale), y2="most:Q", tooltip=tooltip
    )
    even = alt.Chart(rows_data([{"mean": 1}])).mark_rule(style="guide", strokeDash=[4, 3]).encode(y=y)
    layers = [bands, bars, span, even, numbers]
    return Figure(
        "routing-loads",
        "Rows of each expert over the even share: bars are the mean of all MoE layers, strokes reach from the layer "
        "with fewest to the one with most. Shaded bands and the numbers above are expert-parallel ranks.",
        layered(layers, rows, "Load of each expert", 260).add_params(chosen),
    )


def strip(frame: pl.DataFrame) -> Figure:
    """How many rows each rank gets in each layer, one histogram at a time.

    Args:
        frame: `labkit.workbench.routing.STRIP`.
    """
    rows, names = _labelled(frame, "histogram", "layer", "rank", "over_even")
    rows = rows.with_columns(pl.col("over_even").round(3))
    most = max(2.0, float(rows["over_even"].max() or 0))  # type: ignore[arg-type]
    ranks, layers = rows["rank"].n_unique(), rows["layer"].n_unique()
    base = (
        alt.Chart()
        .transform_filter("datum.histogram === strip_histogram")
        .encode(
            x=alt.X("rank:O", title="expert-parallel rank", axis=alt.Axis(labelAngle=0, orient="top")),
            y=alt.Y("layer:O", title="MoE layer", axis=alt.Axis(labelFontSize=10, ticks=False)),
        )
    )
    colour = alt.Color(
        "over_even:Q",
        title="rows over the even share",
        scale=alt.Scale(domain=[0, 1, most], range=list(DIVERGING), interpolate="rgb"),
        legend=alt.Legend(orient="bottom", gradientLength=200, format=".1f", values=[0, 1, most]),
    )
    tooltip = [
        alt.Tooltip("histogram:N", title="histogram"),
        alt.Tooltip("layer:O", title="layer"),
        alt.Tooltip("rank:O", title="rank"),
        alt.Tooltip("over_even:Q", title="rows over the even share", format=".3f"),
    ]
    cells = base.mark_rect(style="segment").encode(color=colour, tooltip=tooltip)
    numbers = (
        base.transform_filter(f"width > {ranks * 26}")
        .mark_text(fontSize=9.5, color="#000000")
        .encode(text=alt.Text("over_even:Q", format=".2f"), tooltip=tooltip)
    )
    return Figure(
        "routing-strip",
        "Rows of each expert-parallel rank in each MoE layer over the even share: blue is fewer, orange is more. The "
        "rank that holds most is priced with its own rows in every layer.",
        layered([cells, numbers], rows, "Load of each rank, layer by layer", layers * _STRIP_ROW).add_params(
            menu("strip_histogram", names, "Histogram")
        ),
    )


def by_layer(frame: pl.DataFrame) -> Figure:
    """What the peak would lose if one layer alone were balanced.

    Args:
        frame: `labkit.workbench.routing.LAYERS`.
    """
    rows, names = _labelled(frame, "histogram", "layer", "rank", "over_even", "saved_bytes")
    rows = rows.with_columns((pl.col("saved_bytes") / MIB).round(3).alias("saved_mib"), pl.col("over_even").round(3))
    base = alt.Chart().encode(
        x=alt.X("layer:O", title="MoE layer", axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("histogram:N", sort=names, scale=alt.Scale(domain=names)),
        tooltip=[
            alt.Tooltip("histogram:N", title="histogram"),
            alt.Tooltip("layer:O", title="layer"),
            alt.Tooltip("rank:Q", title="priced rank"),
            alt.Tooltip("over_even:Q", title="its rows over the even share", format=".3f"),
            alt.Tooltip("saved_mib:Q", title="off the passes' peak if balanced (MiB)", format=",.1f"),
        ],
    )
    y = alt.Y("saved_mib:Q", title="off the passes' peak if balanced (MiB)")
    stems = base.mark_rule(strokeWidth=2).encode(y=y, y2=alt.datum(0), color=named_colour("histogram", names))
    ends = base.mark_point(filled=True, size=36, opacity=1).encode(
        y=y, color=named_colour("histogram", names), shape=named_shape("histogram", names)
    )
    return Figure(
        "routing-layers",
        "What the estimated peak of forward and backward on the fullest rank would lose, in MiB, if this layer alone "
        "sent it the even share; below zero where the layer sends it less than that.",
        layered([stems, ends], rows, "Which layer's skew decides", 260),
    )


def options(frame: pl.DataFrame) -> Figure:
    """What recompute, capacities and padding do to the peak under every plan, as bars from zero.

    Args:
        frame: `labkit.workbench.routing.OPTIONS`.
    """
    found, plans = _labelled(frame, "plan", "option", "change_bytes", "dropped")
    rows = found.filter(pl.col("change_bytes").is_not_null()).with_columns(
        (pl.col("change_bytes") / GIB).round(4).alias("change_gib"),
        pl.col("dropped").round(4),
    )
    names = rows["option"].unique(maintain_order=True).to_list()
    base = alt.Chart().encode(
        y=alt.Y("option:N", title=None, sort=names, axis=alt.Axis(ticks=False, domain=False)),
        yOffset=named_offset("plan", plans),
        tooltip=[
            alt.Tooltip("option:N", title="option"),
            alt.Tooltip("plan:N", title="rows"),
            alt.Tooltip("change_gib:Q", title="against the workload as it is (GiB)", format="+.3f"),
            alt.Tooltip("dropped:Q", title="of all rows dropped", format=".1%"),
        ],
    )
    x = alt.X(
        "change_gib:Q",
        title="change of the peak (GiB)",
        scale=alt.Scale(padding=44, nice=False),
        axis=alt.Axis(tickCount=6),
    )
    stems = base.mark_rule(strokeWidth=3).encode(x=x, x2=alt.datum(0), color=named_colour("plan", plans))
    ends = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=x, color=named_colour("plan", plans), shape=named_shape("plan", plans)
    )
    values = [
        base.transform_filter(f"datum.change_gib {relation} 0")
        .mark_text(style="note", align=align, dx=shift)
        .encode(x=x, text=alt.Text("change_gib:Q", format="+.2f"))
        .properties(name=f"note_{align}")
        for relation, (align, shift) in zip((">=", "<"), SIDES, strict=True)
    ]
    height = max(1, len(names)) * (len(plans) * _ROW + 14)
    return Figure(
        "routing-options",
        "What each choice changes of the estimated peak, in GiB, against the workload as it is, rows lying alike.",
        layered([stems, ends, *values], rows, "What recompute and capacities change", height),
    )


def _labelled(frame: pl.DataFrame, name: str, *columns: str) -> tuple[pl.DataFrame, list[str]]:
    """The columns a chart shows, with short names, and those names in order."""
    labels = display_labels(frame[name].drop_nulls())
    rows = clean(frame, [name, *columns]).with_columns(pl.col(name).replace_strict(labels, return_dtype=pl.String))
    return rows, list(labels.values())
