"""A study's tables: what to decide, how far the figures can be trusted, and how they came about.

The frames they show are `labkit.study.frames`'.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import polars as pl
from great_tables import GT, loc, style

from labkit.report.data import OUTCOMES, display_labels, relabelled
from labkit.report.prose import Prose, note
from labkit.report.tables.look import NONE, number, signed, table, wrapped
from labkit.workload.gpu import GIB, MIB

_PEAKS = ("estimated", "traced", "measured", "recorded", "published")


_DECISION = {
    "candidate": "Recompute",
    "rank": "Try",
    "fits": "Fits",
    "replay_time": "ms",
    "replay_share": "% of step",
    "replay_flops": "TFLOP",
    "replay_checkpoints": "regions",
    "verdict": "Verdict",
}
"""Column heads of the decision table."""
_CONTRACT = {
    "source": "Source",
    "candidates": "Recompute",
    "outcome": "Outcome",
    "origin": "Figures from",
    "latest": "Latest, UTC",
    "seconds": "Seconds, all cells",
    "steady_iterations": "Steady steps",
    "versions": "Versions",
    "environment": "Environment",
    "recorded": "Contract fields",
}
"""Column heads of the contract table."""
_ACCURACY = {
    "candidate": "Recompute",
    "published_peak": "published",
    "recorded_peak": "recorded",
    "measured_peak": "measured",
    "traced_peak": "traced",
    "traced_error": "from published, %",
    "traced_measured_error": "from measured, %",
    "traced_recorded_error": "from recorded, %",
    "estimated_peak": "estimated",
    "estimated_error": "from published, %",
    "estimated_measured_error": "from measured, %",
    "estimated_recorded_error": "from recorded, %",
    "traced_static": "traced, GiB",
    "static_difference": "estimated less traced, MiB",
    "traced_retained": "traced, GiB",
    "retained_difference": "estimated against traced, %",
}


def decision(frame: pl.DataFrame) -> GT:
    """The decision table: one row per candidate, the control first, then in the order to try.

    Args:
        frame: a study's `decision` frame: candidate, setting, is_control, evidence (source of the peaks that decide),
            outcome, estimated_bytes, traced_bytes, measured_bytes, recorded_bytes, published_bytes, saved_bytes,
            step_time_source, step_time_change (fraction), step_bound_change (fraction of the control's lower bound),
            replay_source, replay_seconds, replay_flops, replay_checkpoints, fits, tight (it fits, the allocator's
            segments do not), verdict, rank.
    """
    place = pl.col("setting").rle_id()
    rows = _labelled(frame).sort(place, ~pl.col("is_control"), "rank", nulls_last=True, maintain_order=True)
    shown = rows.select(
        "candidate",
        "rank",
        pl.when(pl.col("outcome") == "ok")
        .then(
            pl.when("tight")
            .then(pl.lit("fits, tight"))
            .otherwise(pl.when("fits").then(pl.lit("fits")).otherwise(pl.lit("does not fit")))
        )
        .otherwise(pl.col("outcome").replace(OUTCOMES))
        .alias("fits"),
        *(pl.col(f"{name}_bytes").alias(name) for name in _PEAKS),
        saved="saved_bytes",
        step_time="step_time_change",
        replay_time="replay_seconds",
        replay_share="step_bound_change",
        replay_flops="replay_flops",
        replay_checkpoints="replay_checkpoints",
        verdict="verdict",
    )
    shown = _known(shown, "traced", "measured", "recorded", "published", "step_time")
    source, evidence, clock = (frame[name][0] for name in ("replay_source", "evidence", "step_time_source"))
    labels = {**_DECISION, "saved": f"Saved, GiB ({evidence})", "step_time": f"Step time, % ({clock})"}
    peaks = [name for name in _PEAKS if name in shown.columns]
    changes = [name for name in ("step_time", "replay_share") if name in shown.columns]
    first = [place for place, rank in enumerate(shown["rank"].to_list()) if rank == 1]
    return (
        table(shown, "decision")
        .tab_spanner("Peak on one rank, GiB", columns=peaks)
        .tab_spanner(
            f"Replay per step, {source}, lower bound",
            columns=["replay_time", "replay_share", "replay_flops", "replay_checkpoints"],
        )
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=peaks)
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 3).lstrip("+")), columns="saved")
        .fmt(number(lambda change: signed(change * 100, 1)), columns=changes)
        .fmt(number(lambda seconds: f"{seconds * 1e3:.2f}"), columns="replay_time")
        .fmt(number(lambda flops: f"{flops / 1e12:.3f}"), columns="replay_flops")
        .sub_missing(missing_text=NONE)
        .cols_label({name: label for name, label in labels.items() if name in shown.columns})
        .cols_align("left", columns=["candidate", "fits", "verdict"])
        .cols_align("right", columns=["rank", *changes, "replay_checkpoints"])
        .tab_style(style.text(weight="600"), loc.body(rows=first))
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["candidate", "fits"]))
        .tab_style(style.css("min-width: 14em; white-space: normal"), loc.body(columns="verdict"))
    )


def accuracy(cells: pl.DataFrame) -> GT:
    """How far estimate and trace are from the published and the measured peaks, and the estimate from the trace.

    Args:
        cells: a study's `cells` frame.
    """
    named = _labelled(cells)
    sources = {
        source: named.filter(pl.col("source") == source).select(
            "candidate",
            pl.col("peak_allocated_bytes").alias(f"{source}_peak"),
            pl.col("error_vs_published").alias(f"{source}_error"),
            pl.col("between_steps_bytes").alias(f"{source}_static"),
            pl.col("retained_bytes").alias(f"{source}_retained"),
        )
        for source in _PEAKS
    }
    joined = named.select("candidate").unique(maintain_order=True)
    for frame in sources.values():
        joined = joined.join(frame, on="candidate", how="left", maintain_order="left")
    shown = joined.select(
        "candidate",
        "published_peak",
        "recorded_peak",
        "measured_peak",
        "traced_peak",
        "traced_error",
        (pl.col("traced_peak") / pl.col("measured_peak") - 1).alias("traced_measured_error"),
        (pl.col("traced_peak") / pl.col("recorded_peak") - 1).alias("traced_recorded_error"),
        "estimated_peak",
        "estimated_error",
        (pl.col("estimated_peak") / pl.col("measured_peak") - 1).alias("estimated_measured_error"),
        (pl.col("estimated_peak") / pl.col("recorded_peak") - 1).alias("estimated_recorded_error"),
        "traced_static",
        static_difference=pl.col("estimated_static") - pl.col("traced_static"),
        traced_retained="traced_retained",
        retained_difference=(pl.col("estimated_retained") / pl.col("traced_retained") - 1).fill_nan(None),
    )
    shown = _known(shown, "published_peak", "traced_error", "estimated_error")
    shown = _known(shown, "recorded_peak", "traced_recorded_error", "estimated_recorded_error")
    shown = _known(shown, "measured_peak", "traced_measured_error", "estimated_measured_error")
    peaks = [name for name in shown.columns if name.endswith(("_peak", "_error"))]
    errors = [name for name in peaks if name.endswith("_error")]
    gib = [name for name in (*peaks, "traced_static", "traced_retained") if name not in errors]
    return (
        table(shown, "accuracy")
        .tab_spanner(f"Peak, GiB{', and its distance from others, %' if errors else ''}", columns=peaks)
        .tab_spanner("Between steps", columns=["traced_static", "static_difference"])
        .tab_spanner("Retained by forward", columns=["traced_retained", "retained_difference"])
        .fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=gib)
        .fmt(number(lambda error: signed(error * 100, 2)), columns=errors)
        .fmt(number(lambda nbytes: signed(nbytes / MIB, 1)), columns="static_difference")
        .fmt(number(lambda error: signed(error * 100, 2)), columns="retained_difference")
        .sub_missing(missing_text=NONE)
        .cols_label({name: _ACCURACY[name] for name in shown.columns})
        .cols_align("left", columns="candidate")
        .cols_align("right", columns=shown.columns[1:])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns="candidate"))
    )


def asked(workload: Mapping[str, Any], head: str = "Control") -> GT:
    """What the control, or another workload, states, in Megatron's names; what it leaves to defaults is not repeated.

    Args:
        workload: the stated fields of the control's workload as plain data: a mapping of fields for each part.
        head: of the column.
    """
    parts = {part: ", ".join(_fields(values or {})) for part, values in workload.items()}
    stated = {part: fields for part, fields in parts.items() if fields}
    shown = pl.DataFrame({"part": list(stated), "fields": list(stated.values())})
    return (
        table(shown, "asked")
        .cols_label(part="Part", fields=head)
        .tab_style(style.css("white-space: normal"), loc.body(columns="fields"))
    )


def _fields(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value)
        else:
            yield f"{name} {_runs(value) if isinstance(value, list) else _plain(value)}"


def _plain(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _runs(values: list[Any]) -> str:
    """A list with its repetitions counted: `[0, 1 x 26]`."""
    counted = ((value, len(list(equal))) for value, equal in groupby(values))
    return "[" + ", ".join(f"{value} x {count}" if count > 1 else str(value) for value, count in counted) + "]"


def ranks(frame: pl.DataFrame) -> GT | Prose:
    """The traced ranks of each choice: what they hold between steps and at their peaks.

    Args:
        frame: a study's `ranks` frame: candidate, source, stages, rank, parameters, between_steps_bytes,
            first_step_peak_bytes, steady_peak_bytes, peak_reserved_bytes.
    """
    if frame.is_empty():
        return note(("No rank is traced or measured yet.",))
    sizes = ["between_steps_bytes", "first_step_peak_bytes", "steady_peak_bytes", "peak_reserved_bytes"]
    shown = _labelled(frame).select(
        "candidate",
        "source",
        pl.col("stages").replace("", NONE),
        "rank",
        pl.col("parameters") / 10**6,
        *(pl.col(size) / GIB for size in sizes),
    )
    return (
        table(shown, "ranks")
        .fmt(number(lambda millions: f"{millions:,.1f}"), columns="parameters")
        .fmt(number(lambda gib: f"{gib:.3f}"), columns=sizes)
        .sub_missing(missing_text=NONE)
        .cols_label(
            candidate="Recompute",
            source="Source",
            stages="Pipeline stages",
            rank="Rank",
            parameters="Parameters, millions",
            between_steps_bytes="Between steps, GiB",
            first_step_peak_bytes="First step, GiB",
            steady_peak_bytes="Later steps, GiB",
            peak_reserved_bytes="Reserved, GiB",
        )
        .cols_align("left", columns=["candidate", "source", "stages"])
        .cols_align("right", columns=["rank", "parameters", *sizes])
    )


def contract(frame: pl.DataFrame) -> GT:
    """How each traced and published figure came about.

    Args:
        frame: a study's `contract` frame: candidate, source, outcome, origin, created_at, wall_seconds,
            steady_iterations, versions, environment, contract_recorded, contract_fields, contract_lacking.
    """
    same = ["source", "outcome", "origin", "steady_iterations", "versions", "environment"]
    same += ["contract_recorded", "contract_fields", "contract_lacking"]
    grouped = (
        _labelled(frame)
        .group_by(same, maintain_order=True)
        .agg(
            pl.when(pl.len() == frame["candidate"].n_unique())
            .then(pl.lit("all"))
            .otherwise(pl.col("candidate").implode().list.join("; "))
            .alias("candidates"),
            pl.col("created_at").filter(pl.col("created_at") != "").max().alias("latest"),
            pl.col("wall_seconds").sum().alias("seconds"),
        )
        .select(
            "source",
            "candidates",
            pl.col("outcome").replace(OUTCOMES),
            pl.col("origin").replace("", NONE),
            pl.col("latest").str.slice(0, 16).str.replace("T", " "),
            pl.when(pl.col("seconds") > 0).then("seconds").alias("seconds"),
            pl.when(pl.col("steady_iterations") > 0).then("steady_iterations").alias("steady_iterations"),
            pl.col("versions").replace("", None),
            pl.col("environment").replace("", None),
            pl.format("{} of {}", "contract_recorded", "contract_fields").alias("recorded"),
            pl.col("contract_lacking").replace("", NONE).alias("lacking"),
        )
    )
    lacking = grouped.select("source", "lacking").filter(pl.col("lacking") != NONE).unique(maintain_order=True)
    grouped = _known(grouped.drop("lacking"), "latest", "seconds", "steady_iterations", "versions", "environment")
    wide = [name for name in ("candidates", "origin", "versions", "environment") if name in grouped.columns]
    shown = (
        table(grouped, "contract")
        .fmt(number(lambda seconds: f"{seconds:.1f}"), columns=[name for name in grouped.columns if name == "seconds"])
        .sub_missing(missing_text=NONE)
        .cols_label({name: _CONTRACT[name] for name in grouped.columns})
        .cols_align("left", columns=[name for name in grouped.columns if name not in ("seconds", "steady_iterations")])
        .cols_align("right", columns=[name for name in grouped.columns if name in ("seconds", "steady_iterations")])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["outcome", "recorded"]))
        .tab_style(wrapped(11), loc.body(columns=wide))
    )
    for source, fields in lacking.iter_rows():
        shown = shown.tab_source_note(f"Contract fields that are not {source}: {fields}.")
    return shown


def _labelled(frame: pl.DataFrame) -> pl.DataFrame:
    return relabelled(frame, display_labels(frame["candidate"]))


def _known(frame: pl.DataFrame, *names: str) -> pl.DataFrame:
    """The frame without those of the columns that say nothing: where nothing is published."""
    return frame.drop(name for name in names if frame[name].is_null().all())
