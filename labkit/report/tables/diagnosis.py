"""The tables of a diagnosis, from the frames of `labkit.workbench.diagnosis`."""

import polars as pl
from great_tables import GT, loc, style

from labkit.report.prose import Prose, note
from labkit.report.tables.look import NONE, number, signed, table, wrapped
from labkit.workload.gpu import GIB, MIB

_WRAPPED = wrapped(11)


def findings(frame: pl.DataFrame) -> GT:
    """Everything that was found, a group of rows for each finding.

    Args:
        frame: finding, part, text.
    """
    same = pl.col("part") == pl.col("part").shift(1).over("finding")
    shown = frame.with_columns(pl.when(same).then(pl.lit("")).otherwise("part").alias("part"))
    return (
        table(shown, "findings", groupname_col="finding")
        .cols_label(part="", text="")
        .cols_align("left", columns=["part", "text"])
        .tab_options(column_labels_hidden=True)
        .tab_style(style.css("white-space: nowrap; vertical-align: top"), loc.body(columns="part"))
        .tab_style(_WRAPPED, loc.body(columns="text"))
        .tab_style(style.text(weight="600"), loc.row_groups())
    )


def ranks(frame: pl.DataFrame) -> GT | Prose:
    """What ranks said of their memory.

    Args:
        frame: rank, iteration, allocated_bytes, max_allocated_bytes, reserved_bytes, max_reserved_bytes, place.
    """
    if frame.is_empty():
        return note(("No file says what a rank had allocated.",))
    sizes = ["allocated_bytes", "max_allocated_bytes", "reserved_bytes", "max_reserved_bytes"]
    return (
        table(frame, "recorded-ranks")
        .tab_spanner("Recorded, GiB", columns=sizes)
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=sizes)
        .sub_missing(missing_text=NONE)
        .cols_label(
            rank="Rank",
            iteration="After iteration",
            allocated_bytes="allocated",
            max_allocated_bytes="max allocated",
            reserved_bytes="reserved",
            max_reserved_bytes="max reserved",
            place="Said in",
        )
        .cols_align("right", columns=["rank", "iteration", *sizes])
        .cols_align("left", columns="place")
        .tab_style(_WRAPPED, loc.body(columns="place"))
    )


def beside(frame: pl.DataFrame) -> GT | Prose:
    """labkit's estimate beside what the files say.

    Args:
        frame: stage, moment, rank, recorded_bytes, estimated_bytes, verdict, place.
    """
    if frame.is_empty():
        return note(
            (
                "There is no estimate beside the log: no file says both what was run and what was allocated. Give the "
                "launch script, or a labkit workload, with the log.",
            )
        )
    sizes = ["recorded_bytes", "estimated_bytes"]
    return (
        table(frame, "beside")
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=sizes)
        .sub_missing(missing_text=NONE)
        .cols_label(
            stage="Pipeline stage",
            moment="Moment",
            rank="Rank",
            recorded_bytes="Recorded, GiB",
            estimated_bytes="Estimated, GiB",
            verdict="The estimate",
            place="Said in",
        )
        .cols_align("right", columns=["stage", "rank", *sizes])
        .cols_align("left", columns=["moment", "verdict", "place"])
        .tab_style(_WRAPPED, loc.body(columns="place"))
    )


def live(frame: pl.DataFrame) -> GT | Prose:
    """What held a snapshot's peak, by source line.

    Args:
        frame: device, site, caller, phase, bytes, count.
    """
    if frame.is_empty():
        return note(())
    return (
        table(frame, "live", groupname_col="device")
        .fmt(number(lambda nbytes: f"{nbytes / MIB:,.1f}"), columns="bytes")
        .sub_missing(missing_text=NONE)
        .cols_label(
            site="Source line",
            caller="Called by",
            phase="Allocated in",
            bytes="Recorded, MiB",
            count="Tensors",
        )
        .cols_align("left", columns=["site", "caller", "phase"])
        .cols_align("right", columns=["bytes", "count"])
        .tab_style(_WRAPPED, loc.body(columns=["site", "caller"]))
    )


def compared(frame: pl.DataFrame) -> GT | Prose:
    """Which source lines hold more or less in the second of two snapshots.

    Args:
        frame: device, moment, site, caller, phase, before_bytes, after_bytes, change_bytes, state.
    """
    if frame.is_empty():
        return note(())
    shown = frame.select(
        pl.format("GPU {} at the {}", "device", "moment").alias("moment"),
        "site",
        "caller",
        "before_bytes",
        "after_bytes",
        "change_bytes",
        "state",
    )
    sizes = ["before_bytes", "after_bytes"]
    return (
        table(shown, "compared", groupname_col="moment")
        .tab_spanner("Recorded, MiB", columns=[*sizes, "change_bytes"])
        .fmt(number(lambda nbytes: f"{nbytes / MIB:,.1f}"), columns=sizes)
        .fmt(number(lambda nbytes: signed(nbytes / MIB, 1)), columns="change_bytes")
        .cols_label(
            site="Source line",
            caller="Called by",
            before_bytes="before",
            after_bytes="after",
            change_bytes="change",
            state="",
        )
        .cols_align("left", columns=["site", "caller", "state"])
        .cols_align("right", columns=[*sizes, "change_bytes"])
        .tab_style(_WRAPPED, loc.body(columns=["site", "caller"]))
    )
