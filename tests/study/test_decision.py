"""What to try first follows from the figures, and the sentences say why."""

from collections.abc import Sequence
from typing import Any

import polars as pl
import pytest

from labkit.study.decision import Decision, Limit, decide
from labkit.study.frames import CELLS
from labkit.workload.gpu import GIB

H100 = Limit("H100", int(79.1 * GIB), stated=False)
MOONLIGHT = [
    # label, peak in 1e9 bytes, its phase, published step time, estimated replay seconds
    ("[]", 36.30, "backward", 457.18, 0.0),
    ("[core_attn]", 36.296, "backward", 474.80, 0.006),
    ("[mla_up_proj]", 35.695, "optimizer", 480.89, 0.009),
    ("[mla_up_proj, mlp]", 35.701, "optimizer", 496.73, 0.010),
    ("[moe_act]", 35.677, "optimizer", 466.26, 0.004),
    ("[layernorm, moe_act]", 35.691, "optimizer", 506.53, 0.008),
]


def frame(rows: Sequence[tuple[str, float, str, float | None, float]], **changes: dict[str, Any]) -> pl.DataFrame:
    """`cells` with three sources; `changes` overrides the traced row of a label (brackets left out)."""
    control = rows[0][1]
    cells = []
    for label, peak, phase, step_time, replay in rows:
        common = {"candidate": label, "is_control": label == rows[0][0], "outcome": "ok"}
        held = {"peak_allocated_bytes": round(peak * 1e9), "saved_bytes": round((control - peak) * 1e9)}
        traced = {**common, "source": "traced", "peak_phase": phase, **held}
        cells += [
            {**common, "source": "estimated", "replay_seconds": replay, "replay_flops": 0, **held},
            traced | changes.get(label.strip("[]"), {}),
        ]
        if step_time is not None:
            cells.append({**common, "source": "published", "step_time_ms": step_time, **held})
    return pl.DataFrame(cells, schema=CELLS)


def ranks(decision: Decision) -> dict[str, int]:
    return {row["candidate"]: row["rank"] for row in decision.frame.iter_rows(named=True) if row["rank"] is not None}


def verdict(decision: Decision, label: str) -> str:
    return str(decision.frame.filter(candidate=label)["verdict"].item())


def test_moonlight_tries_moe_act_first_and_says_why() -> None:
    decision = decide(frame(MOONLIGHT), H100)
    assert ranks(decision) == {"[moe_act]": 1}
    assert decision.sentences == (
        "Try [moe_act] first: it lowers the traced peak from 33.81 GiB to 33.23 GiB (-0.58 GiB) for 9.1 ms a step "
        "(+2.0%, published step time).",
        "[core_attn]: next to nothing saved.",
        "[mla_up_proj], [mla_up_proj, mlp] and [layernorm, moe_act]: dearer than [moe_act] and not materially lower.",
        "All 4 choices that save end on a floor: the optimizer step, in which no activation is alive, holds the peak; "
        "more labels will not lower it.",
        "Every traced choice fits H100 (79.10 GiB), the control with 45.29 GiB to spare: unless that memory is needed, "
        "nothing has to be recomputed.",
    )
    assert decision.frame["fits"].all()


def test_without_step_times_the_estimated_replay_decides_and_is_named() -> None:
    rows = [(label, peak, phase, None, replay) for label, peak, phase, _, replay in MOONLIGHT]
    decision = decide(frame(rows), H100)
    assert ranks(decision) == {"[moe_act]": 1}
    assert "for 4.0 ms a step (estimated replay time, a lower bound)" in decision.sentences[0]
    assert decision.frame["step_time_change"].null_count() == 6


def test_a_traced_replay_takes_the_estimates_place() -> None:
    rows = [(label, peak, phase, None, replay) for label, peak, phase, _, replay in MOONLIGHT]
    traced = {
        label.strip("[]"): {"replay_seconds": 2 * replay, "replay_checkpoints": 9, "step_seconds": 0.1 + 2 * replay}
        for label, _, _, _, replay in rows
    }
    decision = decide(frame(rows, **traced), H100)
    assert "for 8.0 ms a step (traced replay at the GPU's full speed, a lower bound)" in decision.sentences[0]
    chosen = decision.frame.row(4, named=True)
    assert (chosen["replay_source"], chosen["replay_checkpoints"]) == ("traced", 9)
    assert chosen["step_bound_change"] == pytest.approx(0.08)
    del traced["core_attn"]
    assert "estimated replay time" in decide(frame(rows, **traced), H100).sentences[0], "one source for all"


def test_what_fits_only_without_cached_blocks_is_called_tight() -> None:
    changed = frame(MOONLIGHT, moe_act={"peak_reserved_bytes": 80 * GIB}, mla_up_proj={"peak_reserved_bytes": 70 * GIB})
    decision = decide(changed, H100)
    assert decision.sentences[1] == (
        "[moe_act]: tight by fragmentation, since the allocator would hold 80.00 GiB in segments, more than H100 "
        "(79.10 GiB), unless it gives cached blocks back."
    )
    assert decision.frame.filter("tight")["candidate"].to_list() == ["[moe_act]"]


def test_one_missing_step_time_prices_everything_by_the_estimate() -> None:
    rows = [*MOONLIGHT[:5], ("[layernorm, moe_act]", 35.691, "optimizer", None, 0.008)]
    assert "estimated replay time" in decide(frame(rows), H100).sentences[0]


def test_front_is_ranked_by_bytes_saved_per_second() -> None:
    rows = [
        ("[]", 70.0, "backward", 1000.0, 0.0),
        ("[cheap]", 65.0, "backward", 1010.0, 0.0),
        ("[large]", 50.0, "backward", 1100.0, 0.0),
        ("[silly]", 66.0, "backward", 1200.0, 0.0),
    ]
    decision = decide(frame(rows), H100)
    assert ranks(decision) == {"[cheap]": 1, "[large]": 2}
    assert verdict(decision, "[silly]") == "dearer than [cheap] and not materially lower"
    assert "floor" not in " ".join(decision.sentences)


def test_target_takes_the_cheapest_that_meets_it() -> None:
    rows = [
        ("[]", 70.0, "backward", 1000.0, 0.0),
        ("[cheap]", 65.0, "backward", 1010.0, 0.0),
        ("[large]", 50.0, "backward", 1100.0, 0.0),
    ]
    decision = decide(frame(rows), Limit("the target", 60 * 10**9, stated=True))
    assert ranks(decision) == {"[large]": 1}
    assert verdict(decision, "[cheap]") == "misses the target by 4.66 GiB"
    assert decision.sentences[0].startswith("Try [large] first: of the 1 that stay below the target (55.88 GiB)")
    assert decision.frame["fits"].to_list() == [False, False, True]


def test_target_the_control_meets_needs_nothing_more() -> None:
    decision = decide(frame(MOONLIGHT), Limit("the target", 40 * 10**9, stated=True))
    assert ranks(decision)["[]"] == 1
    assert "recompute nothing more" in decision.sentences[0]


def test_target_nobody_meets_names_the_lowest_and_the_floor() -> None:
    decision = decide(frame(MOONLIGHT[:1] + MOONLIGHT[2:]), Limit("the target", 35 * 10**9, stated=True))
    assert ranks(decision) == {}
    assert (
        "No choice stays below the target (32.60 GiB): the lowest, [moe_act], misses the target by 0.63 GiB."
        in (decision.sentences[0])
    )
    assert "the optimizer step" in decision.sentences[1]


def test_control_larger_than_the_gpu_makes_the_gpu_the_target() -> None:
    rows = [("[]", 90.0, "backward", None, 0.0), ("[moe]", 60.0, "backward", None, 0.2)]
    decision = decide(frame(rows), H100)
    assert ranks(decision) == {"[moe]": 1}
    assert verdict(decision, "[]").startswith("misses H100 by")


def test_nothing_that_saves_is_said() -> None:
    decision = decide(frame(MOONLIGHT[:2]), H100)
    assert ranks(decision) == {}
    assert decision.sentences[0] == "No choice lowers the control's peak of 33.81 GiB by more than 0.1%."


def test_failed_missing_and_unmatched_candidates_are_named() -> None:
    lost = {"peak_allocated_bytes": None, "saved_bytes": None}
    decision = decide(
        frame(
            MOONLIGHT,
            core_attn={"outcome": "failed", **lost},
            mla_up_proj={"outcome": "missing", **lost},
            moe_act={"differs_in": "recompute, batch.seq_length"},
        ),
        H100,
    )
    assert verdict(decision, "[core_attn]") == "failed, not compared"
    assert verdict(decision, "[mla_up_proj]") == "not traced"
    assert verdict(decision, "[moe_act]").endswith(
        "not matched, changes several choices at once (recompute, batch.seq_length)"
    )
    assert decision.sentences[-1] == (
        "This study is not matched: 1 of its 5 candidates change more than one choice against the control, so that "
        "their differences have no single cause."
    )
    assert "[mla_up_proj]: not traced." in decision.sentences


def test_labels_that_do_nothing_are_named_with_the_reason() -> None:
    decision = decide(frame(MOONLIGHT, core_attn={"warnings": "core_attn saves nothing: attention is fused"}), H100)
    assert "core_attn saves nothing: attention is fused." in decision.sentences


def test_missing_control_compares_nothing() -> None:
    rows = frame(MOONLIGHT).with_columns(
        outcome=pl.when(pl.col("is_control")).then(pl.lit("missing")).otherwise("outcome"),
        saved_bytes=pl.lit(None, pl.Int64),
    )
    decision = decide(rows, H100)
    assert decision.sentences[0] == "The control [] has no traced result: nothing can be compared yet."
    assert ranks(decision) == {}


def test_gpus_decide_where_they_have_run_every_choice() -> None:
    traced = frame([(label, peak, phase, None, replay) for label, peak, phase, _, replay in MOONLIGHT])
    gpus = traced.filter(source="traced").with_columns(
        source=pl.lit("measured"),
        peak_allocated_bytes=pl.col("peak_allocated_bytes") + 10**9,
        step_time_ms=pl.when(pl.col("candidate") == "[mla_up_proj]").then(440.0).otherwise(450.0),
    )
    decision = decide(pl.concat([traced, gpus]), H100)
    assert set(decision.frame["evidence"]) == {"measured"}
    assert set(decision.frame["step_time_source"]) == {"measured"}
    assert ranks(decision) == {"[mla_up_proj]": 1}
    assert "lowers the measured peak from 34.74 GiB" in decision.sentences[0]
    assert "-10.0 ms a step (-2.2%, measured step time)" in decision.sentences[0]

    waiting = gpus.with_columns(
        outcome=pl.when(pl.col("candidate") == "[moe_act]").then(pl.lit("missing")).otherwise("outcome")
    )
    assert set(decide(pl.concat([traced, waiting]), H100).frame["evidence"]) == {"traced"}
    died = gpus.with_columns(
        outcome=pl.when(pl.col("candidate") == "[moe_act]").then(pl.lit("oom")).otherwise("outcome"),
        peak_allocated_bytes=pl.when(pl.col("candidate") != "[moe_act]").then("peak_allocated_bytes"),
    )
    assert verdict(decide(pl.concat([traced, died]), H100), "[moe_act]") == "oom, not compared"


def test_another_choice_than_recompute_costs_what_the_whole_step_does() -> None:
    rows = [(label, peak, phase, None, replay) for label, peak, phase, _, replay in MOONLIGHT[:2]]
    changed = {
        "step_seconds": 0.3,
        "changes": "parallelism.tensor_model_parallel_size",
        "peak_allocated_bytes": 20 * 10**9,
    }
    figures: dict[str, Any] = {"replay_seconds": 0.0, "replay_checkpoints": 0, "step_seconds": 0.2}
    traced = {rows[0][0].strip("[]"): figures, rows[1][0].strip("[]"): figures | changed | {"saved_bytes": 10**10}}
    decision = decide(frame(rows, **traced), H100)
    assert "for 100.0 ms a step (the traced step at the GPU's full speed, a lower bound)" in decision.sentences[0]
