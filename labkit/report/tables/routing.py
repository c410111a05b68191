"""The tables of expert routing, from the frames of `labkit.workbench.routing`."""

import polars as pl
from great_tables import GT, loc, style

from labkit.report.data import display_labels
from labkit.report.tables.look import NONE, counted, number, signed, table
from labkit.workload.gpu import GIB

_MOST_RANKS = 8
"""Of each histogram: those that hold most."""


def shares(frame: pl.DataFrame) -> GT:
    """Rows of the fullest rank over the even share: a row for each expert-parallel size, a column for each plan.

    Args:
        frame: `labkit.workbench.routing.SHARES`; a plan that differs by layer has a column for the layer with most.
    """
    labels = display_labels(frame["plan"])
    shown, spanned = frame.select("ep").unique(maintain_order=True), dict[str, list[str]]()
    for plan in labels:
        rows = frame.filter(pl.col("plan") == plan)
        differs = bool(((rows["most"] - rows["mean"]).abs() > 1e-9).any())
        columns = {"mean": f"{plan}|mean", "most": f"{plan}|most"} if differs else {"mean": f"{plan}|mean"}
        spanned[plan] = list(columns.values())
        found = rows.select("ep", *(pl.col(name).alias(alias) for name, alias in columns.items()))
        shown = shown.join(found, on="ep", how="left", maintain_order="left")
    # Names from files are no column names of ours.
    renamed = {name: f"column_{at}" for at, name in enumerate(shown.columns[1:])}
    made = table(shown.rename(renamed), "shares").cols_label(ep="EP")
    for plan, names in spanned.items():
        heads = ["mean of layers", "layer with most"] if len(names) > 1 else [labels[plan]]
        made = made.cols_label(dict(zip((renamed[name] for name in names), heads, strict=True)))
        if len(names) > 1:
            made = made.tab_spanner(labels[plan], columns=[renamed[name] for name in names])
    return (
        made.fmt(number(lambda over: f"{over:.3f}"), columns=list(renamed.values()))
        .sub_missing(missing_text=NONE)
        .cols_align("right", columns=["ep", *renamed.values()])
    )


def rows(frame: pl.DataFrame) -> GT:
    """What each plan means in rows of one micro-batch.

    Args:
        frame: `labkit.workbench.routing.ROWS`.
    """
    counts = ["sent", "to_busiest", "received"]
    return (
        table(_labelled(frame), "rows")
        .tab_spanner("Rows of one micro-batch and layer", columns=[*counts, "per_expert"])
        .fmt(number(lambda over: f"{over:.3f}"), columns="over_even")
        .fmt(number(counted), columns=[*counts, "per_expert"])
        .sub_missing(missing_text=NONE)
        .cols_label(
            plan="Rows",
            basis="These are",
            layer="Layer with most",
            over_even="Over the even share",
            sent="one rank sends",
            to_busiest="of them to the priced rank",
            received="it gets from all",
            per_expert="each of its experts, if alike",
        )
        .cols_align("left", columns=["plan", "basis"])
        .cols_align("right", columns=["layer", "over_even", *counts, "per_expert"])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="basis"))
    )


def fit(frame: pl.DataFrame) -> GT:
    """The peak at every size under every plan, and on which GPUs it fits.

    Args:
        frame: `labkit.workbench.routing.PEAKS`.
    """
    fits = {name: f"fits_{at}" for at, name in enumerate(each for each in frame.columns if each.startswith("fits "))}
    shown = _labelled(frame).select(
        "ep",
        pl.col("plan").fill_null("cannot run"),
        pl.coalesce("basis", "refused").alias("basis"),
        "over_even",
        "peak_bytes",
        "covered_bytes",
        "phase",
        *(
            pl.when(pl.col(name)).then(pl.lit("fits")).when(~pl.col(name)).then(pl.lit("does not fit")).alias(alias)
            for name, alias in fits.items()
        ),
    )
    sizes = ["peak_bytes", "covered_bytes"]
    return (
        table(shown, "fit")
        .tab_spanner("Peak of the fullest rank, estimated, GiB", columns=sizes)
        .tab_spanner("With its margin on", columns=list(fits.values()))
        .fmt(number(lambda over: f"{over:.2f}"), columns="over_even")
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=sizes)
        .sub_missing(missing_text=NONE)
        .cols_label(
            {
                "ep": "EP",
                "plan": "Rows",
                "basis": "These are",
                "over_even": "Over the even share, at most",
                "peak_bytes": "peak",
                "covered_bytes": "with margin",
                "phase": "In phase",
                **{alias: name.removeprefix("fits ") for name, alias in fits.items()},
            }
        )
        .cols_align("left", columns=["plan", "basis", "phase", *fits.values()])
        .cols_align("right", columns=["ep", "over_even", *sizes])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=list(fits.values())))
    )


def ranks(frame: pl.DataFrame) -> GT:
    """The ranks that hold most under each histogram, and which of them is priced.

    Args:
        frame: `labkit.workbench.routing.RANKS`.
    """
    most = frame.sort("peak_bytes", descending=True, nulls_last=True, maintain_order=True)
    kept = most.group_by("histogram", maintain_order=True).head(_MOST_RANKS)
    order = frame["histogram"].unique(maintain_order=True).to_list()
    shown = pl.concat([kept.filter(pl.col("histogram") == name) for name in order]).select(
        pl.col("histogram").replace_strict(display_labels(order), return_dtype=pl.String),
        "rank",
        "mean",
        "most",
        "peak_bytes",
        pl.when("fullest", "busiest")
        .then(pl.lit("holds most and gets most rows"))
        .when("fullest")
        .then(pl.lit("holds most"))
        .when("busiest")
        .then(pl.lit("gets most rows"))
        .alias("role"),
    )
    return (
        table(shown, "routing-ranks")
        .tab_spanner("Rows over the even share", columns=["mean", "most"])
        .fmt(number(lambda over: f"{over:.3f}"), columns=["mean", "most"])
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns="peak_bytes")
        .sub_missing(missing_text=NONE)
        .cols_label(
            histogram="Histogram",
            rank="Rank",
            mean="mean of layers",
            most="layer with most",
            peak_bytes="Peak, estimated, GiB",
            role="This one",
        )
        .cols_align("left", columns=["histogram", "role"])
        .cols_align("right", columns=["rank", "mean", "most", "peak_bytes"])
    )


def options(frame: pl.DataFrame) -> GT:
    """What recompute, capacities and padding change of the peak under each plan, and what part of the rows they drop.

    Args:
        frame: `labkit.workbench.routing.OPTIONS`.
    """
    plans = frame["plan"].unique(maintain_order=True).to_list()
    labels = display_labels(plans)
    shown = frame.select("option", pl.col("refused").fill_null("")).unique("option", maintain_order=True)
    groups: dict[str, dict[str, str]] = {"change_bytes": {}, "dropped": {}}
    for what, names in groups.items():
        for at, plan in enumerate(plans):
            names[f"{what}_{at}"] = labels[plan]
            found = frame.filter(pl.col("plan") == plan).select("option", pl.col(what).alias(f"{what}_{at}"))
            shown = shown.join(found, on="option", how="left", maintain_order="left")
    change, dropped = (list(names) for names in groups.values())
    refused = bool((shown["refused"] != "").any())
    if not refused:
        shown = shown.drop("refused")
    return (
        table(shown, "options")
        .tab_spanner("Change of the fullest rank's peak, estimated, GiB", columns=change)
        .tab_spanner("Rows dropped in the layer with most, %", columns=dropped)
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 3)), columns=change)
        .fmt(number(lambda part: f"{part * 100:.1f}"), columns=dropped)
        .sub_missing(missing_text=NONE)
        .cols_label({"option": "Choice", **({"refused": "Refused"} if refused else {})})
        .cols_label({**groups["change_bytes"], **groups["dropped"]})
        .cols_align("left", columns=["option", *(["refused"] if refused else [])])
        .cols_align("right", columns=[*change, *dropped])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="option"))
    )


def _labelled(frame: pl.DataFrame) -> pl.DataFrame:
    labels = display_labels(frame["plan"].drop_nulls())
    return frame.with_columns(pl.col("plan").replace_strict(labels, return_dtype=pl.String))
