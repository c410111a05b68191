"""Launches through Megatron's own parser: the workload says what Megatron's configuration says, the rest is named.

`jobs.jsonl`: recipes of Megatron-LM's functional tests (NVIDIA, `tests/functional_tests/test_cases`, 2026), without
paths and logging.
"""

import json
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml

from labkit.errors import InputError
from labkit.importers.bridge import _silent, _tables, import_bridge
from labkit.importers.fields import _MEANING, EXPRESSED
from labkit.importers.imported import backend_note
from labkit.importers.megatron import import_megatron
from labkit.importers.recipe_values import resolved
from labkit.importers.silent import SILENT, decides_no_memory
from labkit.workload import Workload
from labkit.workload.attention_backends import attention_backend
from labkit.workload.launch_rules import MORE_VALUES_THAN_FIELDS, SAID_BY_FIELDS
from labkit.workload.launched import CHOICES, OPTION_OF, Launched
from labkit.workload.megatron_options import OPTIONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
JOBS = {
    job["case"]: json.dumps(job)
    for job in map(json.loads, Path(__file__).with_name("jobs.jsonl").read_text(encoding="utf-8").splitlines())
}
DENSE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --global-batch-size 16 --bf16 --vocab-size 1000 --no-create-attention-mask-in-dataloader "
    "--attention-backend fused"
)
ROPE = (
    f"{DENSE} --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0"
)
EXPERTS = (
    "--num-experts 8 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-router-topk 2 "
    "--moe-ffn-hidden-size 128 --moe-permute-fusion"
)
LINES = {
    "dense": DENSE,
    "swiglu": f"{ROPE} --group-query-attention --num-query-groups 2 --kv-channels 48 --qk-layernorm",
    "experts": f"{ROPE} {EXPERTS} --moe-layer-freq '([0]*1+[1]*3)' --moe-shared-expert-intermediate-size 128 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-3 "
    "--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
    "latent": f"{ROPE} {EXPERTS} --multi-latent-attention --kv-lora-rank 64 --q-lora-rank 96 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --rope-type rope --no-rope-fusion --recompute-granularity selective "
    "--recompute-modules mla_up_proj moe_act",
    "delta": f"{ROPE} --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-key-head-dim 32 --linear-value-head-dim 32 --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--attention-output-gate",
    "prediction": f"{ROPE} --mtp-num-layers 1 --untie-embeddings-and-output-weights",
    "interleaved": f"{ROPE} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "full": f"{DENSE} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "precise": f"{ROPE} --use-distributed-optimizer --use-precision-aware-optimizer --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp16 --context-parallel-size 2 --cp-comm-type a2a",
    "fp32": DENSE.replace("--bf16 ", "").replace("fused", "unfused"),
    "packed": f"{ROPE.replace('--micro-batch-size 2', '--micro-batch-size 1')} --sft",
    "yarn": f"{ROPE.replace('type rope', 'type yarn')} --rotary-scaling-factor 8 --yarn-beta-fast 16 "
    "--yarn-original-max-position-embeddings 256",
    "latent yarn": f"{ROPE} --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 --rotary-scaling-factor 8 --mscale 0.7",
    "squared": f"{DENSE} --squared-relu --no-bias-gelu-fusion --no-bias-dropout-fusion",
}
CARRIED = {
    "sharded": f"{DENSE} --use-megatron-fsdp --load here --no-load-optim --log-params-norm --log-throughput",
    "other": f"{DENSE} --use-transformer-engine-op-fuser --load here --log-params-norm",
    "unknown": f"{DENSE} --use-megatron-fsdp --load $UNSET --save $UNSET/x",
}
"""What no field says: `launch` carries it."""
REFUSED = {
    "--num-layers $LAYERS --hidden-size 8": "--num-layers needs $LAYERS, which is not set",
    "--num-layers $(rm -rf /) --hidden-size 8": "--num-layers needs what `rm -rf /` prints, and nothing is run here",
    "--num-layer 3": "unknown argument --num-layer; did you mean --num-layers or",
    "--num-layers x": "argument --num-layers: invalid int value: 'x'",
    f"{DENSE} --tensor-model-parallel-size 3": "Megatron's",
    f"{DENSE} --moe-layer-freq '([0]*99999)*99999'": "--moe-layer-freq ([0]*99999)*99999: it is no list such as",
    f"{DENSE} --moe-layer-freq 9**9**9**[9]": "--moe-layer-freq 9**9**9**[9]: it is no list such as",
    f"{DENSE} '--linear-attention-freq=(99999999+9)*[0]'": "--linear-attention-freq (99999999+9)*[0]: it is no list",
    f"{DENSE} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*30000000|tL'": "-layout "
    "Et*30000000|tL: it repeats more than can be meant",
    f"{DENSE} --seq-length '['": "argument --seq-length: invalid int value: '['",
    f"{DENSE} --num-layers -2": "--num-layers -2: should be at least 1",
    f"{DENSE} --num-layers 0": "--num-layers 0: should be at least 1",
    f"{DENSE} --attention-backend -1": "--attention-backend -1: there is none; valid are: auto, flash, fused",
    f"{DENSE} --attention-backend fusd": "--attention-backend fusd: there is none; did you mean 'fused'?",
    f"{DENSE} --num-layers 1000000000": "num_layers",
    f"{DENSE} --num-experts 1000000000": "",
    f"{DENSE} --yaml-cfg /etc/passwd": "--yaml-cfg cannot be imported; write what that file says as arguments",
    f"{DENSE} extra": "unrecognized arguments: extra",
    f"{DENSE} --use-distributed-optimizer --overlap-param-gather": "Must use --overlap-param-gather with",
    f"{ROPE} --hidden-size 250": "Megatron's validator refuses the arguments: assert args.hidden_size % args.num_att",
    "--encoder-num-layers 2": "Megatron's",
    f"{ROPE} {EXPERTS} --moe-aux-loss-coeff 1e-3 inf": "model.mixture_of_experts.moe_aux_loss_coeff: input should be",
}
UNLIKE = {
    "tensor_parallel_num_weight_shards": "worked out before the configuration, or in it",
    "expert_tensor_parallel_num_weight_shards": "the same",
}
"""Fields that differ and decide nothing, besides those whose argument is named in `silent.py`."""

OF_OWN_LAYERS = frozenset(
    "attention_softmax_in_fp32 apply_query_key_layer_scaling masked_softmax_fusion persist_layer_norm".split()
)
"""Fields that Transformer Engine's layers do not read."""

OTHER_NAMES = {
    "moe_router_score_function": "__moe_router_load_balancing_type sinkhorn",  # which takes sigmoids of top-1 scores
}
"""Fields whose argument, where it is not expressed, is called something else."""

RECIPES = [path.stem for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))]
PROVIDERS = {"TransformerConfig": "GPTModelProvider", "MLATransformerConfig": "MLAModelProvider"}
OF_RECIPES = {
    "OptimizerConfig": {
        "grad_norm_skip_threshold",
        "bf16",
        "fp16",
        "params_dtype",
        "lr",
        "min_lr",
        "clip_grad",
        "overlap_param_gather",
    },
    "MLATransformerConfig": set[str](),
    "DistributedDataParallelConfig": set[str](),
    "TransformerConfig": {
        "cross_entropy_loss_fusion",
        "deallocate_pipeline_outputs",
        "masked_softmax_fusion",
        "attention_softmax_in_fp32",
        "gradient_accumulation_fusion",
    },
}
"""Defaults that Megatron Bridge's own classes change, or set when a run is set up."""

type Found = dict[str, Any]


UNLIKE_RECIPES = {
    "apply_rope_fusion": "of a model without positions, where Bridge turns it off",
    "cuda_graph_impl": "not priced",
    "deallocate_pipeline_outputs": "not expressed, or without a pipeline",
    "fp8_recipe": "that of mixed_precision, which is applied when a run is set up",
    "kv_channels": "which latent attention does not read",
    "mtp_num_layers": "none, for 0",
    "pipeline_model_parallel_layout": "lists of names in a recipe",
}
"""Fields of a recipe's model that an imported workload has otherwise."""


def asked(name: str) -> str:
    """For Megatron's configuration of an imported recipe, without what only a trace runs."""
    workload = import_bridge(Path(__file__).with_name("recipes") / f"{name}.yaml").workload
    return json.dumps({"workload": workload.model_dump(mode="json", exclude={"launch"})})


def read(texts: list[str]) -> list[Found]:
    """What the importer makes of texts, in one process."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.importers.reading"],
        input=json.dumps(texts),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    found: list[Found] = json.loads(process.stdout)
    return found


@pytest.fixture(scope="session")
def found() -> dict[str, Found]:
    texts = JOBS | LINES | CARRIED | {text: text for text in REFUSED} | {name: asked(name) for name in RECIPES}
    return dict(zip(["names", *texts], read(list(texts.values())), strict=True))


def test_every_name_is_one_of_megatrons(found: dict[str, Found]) -> None:
    arguments, known = found["names"]["arguments"], {*found["names"]["arguments"], *found["names"]["configuration"]}
    assert [pattern for pattern in SILENT if not any(fnmatchcase(name, pattern) for name in arguments)] == []
    assert EXPRESSED - known == set()
    assert {name for name in EXPRESSED & set(arguments) if decides_no_memory(name)} == set()
    assert _MEANING.keys() - set(arguments) == set()
    assert set(found["names"]["options"]) == OPTIONS


def test_rules_read_a_launch_as_megatrons_parser_does(found: dict[str, Found]) -> None:
    defaults, types = Launched(), get_type_hints(Launched)
    for name, option in OPTION_OF.items():
        dest, default, values = found["names"]["launched"][option]
        assert dest == name
        ours = getattr(defaults, name)
        assert ours in (None, () if default == [] else default), name
        whole = get_origin(types[name]) not in (Union, UnionType)
        kinds = [kind for kind in ((types[name],) if whole else get_args(types[name])) if kind is not type(None)]
        choices = [str(choice) for kind in kinds for choice in get_args(kind) if get_origin(kind) is Literal]
        assert (values == []) == (types[name] is bool), name
        if choices or name in CHOICES:
            assert set(CHOICES.get(name, choices)) == set(values) or values == ["_parse_cuda_graph_modules_arg"], name
        elif types[name] is not bool and name != "no_rope_freq":
            kind = next(iter(get_args(kinds[0])), kinds[0]) if get_origin(kinds[0]) is tuple else kinds[0]
            assert [kind.__name__] == values, name


def test_options_of_fields_are_those_that_drivers_set(found: dict[str, Found]) -> None:
    said = set(found["names"]["said_by_fields"])
    assert said >= SAID_BY_FIELDS
    assert said - SAID_BY_FIELDS - MORE_VALUES_THAN_FIELDS.keys() == {
        "--disable-gloo-process-groups",
        "--experimental-attention-variant",
        "--fp8-recipe",
        "--lr",
        "--max-position-embeddings",
        "--moe-flex-dispatcher-backend",
        "--train-iters",
    }


@pytest.mark.parametrize("name", [*JOBS, *LINES])
def test_configuration_of_the_workload_is_that_of_the_arguments(found: dict[str, Found], name: str) -> None:
    one = found[name]
    assert "error" not in one, one["error"]
    said = " ".join((*one["not_expressed"], *one["assumed"])).replace("-", "_")
    differing = {
        field: values
        for field, values in one["differing"].items()
        if field not in UNLIKE and not decides_no_memory(field) and f"__{field}" not in said
    }
    experts = one["workload"]["model"]["mixture_of_experts"]
    if one["workload"]["training"]["kernels"]["transformer_impl"] != "local":
        differing = {field: values for field, values in differing.items() if field not in OF_OWN_LAYERS}
    if experts is None or one["workload"]["training"]["kernels"]["moe_token_dispatcher_type"] != "flex":
        differing.pop("moe_flex_dispatcher_backend", None)  # of a dispatcher that is not used
    said += " ".join(one["not_priced"]).replace("-", "_")
    assert {field for field in differing if OTHER_NAMES.get(field, "-") not in said} == set()


@pytest.mark.parametrize("name", JOBS)
def test_arguments_that_a_log_prints_are_those_of_the_launch(found: dict[str, Found], name: str) -> None:
    assert found[name]["of_its_log"] == found[name]["workload"]


@pytest.mark.parametrize("name", LINES)
def test_everything_is_expressed(found: dict[str, Found], name: str) -> None:
    assert (found[name]["not_priced"], found[name]["not_expressed"]) == ([], [])
    assert found[name]["workload"]["launch"] is None


def test_defaults_of_recipes_are_megatrons(found: dict[str, Found]) -> None:
    recipes = _tables()["defaults"]
    for kind, changed in OF_RECIPES.items():
        ours = recipes[PROVIDERS.get(kind, kind)]
        theirs = {name: value for name, value in found["names"]["defaults"][kind].items() if name in ours}
        assert len(theirs) > 10
        assert {
            name: [ours[name], value] for name, value in theirs.items() if ours[name] != value and name not in changed
        } == {}


@pytest.mark.parametrize("name", RECIPES)
def test_configuration_of_an_imported_recipe_is_the_recipes(found: dict[str, Found], name: str) -> None:
    assert "error" not in found[name], found[name]["error"]
    config = found[name]["configuration"]
    recipe = resolved(yaml.safe_load((Path(__file__).with_name("recipes") / f"{name}.yaml").read_text())["model"])
    recipe["activation_func"] = recipe["activation_func"].rpartition(".")[2]
    compared = {
        field: [value, config[field]] for field, value in recipe.items() if field in config and value is not None
    }
    differing = {field for field, (theirs, ours) in compared.items() if theirs != ours}
    assert len(compared) > 150
    assert {field for field in differing if field not in UNLIKE_RECIPES and not decides_no_memory(field)} <= _silent()


def test_megatrons_defaults_hold(found: dict[str, Found]) -> None:
    workload = Workload.from_mapping(found["dense"]["workload"])
    model, training = workload.model, workload.training
    assert (model.normalization, model.activation_func, model.gated_linear_unit) == ("LayerNorm", "gelu", False)
    assert (model.add_bias_linear, model.add_qkv_bias, model.position_embedding_type) == (
        True,
        True,
        "learned_absolute",
    )
    assert (model.hidden_dropout, model.attention_dropout, model.ffn_hidden_size) == (0.1, 0.1, 1024)
    assert not model.untie_embeddings_and_output_weights
    assert not training.data_parallel.use_distributed_optimizer
    assert not training.kernels.cross_entropy_loss_fusion
    assert training.data_parallel.grad_reduce_in_fp32  # `validate_args` turns it on for bf16
    assert workload.parallelism.world_size == 1
    assert training.precision == "bf16"
    wide = found["fp32"]["workload"]["training"]
    assert (wide["precision"], wide["kernels"]["attention_backend"]) == ("fp32", "unfused")
    assert not wide["data_parallel"]["grad_reduce_in_fp32"]  # gradients have the parameters' dtype


def test_vocabulary_positions_and_layout_of_a_job(found: dict[str, Found]) -> None:
    (name,) = (name for name in JOBS if "cross_entropy_loss_fusion" in name)
    workload = Workload.from_mapping(found[name]["workload"])
    assert (workload.padded_vocab_size, workload.model.vocab_size) == (50432, 50257)  # a multiple of 128 x 2
    assert (workload.parallelism.world_size, workload.parallelism.tp, workload.parallelism.pp) == (8, 2, 2)
    assert workload.training.kernels.cross_entropy_fusion_impl == "native"


def test_what_is_not_priced_is_named_once_and_goes_into_the_launch(found: dict[str, Found]) -> None:
    (name,) = (name for name in JOBS if "multi_dist_optimizer_instances" in name)
    assert found[name]["not_expressed"] == []
    assert found[name]["not_priced"] == ["--moe-router-load-balancing-type sinkhorn: taken as none"]
    assert found[name]["workload"]["launch"] == {
        "arguments": ["--moe-router-load-balancing-type sinkhorn"],
        "environment": [],
    }
    assert found[name]["workload"]["training"]["data_parallel"]["num_distributed_optimizer_instances"] == 2
    assert found[name]["workload"]["training"]["kernels"]["deterministic_mode"]
    assert found[name]["workload"]["training"]["kernels"]["deterministic_attention"]
    assert found[name]["workload"]["training"]["cublas_workspace_config"] == ":4096:8"
    assert found[name]["workload"]["batch"]["create_attention_mask_in_dataloader"]
    assert not found[name]["workload"]["training"]["kernels"]["moe_grouped_gemm"]


def test_loading_and_norms_matter_to_megatron_fsdp_alone(found: dict[str, Found]) -> None:
    sharded, other, _ = ({*found[name]["workload"]["launch"]["arguments"]} for name in CARRIED)
    assert sharded == {"--use-megatron-fsdp", "--load here", "--no-load-optim", "--log-params-norm"}
    assert other == {"--use-transformer-engine-op-fuser"}
    why = "needs $UNSET, which is not set"
    unknown = found["unknown"]
    assert unknown["not_expressed"] == [f"--load: decides memory with --use-megatron-fsdp, and {why}"]
    assert unknown["assumed"] == [f"left out, as it decides no memory: --save ({why})"]


def test_attention_behind_auto(found: dict[str, Found]) -> None:
    chosen = {name.split("/")[1]: Workload.from_mapping(found[name]["workload"]) for name in JOBS}
    own = chosen["gpt3_mcore_tp1_pp4"]
    assert own.training.kernels.apply_query_key_layer_scaling
    assert attention_backend(own) == "unfused"
    assert attention_backend(chosen["gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer"]) == "fused"


def test_hybrid_pattern_marks_stages(found: dict[str, Found]) -> None:
    (name,) = (name for name in JOBS if "hybrid_mr_mcore_te_tp1_pp4" in name)
    model = found[name]["workload"]["model"]
    assert model["hybrid_layer_pattern"].count("|") == 3
    assert model["num_layers"] == len(model["hybrid_layer_pattern"].replace("|", ""))
    assert model["mamba"]["mamba_state_dim"] == 128


@pytest.mark.parametrize("text", REFUSED)
def test_refusals_are_one_sentence(found: dict[str, Found], text: str) -> None:
    error = found[text]["error"]
    assert REFUSED[text] in error
    assert "\n" not in error
    assert "\0" not in error


def test_command_writes_a_workload_whole(tmp_path: Path) -> None:
    script, output = tmp_path / "my run.sh", tmp_path / "made" / "workload.yaml"
    script.write_text(
        f"#!/bin/bash\nDATA=$1\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nARGS=({DENSE} --lr 1e-4 --data-path $DATA\n"
        "  --fp8-format hybrid --train-iters ${ITERS})\n"
        'torchrun --nproc_per_node 4 pretrain_gpt.py "${ARGS[@]}" --tensor-model-parallel-size 2\n'
    )
    command = [sys.executable, "-m", "labkit", "import", "megatron-args", str(script), "-o", str(output)]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False
    )
    lost = "not priced: --fp8-format hybrid: FP8 copies of weights and activations; taken as bf16 throughout"
    unknown = "assumed: left out, as it decides no memory: --data-path "
    unknown += "(needs ${1}, which is given when the script is called), --train-iters (needs $ITERS, which is not set)"
    notes = ["assumed: GPU: none is stated; h100-80gb (--gpu says another)", unknown, lost]
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == "".join(f"labkit: {note}\n" for note in notes)
    assert output.read_text().startswith("".join(f"# {note}\n" for note in notes))
    workload = Workload.load(output)
    assert (workload.model.name, workload.parallelism.world_size) == ("my-run", 4)
    stated = yaml.safe_load(output.read_text())
    assert stated["training"]["kernels"]["apply_rope_fusion"] is False


def test_own_layers_have_nothing_to_choose() -> None:
    own = Workload.load("gpt-local").model_dump(exclude_unset=True)
    own["training"]["kernels"]["attention_backend"] = "auto"
    assert backend_note(Workload.from_mapping(own), "--attention-backend") == []
    engines = {**own, "training": {"kernels": {"attention_backend": "auto", "bias_activation_fusion": False}}}
    assert backend_note(Workload.from_mapping(engines), "x")[0].startswith("x auto: fused")


def test_files_that_say_nothing_are_refused_before_megatron_starts(tmp_path: Path) -> None:
    binary, huge = tmp_path / "binary", tmp_path / "huge"
    binary.write_bytes(b"\xff\xfe\x00")
    huge.write_bytes(b"#" * (2**20 + 1))
    for path, said in (
        (binary, "not text in UTF-8"),
        (huge, "larger than 1 MiB"),
        (tmp_path, "regular"),
        (tmp_path / "no", "read"),
    ):
        with pytest.raises(InputError, match=said):
            import_megatron(path)
