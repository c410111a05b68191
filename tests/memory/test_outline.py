"""The outline (levels, summed by kind of unit) against the estimate's rows: two ways to the same bytes."""

from collections.abc import Mapping
from typing import Any

import pytest

from labkit.allocator import simulate
from labkit.ledger import rounded
from labkit.memory.estimate import estimate
from labkit.memory.outline import block, outline
from labkit.workload import Workload
from tests.memory.grid import NAMES, changed, mlp, moonlight, workload

PIPELINES: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline_model_parallel_size": 2},
    "two stages, interleaved": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "uneven": {"pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 2},
}


@pytest.mark.parametrize(
    "name",
    [name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.long) for number, name in enumerate(NAMES[::2])],
)
def test_agrees_with_the_rows_to_the_byte(name: str) -> None:
    case = workload(name)
    for stage in range(case.parallelism.pp):
        _agree(case, stage)


@pytest.mark.parametrize("name", PIPELINES)
def test_agrees_on_every_pipeline_stage(name: str) -> None:
    case = _pipelined(PIPELINES[name])
    for stage in range(case.parallelism.pp):
        _agree(case, stage)


def _pipelined(layout: Mapping[str, Any]) -> Workload:
    experts = moonlight.BASE["model"]["mixture_of_experts"] | {"moe_layer_freq": 1}
    world = 8 * layout["pipeline_model_parallel_size"]
    return Workload.model_validate(
        moonlight.BASE
        | {
            "model": moonlight.BASE["model"] | {"num_layers": 8, "mixture_of_experts": experts},
            "parallelism": moonlight.BASE["parallelism"] | {"world_size": world, **layout},
            "batch": moonlight.BASE["batch"] | {"global_batch_size": 32},
        }
    )


def _agree(case: Workload, stage: int) -> None:
    summary = estimate(case, stage).summary
    summed = outline(case, stage)
    peaks: dict[tuple[int, str], int] = {}
    for phase in summary.phases:
        key = phase.iteration, phase.phase
        peaks[key] = max(peaks.get(key, 0), phase.peak_tensor_bytes)
    assert {(phase.iteration, phase.phase): phase.bytes for phase in summed.phases} == peaks
    assert summed.between_steps_bytes == summary.between_steps_bytes
    assert summed.retained_bytes == summary.retained_bytes


@pytest.mark.parametrize("number", [1, 3, 7, 20])
def test_agrees_where_a_cache_fills_up_inside_a_checkpoint(number: int) -> None:
    """32 rotary tables are cached, a module each."""
    latent = {"kv_lora_rank": 32, "qk_head_dim": 32, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
    model = {"name": "deep", "num_layers": 45, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": number}
    case = {"model": {**model, "vocab_size": 1000, "multi_latent_attention": latent}, "recompute": full}
    _agree(Workload.from_mapping({**case, **_ONE_RANK}), 0)


_ONE_RANK = {"parallelism": {"world_size": 1}, "batch": {"seq_length": 256, "global_batch_size": 1}}


def test_a_table_of_learned_positions_is_as_long_as_the_sequence() -> None:
    base = changed(mlp.BASE, {"model.position_embedding_type": "learned_absolute"}, "learned positions")
    for length in (512, 4096):
        _agree(base.model_copy(update={"batch": base.batch.model_copy(update={"seq_length": length})}), 0)


@pytest.mark.parametrize("mebibytes", [0.5, 1, 3, 9.5, 10.5, 11.5, 32, 33.5, 100.1])
def test_a_block_is_what_a_fresh_allocator_gives(mebibytes: float) -> None:
    nbytes = rounded(int(mebibytes * 2**20))
    assert block(nbytes) == simulate([(1, nbytes)]).block_bytes[1]
