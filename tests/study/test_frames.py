"""The frames carry a study's figures exactly, source by source."""

from dataclasses import replace
from typing import Literal

import polars as pl
import pytest

from labkit.drivers.contract import Failure, Measurement, PhasePeak, RankRecord
from labkit.memory.estimate import estimate
from labkit.report import prose
from labkit.study import frames
from labkit.study.decision import Limit
from labkit.study.matrix import Candidate, Matrix, Setting
from labkit.study.results import CandidateResult, CellResult, Results
from labkit.study.status import CellStatus
from labkit.summary import CATEGORIES, Result, Written
from labkit.work import WorkRow
from labkit.workload import Workload
from tests.study.builder import ledger, measured, small

MB = 10**6


FORWARD = WorkRow(
    module="decoder.layers.*.mlp",
    phase="forward",
    launches=4,
    flops=80,
    hbm_bytes=60,
    communicated_bytes=9,
    seconds=0.08,
)
REPLAYED = FORWARD.model_copy(
    update={"phase": "backward", "replayed": True, "checkpoints": 3, "flops": 20, "hbm_bytes": 6, "seconds": 0.02}
)


class Traced(Result):
    certainty: Literal["traced"] = "traced"
    work: tuple[WorkRow, ...] = (FORWARD, REPLAYED)


class Uncounted(Traced):
    work: tuple[WorkRow, ...] = ()


def published(workload: Workload, peak: int, step_time_ms: float) -> Measurement:
    reading = PhasePeak(iteration=2, phase="after optimizer", peak_allocated_bytes=peak)
    return Measurement(
        driver="published",
        workload=workload,
        outcome="ok",
        ranks=(RankRecord(rank=0, phases=(reading,)),),
        step_time_ms=step_time_ms,
        source="somebody, somewhere",
    )


def candidate(*labels: str, control: bool = False, saved: int | None = 0, peak: int | None = None) -> CandidateResult:
    """A candidate whose trace saves `saved` bytes, or failed if None; published if `peak` is given."""
    workload = small(*labels)
    made = measured(workload, saved=saved or 0).measurement
    traced = None
    if saved is None:
        made = made.model_copy(update={"outcome": "failed", "failure": Failure(phase="forward", message="killed")})
    else:
        traced = Traced(workload, 0, lambda: Written(ledger(saved), 40 * MB))
    label = workload.recompute.label
    status = CellStatus(candidate=label, is_control=control, driver="trace", state="done", detail="", file="")
    return CandidateResult(
        candidate=Candidate(label, workload, is_control=control, changes=() if control else ("recompute",)),
        estimate=estimate(workload),
        runs=(CellResult(status, made, traced),),
        published=None if peak is None else published(workload, peak, step_time_ms=peak / MB),
    )


@pytest.fixture(scope="module")
def results() -> Results:
    candidates = (
        candidate(control=True, peak=22 * MB),
        candidate("moe_act", saved=2 * MB, peak=20 * MB),
        candidate("moe", saved=None),
    )
    limit = Limit("H100", 80 * 10**9, stated=False)
    setting = Setting("", tuple(result.candidate for result in candidates), limit)
    return Results(Matrix("s", "S", "", (setting,)), candidates)


def row(frame: pl.DataFrame, candidate: str, source: str) -> dict[str, object]:
    return frame.row(by_predicate=(pl.col("candidate") == candidate) & (pl.col("source") == source), named=True)


def test_cells_come_in_study_order_with_every_source(results: Results) -> None:
    frame = results.cells
    assert frame.schema == pl.Schema(frames.CELLS)
    assert list(zip(frame["candidate"], frame["source"], strict=True)) == [
        ("[]", "estimated"),
        ("[]", "traced"),
        ("[]", "published"),
        ("[moe_act]", "estimated"),
        ("[moe_act]", "traced"),
        ("[moe_act]", "published"),
        ("[moe]", "estimated"),
        ("[moe]", "traced"),
    ]


def test_traced_row_holds_the_ledgers_figures(results: Results) -> None:
    control = row(results.cells, "[]", "traced")
    # parameters 10 + moments 4 + retained 6 + gradient 1 MB, and 512 bytes of a block that are no tensor's
    assert control["peak_allocated_bytes"] == 21 * MB + 512
    assert control["peak_tensor_bytes"] == 21 * MB
    assert control["peak_phase"] == "backward"
    assert control["between_steps_bytes"] == 14 * MB
    assert control["retained_bytes"] == 6 * MB
    assert control["peak_reserved_bytes"] == 40 * MB
    assert control["saved_bytes"] == 0
    assert control["error_vs_published"] == pytest.approx((21 * MB + 512) / (22 * MB) - 1)
    candidate = row(results.cells, "[moe_act]", "traced")
    assert candidate["saved_bytes"] == 2 * MB
    assert (candidate["replay_flops"], candidate["replay_hbm_bytes"]) == (20, 6)
    assert (candidate["replay_seconds"], candidate["replay_checkpoints"]) == (0.02, 3)
    assert candidate["step_seconds"] == pytest.approx(0.1)


def test_a_trace_that_did_not_count_leaves_the_estimate_to_price(results: Results) -> None:
    counted = results.candidates[1]
    traced = Uncounted(counted.candidate.workload, 0, lambda: Written(ledger(0), 40 * MB))
    (run,) = counted.runs
    uncounted = Results(results.matrix, (results.candidates[0], replace(counted, runs=(replace(run, traced=traced),))))
    assert row(uncounted.cells, "[moe_act]", "traced")["replay_seconds"] is None
    assert set(uncounted.decision["replay_source"]) == {"estimated"}
    assert set(results.decision["replay_source"]) == {"traced"}


def test_estimated_row_prices_the_replay_and_published_row_the_step(results: Results) -> None:
    estimated, quoted = row(results.cells, "[moe_act]", "estimated"), row(results.cells, "[moe_act]", "published")
    replay = results.candidates[1].estimate.replay
    assert estimated["replay_flops"] == replay.flops
    assert estimated["replay_seconds"] == replay.seconds > 0
    assert estimated["step_time_ms"] is None
    assert (quoted["step_time_ms"], quoted["saved_bytes"]) == (20.0, 2 * MB)
    assert quoted["error_vs_published"] is None
    assert quoted["peak_tensor_bytes"] is None


def test_failed_cell_has_its_reason_and_no_figures(results: Results) -> None:
    failed = row(results.cells, "[moe]", "traced")
    assert (failed["outcome"], failed["failure"]) == ("failed", "killed (in forward)")
    assert failed["peak_allocated_bytes"] is None
    assert failed["saved_bytes"] is None


def test_a_trace_that_its_gpu_has_no_room_for_keeps_its_peak_and_says_so() -> None:
    found = candidate(control=True)
    (run,) = found.runs
    assert run.measurement is not None
    short = Failure(phase="forward", message="rank 0 would run out of memory in forward of iteration 1", rank=0)
    (record,) = run.measurement.ranks
    ranks = (record.model_copy(update={"out_of_memory": short}),)
    tight = replace(found, runs=(replace(run, measurement=run.measurement.model_copy(update={"ranks": ranks})),))
    setting = Setting("", (tight.candidate,), Limit("H100", 80 * 10**9, stated=False))
    cells = Results(Matrix("s", "S", "", (setting,)), (tight,)).cells
    traced = row(cells, "[]", "traced")
    assert (traced["outcome"], traced["failure"]) == ("ok", short.message)
    assert traced["peak_allocated_bytes"] is not None
    assert prose.failures(cells).sentences == (f"[] (traced) would not fit: {short.message}.",)


def test_ranks_are_those_that_were_traced(results: Results) -> None:
    frame = frames.ranks(results)
    assert frame.schema == pl.Schema(frames.RANKS)
    control = frame.row(0, named=True)
    assert (control["candidate"], control["source"], control["rank"], control["stages"]) == ("[]", "traced", 0, "")
    # Without the moments the first step peaks 4 MB lower, until its optimizer has made them.
    assert (control["first_step_peak_bytes"], control["steady_peak_bytes"]) == (17 * MB + 512, 21 * MB + 512)
    assert control["peak_allocated_bytes"] == 21 * MB + 512


def test_breakdown_sums_to_each_peak(results: Results) -> None:
    sums = results.breakdown.group_by("candidate", "source").agg(pl.col("bytes").sum())
    compared = results.cells.join(sums, on=["candidate", "source"], how="left").filter(outcome="ok")
    assert compared["bytes"].to_list() == compared["peak_allocated_bytes"].to_list()
    assert set(results.breakdown["category"]) <= {*CATEGORIES, "published total"}


def test_timeline_reaches_the_peak_and_is_thinned(results: Results) -> None:
    timeline, peaks = results.timeline(moments=40)
    assert timeline.schema == pl.Schema(frames.TIMELINE)
    totals = timeline.group_by("candidate", "source", "clock", "phase", "position", maintain_order=True).agg(
        pl.col("bytes").sum()
    )
    assert all(kept <= 60 for kept in totals.group_by("candidate", "source").len()["len"])
    assert timeline["position"].min() == 0.0
    assert timeline["position"].max() == 1.0
    assert timeline["bytes"].min() == 0
    for peak in peaks.iter_rows(named=True):
        mine = totals.filter(candidate=peak["candidate"], source=peak["source"])
        assert mine["bytes"].max() == peak["bytes"]
        assert mine.filter(position=peak["position"])["phase"].item() == peak["phase"]
        assert mine["clock"].is_sorted()


def test_timeline_keeps_the_peak_of_every_phase(results: Results) -> None:
    timeline, _ = results.timeline(moments=10)
    for result in results.candidates:
        held = result.estimate.ledger
        steady = held.steady_iteration()
        mine = timeline.filter(candidate=result.candidate.label, source="estimated")
        kept = mine.group_by("phase", "clock").agg(pl.col("bytes").sum()).group_by("phase").agg(pl.col("bytes").max())
        births = {row.born for row in held.rows}
        for peak in held.phase_peaks():
            # A phase that allocates nothing peaks as it begins, before its own first moment.
            end = held.end(peak.iteration, peak.phase)
            lasts = range(held.start(peak.iteration, peak.phase), max(births) + 1 if end is None else end)
            if peak.iteration == steady and births.intersection(lasts):
                assert kept.filter(phase=peak.phase)["bytes"].item() == peak.bytes


def test_contract_names_the_origin_of_measured_figures(results: Results) -> None:
    contract = results.contract
    assert row(contract, "[]", "published")["origin"] == "somebody, somewhere"
    assert row(contract, "[]", "traced")["versions"] == "labkit 0.1.0, megatron-core 0.19.2"
    assert row(contract, "[moe]", "traced")["outcome"] == "failed"


def test_contract_counts_what_each_figure_was_recorded_with(results: Results) -> None:
    for one in results.contract.iter_rows(named=True):
        assert one["contract_fields"] == 17
        assert one["contract_recorded"] == 17 - len(one["contract_lacking"].split(", "))
    traced = str(row(results.contract, "[]", "traced")["contract_lacking"])
    assert traced.startswith("step_time_ms, tflops_per_gpu, step_times_ms, losses, gradient_norms")
    assert "versions.labkit" not in traced


def test_decision_puts_the_figures_side_by_side(results: Results) -> None:
    decision = results.decision
    assert decision["candidate"].to_list() == ["[]", "[moe_act]", "[moe]"]
    assert decision["published_bytes"].to_list() == [22 * MB, 20 * MB, None]
    assert decision["rank"].to_list() == [None, 1, None]
    assert results.decided.sentences[0].startswith("Try [moe_act] first")
