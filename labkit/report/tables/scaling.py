"""The tables of notebook `scaling` (frames: `labkit.workbench.scaling`)."""

from itertools import chain

import polars as pl
from great_tables import GT, loc, style

from labkit.report.tables.look import NONE, counted, number, table, wrapped
from labkit.workload.gpu import GIB, MIB


def frontier(frame: pl.DataFrame) -> GT:
    """The longest sequences that fit each GPU, a row for each layout and choice (`Scaling.frontier`)."""
    gpus = frame["gpu"].unique(maintain_order=True).to_list()
    said = (
        pl.when(pl.col("tokens").is_null())
        .then(pl.lit("no length fits"))
        .when(pl.col("too_long").is_null())
        .then(pl.lit("or longer"))
        .when(~pl.col("runs"))
        .then(pl.lit("fragments"))
        .otherwise(pl.lit(NONE))
    )
    keys = ["setting", "choice", "replay_seconds", "replay_share"]
    # Columns are numbered: a name could be anything.
    wide = frame.select(*keys).unique(["setting", "choice"], keep="first", maintain_order=True)
    for place, gpu in enumerate(gpus):
        there = frame.filter(pl.col("gpu") == gpu).select(
            "setting",
            "choice",
            pl.col("tokens").alias(f"tokens{place}"),
            pl.col("over_none").alias(f"over{place}"),
            pl.col("sound").alias(f"sound{place}"),
            said.alias(f"note{place}"),
        )
        wide = wide.join(there, on=["setting", "choice"], how="left", maintain_order="left")
    names = ("tokens", "over", "sound", "note")
    tokens, over, sound, notes = ([f"{name}{place}" for place in range(len(gpus))] for name in names)
    replay = ["replay_seconds", "replay_share"]
    groups = list(zip(tokens, over, sound, notes, strict=True))
    made = (
        table(wide.select("setting", "choice", *chain.from_iterable(groups), *replay), "frontier")
        .fmt(number(counted), columns=[*tokens, *sound])
        .fmt(number(lambda times: f"{times:.2f}"), columns=over)
        .fmt(number(lambda seconds: f"{seconds * 1e3:.2f}"), columns="replay_seconds")
        .fmt(number(lambda share: f"{share * 100:.1f}"), columns="replay_share")
        .sub_missing(missing_text=NONE)
        .tab_spanner("Replay per step, lower bound", columns=replay)
        .cols_label(setting="Layout", choice="Recompute", replay_seconds="ms", replay_share="% of step")
        .cols_align("left", columns=["setting", "choice", *notes])
        .cols_align("right", columns=[*tokens, *over, *sound, *replay])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["setting", *notes]))
    )
    for (longest, times, along, note), gpu in zip(groups, gpus, strict=True):
        made = made.tab_spanner(f"{gpu}, longest", columns=[longest, times, along, note])
        made = made.cols_label({longest: "tokens", times: "times none's", along: "allocator up to", note: "note"})
    return made


def growth(frame: pl.DataFrame) -> GT:
    """What holds the peak at each choice's longest length, and what each more token adds (`Scaling.growth`)."""
    ends = frame.select("choice", "gpu", "tokens").unique("choice", keep="first", maintain_order=True)
    shown = frame.select("category").unique(maintain_order=True)
    slope = (pl.col("bytes_per_token") * 1024 / MIB).round(1)
    for place, choice in enumerate(ends["choice"]):
        there = frame.filter(pl.col("choice") == choice).select(
            "category", pl.col("bytes").alias(f"bytes{place}"), slope.alias(f"slope{place}")
        )
        shown = shown.join(there, on="category", how="left", maintain_order="left")
    held = [name for name in shown.columns if name.startswith("bytes")]
    slopes = [name for name in shown.columns if name.startswith("slope")]
    made = (
        table(shown, "growth")
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=held)
        .fmt(number(lambda mib: f"{mib or 0.0:,.1f}"), columns=slopes)
        .sub_missing(missing_text=NONE)
        .cols_label({"category": "Held by, estimated"} | dict.fromkeys(held, "GiB"))
        .cols_label(dict.fromkeys(slopes, "MiB per 1,024 tokens"))
        .cols_align("right", columns=[*held, *slopes])
    )
    for place, row in enumerate(ends.iter_rows(named=True)):
        head = f"{row['choice']}, {row['tokens']:,} tokens on {row['gpu']}"
        made = made.tab_spanner(head, columns=[f"bytes{place}", f"slope{place}"])
    return made


def refused(frame: pl.DataFrame) -> GT:
    """Settings that a rule refuses (`Scaling.refused`)."""
    return (
        table(frame, "refused")
        .cols_label(setting="Setting", choices="Under", reason="Refused because")
        .tab_style(wrapped(10), loc.body(columns="reason"))
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="setting"))
    )
