"""The `lora` runtime: adapters on a frozen base, packed sequences, and the rules that go with them."""

from typing import Any

import pytest

from labkit.errors import InputError
from labkit.memory.estimate import Estimate, estimate
from labkit.memory.outline import outline
from labkit.workload import Workload
from tests.memory.grid import lora

MODEL: dict[str, Any] = lora.BASE["model"]
HIDDEN, LAYERS, ROWS, TENSOR_RANKS = 512, 4, 1024, 2


def tuned(**changes: Any) -> Workload:
    """A small hybrid under the lora runtime, dotted fields changed (`__` for dots)."""
    mapping: dict[str, Any] = {
        "model": {
            **MODEL,
            "name": "hybrid",
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_query_groups": 2,
            "gated_delta_net": {**MODEL["gated_delta_net"], "linear_value_head_dim": 64},
        },
        "parallelism": {
            "world_size": TENSOR_RANKS,
            "tensor_model_parallel_size": TENSOR_RANKS,
            "sequence_parallel": True,
        },
        "batch": {"seq_length": ROWS, "global_batch_size": 1, "packed": {"lengths": [512, 512]}},
        "training": {"runtime": "lora", "lora": {"rank": 1, "optimizer_step": False}},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = mapping
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return Workload.from_mapping(mapping)


@pytest.fixture(scope="module")
def base() -> Estimate:
    return estimate(tuned())


def test_base_weights_have_no_gradients_and_no_optimizer(base: Estimate) -> None:
    kinds = {row.kind for row in base.ledger.between_steps().rows}
    assert "gradients" not in kinds
    assert "optimizer" not in kinds


def test_only_adapters_are_optimized() -> None:
    between = estimate(tuned(training__lora__optimizer_step=True)).ledger.between_steps()
    optimized = {row.module for row in between.rows if row.kind == "optimizer" and row.module != "optimizer"}
    assert optimized
    assert all("adapter" in module for module in optimized)


def test_ends_the_step_as_it_began(base: Estimate) -> None:
    ledger = base.ledger
    assert ledger.at(ledger.rows[-1].born + 10**9).total() == ledger.between_steps().total()


def test_regathering_drops_every_gathered_input(base: Estimate) -> None:
    """One whole norm output for each column-parallel linear: its mixer's and its MLP's in every layer."""
    saved = base.retained_bytes - estimate(tuned(training__lora__regather=True)).retained_bytes
    assert saved == 2 * LAYERS * ROWS * HIDDEN * 2


def test_a_linear_without_adapter_keeps_less(base: Estimate) -> None:
    chosen = estimate(tuned(training__lora__target_modules=["linear_qkv", "in_proj"]))
    names = {row.module.rpartition(".")[2] for row in chosen.ledger.rows if row.tensor == "adapter_down"}
    assert names == {"linear_qkv", "in_proj"}
    assert chosen.retained_bytes < base.retained_bytes


def test_compiled_layers_keep_less_than_eager_ones(base: Estimate) -> None:
    assert estimate(tuned(training__lora__compile_layers=True)).retained_bytes < base.retained_bytes


def test_a_shared_prefix_is_computed_once_and_handed_out_twice(base: Estimate) -> None:
    packed = {"lengths": [640, 640], "shared_prefix": 256}
    shared = estimate(tuned(batch__packed=packed))
    layers = [row for row in shared.ledger.retained().rows if row.layer is not None]
    assert sum(row.bytes for row in layers) == pytest.approx(
        sum(row.bytes for row in base.ledger.retained().rows if row.layer is not None), rel=0.01
    )
    outputs = [row for row in shared.ledger.retained().rows if row.module == "outputs"]
    assert sum(row.bytes for row in outputs) == 1280 * HIDDEN * 2


def test_every_segment_keeps_its_state() -> None:
    """An fp32 state of each value head, and the convolution's last inputs."""
    two, eight = (estimate(tuned(batch__packed={"lengths": lengths})) for lengths in ([512] * 2, [128] * 8))
    states, convolved = 4 * 64 * 64 * 4, (2 * 2 * 64 + 4 * 64) * 3 * 2
    deltas = 3
    assert eight.retained_bytes - two.retained_bytes == pytest.approx(
        deltas * 6 * (states + convolved), abs=deltas * 512
    )


WITHOUT_GRADIENTS = {"training__lora__no_grad": True}


def test_a_pass_without_gradients_keeps_its_outputs_alone() -> None:
    result = estimate(tuned(**WITHOUT_GRADIENTS))
    retained = [row for row in result.ledger.retained().rows if row.lifetime == "retained"]
    assert [(row.tensor, row.bytes) for row in retained] == [("hidden_states", ROWS * HIDDEN * 2)]
    assert not [row for row in result.ledger.rows if "gradient" in row.tensor]
    after = result.ledger.at(result.ledger.rows[-1].born + 10**9)
    assert after.total() == result.ledger.between_steps().total()


@pytest.mark.parametrize(
    ("outputs", "kept"),
    [("log_probs", ROWS * 4), ("top_k", ROWS * 5 * (4 + 8)), ("logits", 256 * 1024 * 2)],
)
def test_outputs_of_the_vocabulary_come_in_chunks(outputs: str, kept: int) -> None:
    """Per token a log-probability, or five candidates; or the last chunk's logits over the padded vocabulary."""
    changes = {"training__lora__outputs": outputs, "training__lora__output_chunk_rows": 256} | WITHOUT_GRADIENTS
    workload = tuned(**changes, **({"training__lora__top_k": 5} if outputs == "top_k" else {}))
    result = estimate(workload)
    assert workload.padded_vocab_size == 1024
    retained = [row for row in result.ledger.retained().rows if row.lifetime == "retained"]
    assert sum(row.bytes for row in retained) == kept
    widths = {row.shape[0] for row in result.ledger.rows if row.tensor == "logits"}
    assert widths == {256}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"training__runtime": "megatron"}, "training.lora: the megatron runtime has no adapters"),
        ({"training__lora": None}, "training.lora: the lora runtime needs it"),
        ({"batch__packed": {"lengths": [512, 1000]}}, "batch.seq_length: the packed sequences have 1512 tokens"),
        ({"batch__packed": {"lengths": [512, 100], "shared_prefix": 100}}, "batch.packed.shared_prefix"),
        ({"batch__packed": {"lengths": [512, 512], "busiest_rank_rows": 100}}, "batch.packed.busiest_rank_rows"),
        ({"training__lora__outputs": "log_probs"}, "training.lora.outputs: log_probs are priced for passes without"),
        ({"training__lora__outputs": "top_k"} | WITHOUT_GRADIENTS, "training.lora.top_k: outputs: top_k and the"),
        (
            {"training__lora__optimizer_step": True} | WITHOUT_GRADIENTS,
            "training.lora.optimizer_step: a pass without gradients",
        ),
        ({"batch__create_attention_mask_in_dataloader": True}, "mask_in_dataloader: the lora runtime reads no mask"),
        ({"model__qk_layernorm": False}, "model.qk_layernorm: the lora runtime is priced for"),
    ],
)
def test_says_in_one_sentence_what_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        tuned(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WITHOUT_GRADIENTS,
        {"training__lora__outputs": "log_probs"} | WITHOUT_GRADIENTS,
        {"training__lora__outputs": "top_k", "training__lora__top_k": 5} | WITHOUT_GRADIENTS,
    ],
    ids=["training", "no_grad", "log_probs", "top_k"],
)
def test_the_outline_agrees_to_the_byte(changes: dict[str, Any]) -> None:
    workload = tuned(**changes)
    outlined = {(each.iteration, each.phase): each.bytes for each in outline(workload).phases}
    estimated = {
        (peak.iteration, peak.phase): peak.bytes for peak in estimate(workload).ledger.phase_peaks(blocks=False)
    }
    assert outlined == estimated


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"batch__packed": None, "batch__micro_batch_size": 10**7, "batch__global_batch_size": 10**7},
            "batch.micro_batch_size: 10000000 sequences",
        ),
        (
            {"batch__packed": {"lengths": [1] * 20_000}, "batch__seq_length": 20_000},
            "batch.packed.lengths: 20000 sequences in a pass of the lora runtime are more than are listed one by one",
        ),
        ({"training__lora__outputs": "top_k", "training__lora__top_k": 1001}, "use at most 1000"),
        (
            {
                "batch__packed": None,
                "batch__seq_length": 10**6,
                "training__lora__outputs": "log_probs",
                "training__lora__output_chunk_rows": 1,
            },
            "1000000 tokens make 1000000 chunks, more than the 4096 that are listed one by one; use at least 245",
        ),
    ],
)
def test_more_than_can_be_listed_is_one_sentence(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        tuned(**(changes | WITHOUT_GRADIENTS))


def test_whole_logits_cost_the_same_however_small_their_chunks() -> None:
    changes = {"training__lora__outputs": "logits", "batch__packed": None, "batch__seq_length": 10**6}
    rows = [
        len(estimate(tuned(**changes, training__lora__output_chunk_rows=chunk, **WITHOUT_GRADIENTS)).ledger.rows)
        for chunk in (1, 10, 1000)
    ]
    assert len(set(rows)) == 1
