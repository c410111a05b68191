"""What is picked: every control is a field, every start can run, what cannot says why as `labkit check` does."""

from pathlib import Path
from typing import Any

import pytest

from labkit import Workload
from labkit.check import check
from labkit.errors import InputError
from labkit.explore.state import CONTROLS, GIVEN, LABELS, LAYERS, MODE, Choice, Starts, controls, picked, values
from labkit.memory.outline import block, outline
from labkit.workload.gpu import GPUS
from labkit.workload.stages import fullest_stages
from tests.small import selective, small

MOONLIGHT = Choice("workloads/moonlight-16b")


def changed(start: Workload, **fields: Any) -> Workload:
    """The workload with fields picked, which can run; `__` are dots."""
    choice = Choice.of({"start": GIVEN, "fields": {name.replace("__", "."): value for name, value in fields.items()}})
    found = picked(choice, Starts(start))
    assert found.workload is not None
    assert found.can_run, found.findings
    return found.workload


KEYS = [entry["key"] for group in Starts().listed for entry in group["starts"]]


@pytest.mark.parametrize("key", KEYS)
def test_every_start_can_run_and_is_shown_as_it_is(key: str) -> None:
    starts = Starts()
    start = starts.workload(key)
    assert start.can_run
    assert not [finding for finding in start.findings if finding.severity == "warning"]
    shown = Choice.of({"start": key, "fields": {name: _plain(value) for name, value in values(start).items()}})
    again = picked(shown, starts).workload
    assert again == start
    assert again is not None
    assert again.model_dump(exclude_unset=True) == start.model_dump(exclude_unset=True), "what is open stays open"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("models/")])
def test_a_model_starts_where_it_fits(key: str) -> None:
    start = Starts().workload(key)
    peak = max(outline(start, stage, block).peak_bytes for stage in fullest_stages(start))
    assert peak < GPUS["h100-80gb"].total_memory_bytes


def test_the_shipped_and_the_given_are_listed() -> None:
    listed = {group["group"]: [each["name"] for each in group["starts"]] for group in Starts(small()).listed}
    assert listed["given"] == ["small"]
    assert {"moonlight-16b", "nemotron-3-nano"} <= set(listed["workloads"])
    assert len(listed["models"]) == len(list(Path("data/models").glob("*.yaml")))


def test_every_control_is_of_a_kind() -> None:
    about = {each["path"]: each for each in controls()["controls"]}
    assert len(about) == len(CONTROLS)
    assert about["parallelism.sequence_parallel"]["kind"] == "flag"
    assert about["parallelism.expert_tensor_parallel_size"]["optional"]
    assert about["training.gpu"]["options"] == list(GPUS)
    assert about["training.optimizer.exp_avg_dtype"]["options"] == ["fp32", "bf16", "fp16"]
    assert about["batch.seq_length"] | {"kind": "number", "optional": False} == about["batch.seq_length"]
    assert len(controls()["labels"]) == 8


def test_fields_that_are_picked_are_the_workload_s() -> None:
    start = small()
    assert changed(start, batch__seq_length=512) == small(batch__seq_length=512)
    layout = {"parallelism__tensor_model_parallel_size": 1, "parallelism__sequence_parallel": False}
    assert changed(start, batch__global_batch_size=4, **layout) == small(batch__global_batch_size=4, **layout)
    moments = {"training__optimizer__use_precision_aware_optimizer": True, "training__optimizer__exp_avg_dtype": "bf16"}
    assert changed(start, **moments) == small(**moments)
    assert changed(start, routing__kind="worst") == small(routing__kind="worst")
    assert changed(small(routing__kind="worst"), routing__kind=None).routing is None


@pytest.mark.parametrize(
    ("fields", "recompute"),
    [
        ({MODE: "none"}, {}),
        ({MODE: "selective", LABELS: ["moe_act", "layernorm"]}, selective("moe_act", "layernorm")),
        (
            {MODE: "full uniform", LAYERS: 1, LABELS: ["moe_act"]},
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        (
            {MODE: "full block", LAYERS: 2},
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
        ),
    ],
)
def test_recompute_is_megatron_s_four_fields(fields: dict[str, Any], recompute: dict[str, Any]) -> None:
    found = picked(Choice.of({"start": GIVEN, "fields": fields}), Starts(small()))
    assert found.workload == small(recompute=recompute)


def test_fp8_of_a_launch_can_be_taken_off() -> None:
    start = small(launch__arguments=["--fp8-format hybrid", "--log-params-norm"])
    assert values(start)["fp8"]
    found = picked(Choice.of({"start": GIVEN, "fields": {"fp8": False}}), Starts(start)).workload
    assert found is not None
    assert found.launch is not None
    assert found.launch.arguments == ("--log-params-norm",)
    assert not values(small())["fp8"]


def test_what_cannot_run_says_why_as_check_does(tmp_path: Path) -> None:
    found = picked(Choice(MOONLIGHT.start, (("parallelism.expert_model_parallel_size", 7),)), Starts())
    assert not found.can_run
    file = tmp_path / "seven.yaml"
    text = Path("data/workloads/moonlight-16b.yaml").read_text()
    file.write_text(text.replace("expert_model_parallel_size: 8", "expert_model_parallel_size: 7"))
    assert found.findings == check([file]).files[0].findings
    assert "7 does not divide num_moe_experts (64)" in found.findings[0].reason
    assert found.findings[0].remedy.startswith("use one of 1, 2, 4, 8")


def test_an_idle_label_is_a_warning_and_runs() -> None:
    found = picked(Choice(GIVEN, ((MODE, "selective"), (LABELS, ("core_attn",)))), Starts(small()))
    assert found.can_run
    assert [each.severity for each in found.findings] == ["warning"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("batch.seq_length", "many", "should be a valid integer"),
        ("batch.seq_length", 2.5, "should be a valid integer"),
        ("batch.seq_length", 0, "greater than 0"),
        ("parallelism.world_size", 2**40, "less than or equal to 1048576"),
        ("training.gpu", "<script>", "is not allowed"),
        (MODE, "sideways", "is not allowed"),
    ],
)
def test_a_value_of_the_wrong_kind_is_a_finding(field: str, value: Any, reason: str) -> None:
    found = picked(Choice.of({"start": MOONLIGHT.start, "fields": {field: value}}), Starts())
    assert found.workload is None
    (finding,) = found.findings
    assert reason in finding.reason
    assert finding.severity == "error"


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"start": 3},
        {"start": GIVEN, "fields": []},
        {"start": GIVEN, "fields": {"model.name": "x"}},
        {"start": GIVEN, "fields": {"batch.seq_length": {"a": 1}}},
        {"start": GIVEN, "fields": {f"x{number}": 1 for number in range(101)}},
    ],
)
def test_a_message_of_another_form_is_refused_in_a_sentence(message: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"^explorer: "):
        Choice.of(message)


@pytest.mark.parametrize("key", ["given", "models/none", "workloads/../models/qwen3-8b", "", "x" * 10_000])
def test_a_start_that_is_not_there_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="explorer: no start") as raised:
        Starts().workload(key)
    assert len(str(raised.value)) < 200


def test_choices_are_values() -> None:
    assert Choice.of({"start": "a", "fields": {LABELS: ["mlp"]}}) == Choice("a", ((LABELS, ("mlp",)),))
    assert len({MOONLIGHT, Choice("workloads/moonlight-16b")}) == 1
