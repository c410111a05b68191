"""A workload is one frozen, hashable value; anything wrong with it is one clear sentence."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from labkit.errors import InputError
from labkit.workload import RECOMPUTE_MODULES, Workload
from labkit.workload.files import data_directory
from tests.small import full, selective, small

MOONLIGHT = data_directory() / "workloads" / "moonlight-16b.yaml"


@pytest.fixture
def moonlight() -> Workload:
    return Workload.load(MOONLIGHT)


def changed(workload: Workload, **parts: object) -> dict[str, object]:
    """Plain data of `workload` with fields replaced: `parallelism__world_size=6`."""
    data = workload.model_dump()
    for path, value in parts.items():
        *parents, last = path.split("__")
        target = data
        for parent in parents:
            target = target[parent]
        target[last] = value
    return data


def test_moonlight_is_the_published_model(moonlight: Workload) -> None:
    assert moonlight.model.mlp_kinds == ("dense",) + ("moe",) * 26
    assert (moonlight.parallelism.dp, moonlight.parallelism.edp) == (4, 1)
    assert moonlight.num_microbatches == 1
    assert moonlight.padded_vocab_size == 163840
    assert moonlight.findings == []


def test_is_frozen_and_hashable(moonlight: Workload) -> None:
    assert {moonlight, Workload.load(MOONLIGHT)} == {moonlight}
    with pytest.raises(ValidationError):
        moonlight.batch.seq_length = 1  # type: ignore[misc]


def test_content_hash_is_the_same_in_every_process(moonlight: Workload) -> None:
    code = f"from labkit.workload import Workload; print(Workload.load({str(MOONLIGHT)!r}).content_hash)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == moonlight.content_hash


@given(st.sets(st.sampled_from(sorted(set(RECOMPUTE_MODULES) - {"gdn_norm_out", "shared_experts"}))))
def test_round_trips_through_plain_data(labels: set[str]) -> None:
    workload = Workload.load(MOONLIGHT).with_recompute(
        recompute_granularity="selective", recompute_modules=sorted(labels)
    )
    again = Workload.from_mapping(workload.model_dump(mode="json"))
    assert again == workload
    assert again.content_hash == workload.content_hash
    assert again.recompute.modules == labels


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("parallelism__tensor_model_parallel_size", 3, "3 does not divide num_attention_heads (16)"),
        ("parallelism__expert_model_parallel_size", 7, "7 does not divide num_moe_experts (64)"),
        ("parallelism__world_size", 7, "7 ranks do not factor"),
        ("parallelism__sequence_parallel", False, "only with sequence parallelism"),
        ("batch__global_batch_size", 3, "not a multiple of micro_batch_size x data-parallel ranks = 4"),
        ("batch__seq_length", "4096", "input should be a valid integer (got '4096')"),
        ("batch__seq_length", 0, "greater than 0"),
        ("batch__micro_batch_size", 10**30, "less than or equal to 281474976710656"),
        ("batch__global_batch_size", 10**30, "less than or equal to 281474976710656"),
        ("model__num_layers", 28, "it names 27 layers but num_layers is 28"),
        ("model__hiden_size", 1, "unknown key 'model.hiden_size'; did you mean 'hidden_size'?"),
        ("recompute__recompute_modules", ["moe_atc"], "did you mean 'moe_act'?"),
        ("recompute__recompute_modules", ["gdn_norm_out"], "gdn_norm_out needs gated-delta-net layers"),
        ("recompute__recompute_modules", ["shared_experts"], "cannot be recomputed while their computation overlaps"),
        ("recompute__recompute_method", "uniform", "only full recompute takes it"),
        ("recompute__recompute_granularity", "full", "full recompute needs it"),
        ("model__rotary_base", "5e5", "(got '5e5', which is text in YAML; write 500000)"),
        ("model__rotary_base", 5.0e5, "(got 500000.0; write 500000)"),
        ("training__gpu", "h100", "did you mean 'h100-80gb'?"),
    ],
)
def test_says_what_is_wrong_in_one_sentence(moonlight: Workload, field: str, value: object, sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        Workload.from_mapping(changed(moonlight, **{field: value}), source="w.yaml")
    message = str(raised.value)
    assert message.startswith("w.yaml: ")
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "empty"),
        ("- 1", "expected a mapping"),
        ("a:\n  b:\n  c: 1", "nothing follows key 'b': give it a value, or leave it out (line 2, column 3)"),
        ("a: 1\na: 2", "key 'a' is given twice (line 2, column 1)"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.system [echo]", "not valid YAML"),
        ("? [1, 2]\n: 3", "a key must be a plain value"),
        ("model: moonlight-16b-a3b\n", "is missing"),
        ("model: <script>alert(1)</script>\n", "unknown model '<script>alert(1)</script>'"),
    ],
)
def test_hostile_or_broken_yaml_is_an_input_error(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as raised:
        Workload.load(path)
    assert sentence in str(raised.value)


def test_a_model_may_be_named_by_its_file(tmp_path: Path) -> None:
    sizes = data_directory() / "models" / "deepseek-v2-lite.yaml"
    (tmp_path / "mine.yaml").write_text(sizes.read_text())
    text = MOONLIGHT.read_text().replace("model: moonlight-16b-a3b", "model: mine.yaml")
    (tmp_path / "w.yaml").write_text(text)
    assert Workload.load(tmp_path / "w.yaml").model.name == "mine"
    named = text.replace("model: mine.yaml", "model: deepseek-v2-lite")
    (tmp_path / "w.yaml").write_text(named)
    assert Workload.load(tmp_path / "w.yaml").model.vocab_size == 102400


def test_a_misspelt_key_is_named_before_the_one_it_leaves_missing(moonlight: Workload) -> None:
    data = moonlight.model_dump()
    data["batch"]["seq_len"] = data["batch"].pop("seq_length")
    with pytest.raises(InputError, match=r"unknown key 'batch\.seq_len'; did you mean 'seq_length'"):
        Workload.from_mapping(data)


MOE = "model__mixture_of_experts__"
OPTIMIZER = "training__optimizer__"
DATA_PARALLEL = "training__data_parallel__"
DENSE = {"model__mixture_of_experts": None, "parallelism__expert_model_parallel_size": 1}


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MOE}moe_router_topk": 1},
        {f"{OPTIMIZER}exp_avg_dtype": "bf16"},
        {f"{OPTIMIZER}main_grads_dtype": "bf16"},
        {f"{OPTIMIZER}main_params_dtype": "fp16"},
        {f"{OPTIMIZER}optimizer": "sgd"},
        {"training__precision": "fp32"},  # with the fused kernel
        {
            "training__precision": "fp32",
            "training__kernels__attention_backend": "unfused",
            f"{OPTIMIZER}use_precision_aware_optimizer": True,
        },
        {f"{DATA_PARALLEL}use_distributed_optimizer": False},
        {f"{DATA_PARALLEL}overlap_grad_reduce": False},
        {
            f"{DATA_PARALLEL}use_distributed_optimizer": False,
            f"{DATA_PARALLEL}overlap_param_gather": False,
            f"{OPTIMIZER}use_precision_aware_optimizer": True,
        },
        {f"{MOE}moe_router_num_groups": 3, f"{MOE}moe_router_group_topk": 1},
        {f"{MOE}moe_router_group_topk": 2},
        {f"{MOE}moe_router_num_groups": 2, f"{MOE}moe_router_group_topk": 4},
        {f"{MOE}moe_router_num_groups": 8, f"{MOE}moe_router_group_topk": 1},
        {f"{MOE}moe_router_enable_expert_bias": True},
        {"model__hidden_size": 3},
        {"model__hidden_size": 258},  # `validate_args` takes no 4 heads out of it
        {"model__multi_latent_attention__qk_pos_emb_head_dim": 15},
        {"parallelism__expert_tensor_parallel_size": None},
        {f"{MOE}moe_aux_loss_coeff": float("nan")},
        {"model__num_layers": 10**9},
        {f"{MOE}num_moe_experts": 10**7},
        {"batch__seq_length": 10**9 + 1},
        {"model__activation_func": "squared_relu"} | DENSE,
        {"model__gated_linear_unit": False} | DENSE,
        {"model__gated_linear_unit": False, "model__activation_func": "gelu"} | DENSE,
        {"model__hidden_dropout": 1.0},
        {"model__mtp_num_layers": 1, "recompute": full("uniform", 2)},
        {
            "model__multi_latent_attention": None,
            "model__num_query_groups": 1,
            "parallelism__tensor_model_parallel_size": 1,
            "parallelism__sequence_parallel": False,
            "batch__seq_length": 1,
        },
        {"model__mtp_num_layers": 1, "model__position_embedding_type": "learned_absolute"},
        {"model__hybrid_layer_pattern": "+E/+E"},
        {"model__hybrid_layer_pattern": "+E/+E", "model__mtp_num_layers": 2},
        {"model__hybrid_layer_pattern": "+E/", "model__mtp_num_layers": 1},
        {"model__hybrid_layer_pattern": "+E/+|E", "model__mtp_num_layers": 1},
        {"model__hybrid_layer_pattern": "+|E"},
        {"model__hybrid_layer_pattern": "+E|"},
        {"model__mtp_num_layers": 1, "model__gated_delta_net": {"linear_attention_freq": [0, 1]}},
        {"model__add_bias_linear": True, "recompute": selective("mlp")} | DENSE,
        {"batch__seq_length": -(16**5000)},
    ],
)
def test_what_megatron_or_memory_cannot_run_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InputError) as raised:
        small(**changes)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "changes",
    [
        {f"{MOE}moe_router_topk": 1, f"{MOE}moe_router_pre_softmax": True},
        {f"{MOE}moe_router_num_groups": 3},
        {f"{MOE}moe_router_num_groups": 4, f"{MOE}moe_router_group_topk": 2, f"{MOE}moe_router_topk": 3},
        {"model__hidden_size": 258, "model__kv_channels": 64},
        {f"{DATA_PARALLEL}use_distributed_optimizer": False, f"{DATA_PARALLEL}overlap_param_gather": False},
        {
            f"{DATA_PARALLEL}use_distributed_optimizer": False,
            f"{DATA_PARALLEL}overlap_param_gather": False,
            f"{OPTIMIZER}optimizer": "sgd",
        },
        {"model__gated_linear_unit": False, "model__activation_func": "gelu", "model__add_bias_linear": True} | DENSE,
        {"model__activation_func": "squared_relu", "training__kernels__bias_activation_fusion": False} | DENSE,
        {"model__add_bias_linear": True, "recompute": full("uniform", 1)} | DENSE,
        {"model__mtp_num_layers": 1, "recompute": full("block", 2)},
        {"model__hybrid_layer_pattern": "+E/+E/+E", "model__mtp_num_layers": 2},
        {"model__untie_embeddings_and_output_weights": False, "model__position_embedding_type": "learned_absolute"},
        {"model__ffn_hidden_size": 513, f"{MOE}moe_layer_freq": 1},
    ],
)
def test_what_megatron_runs_is_not_refused(changes: dict[str, object]) -> None:
    small(**changes)


def test_aliases_that_stand_for_more_than_memory_holds_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 13)]
    for last in ("model: *a12", "model: {name: *a12}"):
        (tmp_path / "w.yaml").write_text("\n".join([*lines, last]))
        with pytest.raises(InputError):
            Workload.load(tmp_path / "w.yaml")


def test_versions_whose_habits_are_unknown_are_refused(moonlight: Workload) -> None:
    for name, version in (
        ("transformer_engine", "2.12.0"),
        ("transformer_engine", "banana"),
        ("megatron_core", "0.18"),
    ):
        with pytest.raises(InputError, match="is not known here; use one of"):
            Workload.from_mapping(changed(moonlight, **{f"training__software__{name}": version}))


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing.yaml", tmp_path, tmp_path / "binary.yaml", Path("/dev/zero")):
        with pytest.raises(InputError):
            Workload.load(path)


def test_choices_that_do_nothing_are_warned_about(moonlight: Workload) -> None:
    idle = moonlight.with_recompute(recompute_granularity="selective", recompute_modules=["core_attn", "mlp"])
    assert [finding.severity for finding in idle.findings] == ["warning"]
    assert "core_attn saves next to nothing" in str(idle.findings[0])
    normed = moonlight.with_recompute(recompute_granularity="selective", recompute_modules=["layernorm"])
    assert not normed.findings
    data = changed(normed, model__multi_latent_attention=None, **DENSE)
    (finding,) = Workload.from_mapping(data).findings
    assert "layernorm saves nothing: the layers' norms are parts of the linears behind them" in str(finding)
    kernels = {"transformer_impl": "local", "persist_layer_norm": False}
    own = Workload.from_mapping({**data, "training": {"kernels": kernels}, "parallelism": {"world_size": 1}})
    assert not own.findings


def test_full_recompute_supersedes_the_list(moonlight: Workload) -> None:
    full = moonlight.with_recompute(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        recompute_modules=["moe_act"],
    )
    assert full.recompute.modules == frozenset()
    assert full.recompute.label == "full uniform 1"
    assert "supersedes" in str(full.findings[0])


def test_a_ring_too_long_to_list_is_one_sentence_and_says_what_would_work() -> None:
    layout = {"world_size": 2**20, "context_parallel_size": 2**20}
    with pytest.raises(InputError, match="use cp_comm_type all_gather or at most 512 ranks"):
        small(parallelism=layout, batch__seq_length=2**21, model__mixture_of_experts=None)
    small(parallelism=layout | {"cp_comm_type": "all_gather"}, batch__seq_length=2**21, model__mixture_of_experts=None)


def test_a_world_larger_than_any_is_one_sentence() -> None:
    with pytest.raises(InputError, match=r"parallelism\.world_size: input should be less than or equal to 1048576"):
        small(parallelism={"world_size": 2**40})


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"recompute": None}, r"recompute: should be a mapping of keys to values \(got None\)"),
        ({"batch": [1, 2]}, r"batch: should be a mapping of keys to values \(got a list of 2\)"),
    ],
)
def test_a_part_that_is_no_mapping_is_one_sentence(part: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        small(**part)
