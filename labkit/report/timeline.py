"""The chart of memory through a step."""

import altair as alt
import polars as pl

from labkit.report.data import display_labels, relabelled
from labkit.report.encodings import SIDES, category_colour_scale, layered, literal
from labkit.report.figure import Figure, csv_data
from labkit.report.theme import STACK, category_colour, category_number, text_on
from labkit.workload.gpu import GIB, MIB


def timeline(moments: pl.DataFrame, peaks: pl.DataFrame) -> Figure:
    """Live bytes through the steady step: the trace by category, the estimate's total over it, one candidate at a time.

    The trace counts allocations and frees, the estimate counts schedule steps; the estimate's phases are stretched
    to the trace's, so that both change phase at the same place.

    Args:
        moments: candidate, source, position (0 to 1 through the step), phase, category, bytes; every category of a
            moment has a row.
        peaks: candidate, source, position, phase, bytes: the highest moment of each.
    """
    labels = display_labels(moments["candidate"])
    names = list(labels.values())
    moments, peaks = relabelled(moments, labels), relabelled(peaks.filter(pl.col("candidate").is_in(labels)), labels)
    phases = _phases(moments.filter(pl.col("source") == "traced"))
    held = moments.filter(pl.col("bytes") > 0)["category"].to_list()
    present = [name for name in STACK if name in held]
    keys = {name: name.replace(": ", "_").replace(" ", "_") for name in present}
    traced = _wide(moments.filter(pl.col("source") == "traced"), keys)
    estimated = (
        _stretched(moments.filter(pl.col("source") == "estimated"), phases)
        .group_by("candidate", "position", maintain_order=True)
        .agg((pl.col("bytes").sum() / GIB).alias("gib"))
    )
    marked = peaks.filter(pl.col("source") == "traced").with_columns((pl.col("bytes") / GIB).alias("gib"))

    chosen = alt.param(
        name="timeline_candidate",
        value=names[0] if names else None,
        bind=alt.binding_select(options=names, name="Recompute "),
    )
    highlighted = alt.selection_point(name="timeline_category", fields=["category"], bind="legend")
    pointed = alt.selection_point(name="timeline_moment", on="pointermove", nearest=True, encodings=["x"], empty=False)
    only_chosen = "datum.candidate === timeline_candidate"
    top = float(traced["total"].max() or 0) / 1024 * 1.12 if len(traced) else 1.0  # type: ignore[arg-type]
    x_title = "through the steady step, in order of allocations (not of time)"
    x = alt.X(
        "position:Q",
        title=x_title,
        scale=alt.Scale(domain=[0, 1], nice=False),
        axis=alt.Axis(format="%", tickCount=5, grid=False),
    )
    y_title, y_scale = "allocated on one rank (GiB)", alt.Scale(domain=[0, top], nice=False)
    places = {keys[name]: place for place, name in enumerate(present)}
    areas = (
        alt.Chart()
        .transform_filter(only_chosen)
        .transform_fold(list(keys.values()), as_=["key", "mib"])
        .transform_calculate(gib="datum.mib / 1024", place=f"{literal(places)}[datum.key]")
        .transform_calculate(category=f"{literal(present)}[datum.place]")
        .mark_area(interpolate="step-after", style="segment", line=False)
        .encode(
            x=x,
            y=alt.Y("gib:Q", title=y_title, stack="zero", scale=y_scale),
            color=category_colour_scale(present),
            order=alt.Order("place:Q"),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
        )
        .add_params(highlighted)
    )
    numbers = (
        alt.Chart(csv_data(_number_places(moments.filter(pl.col("source") == "traced"), top)))
        .transform_filter(only_chosen)
        .mark_text(fontSize=9.5, tooltip=None)
        .encode(
            x=x,
            y=alt.Y("gib:Q", title=y_title, scale=y_scale),
            text="number:N",
            color=alt.Color("ink:N", scale=None),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
        )
    )
    estimate = (
        alt.Chart(csv_data(estimated))
        .transform_filter(only_chosen)
        .mark_line(interpolate="step-after", style="guide", strokeDash=[4, 3], strokeWidth=1.4)
        .encode(x=x, y=alt.Y("gib:Q", title=y_title, scale=y_scale))
    )
    boundaries = alt.Chart(csv_data(phases)).transform_filter(only_chosen)
    starts = boundaries.mark_rule(style="guide", strokeDash=[1, 3]).encode(x=alt.X("start:Q", title=x_title))
    phase_names = (
        boundaries.transform_filter("datum.end - datum.start > 0.07")
        .mark_text(style="note", align="left", baseline="bottom", dx=2, dy=-3)
        .encode(x=alt.X("start:Q", title=x_title), y=alt.value(0), text="phase:N")
        .properties(name="note_phases")
    )
    peak = alt.Chart(csv_data(marked.select("candidate", "position", "phase", "gib"))).transform_filter(only_chosen)
    peak_layers = [
        peak.mark_point(style="marker", shape="triangle-down", size=70, filled=True, opacity=1, yOffset=-5).encode(
            x=x, y=alt.Y("gib:Q", title=y_title, scale=y_scale)
        ),
        *(
            peak.transform_filter(f"datum.position {relation} 0.5")
            .transform_calculate(text="'traced peak ' + format(datum.gib, '.3f') + ' GiB in ' + datum.phase")
            .mark_text(style="note", align=align, dx=shift, dy=-9, fontWeight=600)
            .encode(x=x, y=alt.Y("gib:Q", title=y_title, scale=y_scale), text="text:N")
            .properties(name=f"note_peak_{align}")
            for relation, (align, shift) in zip(("<", ">="), SIDES, strict=True)
        ),
    ]
    hover = (
        alt.Chart()
        .transform_filter(only_chosen)
        .transform_calculate(**{f"{key}_gib": f"datum.{key} / 1024" for key in [*keys.values(), "total"]})
        .mark_rule(style="guide")
        .encode(
            x=x,
            opacity=alt.condition(pointed, alt.value(0.8), alt.value(0)),
            tooltip=[
                alt.Tooltip("candidate:N", title="recompute (traced)"),
                alt.Tooltip("phase:N", title="phase"),
                alt.Tooltip("total_gib:Q", title="total (GiB)", format=".3f"),
                *(alt.Tooltip(f"{keys[name]}_gib:Q", title=name, format=".3f") for name in reversed(present)),
            ],
        )
        .add_params(pointed)
    )
    layers = [areas, numbers, estimate, starts, phase_names, *peak_layers, hover]
    chart = layered(layers, traced, "Live memory through one step", 340).add_params(chosen)
    return Figure(
        "timeline",
        "Allocated memory through the steady step under the chosen recompute, in GiB: traced by category (areas), the "
        "estimated total (dashed line), the traced peak and the phases.",
        chart,
    )


def _phases(traced: pl.DataFrame) -> pl.DataFrame:
    """candidate, phase, start, end (positions) of the trace's phases, in order."""
    starts = (
        traced.group_by("candidate", "phase", maintain_order=True)
        .agg(pl.col("position").min().alias("start"))
        .sort("candidate", "start", maintain_order=True)
    )
    return starts.with_columns(pl.col("start").shift(-1, fill_value=1.0).over("candidate").alias("end"))


def _stretched(estimated: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """The estimate's moments with each phase moved and stretched onto the trace's phase of that name."""
    own = _phases(estimated).rename({"start": "own_start", "end": "own_end"})
    joined = estimated.join(own, on=["candidate", "phase"], how="left").join(
        phases, on=["candidate", "phase"], how="left"
    )
    share = (pl.col("position") - pl.col("own_start")) / (pl.col("own_end") - pl.col("own_start"))
    moved = pl.col("start") + share.fill_nan(0.0) * (pl.col("end") - pl.col("start"))
    return joined.with_columns(pl.coalesce(moved, pl.col("position")).alias("position"))


def _number_places(traced: pl.DataFrame, top: float) -> pl.DataFrame:
    """Where each category's number stands: the middle of its band where the band is highest, if it is high enough."""
    place = pl.col("category").replace_strict({name: place for place, name in enumerate(STACK)}, return_dtype=pl.Int64)
    moment = ["candidate", "position"]
    bands = (
        traced.with_columns(place.alias("place"), (pl.col("bytes") / GIB).alias("high"))
        .sort([*moment, "place"])
        .with_columns((pl.col("high").cum_sum().over(moment) - pl.col("high") / 2).alias("gib"))
    )
    inside = bands.filter(pl.col("position").is_between(0.02, 0.98), pl.col("high") > top / 40)
    best = inside.sort("high", descending=True, maintain_order=True).unique(
        ["candidate", "category"], keep="first", maintain_order=True
    )
    return best.select(
        "candidate",
        "category",
        "position",
        "gib",
        pl.col("category").replace_strict({name: str(category_number(name)) for name in STACK}).alias("number"),
        pl.col("category").replace_strict({name: text_on(category_colour(name)) for name in STACK}).alias("ink"),
    )


def _wide(traced: pl.DataFrame, keys: dict[str, str]) -> pl.DataFrame:
    """One row per moment: candidate, position, phase, MiB per category and in total (to a tenth: it stays small)."""
    wide = traced.pivot("category", index=["candidate", "position", "phase"], values="bytes", aggregate_function="sum")
    columns = [
        (pl.col(name) if name in wide.columns else pl.lit(0)).fill_null(0).alias(key) for name, key in keys.items()
    ]
    wide = wide.select("candidate", pl.col("position").round(5), "phase", *columns)
    names = list(keys.values())
    total = pl.sum_horizontal(pl.col(name) for name in names) if names else pl.lit(0)
    return wide.with_columns(total.alias("total")).with_columns((pl.col(*names, "total") / MIB).round(1))
