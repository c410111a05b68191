"""What the advisor proposes: the published studies are its exam, brute force over the estimates its check."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit import Workload, estimate
from labkit.errors import InputError
from labkit.ledger import MATERIAL
from labkit.memory.outline import block, outline
from labkit.plan import Advice, Budget, advise
from labkit.plan.advised import Option
from labkit.plan.price import EVERY_LAYER, Priced, Pricer, exact_peaks, exactly
from labkit.plan.ranking import Ranking
from labkit.plan.space import other_settings, recompute_choices
from labkit.plan.ways import longest_that_fits
from labkit.study.matrix import Matrix
from labkit.workload import RECOMPUTE_MODULES, Recompute
from labkit.workload.gpu import GPUS
from labkit.workload.stages import fullest_stages
from tests.small import MODEL

WORKLOADS = Path(__file__).parents[2] / "data" / "workloads"
GB = 10**9
DENSE = {name: value for name, value in MODEL.items() if name not in ("multi_latent_attention", "mixture_of_experts")}


@pytest.fixture(scope="module")
def moonlight() -> Workload:
    """NVIDIA's study's control."""
    return Workload.load(WORKLOADS / "moonlight-16b.yaml")


@pytest.fixture(scope="module")
def nemotron() -> Advice:
    """NVIDIA's other study's control, which runs out of memory."""
    return advise(Workload.load(WORKLOADS / "nemotron-3-nano.yaml"), Budget.read("80GB"))


def small(**fields: Any) -> Workload:
    """One dense and one MoE layer."""
    batch = {"seq_length": 512, "global_batch_size": 8}
    return Workload.from_mapping({"model": MODEL, "parallelism": {"world_size": 1}, "batch": batch, **fields})


def test_moonlight_tries_moe_act_first_and_says_where_the_floor_is(moonlight: Workload) -> None:
    advice = advise(moonlight)
    assert advice.first is not None
    assert advice.first.label == "[moe_act]"
    assert advice.control.fits
    assert "More labels will not lower the peak: the optimizer step holds it now" in " ".join(advice.sentences)
    named = " ".join(saving.tensor for saving in advice.savings)
    assert "mlp.experts" in named


def test_on_nemotron_no_list_narrower_than_moe_fits(nemotron: Advice) -> None:
    assert not nemotron.control.fits
    assert nemotron.labels is not None
    assert nemotron.labels.label == "[moe]"
    assert nemotron.first is not None
    assert nemotron.first.fits
    assert nemotron.first.replay_seconds <= nemotron.labels.replay_seconds
    said = " ".join(nemotron.why_not_less)
    assert "[layernorm, moe_act, shared_experts] is narrower and holds" in said
    assert "GiB too much" in said


def test_the_old_failure_is_refused_as_it_is_with_what_was_measured_to_work() -> None:
    advice = advise(Workload.load(WORKLOADS / "qwen3.8-27b-failure.yaml"))
    assert not advice.control.fits
    assert advice.first is not None
    assert advice.first.recompute.recompute_granularity == "full"
    said = " ".join(advice.sentences)
    assert "No list of labels fits" in said
    assert "As it is it fits with TP 8: " in said
    assert "tokens fit as it is" in said
    every = next(option for option in advice.options if option.label == "full uniform 1")
    assert f"full uniform 1, holds {41.6}" in said
    # Measured under full recompute: 41 GiB. At TP 8 (cell h200-07): 130.2 GB, that is 121.3 GiB.
    assert every.peak_allocated_bytes / 2**30 == pytest.approx(41, rel=0.02)


def test_what_does_not_fit_at_all_is_refused_with_what_would(moonlight: Workload) -> None:
    advice = advise(moonlight, Budget.read("25GB"))
    assert (advice.first, advice.labels) == (None, None)
    assert "the optimizer step needs" in " ".join(advice.sentences)
    long = small(training={"gpu": "h100-80gb"}, parallelism={"world_size": 8})
    activations = advise(long, Budget("a budget", priced_peak(long, least=True) - 1))
    assert activations.first is None
    assert any("fits with" in each or "tokens fit" in each for each in activations.sentences)
    assert all(option.fits is not False and option.setting for option in activations.settings)


def test_shorter_sequences_fit_by_blocks_and_by_the_allocator_as_it_is_set(moonlight: Workload) -> None:
    batch = moonlight.batch.model_copy(update={"seq_length": 2**18})
    pricer = Pricer(moonlight.model_copy(update={"batch": batch}))
    ranking = Ranking(Budget.of("h100-80gb"), [pricer.price(Recompute())], pricer.step_seconds)
    found = longest_that_fits(ranking, EVERY_LAYER)
    assert found is not None
    # Of 64ths; the next one's blocks are too many.
    assert found.fits.batch.seq_length == 217_088
    assert found.runs is not None
    assert found.runs.batch.seq_length < 0.75 * found.fits.batch.seq_length
    for case, runs in ((found.fits, False), (found.runs, True)):
        peaks = exact_peaks(case.model_copy(update={"recompute": EVERY_LAYER})).values()
        assert all(each.runs_within(ranking.budget.bytes) for each in peaks) is runs


def priced(workload: Workload) -> list[Priced]:
    """Every choice of a workload."""
    return list(Pricer(workload).each(recompute_choices(workload)))


def priced_peak(workload: Workload, *, least: bool) -> int:
    """The least or the largest covered peak of all choices."""
    peaks = [each.covered_bytes for each in priced(workload)]
    return min(peaks) if least else max(peaks)


def test_a_price_is_the_estimates(moonlight: Workload) -> None:
    for each in priced(moonlight)[::34]:
        result = estimate(each.workload, each.stage)
        # Blocks of fresh segments: cached ones, which an estimate plays through, can only be smaller.
        assert -1e-4 < each.peak_bytes / result.peak_allocated_bytes - 1 < 5e-3
        covered = result.peak_allocated_bytes + result.summary.margin_bytes
        assert -1e-4 < each.covered_bytes / covered - 1 < 5e-3


def test_an_exact_price_is_the_estimates_own(moonlight: Workload) -> None:
    for each in priced(moonlight)[33::40]:
        result, exact = estimate(each.workload, each.stage), exactly(each)
        summary = result.summary
        assert exact.priced.peak_bytes == summary.peak_allocated_bytes
        assert exact.priced.covered_bytes == summary.peak_allocated_bytes + summary.margin_bytes
        assert [phase.bytes for phase in exact.peaks.phases] == [each.peak_allocated_bytes for each in summary.phases]
        held = exact.peaks.held(summary.peak_iteration, summary.peak_phase)
        assert held.total() == summary.peak_allocated_bytes


def test_a_pipelines_price_is_that_of_its_fullest_stage() -> None:
    layout = {"world_size": 8, "pipeline_model_parallel_size": 8}
    uneven = {**layout, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
    deep = small(
        model={**DENSE, "num_layers": 26}, parallelism=uneven, batch={"seq_length": 512, "global_batch_size": 9}
    )
    assert fullest_stages(deep) == [0, 1, 7]
    for each in priced(deep)[::3]:
        outlines = [outline(each.workload, stage, block) for stage in range(8)]
        assert each.peak_bytes == max(outline.peak_bytes for outline in outlines)
        assert each.stage in fullest_stages(deep)


@pytest.mark.parametrize("layers", [6, 40])
def test_long_regions_are_left_out_only_where_they_hold_more(layers: int) -> None:
    deep = small(model={**DENSE, "num_layers": layers})
    every = list(recompute_choices(deep))
    pricer = Pricer(deep)
    kept, by_layer = list(pricer.worth_pricing(every)), pricer.price(EVERY_LAYER)
    left_out = [each for each in every if each not in kept]
    assert left_out
    for each in pricer.each(left_out):
        assert each.peak_bytes >= by_layer.peak_bytes
        assert each.replay.seconds == pytest.approx(by_layer.replay.seconds, rel=0.01)


def test_each_label_is_priced_alone_or_has_a_reason(moonlight: Workload) -> None:
    advice = advise(moonlight)
    alone, idle = ({each.label: each for each in group} for group in (advice.alone, advice.idle))
    assert alone.keys() | idle.keys() == set(RECOMPUTE_MODULES)
    assert "fused attention already keeps no scores" in advice.idle[0].reason
    cases = [moonlight.with_recompute(**_labels(labels)) for labels in ([], ["moe_act"])]
    nothing, moe_act = (estimate(case).summary for case in cases)
    price = next(each for each in advice.alone if each.label == "moe_act")
    assert price.retained_saved_bytes == nothing.retained_bytes - moe_act.retained_bytes > 0
    peaks = [max(phase.peak_tensor_bytes for phase in summary.phases) for summary in (nothing, moe_act)]
    assert price.peak_saved_bytes == peaks[0] - peaks[1]


def test_a_choice_whose_segments_do_not_fit_is_not_first(nemotron: Advice) -> None:
    whole = Workload.load(WORKLOADS / "nemotron-3-nano.yaml")
    budget = Budget.read("76.59GiB")
    advice = advise(whole, budget)
    assert advice.first is not None
    assert advice.first.covered_bytes <= budget.bytes
    assert "it runs out of memory" not in " ".join(advice.sentences)
    assert "That decides whether it fits" in " ".join(advice.sentences), "bf16 gradients or fp32 ones, for one"
    assert set(advice.remedies) < set(advice.sentences)
    assert nemotron.savings


def test_where_the_optimizer_is_too_much_another_is_proposed() -> None:
    training = {"gpu": "h100-80gb", "data_parallel": {"use_distributed_optimizer": True}}
    wide = small(model={**DENSE, "vocab_size": 128_000}, training=training, parallelism={"world_size": 2})
    advice = advise(wide, Budget("a budget", priced_peak(wide, least=True) * 96 // 100))
    assert advice.first is None
    assert any(each.startswith("With use_precision_aware_optimizer") for each in advice.remedies)
    assert not any("distributed optimizer" in each for each in advice.sentences), "it is on"


def _labels(labels: list[str]) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": labels}


def test_the_front_has_nothing_that_another_choice_undercuts() -> None:
    # Segments of a few MiB are much to so small a model.
    training = {"allocator": {"expandable_segments": True}}
    workload = small(parallelism={"world_size": 2, "expert_model_parallel_size": 2}, training=training)
    choices = priced(workload)
    least, most = (min(each.covered_bytes for each in choices), max(each.covered_bytes for each in choices))
    for part in (0, 3, 8):
        advice = advise(workload, Budget("a budget", least + (most - least) * part // 8))
        for option in advice.options:
            undercut = any(_undercuts(other, option) for other in advice.options)
            assert not (option.on_front and undercut)
        assert advice.first is not None
        assert advice.first.covered_bytes <= advice.budget_bytes
        fitting = [each for each in choices if each.covered_bytes <= advice.budget_bytes]
        cheapest = min(each.replay.seconds for each in fitting)
        step = 3 * max(each.replay.seconds for each in choices)
        if not advice.control.fits:
            assert advice.first.replay_seconds <= cheapest + 0.01 * step


def _undercuts(other: Option, option: Option) -> bool:
    """It holds less for no more replay of no more regions."""
    cost, most = (other.replay_seconds, other.replay_regions), (option.replay_seconds, option.replay_regions)
    less = other.peak_allocated_bytes < option.peak_allocated_bytes * (1 - MATERIAL)
    return less and all(mine <= theirs for mine, theirs in zip(cost, most, strict=True))


def test_what_already_recomputes_too_much_is_told_so() -> None:
    advice = advise(
        small(recompute={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})
    )
    assert advice.first is not None
    assert advice.first.label == "[]"
    assert "less to run again" in advice.sentences[0]


def test_choices_are_those_that_run_and_save_something(moonlight: Workload) -> None:
    choices = list(recompute_choices(moonlight))
    assert len(set(choices)) == len(choices)
    labels = {label for choice in choices for label in choice.modules}
    assert labels == {"mla_up_proj", "layernorm", "moe_act", "mlp", "moe"}, (
        "flash attention keeps no scores; no overlap"
    )
    for choice in choices:
        assert not [
            each for each in moonlight.model_copy(update={"recompute": choice}).findings if each.severity == "error"
        ]
    layers = moonlight.model.num_layers
    uniform = [choice.recompute_num_layers for choice in choices if choice.recompute_method == "uniform"]
    assert uniform == [1, 2, 3, 4, 5, 6, 7, 9, 14, 27], "each the least for so few regions"
    assert sum(choice.recompute_method == "block" for choice in choices) == layers - 1


def test_hundreds_of_layers_and_millions_of_sequences_take_seconds() -> None:
    deep = small(model={**DENSE, "num_layers": 2000})
    choices = list(recompute_choices(deep))
    assert len(choices) < 200
    assert sum(choice.recompute_num_layers or 0 for choice in choices if choice.recompute_method == "uniform") < 2000
    wide = small(model=DENSE, batch={"seq_length": 64, "global_batch_size": 10**9, "micro_batch_size": 10**9})
    micro_batches = {each.batch.micro_batch_size for each in other_settings(wide)}
    assert {1, 2, 4, 5, 8, 10, 16, 10**9 // 2} <= micro_batches


def test_what_launch_arguments_hold_is_said_to_have_no_price() -> None:
    said = advise(small(model=DENSE, launch={"arguments": ["--log-params-norm"]})).sentences
    assert [each for each in said if "--log-params-norm" in each]


def test_other_settings_run_and_are_others(moonlight: Workload) -> None:
    settings = list(other_settings(moonlight))
    assert settings
    for other in settings:
        assert other.checked().content_hash != moonlight.content_hash
        assert other.parallelism.world_size == moonlight.parallelism.world_size


def test_the_study_that_would_confirm_it_runs(nemotron: Advice, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(nemotron.study_text)
    matrix = Matrix.load(path)
    assert matrix.control.workload.content_hash == nemotron.workload_hash
    labels = [candidate.label for candidate in matrix.candidates]
    assert nemotron.first is not None
    assert labels[1:3] == [nemotron.first.label, "[moe]"]
    assert all(not candidate.differs_in for candidate in matrix.candidates)


def test_a_study_of_a_hostile_name_is_still_a_study(tmp_path: Path) -> None:
    name = "<script>alert('x')</script> \N{RIGHT-TO-LEFT OVERRIDE} ../../etc"
    advice = advise(small(model={**MODEL, "name": name}))
    path = tmp_path / "study.yaml"
    path.write_text(advice.study_text)
    assert Matrix.load(path).control.workload.model.name == name
    assert yaml.safe_load(advice.study_text)["name"].isascii()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80 * GB),
        ("74.5GiB", round(74.5 * 2**30)),
        (" 1 tib ", 2**40),
        ("12345678901", 12345678901),
        ("512 MiB", 2**29),
        ("h200-141gb", GPUS["h200-141gb"].total_memory_bytes),
    ],
)
def test_budgets_are_read(text: str, nbytes: int) -> None:
    assert Budget.read(text).bytes == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "80 parsecs",
        "-1GB",
        "0",
        "1e999GB",
        "nan",
        "80GB80",
        "9" * 40,
        "h100",
        "80G\N{LATIN SMALL LETTER DOTLESS I}B",
    ],
)
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no amount of memory; use one such as 80GB"):
        Budget.read(text)
