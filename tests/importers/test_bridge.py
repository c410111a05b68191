"""Recipes of Megatron Bridge become workloads with everything stated; what they cannot say is named.

`recipes/`: configurations of Megatron Bridge 0.6.2's own recipes (NVIDIA), as a run saves them; but for the first
without sections that decide no memory. That their models are what Megatron makes of the workloads is held by
`test_megatron_args.py`.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cli import main
from labkit.errors import InputError
from labkit.importers.bridge import import_bridge
from labkit.importers.imported import Imported
from labkit.memory.estimate import estimate
from labkit.workload import Workload
from labkit.workload.files import load_mapping, parse_mapping

RECIPES = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}
CONFIGS = {
    row["model"]: row["config"]
    for row in map(json.loads, Path(__file__).with_name("configs.jsonl").read_text(encoding="utf-8").splitlines())
}
OVERRIDES: dict[str, Any] = {
    "model": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "hf_path": "Qwen/Qwen3-0.6B"},
    "train": {"micro_batch_size": 1, "global_batch_size": 8},
    "dataset": {"seq_length": 2048},
}


def imported(recipe: dict[str, Any], folder: Path, **options: Any) -> Imported:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))  # which is YAML too, and written faster
    return import_bridge(path, **options)


def with_config(recipe: dict[str, Any], folder: Path, name: str = "Qwen3-0.6B") -> Imported:
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return imported(recipe, folder, config=folder / "config.json")


@pytest.mark.parametrize("name", RECIPES)
def test_a_saved_configuration_leaves_nothing_unknown(name: str) -> None:
    found = import_bridge(RECIPES[name])
    assert not [note for note in found.notes if "labkit does not know" in note]
    assert Workload.from_mapping(parse_mapping(found.yaml, name)) == found.workload
    assert estimate(found.workload).outline.peak_bytes > 0


def test_moonlight_as_its_recipe_has_it() -> None:
    found = import_bridge(RECIPES["moonlight_16b"])
    workload = found.workload
    assert found.counted == ["15,960,163,840 (15.96 billion); 1,664 expert biases beside them are buffers in Megatron"]
    assert (workload.parallelism.ep, workload.parallelism.etp, workload.parallelism.world_size) == (8, 1, 8)
    assert (workload.batch.micro_batch_size, workload.batch.global_batch_size) == (2, 1024)
    optimizer = workload.training.optimizer
    assert (optimizer.use_precision_aware_optimizer, optimizer.exp_avg_dtype, optimizer.main_grads_dtype) == (
        True,
        "bf16",
        "bf16",
    )
    assert optimizer.fp8_recipe == "tensorwise"  # the default of a precision without FP8
    assert not workload.training.data_parallel.grad_reduce_in_fp32
    assert workload.training.kernels.moe_token_dispatcher_type == "flex"
    assert workload.training.allocator.expandable_segments
    assert [note.partition(":")[0] for note in found.not_priced] == [
        "model.delay_wgrad_compute",
        "model.overlap_moe_expert_parallel_comm",
    ]
    assert found.not_expressed == []


def test_stages_names_and_precisions_of_other_recipes() -> None:
    deepseek = import_bridge(RECIPES["deepseek_v3"]).workload
    layout = "Etttt|" + "tttt|" * 14 + "tmL"
    assert deepseek.parallelism.pipeline_model_parallel_layout == layout
    assert (deepseek.parallelism.world_size, deepseek.model.mtp_num_layers) == (1024, 1)
    assert deepseek.model.vocab_size == 32000  # the tokenizer's, as use_tokenizer_vocab_size asks
    nano = import_bridge(RECIPES["nemotron_3_nano"])
    assert nano.workload.model.activation_func == "squared_relu"
    assert nano.workload.model.num_layers == 52
    low = import_bridge(RECIPES["llama3_8b_low_precision"])
    assert low.workload.launch is not None
    assert {"--fp8-format hybrid", "--fp8-param-gather", "--first-last-layers-bf16"} <= {*low.workload.launch.arguments}


def test_overrides_take_the_model_of_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"model.num_layers is missing; give its config.json by --config \(that of Qwen"
    ):
        imported(OVERRIDES, tmp_path)
    found = with_config(OVERRIDES, tmp_path)
    workload = found.workload
    assert (workload.model.name, workload.model.num_layers, workload.model.qk_layernorm) == ("Qwen3-0.6B", 28, True)
    assert (workload.parallelism.tp, workload.parallelism.sequence_parallel) == (2, True)
    assert (workload.batch.seq_length, workload.batch.global_batch_size) == (2048, 8)
    assert workload.training.data_parallel.grad_reduce_in_fp32  # as `bf16_mixed` has it
    assert not workload.model.untie_embeddings_and_output_weights
    assert sum("as in Megatron Bridge's common recipe" in note for note in found.assumed) == 3


@pytest.mark.parametrize(
    "name", ["DeepSeek-V3", "NVIDIA-Nemotron-3-Super-120B-A12B-FP8", "Qwen3-Next-80B-A3B-Instruct"]
)
def test_every_kind_of_model_can_be_taken(name: str, tmp_path: Path) -> None:
    workload = with_config({"model": {"expert_model_parallel_size": 8}, "train": {}}, tmp_path, name).workload
    again = (tmp_path / "config.json").read_text()
    assert json.loads(again)["hidden_size"] == workload.model.hidden_size
    assert workload.model.mixture_of_experts is not None
    assert workload.parallelism.etp == 1
    assert workload.model.mtp_num_layers == (None if "Next" in name else 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"colour": "red"}}, "model.colour 'red': labkit does not know what it decides"),
        ({"model": {"fp32_residual_connection": True}}, "model.fp32_residual_connection: labkit has no field for it"),
        ({"model": {"mamba_chunk_size": 256}}, "model.mamba_chunk_size 256: states of chunks; taken as 128"),
        ({"ddp": {"nccl_ub": True}}, "ddp.nccl_ub: gradient and parameter buffers in NCCL's own pool"),
        ({"ddp": {"bucket_bytes": 5}}, "ddp.bucket_bytes 5: labkit does not know what it decides"),
        ({"optimizer": {"optimizer": "muon"}}, "optimizer.optimizer muon: taken as adam"),
        ({"peft": {"_target_": "megatron.bridge.peft.lora.LoRA"}}, "peft: adapters on a frozen base"),
        ({"dist": {"use_torch_fsdp2": True}}, "dist.use_torch_fsdp2 true: taken as Megatron's own"),
        ({"extra": {"a": 1}}, "extra a mapping of 1: labkit does not know what it decides"),
        ({"model": {"transformer_layer_spec": "my.own.spec"}}, "model.transformer_layer_spec 'my.own.spec': layers of"),
        ({"comm_overlap": {"tp_comm_overlap": True}}, "model.tp_comm_overlap: user buffers of tensor-parallel overlap"),
        ({"mixed_precision": "bf16-with-mxfp8-mixed"}, "model.fp8 e4m3: FP8 copies of weights and activations"),
    ],
)
def test_what_changes_memory_is_named(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    recipe = {**OVERRIDES, **change, "model": {**OVERRIDES["model"], **change.get("model", {})}}
    found = with_config(recipe, tmp_path)
    assert [note for note in (*found.not_priced, *found.not_expressed) if note.startswith(said)]


def test_communication_and_precision_are_applied_as_a_run_would(tmp_path: Path) -> None:
    ddp = {"overlap_grad_reduce": False, "overlap_param_gather": False, "use_distributed_optimizer": True}
    recipe = {**OVERRIDES, "ddp": ddp, "comm_overlap": {"tp_comm_overlap": False}, "mixed_precision": "fp16-mixed"}
    alone = with_config(recipe, tmp_path).workload.training.data_parallel
    assert (alone.overlap_grad_reduce, alone.overlap_param_gather, alone.grad_reduce_in_fp32) == (False, False, False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen3-0.6B"]))
    several = imported(recipe, tmp_path, config=tmp_path / "config.json", world_size=8)
    assert several.workload.training.data_parallel.overlap_param_gather
    assert several.workload.parallelism.dp == 4
    assert (
        "model.fp16: priced as bf16, whose tensors have the same sizes; a loss scaler's are left out"
        in several.not_priced
    )


def test_numbers_as_recipes_write_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPES["moonlight_16b"].read_text().replace("rotary_base: 50000.0", "rotary_base: 5e4"))
    assert import_bridge(path).workload.model.rotary_base == 50000


def test_a_provider_of_another_name_may_have_other_defaults(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    own = {**OVERRIDES, "model": {"_target_": "megatron.bridge.models.Llama3ModelProvider", **sizes}}
    found = imported(own, tmp_path)
    assert found.workload.model.normalization == "LayerNorm"
    said = "model: Llama3ModelProvider has defaults of its own; what the file leaves out is taken as GPTModelProvider's"
    assert said in found.assumed
    named = {**own, "model": {"_target_": own["model"]["_target_"]}}
    assert not [note for note in with_config(named, tmp_path).assumed if "defaults of its own" in note]


def test_names_are_data(tmp_path: Path) -> None:
    written = {"_target_": "os.system", "_args_": ["touch " + str(tmp_path / "made")], "_call_": True}
    recipe = {**OVERRIDES, "model": {**OVERRIDES["model"], "init_method": written}, "logger": written}
    with_config(recipe, tmp_path)
    assert not (tmp_path / "made").exists()


HOSTILE = {
    b"": "empty; expected a mapping",
    b"- 1": "expected a mapping with text keys",
    b"\xff\xfe": "not text in UTF-8",
    b"a: 1": "no recipe of Megatron Bridge: it has none of model, train",
    b"model: !!python/object/apply:os.system [ls]\n": "not valid YAML",
    b"model: 3": "model: should be a mapping of keys to values (got 3)",
    b"model: {num_layers: 2, num_layers: 3}": "key 'num_layers' is given twice",
    b"model: {num_layers: 1" + b"0" * 40 + b"}": "an integer of more than 63 bits",
    b"model: {num_layers: true, hidden_size: 8}": "model.num_layers: should be a number (got True)",
    b"model: {num_layers: -3, hidden_size: 8, num_attention_heads: 2, vocab_size: 9}": "num_layers: input should be",
    b"model: {num_layers: 2, hidden_size: .nan, num_attention_heads: 2, vocab_size: 9}": "hidden_size: should be a",
    b"model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}": "model.vocab_size is missing",
    b"model: {_target_: a.T5ModelProvider}": "model: T5ModelProvider is an encoder and a decoder",
    b"model: {tensor_model_parallel_size: '${x}'}": "tensor_model_parallel_size: should be a number (got '${x}')",
    b"model: {}\nmixed_precision: bf16_mixd": "mixed_precision: 'bf16_mixd' is not known; did you mean 'bf16_mixed'",
    b"model: {}\nmixed_precision: [1]": "mixed_precision: should be a name or a mapping (got a list of 1)",
    b"model: " + b"{a: " * 5000 + b"1" + b"}" * 5000: "not valid YAML",
    b"model: {add_bias_linear: 1}": "model.add_bias_linear: should be true or false (got 1)",
}


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:40]))
def test_hostile_input_is_one_sentence(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "recipe.yaml", tmp_path / "out.yaml"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["import", "bridge", str(path), "-o", str(output)])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert HOSTILE[content] in said.err
    assert not output.exists()


def test_command_writes_a_workload_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "made" / "workload.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["import", "bridge", str(RECIPES["moonlight_16b"]), "-o", str(output), "--gpu", "h200-141gb"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "")
    assert Workload.load(output).training.gpu == "h200-141gb"


WHOLE = load_mapping(RECIPES["deepseek_v3"])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 70),
    st.integers(-(2**62), 2**62),
    st.floats(),
    st.sampled_from(["fp32", "torch.bfloat16", "auto", "yarn", "M*E/*", "flex", "full", "${a.b}", ""]),
    st.text(max_size=6),
    st.lists(st.integers(0, 3) | st.text(max_size=3), max_size=3),
    st.fixed_dictionaries({"_target_": st.text(max_size=6), "_call_": st.booleans()}),
)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_recipe_is_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    recipe = {name: dict(part) if isinstance(part, dict) else part for name, part in WHOLE.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        section = data.draw(st.sampled_from(["model"] * 4 + sorted(recipe)))
        if isinstance(recipe[section], dict) and data.draw(st.integers(0, 9)):
            key = data.draw(st.sampled_from(sorted(recipe[section])) | st.text(max_size=5))
            recipe[section][key] = data.draw(VALUES)
        else:
            recipe[section] = data.draw(VALUES)
    with suppress(InputError):
        imported(recipe, tmp_path_factory.getbasetemp())


def test_what_a_precision_overrides_is_said_and_layers_in_bf16_are_given_where_there_are_some(tmp_path: Path) -> None:
    model = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    said = imported({"model": {**model, "fp8": "hybrid"}, "train": {}}, tmp_path).assumed
    assert any(each.startswith("model.fp8 'hybrid': null, as mixed_precision sets it in its place") for each in said)
    low = {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"}
    for ends in (False, True):
        found = imported(
            {
                "model": model,
                "mixed_precision": {**low, "first_last_layers_bf16": ends, "num_layers_at_end_in_bf16": 0},
            },
            tmp_path,
        )
        assert found.workload.launch is not None
        assert ("--num-layers-at-end-in-bf16 0" in found.workload.launch.arguments) is ends
