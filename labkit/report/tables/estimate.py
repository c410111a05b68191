"""The tables of notebook `estimate` (frames: `labkit.workbench.estimate`)."""

from collections.abc import Mapping

import polars as pl
from great_tables import GT, loc, style

from labkit.report.tables.look import NONE, number, signed, table, wrapped
from labkit.workload.gpu import GIB

_SHOWN_TENSORS = 25
_CODE = wrapped(9)


def fits(frame: pl.DataFrame) -> GT:
    """Each GPU's memory against the peak with its margin, and the choice to try first there (`Anatomy.fits`)."""
    verdict = (
        pl.when(~pl.col("fits"))
        .then(pl.lit("does not fit"))
        .when(pl.col("peak_reserved_bytes") > pl.col("memory_bytes"))
        .then(pl.lit("fits, tight"))
        .otherwise(pl.lit("fits"))
    )
    sizes = ["memory_bytes", "peak_allocated_bytes", "margin_bytes", "covered_bytes", "peak_reserved_bytes"]
    shown = frame.select(
        "gpu",
        verdict.alias("verdict"),
        *sizes[:4],
        "spare_bytes",
        "peak_reserved_bytes",
        "first",
        "first_covered_bytes",
        "first_replay_seconds",
        "first_replay_share",
    )
    return (
        _sized(table(shown, "fits"), [*sizes, "first_covered_bytes"])
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 2).lstrip("+")), columns="spare_bytes")
        .fmt(number(_ms), columns="first_replay_seconds")
        .fmt(number(_percent), columns="first_replay_share")
        .sub_missing(missing_text=NONE)
        .tab_spanner("As it is, estimated, GiB", columns=[*sizes[1:4], "spare_bytes", "peak_reserved_bytes"])
        .tab_spanner("To try first there (labkit plan)", columns=[name for name in shown.columns if "first" in name])
        .cols_label(
            gpu="GPU",
            verdict="Fits",
            memory_bytes="Memory, GiB",
            peak_allocated_bytes="peak",
            margin_bytes="margin",
            covered_bytes="with margin",
            spare_bytes="to spare",
            peak_reserved_bytes="reserved",
            first="recompute",
            first_covered_bytes="with margin, GiB",
            first_replay_seconds="replay, ms",
            first_replay_share="% of step",
        )
        .cols_align("left", columns=["gpu", "verdict", "first"])
        .cols_align("right", columns=[name for name in shown.columns if name not in ("gpu", "verdict", "first")])
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["gpu", "verdict"]))
    )


def certainty(frame: pl.DataFrame) -> GT:
    """How much of the peak is how sure (`Anatomy.certainty`)."""
    return (
        _sized(table(frame, "certainty"), ["bytes"])
        .fmt(number(_percent), columns="share")
        .cols_label(certainty="Certainty", bytes="GiB", share="% of the peak", meaning="What that means")
        .cols_align("right", columns=["bytes", "share"])
        .tab_style(style.css("min-width: 12em; white-space: normal"), loc.body(columns="meaning"))
    )


def left_open(frame: pl.DataFrame) -> GT:
    """The peak with each value of what the workload does not state (`Anatomy.left_open`)."""
    return (
        _sized(table(frame, "left-open"), ["peak_allocated_bytes"])
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 3)), columns="change_bytes")
        .cols_label(
            field="Not stated",
            value="Value",
            peak_allocated_bytes="Peak, GiB (estimated)",
            change_bytes="Change, GiB",
            cause="Why it is open",
        )
        .cols_align("right", columns=["peak_allocated_bytes", "change_bytes"])
        .tab_style(_CODE, loc.body(columns=["field", "cause"]))
    )


def phases(frame: pl.DataFrame) -> GT:
    """The peak of each phase of both steps (`Anatomy.phases`), the largest in bold."""
    largest = frame["is_peak"].arg_true().to_list()
    return (
        _sized(table(frame.drop("is_peak"), "phases"), ["peak_allocated_bytes", "peak_tensor_bytes"])
        .cols_label(
            iteration="Iteration",
            phase="Phase",
            peak_allocated_bytes="Allocated, GiB",
            peak_tensor_bytes="Of it tensors, GiB",
        )
        .cols_align("right", columns=["peak_allocated_bytes", "peak_tensor_bytes"])
        .cols_align("left", columns=["iteration", "phase"])
        .tab_style(style.text(weight="600"), loc.body(rows=largest))
    )


def categories(frame: pl.DataFrame) -> GT:
    """What holds the peak, by category (`Anatomy.categories`)."""
    return (
        _sized(table(frame, "categories"), ["bytes"])
        .fmt(number(_percent), columns="share")
        .cols_label(category="Held by", bytes="GiB", share="% of the peak")
        .cols_align("right", columns=["bytes", "share"])
    )


def tensors(frame: pl.DataFrame) -> GT:
    """The largest tensors at the peak, those of like layers together (`Anatomy.tensors`)."""
    shown = frame.head(_SHOWN_TENSORS).with_columns(
        pl.col("layers").replace("", NONE), pl.col("recompute").fill_null(NONE), pl.col("module").replace("", NONE)
    )
    rest = frame.slice(_SHOWN_TENSORS)
    note = f"{rest.height} smaller ones hold {rest['bytes'].sum() / GIB:.3f} GiB more."
    return (
        _sized(table(shown, "tensors"), ["bytes"])
        .fmt(number(_percent), columns="share")
        .cols_label(
            module="Module (Megatron's path)",
            tensor="Tensor",
            shape="Shape of one",
            dtype="Dtype",
            layers="Layers",
            count="Count",
            bytes="GiB",
            share="% of the peak",
            lifetime="Lifetime",
            certainty="Certainty",
            recompute="Label",
        )
        .cols_align("right", columns=["count", "bytes", "share"])
        .cols_align("left", columns=["module", "tensor", "shape", "dtype", "layers", "lifetime", "certainty"])
        .tab_style(_CODE, loc.body(columns=["module", "tensor"]))
        .tab_style(style.css("white-space: nowrap"), loc.body(columns=["shape", "layers"]))
        .tab_source_note(note)
    )


def stages(frame: pl.DataFrame) -> GT:
    """What a rank of each pipeline stage holds (`Anatomy.stages`), the one shown elsewhere in bold."""
    here = frame["is_shown"].arg_true().to_list()
    sizes = ["peak_allocated_bytes", "margin_bytes", "between_steps_bytes", "retained_bytes"]
    shown = frame.drop("is_shown").with_columns(pl.col("parameters") / 10**6, pl.col("layers").replace("", NONE))
    return (
        _sized(table(shown, "stages"), sizes)
        .fmt(number(lambda millions: f"{millions:,.1f}"), columns="parameters")
        .cols_label(
            stages="Stage",
            ranks="First rank",
            layers="Decoder layers",
            kinds="They have",
            parameters="Parameters, millions",
            under_way="Passes under way",
            peak_allocated_bytes="Peak, GiB",
            margin_bytes="Margin, GiB",
            peak_phase="Peak in",
            between_steps_bytes="Between steps (tensors), GiB",
            retained_bytes="Retained (tensors), GiB",
        )
        .cols_align("left", columns=["stages", "ranks", "layers", "kinds", "peak_phase"])
        .cols_align("right", columns=["parameters", "under_way", *sizes])
        .tab_style(style.css("min-width: 10em; white-space: normal"), loc.body(columns=["ranks", "kinds"]))
        .tab_style(style.text(weight="600"), loc.body(rows=here))
    )


def best_choices(frame: pl.DataFrame) -> GT:
    """The choices worth a look (`Anatomy.best_choices`), the first to try in bold."""
    first = frame["is_first"].arg_true().to_list()
    control = pl.when("is_control").then(pl.format("{} (as it is)", "label")).otherwise("label")
    exact = pl.when("is_exact").then(pl.lit("exact")).otherwise(pl.lit("within 1 or 2 %"))
    sizes = ["peak_allocated_bytes", "covered_bytes", "retained_bytes"]
    shown = frame.select(
        control.alias("label"),
        *sizes[:2],
        "saved_bytes",
        "retained_bytes",
        "peak_phase",
        "replay_seconds",
        "replay_share",
        "replay_regions",
        exact.alias("price"),
    )
    return (
        _replayed(_sized(table(shown, "best-choices"), sizes))
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 3).lstrip("+")), columns="saved_bytes")
        .tab_spanner("Peak on one rank, estimated, GiB", columns=[*sizes[:2], "saved_bytes"])
        .cols_label(
            label="Recompute",
            peak_allocated_bytes="allocated",
            covered_bytes="with margin",
            saved_bytes="saved",
            retained_bytes="Retained (blocks), GiB",
            peak_phase="Peak in",
            price="Price",
        )
        .cols_align("left", columns=["label", "peak_phase", "price"])
        .cols_align("right", columns=[*sizes, "saved_bytes"])
        .tab_style(style.text(weight="600"), loc.body(rows=first))
    )


def labels(frame: pl.DataFrame) -> GT:
    """What each recompute label changes alone (`Anatomy.labels`)."""
    shown = frame.with_columns(pl.col("note").replace("", NONE))
    saved = ["peak_saved_bytes", "retained_saved_bytes"]
    return (
        _replayed(table(shown, "labels"))
        .fmt(number(lambda nbytes: signed(nbytes / GIB, 3).lstrip("+")), columns=saved)
        .tab_spanner("Against no recompute, estimated, GiB", columns=saved)
        .sub_missing(missing_text=NONE)
        .cols_label(
            label="Label",
            peak_saved_bytes="lower peak",
            retained_saved_bytes="less retained",
            note="Why it is no choice here",
        )
        .cols_align("right", columns=saved)
        .cols_align("left", columns=["label", "note"])
        .tab_style(style.css("min-width: 14em; white-space: normal"), loc.body(columns="note"))
    )


def head(frame: pl.DataFrame) -> GT:
    """Rows of a ledger as its frame has them, under the names of its columns."""
    shown = frame.with_columns(
        pl.col("shape").cast(pl.List(pl.String)).list.join(" x "),
        pl.col("layer", "dies").cast(pl.String).fill_null(NONE),
        pl.col("recompute").fill_null(NONE),
    )
    return table(shown, "ledger").tab_style(_CODE, loc.body(columns=["module", "tensor"]))


_REPLAY: Mapping[str, str] = {
    "replay_seconds": "ms",
    "replay_share": "% of step",
    "replay_regions": "regions",
}


def _replayed(shown: GT) -> GT:
    """A table whose replay columns are under one head."""
    columns = [name for name in _REPLAY if name in shown._tbl_data.columns]
    shown = shown.fmt(number(_ms), columns="replay_seconds").cols_label({name: _REPLAY[name] for name in columns})
    if "replay_share" in columns:
        shown = shown.fmt(number(_percent), columns="replay_share")
    return shown.tab_spanner("Replay per step, lower bound", columns=columns).cols_align("right", columns=columns)


def _sized(shown: GT, columns: list[str]) -> GT:
    """A table with columns of bytes as GiB."""
    return shown.fmt(number(lambda nbytes: f"{nbytes / GIB:.3f}"), columns=columns)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"
