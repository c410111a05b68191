"""A calibration's tables: the answer, errors by group, the cases that are furthest off, and every figure.

Frames are `labkit.workbench.calibration`'s. Errors are percent of the measured figure.
"""

from typing import Final

import polars as pl
from great_tables import GT, loc, style

from labkit.report.data import display_labels, relabelled
from labkit.report.tables.look import NONE, number, signed, table
from labkit.workload.gpu import GIB

_SPREAD: Final = {
    "figures": "Figures",
    "mean": "mean",
    "p90": "90 % within",
    "lowest": "lowest",
    "highest": "highest",
}


def answers(frame: pl.DataFrame) -> GT:
    """How far off estimates and traces are, by collection, held out and calibrated apart.

    Args:
        frame: collection, size, basis, and the columns of `labkit.workbench.calibration.spread`.
    """
    named = frame.with_columns(pl.concat_str("collection", "size", separator=", ", ignore_nulls=True).alias("who"))
    return _spread(named, "answers", {"who": "Measured", "basis": "Basis"}, ["headroom", "least_headroom"])


def groups(frame: pl.DataFrame, name: str) -> GT:
    """The same by group of each facet.

    Args:
        frame: facet, group, basis, and the columns of `labkit.workbench.calibration.spread`.
        name: of the table.
    """
    return _spread(frame, name, {"facet": "By", "group": "Group", "basis": "Basis"}, [])


def _spread(frame: pl.DataFrame, name: str, heads: dict[str, str], rooms: list[str]) -> GT:
    sides = [source for source in ("estimated", "traced") if frame[f"{source}_figures"].sum()]
    columns = {source: [f"{source}_{each}" for each in _SPREAD] for source in sides}
    shown = frame.select(
        *heads,
        *(each for source in sides for each in columns[source]),
        pl.when(pl.col("with_margin") > 0)
        .then(pl.format("{} of {}", "covered", "with_margin"))
        .otherwise(None)
        .alias("covered"),
        *rooms,
    )
    drawn = table(shown, name)
    for source in sides:
        ends = [f"{source}_{end}" for end in ("lowest", "highest")]
        sizes = [f"{source}_{size}" for size in ("mean", "p90")]
        drawn = (
            drawn.tab_spanner(f"{source.capitalize()}: absolute error, %, and range", columns=columns[source])
            .fmt(number(lambda error: f"{error * 100:.2f}"), columns=sizes)
            .fmt(number(lambda error: signed(error * 100, 2)), columns=ends)
            .cols_label({f"{source}_{each}": label for each, label in _SPREAD.items()})
        )
    margin = {"covered": "covers", "headroom": "headroom, %", "least_headroom": "least, %"}
    return (
        drawn.tab_spanner("Estimate with its margin", columns=["covered", *rooms])
        .fmt(number(lambda room: signed(room * 100, 1)), columns=rooms)
        .sub_missing(missing_text=NONE)
        .cols_label(heads | {each: margin[each] for each in ("covered", *rooms)})
        .cols_align("left", columns=list(heads))
        .cols_align("right", columns=shown.columns[len(heads) :])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=[*heads, "covered"]))
    )


def worst(frame: pl.DataFrame, name: str) -> GT:
    """The cases that are furthest off, and why where that is known.

    Args:
        frame: rows of `labkit.workbench.calibration.FIGURES`, with the errors.
        name: of the table.
    """
    shown = _labelled(frame).select(
        "candidate",
        "basis",
        "phase",
        "split",
        "rows",
        *_sizes("measured", "estimated"),
        "estimated_error",
        "traced_error",
        "headroom",
        known=pl.col("known").fill_null("not known"),
    )
    return (
        _drawn(_known(shown), name)
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["basis", "split"]))
        .tab_style(style.css("min-width: 16em"), loc.body(columns="known"))
        .tab_style(style.css("min-width: 10em; overflow-wrap: anywhere"), loc.body(columns="candidate"))
    )


def figures(frame: pl.DataFrame, name: str) -> GT:
    """Every figure, a row for each case.

    Args:
        frame: as for `worst`.
        name: of the table.
    """
    labelled = _labelled(frame).with_columns(_sizes("measured"))
    phases = labelled["phase"].unique(maintain_order=True).to_list()
    about, values = ["candidate", "basis", "split", "rows"], ["measured", "estimated_error", "traced_error"]
    cases = labelled.select(*about, trace=pl.when(pl.col("trace") != "ok").then("trace")).unique(maintain_order=True)
    columns = {}
    for place, phase in enumerate(phases):
        columns[phase] = {value: f"{value[0]}{place}" for value in values}
        mine = labelled.filter(phase=phase).select(
            "candidate", *(pl.col(v).alias(to) for v, to in columns[phase].items())
        )
        cases = cases.join(mine, on="candidate", how="left", maintain_order="left")
    shown = _known(cases.select(*about, *(to for each in columns.values() for to in each.values()), "trace"))
    drawn = table(shown, name)
    for phase, each in columns.items():
        gib, *errors = each.values()
        drawn = (
            drawn.tab_spanner(phase, columns=[to for to in each.values() if to in shown.columns])
            .fmt(number(lambda size: f"{size:.3f}"), columns=gib)
            .fmt(number(lambda error: signed(error * 100, 2)), columns=[to for to in errors if to in shown.columns])
            .cols_label({to: _HEADS[f"{value}_short"] for value, to in each.items() if to in shown.columns})
        )
    words = [each for each in shown.columns if shown.schema[each] == pl.String]
    return (
        drawn.sub_missing(missing_text=NONE)
        .cols_label({each: _HEADS[each] for each in (*about, "trace") if each in shown.columns})
        .cols_align("left", columns=words)
        .cols_align("right", columns=[each for each in shown.columns if each not in words])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["candidate", "split"]))
    )


_HEADS: Final = {
    "candidate": "Case",
    "basis": "Basis",
    "models": "Models",
    "phase": "Figure",
    "split": "Layout",
    "rows": "Rows a rank",
    "measured": "Measured, GiB",
    "estimated": "Estimated, GiB",
    "estimated_error": "Estimated, % off",
    "traced_error": "Traced, % off",
    "headroom": "Headroom, %",
    "trace": "Trace",
    "measured_short": "GiB",
    "estimated_error_short": "est., %",
    "traced_error_short": "traced, %",
    "known": "Why, where it is known",
}


def _drawn(shown: pl.DataFrame, name: str) -> GT:
    gib = [each for each in ("measured", "estimated") if each in shown.columns]
    errors = [each for each in ("estimated_error", "traced_error", "headroom") if each in shown.columns]
    words = [each for each in shown.columns if shown.schema[each] == pl.String]
    return (
        table(shown, name)
        .fmt(number(lambda size: f"{size:.3f}"), columns=gib)
        .fmt(number(lambda error: signed(error * 100, 2)), columns=errors)
        .sub_missing(missing_text=NONE)
        .cols_label({each: _HEADS[each] for each in shown.columns})
        .cols_align("left", columns=words)
        .cols_align("right", columns=[each for each in shown.columns if each not in words])
    )


def _sizes(*sources: str) -> list[pl.Expr]:
    return [(pl.col(f"{source}_bytes") / GIB).alias(source) for source in sources]


def _labelled(frame: pl.DataFrame) -> pl.DataFrame:
    return relabelled(frame.rename({"case": "candidate"}), display_labels(frame["case"]))


def _known(frame: pl.DataFrame) -> pl.DataFrame:
    """The frame without columns that say nothing."""
    return frame.drop(name for name in frame.columns if name != "candidate" and frame[name].is_null().all())
