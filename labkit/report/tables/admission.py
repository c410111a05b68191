"""The tables of admission, from the frames of `labkit.workbench.admission`."""

import polars as pl
from great_tables import GT, loc, style

from labkit.report.tables.look import NONE, counted, number, table
from labkit.workload.gpu import GIB

_MOST_MICRO_BATCHES = 24
"""Of each policy."""


def policies(frame: pl.DataFrame) -> GT:
    """The policies side by side.

    Args:
        frame: `labkit.workbench.admission.POLICIES`.
    """
    counted = ["micro_batches", "least", "admitted", "refused", "over", "over_peak"]
    used, seconds = ["used", "used_least", "used_most"], ["passes_seconds", "replay_seconds"]
    return (
        table(frame, "policies")
        .tab_spanner("Micro-batches", columns=["micro_batches", "least", "over", "over_peak"])
        .tab_spanner("Requests", columns=["admitted", "refused"])
        .tab_spanner("Needed of the budget, %", columns=used)
        .tab_spanner("Seconds at data-sheet speed, at least", columns=seconds)
        .fmt(number(lambda part: f"{part * 100:.1f}"), columns=used)
        .fmt(number(lambda value: f"{value:.2f}"), columns=seconds)
        .sub_missing(missing_text=NONE)
        .cols_label(
            policy="Policy",
            recompute="Recompute",
            outcome="All together",
            micro_batches="made",
            least="at least",
            over="over the budget",
            over_peak="peak alone over",
            admitted="admitted",
            refused="refused",
            used="mean",
            used_least="least",
            used_most="most",
            passes_seconds="passes",
            replay_seconds="run again",
        )
        .cols_align("left", columns=["policy", "recompute", "outcome"])
        .cols_align("right", columns=[*counted, *used, *seconds])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["policy", "recompute"]))
    )


def lengths(frame: pl.DataFrame) -> GT:
    """What became of requests of each range of lengths.

    Args:
        frame: `labkit.workbench.admission.LENGTHS`.
    """
    policies = frame["policy"].unique(maintain_order=True).to_list()
    shown = frame.select("bucket", "requests").unique("bucket", maintain_order=True)
    heads: dict[str, str] = {}
    spans: dict[str, list[str]] = {}
    for at, policy in enumerate(policies):
        own = frame.filter(pl.col("policy") == policy)
        for outcome in own["outcome"].unique(maintain_order=True).to_list():
            found = own.filter(pl.col("outcome") == outcome).select("bucket", pl.col("count").alias(f"{outcome} {at}"))
            if outcome.endswith("budget") and not found[f"{outcome} {at}"].sum():
                continue
            shown = shown.join(found, on="bucket", how="left", maintain_order="left")
            heads[f"{outcome} {at}"] = outcome
            spans.setdefault(policy, []).append(f"{outcome} {at}")
    made = table(shown, "lengths").cols_label(bucket="Tokens", requests="Requests", **heads)
    for policy, columns in spans.items():
        made = made.tab_spanner(policy.capitalize(), columns=columns)
    return (
        made.cols_align("left", columns="bucket")
        .cols_align("right", columns=["requests", *heads])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="bucket"))
    )


def micro_batches(frame: pl.DataFrame) -> GT:
    """The micro-batches of each policy.

    Args:
        frame: `labkit.workbench.admission.MICRO_BATCHES`.
    """
    sizes = ["peak_bytes", "covered_bytes", "reserved_bytes"]
    counts = ["number", "requests", "packed_tokens", "logical_tokens", "longest"]
    shown = frame.filter(pl.col("number") < _MOST_MICRO_BATCHES)
    made = (
        table(shown, "micro-batches")
        .tab_spanner("Tokens", columns=["packed_tokens", "logical_tokens", "longest"])
        .tab_spanner("Estimated, GiB", columns=sizes)
        .fmt(number(counted), columns=counts)
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.2f}"), columns=sizes)
        .sub_missing(missing_text=NONE)
        .cols_label(
            policy="Policy",
            number="Micro-batch",
            requests="Requests",
            packed_tokens="packed",
            logical_tokens="logical",
            longest="longest",
            peak_bytes="peak",
            covered_bytes="with margin",
            reserved_bytes="with segments",
            phase="In phase",
            certainty="Figures are",
            verdict="Within the budget",
        )
        .cols_align("left", columns=["policy", "phase", "certainty", "verdict"])
        .cols_align("right", columns=[*counts, *sizes])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["policy", "verdict"]))
    )
    left = frame.height - shown.height
    return made.tab_source_note(f"and {left} more") if left else made


def remedies(frame: pl.DataFrame) -> GT:
    """What would work for the largest that each policy refuses.

    Args:
        frame: `labkit.workbench.admission.REMEDIES`.
    """
    sizes = ["peak_bytes", "covered_bytes", "reserved_bytes"]
    return (
        table(frame, "remedies")
        .tab_spanner("It then needs, estimated, GiB", columns=sizes)
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.2f}"), columns=sizes)
        .cols_label(
            policy="Refused by",
            change="Fits with",
            peak_bytes="peak",
            covered_bytes="with margin",
            reserved_bytes="reserved",
        )
        .cols_align("left", columns=["policy", "change"])
        .cols_align("right", columns=sizes)
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="policy"))
    )


def boundary(frame: pl.DataFrame) -> GT:
    """How many sequences of a length each policy admits together, at every doubling.

    Args:
        frame: `labkit.workbench.admission.BOUNDARY`.
    """
    doublings = frame["length"].unique().sort().gather_every(2)
    kept = frame.filter(pl.col("length").is_in(doublings.to_list()))
    shown = kept.select("sharing", "length").unique(maintain_order=True).sort("sharing", "length")
    policies = frame["policy"].unique(maintain_order=True).to_list()
    heads: dict[str, str] = {}
    spans: dict[str, list[str]] = {}
    for at, policy in enumerate(policies):
        own = kept.filter(pl.col("policy") == policy)
        columns = {f"sequences {at}": pl.col("sequences"), f"tokens {at}": pl.col("packed_tokens")}
        heads |= {f"sequences {at}": "sequences", f"tokens {at}": "packed tokens"}
        if not own["fits"].all():
            columns[f"fits {at}"] = pl.when("fits").then(pl.lit("fits")).otherwise(pl.lit("does not fit"))
            heads[f"fits {at}"] = "by estimate"
        found = own.select("sharing", "length", *(each.alias(name) for name, each in columns.items()))
        shown = shown.join(found, on=["sharing", "length"], how="left", maintain_order="left")
        spans[policy] = list(columns)
    numbers = ["length", *(name for name in heads if not name.startswith("fits"))]
    made = table(shown, "boundary").cols_label(sharing="Of each", length="Tokens of each", **heads)
    for policy, names in spans.items():
        made = made.tab_spanner(policy.capitalize(), columns=names)
    return (
        made.fmt(number(counted), columns=numbers)
        .sub_missing(missing_text=NONE)
        .cols_align("left", columns=["sharing", *(name for name in heads if name.startswith("fits"))])
        .cols_align("right", columns=numbers)
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["sharing", *heads]))
    )
