"""Fine-grained activation offloading: what leaves the device, when it comes back, and two micro-batches in turn."""

from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.offloading import CHUNK_MISMATCH
from labkit.drivers.trace.server import TraceServer
from tests.small import MODEL, small

LAYERS, LOCAL, HIDDEN = 4, 128, 256
"""Layers, tokens of one of two ranks under sequence parallelism, width."""
DENSE: dict[str, Any] = {
    "model": {**MODEL, "num_layers": LAYERS, "mixture_of_experts": None},
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


def offloading(modules: str, *others: str, smallest: int = 1, **changes: Any) -> Workload:
    """The inputs of `modules` go to the host where they have at least `smallest` elements."""
    arguments = ["--fine-grained-activation-offloading", f"--offload-modules {modules}", *others]
    arguments.append(f"--min-offloaded-tensor-size {smallest}")
    return small(launch={"arguments": arguments, "environment": ["NVTE_CPU_OFFLOAD_V1=1"]}, **changes)


def test_inputs_leave_the_device_but_those_of_the_last_layer(server: TraceServer) -> None:
    plain, offloaded = server.run(small(**DENSE)), server.run(offloading("attn_norm", **DENSE))
    deviations = 4 * LOCAL
    left = plain.ledger.retained().total() - offloaded.ledger.retained().total()
    assert left == (LAYERS - 1) * (LOCAL * HIDDEN * 2 + deviations)
    kept = {row.module for row in offloaded.ledger.retained().rows if row.module.endswith("input_layernorm")}
    assert kept >= {"decoder.layers.3.input_layernorm"}
    assert not [row for row in offloaded.ledger.retained().rows if row.module == "embedding"]


def test_what_left_comes_back_as_new_tensors_for_its_layer(server: TraceServer) -> None:
    offloaded = server.run(offloading("attn_norm", **DENSE))
    steady = [row for row in offloaded.ledger.rows if row.tensor == "reload" and row.born > _start(offloaded)]
    assert {row.phase for row in steady} == {"backward"}
    assert sorted(row.shape for row in steady) == [(LOCAL,)] * (LAYERS - 1) + [(LOCAL, HIDDEN)] * (LAYERS - 1)
    assert all(row.dies is not None for row in steady)


def test_small_tensors_stay(server: TraceServer) -> None:
    rows = server.run(offloading("attn_norm", smallest=LOCAL * HIDDEN, **DENSE)).ledger.rows
    assert {row.shape for row in rows if row.tensor == "reload"} == {(LOCAL, HIDDEN)}


def _start(trace: Trace) -> int:
    return trace.ledger.start(trace.ledger.steady_iteration(), "forward")


@pytest.fixture(scope="module")
def in_turn(server: TraceServer) -> dict[str, Trace]:
    """Interleaved stages whose micro-batches take turns in each layer, with and without offloading: the last stage."""
    layout = {
        "world_size": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
    }
    changes: dict[str, Any] = {
        "model": {**MODEL, "num_layers": 4, "mixture_of_experts": {**MODEL["mixture_of_experts"], "moe_layer_freq": 1}},
        "parallelism": layout,
        "batch": {"seq_length": 256, "global_batch_size": 8},
    }
    turns, environment = "--overlap-moe-expert-parallel-comm", ["CUDA_DEVICE_MAX_CONNECTIONS=32"]
    plain = small(launch={"arguments": [turns], "environment": environment}, **changes)
    return {
        "plain": server.run(plain, rank=3),
        "offloaded": server.run(offloading("attn_norm expert_fc1 moe_act", turns, **changes), rank=3),
    }


def test_micro_batches_in_turn_have_forward_and_backward_phases(in_turn: dict[str, Trace]) -> None:
    moments = [moment.phase for moment in in_turn["plain"].ledger.moments if moment.iteration == 2]
    turns = "".join(phase[0] for phase in moments if phase in ("forward", "backward"))
    assert turns.startswith("fb")
    assert turns.count("fb") > 8  # in each layer of every chunk that runs beside another


def test_a_chunk_of_which_nothing_is_offloaded_does_not_end_a_trace(in_turn: dict[str, Trace]) -> None:
    offloaded = in_turn["offloaded"]
    assert offloaded.measurement.environment["mended"] == CHUNK_MISMATCH
    assert CHUNK_MISMATCH in offloaded.summary.warnings
    assert "mended" not in in_turn["plain"].measurement.environment
    assert offloaded.ledger.retained().total() < in_turn["plain"].ledger.retained().total()
