"""Rules say what is wrong, why, what would work, and whose rule it is; docs/check.md lists them all."""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from labkit import Workload
from labkit.workload import Launch
from labkit.workload.finding import Authority
from labkit.workload.launched import Launched, launched, listed, unread
from tests.small import MODEL, full, selective, small
from tests.workload import rules_table

DENSE = {"model__mixture_of_experts": None, "parallelism__expert_model_parallel_size": 1}
KERNELS = "training__kernels__"


def stated(*arguments: str, **changes: Any) -> Workload:
    """The small workload with changes and launch arguments, rules unapplied."""
    return unchecked(**changes).model_copy(update={"launch": Launch(arguments=arguments)})


def unchecked(**changes: Any) -> Workload:
    """As `tests.small.small`, rules unapplied."""
    mapping = small().model_dump(mode="json", exclude_unset=True)
    for path, value in changes.items():
        *sections, last = path.split("__")
        at = mapping
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    return Workload.unchecked(mapping)


def errors(workload: Workload) -> list[tuple[Authority, str, str]]:
    """Authority, field and reason of every error."""
    return [(each.authority, each.field, each.reason) for each in workload.findings if each.severity == "error"]


@pytest.mark.parametrize(
    ("workload", "field", "words"),
    [
        (
            unchecked(recompute={"recompute_granularity": "full"}),
            "recompute.recompute_method",
            "full recompute needs it",
        ),
        (unchecked(recompute=selective() | {"recompute_num_layers": 1}), "recompute.recompute_num_layers", "only full"),
        (
            unchecked(recompute=selective("moe_act"), **{f"{KERNELS}moe_grouped_gemm": False}),
            "recompute.recompute_modules",
            "grouped GEMM",
        ),
        (
            unchecked(recompute=selective("mla_up_proj"), model__multi_latent_attention=None),
            "recompute.recompute_modules",
            "multi-latent",
        ),
        (unchecked(recompute=selective("gdn_norm_out")), "recompute.recompute_modules", "gated-delta-net"),
        (
            stated("--overlap-moe-expert-parallel-comm", recompute=selective("moe")),
            "recompute.recompute_modules",
            "splits what moe",
        ),
        (
            unchecked(recompute=selective("shared_experts"), **{f"{KERNELS}moe_shared_expert_overlap": True}),
            "recompute.recompute_modules",
            "overlaps the dispatch",
        ),
        (
            stated("--fp8-format hybrid", recompute=selective("moe_act")),
            "recompute.recompute_modules",
            "delayed scaling",
        ),
        (
            stated("--cuda-graph-impl transformer_engine", recompute=full("uniform", 1)),
            "recompute.recompute_granularity",
            "straddles",
        ),
        (
            stated(
                "--cuda-graph-impl transformer_engine", "--cuda-graph-modules moe_router", recompute=selective("moe")
            ),
            "recompute.recompute_modules",
            "straddles the graph of moe_router",
        ),
        (
            stated("--distribute-saved-activations", recompute=full("block", 1)),
            "launch.arguments",
            "under sequence_parallel",
        ),
        (stated("--cpu-offloading-num-layers 1"), "recompute.recompute_granularity", "cannot be recomputed as well"),
        (
            stated(
                "--cpu-offloading-num-layers 1", parallelism__pipeline_model_parallel_size=2, parallelism__world_size=8
            ),
            "launch.arguments",
            "no pipeline",
        ),
        (
            unchecked(parallelism={"world_size": 1, "sequence_parallel": True}, model__mixture_of_experts=None),
            "parallelism.sequence_parallel",
            "nothing to split",
        ),
    ],
)
def test_what_transformer_config_refuses_is_refused_in_its_name(workload: Workload, field: str, words: str) -> None:
    found = [reason for authority, at, reason in errors(workload) if authority is Authority.CONFIG and at == field]
    assert any(words in reason for reason in found), errors(workload)


def test_instances_of_the_optimizer_divide_the_ranks_they_share() -> None:
    """`parallel_state` for the dense parameters and for the experts; `DistributedDataParallel`."""
    at = "training__data_parallel__"
    field = "training.data_parallel.num_distributed_optimizer_instances"
    sizes = small().parallelism
    instances = sizes.dp * sizes.cp * 2
    refused = errors(unchecked(**{f"{at}num_distributed_optimizer_instances": instances}))
    assert [(who, where) for who, where, _ in refused] == [(Authority.PARALLEL_STATE, field)] * 2
    whole = {f"{at}use_distributed_optimizer": False, f"{at}overlap_param_gather": False}
    assert (Authority.DATA_PARALLEL, field, "only a distributed optimizer has instances") in errors(
        unchecked(**whole, **{f"{at}num_distributed_optimizer_instances": 2})
    )


def test_a_pattern_without_depths_of_prediction_is_refused_in_words() -> None:
    pattern = {"model__hybrid_layer_pattern": "M-", "model__mamba": {}, "model__mtp_num_layers": 1}
    found = errors(unchecked(**DENSE, model__multi_latent_attention=None, **pattern))
    assert any(where == "model.mtp_num_layers" and "0 depths" in reason for _, where, reason in found), found


@pytest.mark.parametrize("labels", [["mlp"], ["core_attn"]])
def test_labels_that_do_nothing_are_warned_about(labels: list[str]) -> None:
    pure = unchecked(
        recompute=selective(*labels), model__mixture_of_experts=MODEL["mixture_of_experts"] | {"moe_layer_freq": 1}
    )
    (finding,) = pure.findings
    assert (finding.severity, finding.field) == ("warning", "recompute.recompute_modules")
    assert finding.remedy == f"remove {labels[0]}"


def test_a_choice_without_granularity_does_nothing_and_is_not_refused() -> None:
    idle = unchecked(recompute={"recompute_modules": ["moe_act"], "recompute_method": "uniform"})
    assert idle.can_run
    assert {each.field for each in idle.findings} == {"recompute.recompute_modules", "recompute.recompute_method"}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--fp8-recipe delaid", "there is no 'delaid'; did you mean 'delayed'?"),
        ("--cuda-graph-modules attn router", "there is no 'router'; did you mean 'moe_router'?"),
        ("--cuda-graph-warmup-steps many", "'many' is no whole number"),
        ("--cuda-graph-warmup-steps -5", "-5 is no number of steps"),
        ("--cuda-graph-warmup-steps 100000", "100000 is no number of steps"),
        ("--cuda-graph-warmup-steps", "needs a value"),
        ("--fp8-param-gather yes", "takes no value"),
        ("--no-rope-freq [0,1", "it is no list"),
        ("--no-rope-freq ([0]*100000)*100000", "too long"),
        ("--train-iters -1", "-1 is no number of steps"),
        ("--te-precision-config-file /etc/passwd", "no part of a training step"),
        ("--heterogeneous-layers-config-path /etc/passwd", "no part of a training step"),
        ("--num-experts 4", "is what a field of the workload says"),
        ("--num-layers-per-virtual-pipeline-stage 1", "is what parallelism.virtual_pipeline_model_parallel_size says"),
        ("--experimental-attention-variant dsa", "not supported"),
        ("--offload-modules qkv_liner", "there is no 'qkv_liner'"),
    ],
)
def test_a_wrong_option_is_found_without_megatron(argument: str, words: str) -> None:
    workload = stated("--fine-grained-activation-offloading", argument)
    assert any(words in reason for _, at, reason in errors(workload) if at == "launch.arguments"), errors(workload)


def test_options_are_read_as_they_are_written() -> None:
    read = launched(
        Launch(arguments=("--fp8-format=e4m3", "--cuda-graph-modules attn mlp", "--flash-attention-version 3"))
    )
    assert (read.fp8, read.cuda_graph_modules, read.flash_attention_version) == ("e4m3", ("attn", "mlp"), 3)
    assert launched(None) == Launched()
    assert not unread(Launch(arguments=("--no-rope-freq ([0]*3+[1])*2", "--lr x")))
    assert listed("([0]*3+[1])*2") == (0, 0, 0, 1, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("version", "changes", "words"),
    [
        (
            "0.18.2",
            {"recompute": selective("gdn_norm_out"), "model__gated_delta_net": {"linear_attention_freq": 2}},
            "has no label",
        ),
        (
            "0.17.1",
            {f"{KERNELS}moe_shared_expert_overlap": True, f"{KERNELS}moe_token_dispatcher_type": "flex"},
            "alltoall",
        ),
    ],
)
def test_rules_of_older_versions_are_theirs_alone(version: str, changes: dict[str, Any], words: str) -> None:
    older = stated("--use-megatron-fsdp", training__software__megatron_core=version, **changes)
    newer = stated("--use-megatron-fsdp", **changes)
    assert any(words in reason for _, _, reason in errors(older))
    assert not any(words in reason for _, _, reason in errors(newer))


def test_a_single_grouped_weight_needs_its_transformer_engine() -> None:
    arguments = ("--moe-single-grouped-weight", "--use-transformer-engine-op-fuser")
    assert not errors(stated(*arguments))
    ((authority, _, reason),) = errors(stated(*arguments, training__software__transformer_engine="2.13.0"))
    assert (authority, "2.14" in reason) == (Authority.CONFIG, True)


def test_the_document_lists_every_rule() -> None:
    text = rules_table.PAGE.read_text()
    assert text == rules_table.page(text), "python -m tests.workload.rules_table"
    assert len(rules_table.rules()) > 250


def test_every_authority_is_where_it_is_said_to_be() -> None:
    for authority in Authority:
        package = "transformer-engine" if authority.file.startswith("transformer_engine") else "megatron-core"
        if authority.file:
            assert Path(str(distribution(package).locate_file(authority.file))).is_file(), authority


def test_nothing_is_said_that_follows_from_a_wrong_size_alone() -> None:
    wrong = unchecked(parallelism={"world_size": 8, "expert_model_parallel_size": 7}, batch__global_batch_size=8)
    assert [at for _, at, _ in errors(wrong)] == ["parallelism.expert_model_parallel_size"]
