"""The frames of notebook `estimate`: the estimator's own figures, in whole, for workloads of every kind."""

import polars as pl
import pytest

from labkit import estimate
from labkit.errors import InputError
from labkit.memory.estimate import Estimate
from labkit.report.charts import estimate as charts
from labkit.report.figure import VEGALITE
from labkit.report.tables import estimate as tables
from labkit.workbench.estimate import Anatomy
from labkit.workload import Workload
from labkit.workload.gpu import GPUS
from tests.memory.grid import workload

GPU_NAMES = ("h100-80gb", "h200-141gb")
OTHERS = ["pipeline: layout, predictions alone", "lora: hybrid", "inputs: interleaved, prediction, full uniform 1"]


@pytest.fixture(scope="module")
def moonlight() -> Anatomy:
    return Anatomy(Workload.load("moonlight-16b"), gpus=GPU_NAMES)


def test_the_answer_is_the_estimate_with_its_margin(moonlight: Anatomy) -> None:
    held = estimate(moonlight.workload)
    covered = held.peak_allocated_bytes + held.summary.margin_bytes
    assert moonlight.covered_bytes == covered == held.covering.peak().bytes
    first = moonlight.sentences[0]
    assert "holds 34.04 GiB (estimated: rank 0; backward of iteration 2)" in first
    assert "fits NVIDIA H100 80GB HBM3 with 44.58 GiB to spare" in first
    assert moonlight.fits["fits"].to_list() == [True, True]
    memory = [GPUS[name].total_memory_bytes for name in GPU_NAMES]
    assert moonlight.fits["spare_bytes"].to_list() == [each - covered for each in memory]
    assert moonlight.fits["first"].to_list() == ["[moe_act]"] * 2


def test_every_breakdown_sums_to_the_peak(moonlight: Anatomy) -> None:
    peak = moonlight.estimate.peak_allocated_bytes
    for frame in (moonlight.categories, moonlight.parts, moonlight.tensors):
        assert frame["bytes"].sum() == peak
    sure = moonlight.certainty.filter(pl.col("certainty") != "safety margin")
    assert sure["bytes"].sum() == peak
    assert sure["certainty"].to_list() == ["exact", "allowance"]
    stacked = moonlight.choice_breakdown.filter(pl.col("candidate") == "[]")
    assert stacked["bytes"].sum() == moonlight.covered_bytes


def test_like_tensors_are_one_row(moonlight: Anatomy) -> None:
    largest = moonlight.tensors.row(0, named=True)
    assert largest["module"] == "decoder.layers.*.mlp.experts.linear_fc1.weight*"
    assert (largest["tensor"], largest["layers"], largest["count"]) == ("main_param", "1-26", 8 * 26)
    assert largest["bytes"] == 4 * 2048 * 2816 * 8 * 26  # fp32, eight experts a layer, expert data-parallel size 1
    output = moonlight.tensors.filter(
        pl.col("module") == "decoder.layers.*.mlp.experts.linear_fc1", pl.col("tensor") == "output"
    )
    assert output["shape"].to_list() == ["12288 x 2816"]
    assert output["certainty"].to_list() == ["allowance"]


def test_what_is_left_open_moves_the_peak_as_the_estimate_says(moonlight: Anatomy) -> None:
    routing = moonlight.left_open.filter(pl.col("field") == "routing")
    assert routing["value"].to_list() == ["balanced", "allowance", "worst"]
    assert routing["change_bytes"][0] == 0
    allowed = moonlight.workload.model_dump(exclude_unset=True) | {"routing": {"kind": "allowance"}}
    assert routing["peak_allocated_bytes"][1] == estimate(Workload.from_mapping(allowed)).peak_allocated_bytes


def test_choices_and_labels_are_those_of_the_plan(moonlight: Anatomy) -> None:
    best = moonlight.best_choices
    assert best.filter("is_control")["label"].to_list() == ["[]"]
    assert best.filter("is_first")["label"].to_list() == ["[moe_act]"]
    assert best["replay_seconds"].is_sorted()
    assert "full uniform 1" in best["label"]
    alone = moonlight.labels.filter(pl.col("note") == "")
    assert set(alone["label"]) == {"layernorm", "mla_up_proj", "mlp", "moe", "moe_act"}
    assert (alone["retained_saved_bytes"] > 0).all()
    noted = dict(moonlight.labels.filter(pl.col("note") != "").select("label", "note").iter_rows())
    assert "gdn_norm_out needs gated-delta-net layers" in noted["gdn_norm_out"]


def test_the_steady_step_of_each_choice_peaks_where_its_estimate_does(moonlight: Anatomy) -> None:
    moments, peaks = moonlight.timeline(moments=50)
    assert peaks.filter(pl.col("candidate") == "[]")["bytes"].item() == moonlight.estimate.peak_allocated_bytes
    totals = moments.group_by("candidate", "position").agg(pl.col("bytes").sum())
    highest = totals.group_by("candidate").agg(pl.col("bytes").max()).sort("candidate")
    assert highest["bytes"].to_list() == peaks.sort("candidate")["bytes"].to_list()


@pytest.mark.parametrize("name", OTHERS)
def test_any_workload_can_be_looked_at(name: str) -> None:
    anatomy = Anatomy(workload(name), gpus=GPU_NAMES[:1])
    peak = anatomy.estimate.peak_allocated_bytes
    for frame in (anatomy.categories, anatomy.parts, anatomy.tensors):
        assert frame["bytes"].sum() == peak
    layout = anatomy.workload.parallelism
    assert anatomy.stages["peak_allocated_bytes"].max() == peak
    assert anatomy.stages.filter("is_shown").height == 1
    if layout.pp > 1:
        last = Anatomy(anatomy.workload, layout.pp - 1)
        assert last.estimate.peak_allocated_bytes == Estimate(anatomy.workload, layout.pp - 1).peak_allocated_bytes
        assert last.stages.filter("is_shown")["stages"].item() == str(layout.pp - 1)
    for figure in (
        charts.choices(anatomy.choice_breakdown, anatomy.limits),
        charts.parts(anatomy.part_breakdown),
        charts.stages(anatomy.stage_breakdown, anatomy.limits),
        charts.trade(anatomy.choices, anatomy.limits),
    ):
        assert "estimated" in figure._repr_mimebundle_()[0][VEGALITE]["description"]
    for shown in (
        tables.fits(anatomy.fits),
        tables.left_open(anatomy.left_open),
        tables.tensors(anatomy.tensors),
        tables.stages(anatomy.stages),
        tables.best_choices(anatomy.best_choices),
        tables.labels(anatomy.labels),
        tables.head(anatomy.head),
    ):
        assert "<table" in shown.as_raw_html()


def test_a_stage_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="stage 3: the pipeline has stages 0 to 0"):
        Anatomy(Workload.load("gpt-local"), 3)


def test_a_hostile_model_name_is_text() -> None:
    hostile = "<script>alert(1)</script>"
    case = Workload.load("gpt-local")
    named = case.model_copy(update={"model": case.model.model_copy(update={"name": hostile})})
    from labkit.report.prose import lead

    shown = lead(Anatomy(named).sentences)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
