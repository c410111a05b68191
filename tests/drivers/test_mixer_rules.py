"""Rules of hybrid patterns, delta net and Mamba against Megatron's own: both refuse the same, both build the rest."""

import json
import subprocess
import sys
from typing import Any

import pytest

from labkit.errors import InputError
from labkit.workload import Workload
from tests.memory.grid import changed, gdn, hybrid, mamba

BUILD = """
import json, sys, warnings
warnings.simplefilter("ignore")
from labkit.drivers.trace.surface import fake_cuda
from labkit.workload import Workload
from labkit.workload.gpu import GPUS

answers = []
with fake_cuda(GPUS["h100-80gb"]):
    from labkit.drivers import build
    from labkit.drivers.arguments import megatron_arguments
    from labkit.drivers.trace import cuda_surface, session
    from labkit.drivers.trace.origin import Origin
    from labkit.drivers.trace.tracker import StorageTracker
    for mapping in json.load(sys.stdin):
        workload = Workload.model_validate(mapping)
        with session._process_group(workload, 0), cuda_surface.CudaAsMeta(), StorageTracker(Origin()):
            try:
                arguments = megatron_arguments(workload, num_microbatches=workload.num_microbatches)
                build.initialize_megatron(arguments)
                build.build_model(workload, arguments)
            except Exception as error:
                answers.append(f"{type(error).__name__}: {error}")
            else:
                answers.append(None)
print("ANSWERS" + json.dumps(answers))
"""
TENSOR = {"parallelism.world_size": 4, "parallelism.tensor_model_parallel_size": 4}
CONTEXT = {"parallelism.world_size": 8, "parallelism.context_parallel_size": 4}
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (gdn, {"model.gated_delta_net.linear_num_value_heads": 6}, "6 is not a multiple of linear_num_key_heads (4)"),
    (gdn, TENSOR | {"model.gated_delta_net.linear_num_key_heads": 2}, "= 4 does not divide linear_num_key_heads (2)"),
    (gdn, CONTEXT, "tensor x context parallel = 8 does not divide linear_num_key_heads (4)"),
    (gdn, {"model.gated_delta_net.linear_attention_freq": [1, 1]}, "it names 2 layers but num_layers is 3"),
    (mamba, {"labels": ["gdn_norm_out"]}, "gdn_norm_out needs gated-delta-net layers, this model has none"),
    (mamba, {"model.mamba.mamba_num_heads": 18}, "4 groups cannot be shared evenly by 18 heads"),
    (mamba, TENSOR | {"model.mamba.mamba_num_groups": 2}, "4 does not divide mamba_num_groups (2)"),
    (mamba, TENSOR | {"model.mamba.mamba_num_groups": 1, "model.mamba.mamba_num_heads": 6}, "4 does not divide Mamba"),
    (mamba, {"model.mamba.mamba_num_heads": None, "model.mamba.mamba_head_dim": 40}, "40 does not divide twice hidden"),
    (mamba, CONTEXT | {"model.mamba.mamba_num_heads": 12}, "6 heads in 2 groups of a tensor-parallel rank cannot"),
    (hybrid, {"model.hybrid_layer_pattern": "ME*-MX"}, "'X' names no layer; use the symbols M G * + - E"),
    (hybrid, {"model.hybrid_layer_pattern": "ME*-M+"}, "mixes no attention (*) with multi-latent attention (+)"),
    (
        hybrid,
        {"model.mixture_of_experts": None} | {"parallelism.expert_model_parallel_size": 1},
        "E layers have no sizes",
    ),
]
NOT_BUILT = [
    (hybrid, {"model.hybrid_layer_pattern": "ME*-M"}, "it names 5 layers but num_layers is 6"),
    (hybrid, {"model.hybrid_layer_pattern": "MEM|-ME"}, "it marks stages but there is one"),
    (hybrid, {"model.hybrid_layer_pattern": "ME+-ME"}, "the pattern's + layers have no sizes"),
    (hybrid, {"model.mamba": None}, "the pattern's M layers have no sizes; give model.mamba"),
    (gdn, {"model.gated_delta_net.linear_attention_freq": None}, "nothing says which layers are gated delta net"),
    (gdn, {"model.gated_delta_net.linear_key_head_dim": 320}, "key heads of at most 256, not 320"),
    (gdn, {"model.activation_func": "gelu"}, "takes silu, not gelu"),
    (mamba, {"model.mamba.mamba_head_dim": 4, "model.mamba.mamba_state_dim": 17}, "multiples of 8 channels"),
    (gdn, {"parallelism.world_size": 4, "parallelism.context_parallel_size": 2, "batch.seq_length": 1022}, "two equal"),
]
"""What Megatron corrects by itself, or finds out while it runs."""
ACCEPTED: list[tuple[Any, dict[str, Any]]] = [
    (gdn, TENSOR),
    (gdn, {"parallelism.world_size": 4, "parallelism.context_parallel_size": 2}),
    (gdn, {"model.gated_delta_net.linear_num_value_heads": 4, "labels": ["gdn_norm_out"]}),
    (gdn, {"model.gated_delta_net.linear_attention_freq": 1, "labels": ["gdn_norm_out"]}),
    (mamba, TENSOR),
    (mamba, CONTEXT | {"model.mamba.mamba_num_groups": 2}),
    (mamba, {"model.mamba.mamba_num_heads": 20}),
    (mamba, {"model.mamba.mamba_num_heads": None, "model.mamba.mamba_head_dim": 48}),
    (hybrid, {"model.hybrid_layer_pattern": "------"}),
    (hybrid, {"model.hybrid_layer_pattern": "MMMGGG", "labels": ["gdn_norm_out"]}),
    (
        hybrid,
        {"parallelism.world_size": 8, "parallelism.pipeline_model_parallel_size": 2, "batch.global_batch_size": 8},
    ),
]


def mapping(family: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Plain data of a changed workload, whatever the rules say."""
    captured: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workload, "from_mapping", classmethod(lambda cls, data, source="": captured.append(data)))
        changed(family.BASE, changes, "case")
    return captured[0]


def megatron(cases: list[dict[str, Any]]) -> list[str | None]:
    """Why Megatron Core does not build the model of each case; None where it does."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD], input=json.dumps(cases), capture_output=True, text=True, check=True
    )
    answers: list[str | None] = json.loads(done.stdout.rpartition("ANSWERS")[2])
    return answers


def labkit(case: dict[str, Any]) -> str | None:
    """Why labkit refuses a case; None where it does not."""
    errors = [finding for finding in Workload.model_validate(case).findings if finding.severity == "error"]
    return str(errors[0]) if errors else None


def test_labkit_and_megatron_refuse_the_same() -> None:
    refused, accepted = ([mapping(*case[:2]) for case in cases] for cases in (REFUSED, ACCEPTED))
    theirs = megatron([*refused, *accepted])
    ours = [labkit(case) for case in (*refused, *accepted)]
    assert [(mine, other) for mine, other in zip(ours, theirs, strict=True) if (mine is None) != (other is None)] == []
    assert [answer is None for answer in ours] == [False] * len(refused) + [True] * len(accepted)


@pytest.mark.parametrize(("family", "changes", "sentence"), [*REFUSED, *NOT_BUILT])
def test_refusals_are_one_sentence(family: Any, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as raised:
        Workload.from_mapping(mapping(family, changes), source="w.yaml")
    message = str(raised.value)
    assert sentence in message
    assert message.startswith("w.yaml: ")
    assert "\n" not in message
