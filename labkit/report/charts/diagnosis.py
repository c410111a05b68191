"""The charts of a diagnosis, from the frames of `labkit.workbench.diagnosis`. Bytes become GiB (2**30) here."""

import altair as alt
import polars as pl

from labkit.report.charts import study
from labkit.report.data import clean, display_labels
from labkit.report.encodings import SIDES, layered, literal, room_for, rows_data, unit_of
from labkit.report.figure import Figure
from labkit.report.prose import Prose, note
from labkit.report.theme import MEMORY_PARTS, SERIES, SOURCES, text_on

__all__ = ["failures", "holdings", "snapshot", "steps"]

_BAR = 34
"""Height of a bar with the room around it, in pixels."""
_FEW = 100
"""Steps of which each has its mark."""


def failures(frame: pl.DataFrame) -> Figure | Prose:
    """Where each failing GPU's memory was, as a bar of its parts, and what was asked for.

    Args:
        frame: failure, part (`theme.MEMORY_PARTS`), bytes, requested_bytes, place.
    """
    if frame.is_empty():
        return note(("No file has an out-of-memory message with figures.",))
    labels = display_labels(frame["failure"])
    present = [part for part in MEMORY_PARTS if part in frame["part"].to_list()]
    numbers = {part: str(number) for number, part in enumerate(MEMORY_PARTS, 1)}
    inks = {part: text_on(colour) for part, colour in MEMORY_PARTS.items()}
    widest = frame.group_by("failure").agg(pl.col("bytes").sum())["bytes"].max()
    unit, size = unit_of(int(widest or 0))  # type: ignore[arg-type]
    part = pl.col("part")
    rows = clean(frame, ["failure", "part", "bytes", "requested_bytes", "place"]).with_columns(
        pl.col("failure").replace_strict(labels),
        (pl.col("bytes") / size).alias("size"),
        (pl.col("requested_bytes") / size).alias("asked"),
        part.replace_strict({name: place for place, name in enumerate(present)}, return_dtype=pl.Int64).alias("order"),
        part.replace_strict(numbers).alias("number"),
        part.replace_strict(inks).alias("ink"),
    )
    rows = rows.sort("failure", "order", maintain_order=True).with_columns(
        (pl.col("size").cum_sum().over("failure") - pl.col("size") / 2).alias("middle")
    )
    totals = rows.group_by("failure", maintain_order=True).agg(pl.col("size").sum(), pl.col("asked").first())
    most = float(totals["size"].max() or 1)  # type: ignore[arg-type]
    axis = alt.Axis(ticks=False, domain=False, labelPadding=8)
    y = alt.Y("failure:N", title=None, sort=list(labels.values()), axis=axis)
    scale, title = alt.Scale(domain=[0, most], nice=False, range=room_for(96)), f"memory of the GPU ({unit})"
    legend = alt.Legend(
        orient="bottom", symbolType="square", labelExpr=f"{literal(numbers)}[datum.label] + '  ' + datum.label"
    )
    colours = alt.Scale(domain=present, range=[MEMORY_PARTS[name] for name in present])
    bars = (
        alt.Chart()
        .mark_bar(style="segment", height={"band": 0.7})
        .encode(
            y=y,
            x=alt.X("size:Q", title=title, stack="zero", scale=scale, axis=alt.Axis(tickCount=6)),
            color=alt.Color("part:N", title=None, scale=colours, legend=legend),
            order=alt.Order("order:Q"),
            tooltip=[
                alt.Tooltip("failure:N", title="failure"),
                alt.Tooltip("part:N", title="part"),
                alt.Tooltip("size:Q", title=f"{unit} (recorded)", format=".2f"),
                alt.Tooltip("asked:Q", title=f"asked for ({unit})", format=".2f"),
                alt.Tooltip("place:N", title="said in"),
            ],
        )
    )
    x = alt.X("middle:Q", title=title, scale=scale)
    inside = (
        alt.Chart()
        .transform_filter(f"datum.size * width > {most * 16}")
        .mark_text(fontSize=9.5, tooltip=None)
        .encode(y=y, x=x, text="number:N", color=alt.Color("ink:N", scale=None))
    )
    asked = (
        alt.Chart(rows_data(totals))
        .transform_calculate(text="isValid(datum.asked) ? 'asked: ' + format(datum.asked, '.2f') : ''")
        .mark_text(style="note", align="left", dx=6)
        .encode(y=y, x=alt.X("size:Q", title=title, scale=scale), text="text:N")
        .properties(name="note_asked")
    )
    return Figure(
        "failures",
        f"Where the GPU's memory was when a request failed, in {unit}, as the files say it (recorded), and what was "
        "asked for. Numbers in the bars are those of the legend.",
        layered([bars, inside, asked], rows, "The GPU's memory at the failure", len(labels) * _BAR),
    )


def holdings(frame: pl.DataFrame) -> Figure | Prose:
    """What the estimate has at its peak, by category.

    Args:
        frame: candidate, source, category, bytes.
    """
    if frame.is_empty():
        return note(("There is no estimate to take apart: no file says what was run.",))
    return study.holdings(frame)


def steps(frame: pl.DataFrame) -> Figure | Prose:
    """Step times through the run; steps that were skipped or not finite are marked.

    Args:
        frame: iteration, milliseconds, tflops, loss, bad.
    """
    if len(frame) < 2:
        return note(("No file shows two steps with their times.",))
    every = max(1, len(frame) // 1000)
    kept = (pl.int_range(pl.len()) % every == 0) | pl.col("bad")
    rows = clean(frame.filter(kept), ["iteration", "milliseconds", "tflops", "loss", "bad"])
    look = SOURCES["recorded"]
    base = alt.Chart().encode(
        x=alt.X(
            "iteration:Q", title="iteration", scale=alt.Scale(zero=False), axis=alt.Axis(format="d", tickMinStep=1)
        ),
        y=alt.Y("milliseconds:Q", title="step time (ms, recorded)", scale=alt.Scale(zero=False, nice=True)),
        tooltip=[
            alt.Tooltip("iteration:Q", title="iteration", format="d"),
            alt.Tooltip("milliseconds:Q", title="step time (ms)", format=",.1f"),
            alt.Tooltip("tflops:Q", title="TFLOP/s per GPU", format=".1f"),
            alt.Tooltip("loss:Q", title="loss", format=".4f"),
        ],
    )
    line = base.mark_line(strokeWidth=1.5, color=look.colour)
    points = base.mark_point(filled=True, size=34, opacity=1, shape=look.shape, color=look.colour)
    bad = (
        base.transform_filter("datum.bad")
        .transform_calculate(text="'skipped or not finite'")
        .mark_text(style="note", dy=-12, align="right")
        .encode(text="text:N")
        .properties(name="note_bad")
    )
    layers = [line, *([points] if len(rows) <= _FEW else []), *([bad] if rows["bad"].any() else [])]
    return Figure(
        "steps",
        "Time of each step that the log shows, in ms (recorded)."
        + (f" One step of {every} is drawn." if every > 1 else "")
        + " The scale does not start at zero.",
        layered(layers, rows, "Step time", 220),
    )


def snapshot(frame: pl.DataFrame) -> Figure | Prose:
    """What the allocator had through a recorded trace, one GPU at a time.

    Args:
        frame: device, entry, seconds, phase, allocated_bytes, reserved_bytes, awaiting_bytes, event.
    """
    if frame.is_empty():
        return note(("No memory snapshot is among the files, or none with a history.",))
    labels = display_labels(frame["device"])
    unit, size = unit_of(int(frame["reserved_bytes"].max() or 0))  # type: ignore[arg-type]
    names = list(SERIES)
    rows = clean(frame, ["device", "entry", "seconds", "phase", *(f"{name}_bytes" for name in names), "event"])
    rows = rows.with_columns(
        pl.col("device").replace_strict(labels), *((pl.col(f"{name}_bytes") / size).alias(name) for name in names)
    )
    chosen = alt.param(
        name="snapshot_device",
        value=next(iter(labels.values())),
        bind=alt.binding_select(options=list(labels.values()), name="GPU "),
    )
    base = alt.Chart().transform_filter("datum.device === snapshot_device")
    axis = alt.Axis(format="~s", tickCount=5, grid=False)
    x = alt.X("entry:Q", title="entries of the trace", scale=alt.Scale(nice=False), axis=axis)
    title = f"{unit} (recorded)"
    legend = alt.Legend(orient="top", symbolType="stroke")
    colours = alt.Scale(domain=names, range=[stroke.colour for stroke in SERIES.values()])
    dashes = alt.Scale(domain=names, range=[list(stroke.dash) for stroke in SERIES.values()])
    lines = (
        base.transform_fold(list(names), as_=["series", "size"])
        .mark_line(interpolate="step-after", strokeWidth=1.8)
        .encode(
            x=x,
            y=alt.Y("size:Q", title=title, scale=alt.Scale(domainMin=0)),
            color=alt.Color("series:N", title=None, scale=colours, legend=legend),
            strokeDash=alt.StrokeDash("series:N", title=None, scale=dashes, legend=legend),
        )
    )
    pointed = base.mark_rule(style="marker", opacity=0, strokeWidth=6).encode(
        x=x,
        tooltip=[
            alt.Tooltip("device:N", title="GPU"),
            alt.Tooltip("entry:Q", title="entry", format=","),
            alt.Tooltip("seconds:Q", title="seconds", format=".3f"),
            alt.Tooltip("phase:N", title="phase"),
            *(alt.Tooltip(f"{name}:Q", title=f"{name} ({unit})", format=".3f") for name in names),
        ],
    )
    return Figure(
        "snapshot",
        f"Memory of the chosen GPU through the recorded trace, in {unit} (recorded): allocated by tensors, reserved by "
        "PyTorch, and freed while another stream may still use it. By entries, not by time.",
        layered([lines, pointed, *_events(base, rows, title)], rows, "Through the snapshot", 300).add_params(chosen),
    )


def _events(base: alt.Chart, rows: pl.DataFrame, title: str) -> list[alt.Chart]:
    """A mark and a few words at the peak and at each failed request, on the side where there is room."""
    half = float(rows["entry"].max() or 0) / 2  # type: ignore[arg-type]
    x, y = alt.X("entry:Q", title="entries of the trace"), alt.Y("allocated:Q", title=title)
    layers = []
    for peak, rise in ((True, -14), (False, -28)):
        chosen = (pl.col("event") == "peak") if peak else (pl.col("event") != "peak")
        for late, (align, shift) in zip((False, True), SIDES, strict=True):
            if rows.filter(chosen, (pl.col("entry") >= half) == late).is_empty():
                continue
            found = base.transform_filter(
                f"isValid(datum.event) && (datum.event === 'peak') === {str(peak).lower()} && "
                f"(datum.entry >= {half}) === {str(late).lower()}"
            )
            mark = found.mark_point(style="marker", shape="triangle-down", size=70, filled=True, opacity=1, yOffset=-6)
            words = (
                found.transform_calculate(text="datum.event + ' in ' + datum.phase")
                .mark_text(style="note", align=align, dx=shift / 2, dy=rise, fontWeight=600)
                .encode(x=x, y=y, text="text:N")
                .properties(name=f"note_{'peak' if peak else 'failure'}_{align}")
            )
            layers += [mark.encode(x=x, y=y), words]
    return layers
