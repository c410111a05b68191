"""The chart of memory through a step."""

from typing import Any

import altair as alt
import polars as pl

from labkit.report.data import display_labels, relabelled
from labkit.report.encodings import SIDES, category_colour_scale, layered, literal, menu, rows_data
from labkit.report.figure import Figure
from labkit.report.theme import STACK, category_colour, category_number, text_on
from labkit.workload.gpu import GIB, MIB

_CHOSEN = "datum.candidate === timeline_candidate"
_X_TITLE = "through the step, in order of allocations"
_Y_TITLE = "allocated (GiB)"
_WHOLE_SENTENCE = 350
"""Pixels that the sentence about the peak needs beside its mark; where there are fewer it is a few words."""


_CAPTIONS = {
    "traced": "Allocated memory through the steady step under the chosen recompute, in GiB: traced by category "
    "(areas), the estimated total (dashed line), the traced peak and the phases.",
    "estimated": "Allocated memory through the steady step under the chosen recompute, in GiB: estimated by category "
    "(areas), the estimated peak and the phases.",
}


def timeline(moments: pl.DataFrame, peaks: pl.DataFrame) -> Figure:
    """Live bytes through the steady step: the trace by category, the estimate's total over it, one candidate at a time.

    The trace counts allocations and frees, the estimate counts schedule steps; the estimate's phases are stretched
    to the trace's, so that both change phase at the same place. Where nothing was traced, the estimate is shown by
    category.

    Args:
        moments: candidate, source, position (0 to 1 through the step), phase, category, bytes; every category of a
            moment has a row.
        peaks: candidate, source, position, phase, bytes: the highest moment of each.
    """
    labels = display_labels(moments["candidate"])
    moments, peaks = relabelled(moments, labels), relabelled(peaks.filter(pl.col("candidate").is_in(labels)), labels)
    main = "traced" if "traced" in moments["source"] else "estimated"
    traced = moments.filter(pl.col("source") == main)
    estimated = moments.filter(pl.col("source") == "estimated")
    phases = _phases(traced)
    untraced = estimated.join(phases, on="candidate", how="anti", maintain_order="left")
    phases = pl.concat([phases, _phases(untraced)])
    held = moments.filter(pl.col("bytes") > 0)["category"].to_list()
    present = [name for name in STACK if name in held]
    marked = peaks.filter(pl.col("source") == main).select(
        "candidate", "position", "phase", (pl.col("bytes") / GIB).alias("gib")
    )
    top = max([1.0, *(nbytes / GIB * 1.12 for nbytes in peaks["bytes"].to_list())])

    chosen = menu("timeline_candidate", list(labels.values()), "Recompute")
    highlighted = alt.selection_point(name="timeline_category", fields=["category"], bind="legend")
    columns = ["position", "phase", *(f"{_key(name)}_mib" for name in present)]
    layers = [
        _areas(present, top, highlighted),
        _numbers(traced, top, highlighted),
        *([_estimate(top)] if main == "traced" else []),
        *_phase_marks(phases),
        *_peak_marks(marked, top, main),
        _hover(present, main),
    ]
    line = _totals(_stretched(estimated, phases)) if main == "traced" else []
    data = _beside(_packed(_wide(traced, present)), line)
    chart = layered(layers, data, "Live memory through one step", 340).add_params(chosen)
    return Figure(
        "timeline",
        _CAPTIONS[main],
        chart,
        lists={"moments": columns, "estimate": ["position", "estimated_total_gib"]},
    )


def _key(category: str) -> str:
    """A field name Vega does not take apart."""
    return category.replace(": ", "_").replace(" ", "_")


def _packed(moments: pl.DataFrame) -> list[dict[str, Any]]:
    """For each candidate its moments, each a list of the frame's other columns: a quarter of the size of named rows."""
    packed: dict[str, list[list[Any]]] = {}
    for candidate, *moment in moments.iter_rows():
        short = [int(value) if isinstance(value, float) and value.is_integer() else value for value in moment]
        packed.setdefault(candidate, []).append(short)
    return [{"candidate": candidate, "moments": lists} for candidate, lists in packed.items()]


def _beside(traced: list[dict[str, Any]], totals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The candidates of both, each with the estimate's line as a second list."""
    lines = {row["candidate"]: row["moments"] for row in totals}
    known = {row["candidate"]: row["moments"] for row in traced}
    return [
        {"candidate": name, "moments": known.get(name, []), "estimate": lines.get(name, [])}
        for name in dict.fromkeys([*known, *lines])
    ]


def _wide(traced: pl.DataFrame, present: list[str]) -> pl.DataFrame:
    """candidate, position, phase and MiB of every category (to a tenth), a row for each moment."""
    columns = [
        (pl.col("bytes").filter(pl.col("category") == name).sum() / MIB).round(1).alias(_key(name)) for name in present
    ]
    wide = traced.group_by("candidate", "position", "phase", maintain_order=True).agg(columns)
    return wide.with_columns(pl.col("position").round(5))


def _unpacked(column: str, names: list[str]) -> alt.Chart:
    """The chosen candidate's moments in a list, a row each again, with a field for each of their values."""
    fields = {name: f"datum.moment[{place}]" for place, name in enumerate(names)}
    chosen = alt.Chart().transform_filter(f"{_CHOSEN} && length(datum.{column}) > 0")
    layer: alt.Chart = chosen.transform_flatten([column], as_=["moment"]).transform_calculate(**fields)
    return layer


def _traced(present: list[str]) -> alt.Chart:
    return _unpacked("moments", ["position", "phase", *map(_key, present)])


def _x() -> alt.X:
    return alt.X(
        "position:Q",
        title=_X_TITLE,
        scale=alt.Scale(domain=[0, 1], nice=False),
        axis=alt.Axis(format="%", tickCount=5, grid=False),
    )


def _y(top: float) -> alt.Y:
    return alt.Y("gib:Q", title=_Y_TITLE, scale=alt.Scale(domain=[0, top], nice=False))


def _areas(present: list[str], top: float, highlighted: alt.Parameter) -> alt.Chart:
    places = literal({_key(name): place for place, name in enumerate(present)})
    layer: alt.Chart = (
        _traced(present)
        .transform_fold([_key(name) for name in present], as_=["key", "mib"])
        .transform_calculate(gib="datum.mib / 1024", place=f"{places}[datum.key]")
        .transform_calculate(category=f"{literal(present)}[datum.place]")
        .mark_area(interpolate="step-after", style="segment", strokeWidth=0.3)
        .encode(
            x=_x(),
            y=_y(top).stack("zero"),
            color=category_colour_scale(present),
            order=alt.Order("place:Q"),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
        )
        .add_params(highlighted)
    )
    return layer


def _numbers(traced: pl.DataFrame, top: float, highlighted: alt.Parameter) -> alt.Chart:
    """Each category's number in the middle of its band, where the band is highest, if it is high enough."""
    place = pl.col("category").replace_strict({name: place for place, name in enumerate(STACK)}, return_dtype=pl.Int64)
    moment = ["candidate", "position"]
    bands = (
        traced.with_columns(place.alias("place"), (pl.col("bytes") / GIB).alias("height"))
        .sort([*moment, "place"])
        .with_columns((pl.col("height").cum_sum().over(moment) - pl.col("height") / 2).alias("gib"))
    )
    inside = bands.filter(pl.col("position").is_between(0.02, 0.98), pl.col("height") > top / 40)
    highest = inside.sort("height", descending=True, maintain_order=True).unique(
        ["candidate", "category"], keep="first", maintain_order=True
    )
    numbered = highest.select(
        "candidate",
        "category",
        "position",
        "gib",
        pl.col("category").replace_strict({name: str(category_number(name)) for name in STACK}).alias("number"),
        pl.col("category").replace_strict({name: text_on(category_colour(name)) for name in STACK}).alias("ink"),
    )
    layer: alt.Chart = (
        alt.Chart(rows_data(numbered))
        .transform_filter(_CHOSEN)
        .mark_text(fontSize=9.5, tooltip=None, dx=9)
        .encode(
            x=_x(),
            y=_y(top),
            text="number:N",
            color=alt.Color("ink:N", scale=None),
            opacity=alt.condition(highlighted, alt.value(1), alt.value(0.15)),
        )
    )
    return layer


def _totals(estimated: pl.DataFrame) -> list[dict[str, Any]]:
    totals = estimated.group_by("candidate", "position", maintain_order=True).agg(
        (pl.col("bytes").sum() / GIB).round(4).alias("gib")
    )
    return _packed(totals.with_columns(pl.col("position").round(5)))


def _estimate(top: float) -> alt.Chart:
    line: alt.Chart = _unpacked("estimate", ["position", "gib"]).mark_line(
        interpolate="step-after", style="guide", strokeDash=[4, 3], strokeWidth=1.4
    )
    return line.encode(x=_x(), y=_y(top))


def _phase_marks(phases: pl.DataFrame) -> list[alt.Chart]:
    """A rule where each phase starts, its name if there is room for it; the last one finds room at the end."""
    base = alt.Chart(rows_data(phases)).transform_filter(_CHOSEN)
    wide = "(datum.end - datum.start) * width > 56"
    names = [
        base.transform_filter(shown)
        .mark_text(style="note", align=align, baseline="bottom", dx=shift / 4, dy=-3)
        .encode(x=alt.X(f"{edge}:Q", title=_X_TITLE), y=alt.value(0), text="phase:N")
        .properties(name=f"note_phase_{edge}")
        for edge, shown, (align, shift) in zip(
            ("start", "end"), (wide, f"datum.end === 1 && !({wide})"), SIDES, strict=True
        )
    ]
    return [base.mark_rule(style="guide", strokeDash=[1, 3]).encode(x=alt.X("start:Q", title=_X_TITLE)), *names]


def _peak_marks(marked: pl.DataFrame, top: float, source: str) -> list[alt.Chart]:
    base = alt.Chart(rows_data(marked)).transform_filter(_CHOSEN)
    marker = base.mark_point(style="marker", shape="triangle-down", size=70, filled=True, opacity=1, yOffset=-5)
    labels = [
        base.transform_filter(f"datum.position {relation} 0.5")
        .transform_calculate(gib_said="format(datum.gib, '.3f') + ' GiB'")
        .transform_calculate(
            text=f"{room} * width > {_WHOLE_SENTENCE} ? '{source} peak of the steady step ' + datum.gib_said + "
            "' in ' + datum.phase : 'peak ' + datum.gib_said"
        )
        .mark_text(style="note", align=align, dx=shift, dy=-9, fontWeight=600)
        .encode(x=_x(), y=_y(top), text="text:N")
        .properties(name=f"note_peak_{align}")
        for relation, room, (align, shift) in zip(
            ("<", ">="), ("(1 - datum.position)", "datum.position"), SIDES, strict=True
        )
    ]
    return [marker.encode(x=_x(), y=_y(top)), *labels]


def _hover(present: list[str], source: str) -> alt.Chart:
    """A band from each moment to the next: shaded under the pointer, it tells all the moment's figures."""
    pointed = alt.selection_point(
        name="timeline_moment", fields=["position"], on="pointerover", clear="pointerout", empty=False
    )
    keys = {name: _key(name) for name in present}
    total = " + ".join(f"datum.{key}" for key in keys.values()) or "0"
    gib = {f"{key}_gib": f"datum.{key} / 1024" for key in keys.values()}
    layer: alt.Chart = (
        _traced(present)
        .transform_window(next="lead(position)", sort=[{"field": "position"}])
        .transform_calculate(until="isValid(datum.next) ? datum.next : 1", total_gib=f"({total}) / 1024", **gib)
        .mark_rect(style="marker", stroke=None)
        .encode(
            x=_x(),
            x2="until:Q",
            y=alt.value(0),
            y2=alt.value("height"),
            opacity=alt.condition(pointed, alt.value(0.25), alt.value(0)),
            tooltip=[
                alt.Tooltip("candidate:N", title=f"recompute ({source})"),
                alt.Tooltip("phase:N", title="phase"),
                alt.Tooltip("total_gib:Q", title="total (GiB)", format=".3f"),
                *(alt.Tooltip(f"{keys[name]}_gib:Q", title=name, format=".3f") for name in reversed(present)),
            ],
        )
        .add_params(pointed)
    )
    return layer


def _phases(moments: pl.DataFrame) -> pl.DataFrame:
    """candidate, phase, start, end (positions) of each candidate's phases, in order."""
    starts = (
        moments.group_by("candidate", "phase", maintain_order=True)
        .agg(pl.col("position").min().alias("start"))
        .sort("candidate", "start", maintain_order=True)
    )
    return starts.with_columns(pl.col("start").shift(-1, fill_value=1.0).over("candidate").alias("end"))


def _stretched(estimated: pl.DataFrame, phases: pl.DataFrame) -> pl.DataFrame:
    """The estimate's moments, each phase moved and stretched onto the phase of that name in `phases`."""
    own = _phases(estimated).rename({"start": "own_start", "end": "own_end"})
    keys = ["candidate", "phase"]
    joined = estimated.join(own, on=keys, how="left", maintain_order="left").join(
        phases, on=keys, how="left", maintain_order="left"
    )
    share = (pl.col("position") - pl.col("own_start")) / (pl.col("own_end") - pl.col("own_start"))
    moved = pl.col("start") + share.fill_nan(0.0) * (pl.col("end") - pl.col("start"))
    return joined.with_columns(pl.coalesce(moved, pl.col("position")).alias("position"))
