"""The frames of notebook `scaling`: the estimator's own figures; the longest lengths fit and the next ones do not."""

import polars as pl
import pytest

from labkit import estimate
from labkit.plan import Budget
from labkit.plan.price import EVERY_LAYER, exact_peaks, exactly_covered
from labkit.report.charts import scaling as charts
from labkit.report.figure import Figure
from labkit.report.prose import Prose
from labkit.report.tables import scaling as tables
from labkit.workbench.scaling import (
    AXES,
    Guide,
    Scaling,
    longest,
    own_length,
    step,
    up_to,
    with_layers,
    with_layout,
    with_length,
)
from labkit.workload import Workload
from labkit.workload.caching import AllocatorSettings
from tests.memory.grid import workload

GPU = "h100-80gb"


@pytest.fixture(scope="module")
def small() -> Scaling:
    return Scaling(Workload.load("gpt-local"), [GPU], 32768)


@pytest.fixture(scope="module")
def moonlight() -> Workload:
    return Workload.load("moonlight-16b")


def test_a_longest_length_fits_and_the_next_does_not(moonlight: Workload) -> None:
    budget = Budget.of(GPU)
    found = longest(Guide(moonlight, 2**17), budget.bytes)
    assert found.tokens is not None
    assert found.too_long is not None
    assert found.tokens < found.too_long <= found.tokens * (1 + 1 / 64) + step(moonlight)
    for tokens, fits in ((found.tokens, True), (found.too_long, False)):
        case = with_length(moonlight, tokens)
        covered = exactly_covered(case, exact_peaks(case))
        assert (covered <= budget.bytes) is fits
        held = estimate(case)
        assert covered == held.peak_allocated_bytes + held.summary.margin_bytes


def test_up_to_where_the_allocator_gets_along(moonlight: Workload) -> None:
    budget = Budget.of(GPU)
    every = moonlight.model_copy(update={"recompute": EVERY_LAYER})
    guide = Guide(every, 2**18)
    found = longest(guide, budget.bytes)
    assert found.runs is False
    sound = up_to(guide, budget.bytes, found)
    assert sound is not None
    assert found.tokens is not None
    assert found.tokens / 2 - guide.unit < sound < 0.7 * found.tokens
    following = found.tokens * (round(16 * sound / found.tokens) + 1) // 16 // guide.unit * guide.unit
    for tokens, runs in ((sound, True), (following, False)):
        peaks = exact_peaks(with_length(every, tokens)).values()
        assert all(each.runs_within(budget.bytes) for each in peaks) is runs
    training = every.training.model_copy(update={"allocator": AllocatorSettings(expandable_segments=True)})
    expandable = Guide(every.model_copy(update={"training": training}), 2**18)
    there = longest(expandable, budget.bytes)
    assert there.runs
    assert up_to(expandable, budget.bytes, there) == there.tokens


def test_nothing_fits_too_small_a_gpu_and_the_search_ends_where_it_is_told(moonlight: Workload) -> None:
    guide = Guide(moonlight, 8192)
    assert longest(guide, 2**30).tokens is None
    most = longest(guide, 2**40)
    assert (most.tokens, most.too_long) == (8192, None)


def test_the_frontier_is_of_every_layout_and_choice(small: Scaling) -> None:
    frame = small.frontier
    assert frame["setting"].unique(maintain_order=True).to_list() == ["as it is", "micro-batch 2"]
    assert frame.height == 2 * len(small.choices)
    bare = frame.filter(pl.col("choice") == "none (as it is)")
    assert bare["over_none"].to_list() == [1.0, 1.0]
    assert bare["replay_seconds"].to_list() == [0.0, 0.0]
    assert frame.filter(pl.col("choice") == "full uniform 1")["over_none"].min() > 1.3  # type: ignore[operator]
    assert "fits NVIDIA H100 80GB HBM3 up to" in small.sentences[0]
    assert all(len(each) > 1 for each in small.sentences)
    own = frame.filter(pl.col("setting") == "as it is")
    assert (own["sound"] <= own["tokens"]).all()
    assert own["sound"].null_count() == 0
    assert frame.filter(pl.col("setting") != "as it is")["sound"].null_count() == len(small.choices)


def test_what_fills_the_gpu_sums_to_the_covered_peak(small: Scaling) -> None:
    for (choice, tokens), rows in small.growth.group_by("choice", "tokens"):
        case = with_length(small.workload, int(str(tokens)))
        recompute = next(each.recompute for each in small.choices if each.name == choice)
        case = case.model_copy(update={"recompute": recompute})
        assert rows["bytes"].sum() == exactly_covered(case, exact_peaks(case))


def test_curves_pass_through_the_workload_itself(moonlight: Workload) -> None:
    curves = Scaling(moonlight, [GPU]).curves
    own = curves.filter("is_base", pl.col("choice") == "none (as it is)")
    assert own["axis"].to_list() == list(AXES)
    assert own["peak_allocated_bytes"].n_unique() == 1
    assert own["peak_allocated_bytes"][0] == pytest.approx(estimate(moonlight).peak_allocated_bytes, rel=0.01)
    lengths = curves.filter(pl.col("axis") == AXES[0], pl.col("choice") == "none (as it is)")
    assert lengths["peak_allocated_bytes"].is_sorted()
    refused = curves.filter(pl.col("refusal").is_not_null())
    assert refused["label"].unique().to_list() == ["CP 8"]
    assert refused["peak_allocated_bytes"].is_null().all()
    assert "world_size" in refused["refusal"][0]


@pytest.mark.parametrize("count", [13, 27, 54])
def test_fewer_and_more_layers_are_of_the_models_own_kinds(moonlight: Workload, count: int) -> None:
    case = with_layers(moonlight, count)
    assert case.can_run
    assert [kind.mlp for kind in case.model.layers] == ["dense"] + ["moe"] * (count - 1)
    hybrid = with_layers(Workload.load("nemotron-3-nano"), count)
    assert hybrid.can_run
    assert len(hybrid.model.layers) == count


def test_another_layout_keeps_the_micro_batches_of_a_rank(moonlight: Workload) -> None:
    case = with_layout(moonlight, "tensor_model_parallel_size", 4)
    assert case.can_run
    assert case.num_microbatches == moonlight.num_microbatches
    alone = with_layout(moonlight, "tensor_model_parallel_size", 1)
    assert alone.can_run
    assert not alone.parallelism.sequence_parallel


@pytest.mark.parametrize("name", ["packed: fused", "lora: hybrid"])
def test_packed_sequences_grow_together(name: str) -> None:
    case = workload(name)
    longer = with_length(case, 2 * own_length(case))
    assert own_length(longer) == 2 * own_length(case)
    assert longer.can_run
    assert Guide(case, 4 * own_length(case)).guess(2**62) > 0


def test_charts_and_tables_show_them(small: Scaling) -> None:
    drawn = charts.frontier(small.frontier)
    assert "estimated" in drawn.caption
    assert charts.holdings(small.holdings, small.limits).name == "full"
    curve = charts.curve(small.curves, "sequence length", small.limits)
    assert isinstance(curve, Figure)
    assert curve.name == "curve-sequence-length"
    nothing = charts.curve(small.curves, "EP", small.limits)
    assert isinstance(nothing, Prose)
    assert nothing.sentences == ("No other EP can run here.",)
    for shown in (tables.frontier(small.frontier), tables.growth(small.growth), tables.refused(small.refused)):
        assert "<table" in shown.as_raw_html()
