"""What a workload does not state gives its peak a range that names the field."""

from typing import Any

import pytest
from rich.console import Console

from labkit.memory.estimate import estimate
from labkit.summary import Summary
from labkit.workload import Workload
from labkit.workload.unstated import is_stated, open_fields, with_fields
from tests.small import MODEL
from tests.study.builder import SMALL

GRADIENTS = "training.data_parallel.grad_reduce_in_fp32"
ENGINE = "training.software.transformer_engine"
MOMENTS = "training.optimizer.use_precision_aware_optimizer"

# Long enough for the peak to be in the head, not in the optimizer's step.
LONG = {**SMALL, "batch": {"seq_length": 4096, "global_batch_size": 2}}
STATED: dict[str, Any] = {
    "routing": {"kind": "balanced"},
    "training": {
        "data_parallel": {"grad_reduce_in_fp32": False},
        "kernels": {
            "attention_backend": "fused",
            "cross_entropy_loss_fusion": True,
            "cross_entropy_fusion_impl": "te",
            "gradient_accumulation_fusion": True,
        },
        "optimizer": {"use_precision_aware_optimizer": False},
        "software": {"transformer_engine": "2.20.2"},
    },
}


def opened(**training: Any) -> Workload:
    """Everything stated but for what `training` replaces."""
    return Workload.from_mapping({**LONG, **STATED, "training": {**STATED["training"], **training}})


def summary(workload: Workload) -> Summary:
    return estimate(workload).ranged


def test_a_workload_that_states_everything_has_no_range() -> None:
    found = summary(opened())
    assert (found.peak_range, found.ranges, found.span) == (None, (), "")


@pytest.mark.parametrize(
    ("training", "field", "alternatives"),
    [
        ({"data_parallel": {}}, GRADIENTS, [{"data_parallel": {"grad_reduce_in_fp32": True}}]),
        ({"data_parallel": {"overlap_grad_reduce": True}}, GRADIENTS, []),
        ({"software": {}}, ENGINE, [{"software": {"transformer_engine": "2.17.0"}}]),
        (
            {"optimizer": {}},
            MOMENTS,
            [
                {
                    "optimizer": {
                        "use_precision_aware_optimizer": True,
                        "exp_avg_dtype": "bf16",
                        "exp_avg_sq_dtype": "bf16",
                    }
                }
            ],
        ),
    ],
)
def test_an_open_field_is_named_and_priced_as_if_it_were_stated(
    training: dict[str, Any], field: str, alternatives: list[dict[str, Any]]
) -> None:
    found = summary(opened(**training))
    (only,) = found.ranges
    assert only.field == field
    assert only.cases[0].peak_allocated_bytes == found.peak_allocated_bytes
    peaks = [case.peak_allocated_bytes for case in only.cases]
    assert found.peak_range is not None
    assert found.peak_range.low_bytes <= min(peaks)
    assert found.peak_range.high_bytes >= max(peaks)
    for each in alternatives:
        stated = estimate(opened(**each)).peak_allocated_bytes
        assert stated in peaks[1:]
        assert found.peak_range.low_bytes <= stated <= found.peak_range.high_bytes


def test_a_field_that_decides_nothing_here_is_not_named() -> None:
    """Without experts nothing is routed; the fused cross entropy of Transformer Engine has no fp8 recipe to ask for."""
    dense = {**MODEL, "mixture_of_experts": None}
    workload = Workload.from_mapping(
        {**LONG, "model": dense, "parallelism": {"world_size": 2}, "training": STATED["training"]}
    )
    assert summary(workload).ranges == ()
    assert "training.optimizer.fp8_recipe" not in [each.field for each in open_fields(Workload.from_mapping(LONG))]


def test_all_open_fields_together_span_at_least_each_of_them() -> None:
    found = summary(Workload.from_mapping(LONG))
    assert found.peak_range is not None
    assert {GRADIENTS, ENGINE, MOMENTS, "routing"} <= set(found.peak_range.causes)
    for each in found.ranges:
        plausible = [case.peak_allocated_bytes for case in each.cases if case.value != "worst"]
        assert found.peak_range.low_bytes <= min(plausible)
        assert found.peak_range.high_bytes >= max(plausible)
    assert found.peak_range.low_bytes < found.peak_allocated_bytes < found.peak_range.high_bytes
    stated = estimate(Workload.from_mapping(LONG)).summary
    assert found.model_copy(update={"peak_range": None, "ranges": ()}) == stated


def test_every_alternative_runs() -> None:
    for each in open_fields(Workload.from_mapping(LONG)):
        assert each.alternatives
        assert each.assumed not in {alternative.value for alternative in each.alternatives}


def test_another_recompute_choice_leaves_open_what_was_open() -> None:
    changed = Workload.from_mapping(LONG).with_recompute(recompute_granularity=None)
    assert not is_stated(changed, GRADIENTS)
    assert is_stated(changed, "batch.seq_length")
    assert is_stated(opened(), GRADIENTS)


def test_the_range_shows_in_terminal_html_and_json() -> None:
    result = estimate(opened(data_parallel={}))
    console = Console(width=200)
    with console.capture() as text:
        console.print(result)
    for shown in (text.get(), result._repr_html_()):
        assert "by what the workload does not state: training.data_parallel.grad_reduce_in_fp32" in shown
    again = Summary.model_validate_json(result.ranged.model_dump_json(), strict=False)
    assert again.peak_range == result.ranged.peak_range


def test_a_stage_that_was_asked_for_has_a_range_of_its_own() -> None:
    layout = {"world_size": 4, "pipeline_model_parallel_size": 4}
    experts = {**SMALL["model"]["mixture_of_experts"], "moe_layer_freq": 1}
    model = {**SMALL["model"], "num_layers": 8, "mixture_of_experts": experts}
    case = Workload.from_mapping({**LONG, "model": model, "parallelism": layout})
    ranges = [estimate(case, stage).ranged for stage in range(4)]
    stated = with_fields(case, {GRADIENTS: True})
    (reduced,) = (each for each in ranges[2].ranges if each.field == GRADIENTS)
    assert stated is not None
    assert reduced.cases[-1].peak_allocated_bytes == estimate(stated, 2).peak_allocated_bytes
    highs = [each.peak_range.high_bytes for each in ranges if each.peak_range is not None]
    assert len(highs) == 4
    assert len(set(highs)) > 1
