"""A study file becomes workloads that can run, or one sentence on what is wrong with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.errors import InputError
from labkit.study.matrix import Matrix
from labkit.workload.files import data_directory
from tests.study.builder import SMALL

MOONLIGHT = data_directory() / "studies" / "moonlight-16b.yaml"


type Load = Callable[..., Matrix]


def study(**changes: Any) -> dict[str, Any]:
    return {
        "name": "small",
        "title": "Small study",
        "base": SMALL,
        "control": {"recompute": {"recompute_modules": []}},
        "candidates": [{"recompute": {"recompute_modules": ["moe_act"]}}],
        **changes,
    }


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loaded(**changes: Any) -> Matrix:
        path = tmp_path / "study.yaml"
        path.write_text(yaml.safe_dump(study(**changes)))
        return Matrix.load(path)

    return loaded


def test_moonlight_has_six_matched_cells_with_published_figures() -> None:
    matrix = Matrix.load(MOONLIGHT)
    assert [candidate.label for candidate in matrix.candidates] == [
        "[]",
        "[core_attn]",
        "[mla_up_proj]",
        "[mla_up_proj, mlp]",
        "[moe_act]",
        "[layernorm, moe_act]",
    ]
    assert [candidate.is_control for candidate in matrix.candidates] == [True] + [False] * 5
    assert not any(candidate.differs_in for candidate in matrix.candidates)
    assert matrix.published is not None
    measured = [matrix.published.measurement(candidate.workload) for candidate in matrix.candidates]
    assert [one.peak_allocated_bytes for one in measured if one] == [
        36_618_000_000,
        36_614_000_000,
        35_902_000_000,
        35_917_000_000,
        35_941_000_000,
        35_949_000_000,
    ]
    assert [one.step_time_ms for one in measured if one] == [457.18, 474.80, 480.89, 496.73, 466.26, 506.53]
    (setting,) = matrix.settings
    assert (setting.name, setting.limit.name, setting.limit.stated) == ("", "NVIDIA H100 80GB HBM3", False)


def test_override_keeps_what_it_does_not_name(load: Load) -> None:
    matrix = load(candidates=[{"recompute": {"recompute_modules": ["moe_act"]}}])
    control, candidate = matrix.candidates
    assert candidate.workload.recompute.recompute_granularity == "selective"
    assert candidate.workload.model == control.workload.model


def test_candidate_that_changes_more_than_recompute_is_marked(load: Load) -> None:
    override = {"recompute": {"recompute_modules": ["moe_act"]}, "batch": {"seq_length": 256}}
    (_, candidate) = load(candidates=[override]).candidates
    assert candidate.label == "[moe_act], seq_length=256"
    assert candidate.differs_in == ("recompute", "batch.seq_length")


def test_candidate_that_changes_one_other_choice_is_matched(load: Load) -> None:
    (_, candidate) = load(candidates=[{"batch": {"seq_length": 256}}]).candidates
    assert (candidate.label, candidate.changes, candidate.differs_in) == (
        "[], seq_length=256",
        ("batch.seq_length",),
        (),
    )


def test_sweep_has_a_control_with_its_candidates_in_each_setting(load: Load) -> None:
    layouts = [{"world_size": 2}, {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}]
    matrix = load(sweep={"batch.seq_length": [128, 256], "parallelism": layouts})
    names = [setting.name for setting in matrix.settings]
    assert names == [
        "seq_length=128, world_size=2",
        "seq_length=128, sequence_parallel=True, tensor_model_parallel_size=2, world_size=4",
        "seq_length=256, world_size=2",
        "seq_length=256, sequence_parallel=True, tensor_model_parallel_size=2, world_size=4",
    ]
    for setting in matrix.settings:
        assert [candidate.is_control for candidate in setting.candidates] == [True, False]
        assert [candidate.changes for candidate in setting.candidates] == [(), ("recompute",)]
        assert {candidate.setting for candidate in setting.candidates} == {setting.name}
    last = matrix.candidates[-1]
    assert last.label == f"[moe_act] at {names[3]}"
    assert (last.workload.batch.seq_length, last.workload.parallelism.tp, last.workload.parallelism.ep) == (256, 2, 2)
    assert [len(matrix.chosen(label)) for label in ("moe_act", names[1], last.label)] == [4, 2, 1]


def test_sweep_over_models_by_name(load: Load) -> None:
    matrix = load(base="moonlight-16b", sweep={"model": ["moonlight-16b-a3b", "qwen3-30b-a3b"]})
    assert [setting.name for setting in matrix.settings] == ["model=moonlight-16b-a3b", "model=qwen3-30b-a3b"]
    assert [setting.control.workload.model.num_layers for setting in matrix.settings] == [27, 48]


def test_settings_that_the_rules_reject_are_kept_with_the_reason(load: Load) -> None:
    matrix = load(sweep={"parallelism.expert_model_parallel_size": [2, 3]})
    assert [setting.name for setting in matrix.settings] == ["expert_model_parallel_size=2"]
    ((label, reason),) = matrix.refused
    assert label == "control at expert_model_parallel_size=3"
    assert reason.startswith("parallelism.expert_model_parallel_size: 3 does not divide")


def test_full_recompute_can_be_a_candidate_of_a_selective_base(load: Load) -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_modules": None,
    }
    assert load(candidates=[{"recompute": full}]).candidates[1].label == "full uniform 1"


def test_base_is_a_mapping_a_path_or_a_name(load: Load, tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(SMALL))
    assert load().control.workload == load(base="base.yaml").control.workload
    assert load(base="moonlight-16b").control.workload.model.num_layers == 27


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"candidates": []}, "candidates is empty; name at least one choice"),
        ({"drivers": []}, "drivers is empty"),
        ({"drivers": ["trase"]}, "'trase' is not allowed.*trace"),
        ({"candidates": ["moe_act"]}, r"candidates\.0"),
        ({"candidates": [{"recompute": {"recompute_modules": []}}]}, r"candidates\[0\] \[\] repeats the control"),
        (
            {"candidates": [{"recompute": {"recompute_modules": names}} for names in (["mlp", "moe"], ["moe", "mlp"])]},
            r"candidates\[1\] \[mlp, moe\] repeats candidates\[0\]",
        ),
        ({"candidates": [{"recompute": {"recompute_modules": ["moe_akt"]}}]}, "candidates.0.*did you mean 'moe_act'"),
        ({"candidates": [{"recompute": {"modules": ["moe_act"]}}]}, "unknown key 'recompute.modules'.*recompute_mod"),
        ({"candidates": [{"recomput": {}}]}, "unknown key 'recomput'; did you mean 'recompute'"),
        ({"control": {"parallelism": {"tensor_model_parallel_size": 3}}}, "control: parallelism.tensor_model_parallel"),
        ({"candidate": []}, "unknown key 'candidate'; did you mean 'candidates'"),
        ({"name": "../../etc"}, "name: string should match"),
        ({"base": 7}, "base is neither a name, a path nor a workload mapping"),
        ({"base": "moonlite-16b"}, "nothing called 'moonlite-16b' in data/workloads; did you mean 'moonlight-16b'"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml: cannot be read"),
        ({"published": "moonlight-17b"}, "nothing called 'moonlight-17b' in data/published; did you mean"),
        (
            {"sweep": {"parallelism.expert_model_parallel_size": [3]}},
            "no setting of the sweep can run, .* 3 does not div",
        ),
        ({"sweep": {"batch.seq_len": [128]}}, "control at seq_len=128: unknown key 'batch.seq_len'"),
        ({"sweep": {"batch.seq_length": [128, 128]}}, "sweep has seq_length=128 twice"),
        (
            {"sweep": {"batch": [{"seq_length": 128}], "batch.seq_length": [256]}},
            "sweep: batch.seq_length is part of batch, which is swept too",
        ),
        (
            {"sweep": {"recompute.recompute_modules": [["mlp"], ["moe_act"]]}},
            "have the same control; leave what varies out of control",
        ),
        ({"sweep": {"batch.seq_length": []}}, r"sweep.batch\.seq_length"),
        ({"sweep": {"batch.seq_length": list(range(99999))}}, "sweep asks for 199998 candidates"),
        ({"repetitions": 0}, "repetitions"),
        ({"target": {}}, "target takes one of gpu and peak_allocated_bytes"),
        ({"target": {"gpu": "h100-80gb", "peak_allocated_bytes": 1}}, "target takes one of"),
        ({"target": {"gpu": "h100-80"}}, "unknown GPU 'h100-80'; did you mean 'h100-80gb'"),
    ],
)
def test_wrong_study_is_one_sentence(load: Load, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        load(**changes)
    assert "study.yaml" in str(caught.value) or "nowhere.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_control_missing_is_named(tmp_path: Path) -> None:
    stated = study()
    del stated["control"]
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(stated))
    with pytest.raises(InputError, match="'control' is missing"):
        Matrix.load(path)


def test_candidate_is_found_by_label_or_bare_modules() -> None:
    matrix = Matrix.load(MOONLIGHT)
    for label in ("[layernorm, moe_act]", "layernorm, moe_act", "moe_act,layernorm"):
        assert [candidate.label for candidate in matrix.chosen(label)] == ["[layernorm, moe_act]"]
    assert [candidate.is_control for candidate in matrix.chosen("[]")] == [True]
    with pytest.raises(InputError, match=r"no candidate '\[moe_act, mlp\]'"):
        matrix.chosen("[moe_act, mlp]")


def test_target_replaces_the_gpus_memory(load: Load) -> None:
    assert load(target={"peak_allocated_bytes": 10**9}).settings[0].limit[1:] == (10**9, True)
    assert load(target={"gpu": "h200-141gb"}).settings[0].limit.name == "NVIDIA H200"
