"""What a launch carries beyond the fields of a workload: traced as Megatron-LM takes it."""

import json
from pathlib import Path
from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.study import Study
from labkit.study.drivers import Started
from labkit.workload import Launch
from tests.small import MODEL, small
from tests.test_docs import launches


def launched(*arguments: str, environment: tuple[str, ...] = ()) -> Workload:
    """The small workload with further arguments."""
    return small().model_copy(update={"launch": Launch(arguments=arguments, environment=environment)})


def test_an_argument_without_a_field_reaches_megatron(server: TraceServer) -> None:
    plain, normed = server.run(small()), server.run(launched("--log-params-norm"))
    # `calc_params_l2_norm` sums the squares of an fp32 copy of what the optimizer does not hold in fp32 itself.
    peaks = [max(p.peak_tensor_bytes for p in t.summary.phases if p.phase == "optimizer") for t in (plain, normed)]
    assert peaks[1] >= peaks[0]
    assert plain.ledger.between_steps().total() == normed.ledger.between_steps().total()


def test_attention_sinks_are_parameters_of_one_number_a_head(server: TraceServer) -> None:
    workload = launched("--softmax-type learnable")
    sinks = [row for row in server.run(workload).ledger.rows if row.tensor == "softmax_offset"]
    assert {row.shape for row in sinks} == {(workload.model.num_attention_heads // workload.parallelism.tp,)}
    assert len({row.module for row in sinks}) == workload.model.num_layers


def test_frozen_layers_keep_no_gradients(server: TraceServer) -> None:
    plain, frozen = server.run(small()), server.run(launched("--freeze-all-layers"))
    assert frozen.ledger.between_steps().total() < plain.ledger.between_steps().total()
    assert frozen.peak_allocated_bytes < plain.peak_allocated_bytes


def test_blocks_given_back_each_step_leave_less_reserved(server: TraceServer) -> None:
    workload, launch = (
        small(batch__seq_length=8192, model__vocab_size=32000),
        Launch(arguments=("--empty-unused-memory-level 2",)),
    )
    plain, emptied = server.run(workload), server.run(workload.model_copy(update={"launch": launch}))
    assert plain.peak_reserved_bytes is not None
    assert emptied.peak_reserved_bytes is not None
    assert emptied.peak_reserved_bytes < plain.peak_reserved_bytes
    assert [p.peak_tensor_bytes for p in emptied.summary.phases] == [p.peak_tensor_bytes for p in plain.summary.phases]
    assert not emptied.summary.warnings


@pytest.mark.parametrize("section", launches(), ids=lambda section: section["arguments"][-1])
def test_launches_of_the_documents_are_traced(server: TraceServer, section: dict[str, list[str]]) -> None:
    mapping = small(recompute__recompute_modules=["moe_act"]).model_dump(mode="json", exclude_unset=True)
    assert server.run(Workload.from_mapping(mapping | {"launch": section})).peak_allocated_bytes


def test_fp16_has_the_sizes_of_bf16_and_a_loss_scaler(server: TraceServer) -> None:
    native = small(training__kernels__cross_entropy_fusion_impl="native")
    half = native.model_copy(update={"launch": Launch(arguments=("--fp16",))})
    plain, scaled = server.run(native), server.run(half.checked())
    assert {"fp16", "bf16"} & {row.dtype for row in scaled.ledger.retained().rows} == {"fp16"}
    assert plain.ledger.retained().total() == scaled.ledger.retained().total()
    # Each of two optimizers (experts have one) has a scale, its lower bound, two factors and `found_inf` in place of
    # `_scale_one`, and `_dummy_overflow_buf` (`DynamicGradScaler`, `MixedPrecisionOptimizer`).
    added = scaled.ledger.between_steps().total() - plain.ledger.between_steps().total()
    assert added == 2 * 5 * 512


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--num-layers 3", "launch.arguments: --num-layers is what a field of the workload says"),
        ("--attention-backend unfused", "--attention-backend is what a field of the workload says"),
        ("--recompute-activations", "--recompute-activations is what recompute says"),
        ("--padded-vocab-size 5000", "--padded-vocab-size is what model.vocab_size says"),
        ("--yaml-cfg x.yaml", "--yaml-cfg is no part of a training step"),
        ("--result-rejected-tracker-filename x", "--result-rejected-tracker-filename is no part of a training step"),
        ("--nccl-communicator-config-path x", "--nccl-communicator-config-path is no part of a training step"),
        ("--spec os system", "--spec names no layers of megatron.core"),
        ("--spec megatron.core.models.gpt.gpt_layer_specs nope", "--spec names no layers of megatron.core"),
        ("--lr x", "launch.arguments: argument --lr: invalid float value: 'x'"),
        ("--fp8-recipe x", "launch.arguments: the value of --fp8-recipe: there is no 'x'"),
        ("--moe-use-upcycling", "launch.arguments: Megatron refuses them: When using upcycling"),
        ("--delay-wgrad-compute", "launch.arguments: Megatron refuses them: overlap_moe_expert_parallel_comm must"),
        ("--transformer-impl local", "--transformer-impl is what a field of the workload says"),
    ],
)
def test_a_wrong_argument_is_one_sentence(server: TraceServer, argument: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        server.run(launched(argument))


def test_wrong_arguments_are_found_without_a_trace(server: TraceServer) -> None:
    server.check(launched("--log-params-norm"))
    with pytest.raises(InputError, match=r"small: launch.arguments: Megatron refuses them: When using upcycling"):
        server.check(launched("--moe-use-upcycling"))


def test_a_study_with_wrong_arguments_begins_nothing(server: TraceServer, tmp_path: Path) -> None:
    base = launched("--lr x").model_dump(mode="json", exclude_unset=True)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    stated = {"name": "s", "title": "s", "base": base, "control": {}, "candidates": [{"recompute": full}]}
    (tmp_path / "s.yaml").write_text(json.dumps(stated))
    study = Study.load(tmp_path / "s.yaml")
    with pytest.raises(InputError, match=r"s\.yaml: \[\]: small: launch.arguments: argument --lr: invalid float"):
        study._check(study.cells, Started(server.run_stages, server.check))


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"arguments": ["num-layers 3"]}, "should be an option and its values"),
        ({"arguments": ["--log-param-norm"]}, "has no --log-param-norm; did you mean '--log-params-norm'?"),
        ({"arguments": ["--lr 1 --seed 2"]}, "should be one option with its values"),
        ({"arguments": ["--lr '1"]}, "a quote is not closed"),
        ({"environment": ["LD_PRELOAD=x.so"]}, "'LD_PRELOAD' is no variable"),
        ({"environment": ["NVTE_FLASH_ATTN"]}, "should be NAME=value"),
        ({"environment": ["PYTORCH_ALLOC_CONF=x:1"]}, "is what training.allocator says; set it there"),
    ],
)
def test_a_wrong_section_is_one_sentence(section: dict[str, list[str]], said: str) -> None:
    mapping = small().model_dump(mode="json", exclude_unset=True) | {"launch": section}
    with pytest.raises(InputError, match=said):
        Workload.from_mapping(mapping)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "takes no fp16; set native"),
        (
            {"training": {"precision": "fp32", "kernels": {"attention_backend": "unfused"}}},
            "training.precision: --fp16 .*; set bf16",
        ),
    ],
)
def test_fp16_goes_with_what_has_it(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        small(**changes).model_copy(update={"launch": Launch(arguments=("--fp16",))}).checked()


def test_megatron_fsdp_averages_in_collectives_with_experts_alone() -> None:
    launch, averaging = (
        Launch(arguments=("--use-megatron-fsdp",)),
        {"training__data_parallel__average_in_collective": True},
    )
    small(**averaging).model_copy(update={"launch": launch}).checked()
    dense = small(**averaging, model={**MODEL, "mixture_of_experts": None}, parallelism={"world_size": 1})
    with pytest.raises(InputError, match=r"average_in_collective: .*; set it to false"):
        dense.model_copy(update={"launch": launch}).checked()


def test_an_estimate_says_what_it_does_not_price() -> None:
    (finding,) = (
        finding for finding in launched("--fp8-format hybrid").findings if finding.field == "launch.arguments"
    )
    assert finding.severity == "warning"
    assert "does not price --fp8-format hybrid" in finding.reason
