"""Published configurations of Hugging Face become models with the published parameters; what is lost is named.

`configs.jsonl`: published `config.json` files of the models that their rows name, with the parameters that transformers
5.24 builds of them, and the routers' buffers.
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
from labkit.importers.huggingface import Layout, import_huggingface, read_config
from labkit.memory.estimate import estimate
from labkit.memory.parameters import expert_biases, parameter_count, without_prediction
from labkit.workload import Model, Workload
from labkit.workload.files import data_directory, model_mapping
from tests.importers.published import parameters, prediction_parameters

ROWS = [json.loads(line) for line in Path(__file__).with_name("configs.jsonl").read_text(encoding="utf-8").splitlines()]
PUBLISHED = {row["model"]: row for row in ROWS}
CATALOG = {
    "Meta-Llama-3.1-8B": "llama-3.1-8b",
    "Meta-Llama-3.1-70B": "llama-3.1-70b",
    "Qwen2.5-7B": "qwen2.5-7b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen3-Next-80B-A3B-Instruct": "qwen3-next-80b-a3b",
    "Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "DeepSeek-V3": "deepseek-v3",
    "DeepSeek-R1": "deepseek-v3",
    "Kimi-K2-Instruct": "kimi-k2",
    "Nemotron-H-8B-Base-8K": "nemotron-h-8b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-8B": "qwen3-8b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3.5-27B": "qwen3.5-27b",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "Moonlight-16B-A3B": "moonlight-16b-a3b",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
}
"""Models that ship with labkit, by the configuration that says the same."""
OF_TRAINING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_dtype")
"""What a recipe chooses whatever a configuration says."""


def model_of(config: dict[str, Any]) -> Model:
    return Model.model_validate({"name": "published", **read_config(config, "config.json").model})


def written(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name: str) -> None:
    row = PUBLISHED[name]
    found = read_config(row["config"], "config.json")
    model = without_prediction(model_of(row["config"]))
    beyond = sum(number for number, _ in found.differences)
    assert parameter_count(model, padded=False) + beyond == row["parameters"] == parameters(row["config"])
    assert expert_biases(model) == row["buffers"]


def test_known_totals() -> None:
    """As the models' pages and papers have them: DeepSeek-V3's counts the biases of its experts."""
    assert PUBLISHED["DeepSeek-V3"]["parameters"] + PUBLISHED["DeepSeek-V3"]["buffers"] == 671_026_419_200
    assert PUBLISHED["gpt-oss-120b"]["parameters"] == 116_829_156_672


def test_padding_and_multi_token_prediction_are_counted_apart(tmp_path: Path) -> None:
    deepseek = PUBLISHED["DeepSeek-V3"]["config"]
    model = model_of(deepseek)
    more = parameter_count(model, padded=False) - parameter_count(without_prediction(model), padded=False)
    assert more == prediction_parameters(deepseek)
    odd = {**PUBLISHED["Qwen3-0.6B"]["config"], "vocab_size": 151_900}
    counted = import_huggingface(written(odd, tmp_path)).counted
    assert counted == [f"{parameters(odd):,} (0.60 billion); the vocabulary as Megatron pads it has {36 * 1024:,} more"]


@pytest.mark.parametrize("name", CATALOG)
def test_catalog_has_what_the_published_configuration_says(name: str) -> None:
    imported = model_of(PUBLISHED[name]["config"])
    kept = Model.model_validate(model_mapping(CATALOG[name], "catalog", data_directory()))
    if kept.mtp_num_layers is None:
        imported = without_prediction(imported)  # fine-tuned without
    experts = kept.mixture_of_experts
    if experts is not None and imported.mixture_of_experts is not None:
        recipe = {field: getattr(experts, field) for field in OF_TRAINING}
        changed = imported.mixture_of_experts.model_copy(update=recipe)
        imported = imported.model_copy(update={"mixture_of_experts": changed})
    assert imported.model_copy(update={"name": kept.name}) == kept


@pytest.mark.parametrize(
    "name", ["Meta-Llama-3.1-8B", "gpt-oss-20b", "DeepSeek-V3", "Qwen3.5-35B-A3B", "Kimi-K2-Instruct"]
)
def test_a_workload_that_estimates_at_once(name: str, tmp_path: Path) -> None:
    imported = import_huggingface(written(PUBLISHED[name]["config"], tmp_path), Layout(tensor=2, pipeline=1))
    (tmp_path / "w.yaml").write_text(imported.yaml)
    workload = Workload.load(tmp_path / "w.yaml")
    assert workload == imported.workload
    assert (workload.parallelism.world_size, workload.parallelism.tp, workload.batch.seq_length) == (2, 2, 4096)
    assert not [finding for finding in workload.findings if finding.severity == "error"]
    assert estimate(workload).outline.peak_bytes > parameter_count(workload.model)


def test_what_has_no_field_is_named(tmp_path: Path) -> None:
    config = PUBLISHED["gpt-oss-20b"]["config"] | {"attention_chunk": 5, "use_cache": False, "sinks": None}
    imported = import_huggingface(written(config, tmp_path))
    assert [note.partition(":")[0] for note in imported.not_expressed] == [
        "hidden_act 'silu'",
        "attention_chunk 5",
    ]
    assert imported.not_priced == [
        "--softmax-type learnable: attention sinks, one number a head; taken as none",
        "--window-size 127,0: taken as attention to everything before",
        "--window-attn-skip-freq 2: taken as attention to everything before",
    ]
    assert imported.workload.launch is not None
    assert imported.workload.launch.arguments[1:] == ("--window-size 127,0", "--window-attn-skip-freq 2")
    assert imported.counted == [
        "20,914,757,184 (20.91 billion); 1,536 of them, attention sinks, are not in this file",
    ]
    assert any("mxfp4" in note for note in imported.assumed)
    assert imported.yaml.startswith("# parameters: 20,914,757,184")


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Meta-Llama-3.1-8B", {"attention_bias": True}, "attention_bias true: no bias of the attention output"),
        ("Meta-Llama-3.1-8B", {"mlp_bias": True}, "mlp_bias true: taken with biases of attention too"),
        ("Meta-Llama-3.1-8B", {"hidden_act": "xielu"}, "hidden_act 'xielu': taken as silu"),
        ("Meta-Llama-3.1-8B", {"rope_scaling": {"rope_type": "new"}}, "rope type 'new': labkit does not know it"),
        ("Qwen2.5-7B", {"use_sliding_window": True}, "sliding_window 131072: taken as attention to everything"),
        ("Nemotron-H-8B-Base-8K", {"chunk_size": 256}, "chunk_size 256: states of chunks; taken as 128"),
        ("Nemotron-H-8B-Base-8K", {"residual_in_fp32": True}, "residual_in_fp32 true: residuals in fp32; taken as"),
        ("Qwen3-30B-A3B", {"num_shared": 3}, "num_shared 3: labkit does not know what it decides"),
    ],
)
def test_values_that_change_memory_are_named(name: str, changes: dict[str, Any], said: str) -> None:
    (note,) = read_config(PUBLISHED[name]["config"] | changes, "config.json").not_expressed
    assert note.startswith(said)


def test_layers_by_every_key_that_names_them() -> None:
    base = PUBLISHED["Qwen3-30B-A3B"]["config"] | {"num_hidden_layers": 6}
    kinds = model_of(base | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).mlp_kinds
    assert kinds == ("dense", "dense", "dense", "moe", "dense", "moe")
    assert model_of(base | {"decoder_sparse_step": 7}).mixture_of_experts is None
    latent = PUBLISHED["DeepSeek-V2-Lite"]["config"] | {"num_hidden_layers": 5, "first_k_dense_replace": 2}
    assert model_of(latent | {"moe_layer_freq": 2}).mlp_kinds == ("dense", "dense", "moe", "dense", "moe")
    mixed = PUBLISHED["Qwen3-Next-80B-A3B-Instruct"]["config"] | {"num_hidden_layers": 3}
    named = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    assert [layer.mixer for layer in model_of(mixed | named).layers] == ["attention", "gdn", "attention"]
    listed = {**PUBLISHED["Nemotron-H-8B-Base-8K"]["config"], "layers_block_type": ["mamba", "mlp", "attention"]}
    assert model_of(listed).hybrid_layer_pattern == "M-*"


def test_the_index_beside_it_is_compared(tmp_path: Path) -> None:
    row = PUBLISHED["Qwen3-0.6B"]
    path, index = written(row["config"], tmp_path), tmp_path / "model.safetensors.index.json"
    for metadata, said in (
        ({"total_size": 2 * row["parameters"]}, ": the same"),
        ({"total_parameters": row["parameters"] + 7}, ": 7 more than here; towers"),
        ({"total_size": -1}, "not compared, model.safetensors.index.json: metadata.total_size: should be a whole"),
        ({}, "not compared, model.safetensors.index.json has neither"),
    ):
        index.write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
        assert said in import_huggingface(path).counted[1]


DENSE = json.dumps(PUBLISHED["Qwen3-0.6B"]["config"])
HOSTILE = {
    b"": "not valid JSON",
    b"[]": "expected a JSON object",
    b"\xff\xfe{": "not text in UTF-8",
    b"{": "not valid JSON: Expecting property name",
    b'{"a": 1, "a": 2}': "key 'a' is given twice",
    b"[" * 100_000: "not valid JSON: nested too deeply",
    b'{"hidden_size": 1' + b"0" * 5000 + b"}": "an integer of more than 63 bits",
    b"{}": "model_type is missing",
    b'{"model_type": 3}': "model_type: should be a text (got 3)",
    b'{"model_type": "bert"}': "model_type 'bert' is not known here",
    DENSE.replace('"hidden_size": 1024', '"hidden_size": true').encode(): "hidden_size: should be a whole number",
    DENSE.replace(
        '"hidden_size": 1024', '"hidden_size": -4'
    ).encode(): "hidden_size: should be a whole number of at least 1 (got -4)",
    DENSE.replace('"hidden_size": 1024', '"hidden_size": NaN').encode(): "hidden_size: should be a whole number",
    DENSE.replace('"hidden_size": 1024', '"hidden_size": 1e30').encode(): "hidden_size: should be a whole number",
    DENSE.replace('"hidden_size": 1024, ', "").encode(): "hidden_size is missing",
    DENSE.replace('"num_hidden_layers": 28', '"num_hidden_layers": 100000000').encode(): "num_hidden_layers: should be",
    DENSE.replace(
        '"num_key_value_heads": 8', '"num_key_value_heads": 7'
    ).encode(): "7 key-value heads cannot be shared",
    DENSE.replace('"vocab_size": 151936', '"vocab_size": 1099511627776').encode(): "",
    b'{"text_config": 4}': "text_config: should be a mapping",
}


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:30]))
def test_hostile_input_is_one_sentence(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "config.json", tmp_path / "out.yaml"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as ended:
        main(["import", "huggingface", str(path), "-o", str(output)])
    said = capsys.readouterr()
    if HOSTILE[content]:
        assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
        assert HOSTILE[content] in said.err
        assert not output.exists()
    else:
        assert ended.value.code in (0, 2)


def test_a_layout_that_cannot_be_says_what_this_command_can(tmp_path: Path) -> None:
    path = written(PUBLISHED["DeepSeek-V3"]["config"], tmp_path)
    with pytest.raises(InputError, match="import without --pp and write them into the file"):
        import_huggingface(path, Layout(pipeline=16))
    with pytest.raises(InputError, match=r"\(the first of 3 errors\)$"):
        import_huggingface(path, Layout(tensor=3))


def test_a_folder_stands_for_the_file_in_it(tmp_path: Path) -> None:
    written(PUBLISHED["Qwen3-0.6B"]["config"], tmp_path)
    assert import_huggingface(tmp_path).workload.model.name == tmp_path.name


@pytest.mark.parametrize("path", ["missing.json", "Qwen/Qwen3-0.6B", "/proc/self", "x" * 5000, "\0"])
def test_what_is_no_file_is_refused(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import", "huggingface", path])
    assert (ended.value.code, capsys.readouterr().err.count("\n")) == (2, 1)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(0, 70),
    st.floats(),
    st.sampled_from(["silu", "yarn", "full_attention", "M-*E", "noaux_tc", ""]),
    st.text(max_size=8),
    st.lists(st.integers(0, 9), max_size=4),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta"]), st.text(max_size=5) | st.floats()),
)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(PUBLISHED)))
def test_any_configuration_is_read_or_refused(data: st.DataObject, name: str) -> None:
    config = dict(PUBLISHED[name]["config"])
    inner = dict(config.get("text_config", {}))
    target = inner or config
    keys = st.sampled_from(sorted(target)) | st.text(max_size=6)
    for key, value in data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3)).items():
        target[key] = value
    if inner:
        config["text_config"] = inner
    with suppress(InputError):
        found = read_config(config, "config.json")
        workload = Workload.from_mapping(
            {
                "model": {"name": name, **found.model},
                "parallelism": {"world_size": 1},
                "batch": {"seq_length": 512, "global_batch_size": 1},
                "training": {"kernels": found.kernels},
            }
        )
        assert parameter_count(without_prediction(workload.model)) > 0


@settings(max_examples=60, deadline=None)
@given(content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_text_is_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with pytest.raises(InputError):
        import_huggingface(path)
