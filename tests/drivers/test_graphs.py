"""CUDA graphs: what is captured once allocates no more, and what graphs keep for themselves."""

from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.ledger import Row
from tests.small import MODEL, small

LAYERS, TOKENS, LOCAL, HIDDEN = 2, 256, 128, 256
DENSE: dict[str, Any] = {
    "model": {**MODEL, "num_layers": LAYERS, "mixture_of_experts": None},
    "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}
STAGES: dict[str, Any] = {
    "model": {**DENSE["model"], "num_layers": 4},
    "parallelism": {"world_size": 2, "pipeline_model_parallel_size": 2},
    "batch": {"seq_length": TOKENS, "global_batch_size": 8},
}


def graphed(*others: str, **changes: Any) -> Workload:
    return small(launch={"arguments": ["--cuda-graph-impl transformer_engine", *others]}, **changes)


@pytest.fixture(scope="module")
def whole(server: TraceServer) -> Trace:
    """Graphs of whole layers."""
    return server.run(graphed(**DENSE))


def steady(trace: Trace, *, of: str = "decoder.layers") -> list[Row]:
    start = trace.ledger.start(trace.ledger.steady_iteration(), "forward")
    return [row for row in trace.ledger.rows if row.born > start and row.module.startswith(of)]


def kept(trace: Trace) -> dict[str, list[tuple[int, ...]]]:
    """What graphs keep for themselves between steps, by who made it."""
    made: dict[str, list[tuple[int, ...]]] = {}
    for row in trace.ledger.between_steps().rows:
        if row.phase == "capture":
            made.setdefault(row.tensor, []).append(row.shape)
    return made


def test_a_replayed_layer_allocates_nothing(whole: Trace) -> None:
    assert steady(whole) == []
    assert steady(whole, of="output_layer") != []


def test_what_is_outside_the_graphs_allocates_as_ever(server: TraceServer, whole: Trace) -> None:
    attention = server.run(graphed("--cuda-graph-modules attn", **DENSE))
    modules = {row.module.split(".")[3] for row in steady(attention) if row.module.count(".") > 2}
    assert modules == {"mlp"}


def test_graphs_are_captured_between_the_steps_before_and_with_them(whole: Trace) -> None:
    phases = [(moment.iteration, moment.phase) for moment in whole.ledger.moments]
    captured = phases.index((3, "capture"))
    assert phases[captured - 1] == (2, "optimizer")
    assert phases[captured + 1] == (3, "forward")
    before, with_graphs = (
        max(
            peak.bytes for peak in whole.ledger.phase_peaks() if peak.iteration == iteration and peak.phase == "forward"
        )
        for iteration in (2, 4)
    )
    assert with_graphs < before  # the activations of layers are their pool's: reserved, no longer allocated
    assert whole.peak_reserved_bytes is not None
    assert whole.peak_reserved_bytes > before


def test_static_inputs_stay_and_those_of_a_finished_backward_serve_again(server: TraceServer, whole: Trace) -> None:
    inputs, masks = [(LOCAL, 1, HIDDEN)] * LAYERS, [(1, 1, TOKENS, TOKENS)] * LAYERS
    assert kept(whole)["get_layer_static_inputs"] == inputs
    assert kept(whole)["bitwise_not"] == masks
    # One-forward-one-backward: the first stage has two of its eight micro-batches under way, the last one.
    for rank, under_way in ((0, 2), (1, 1)):
        stage = server.run(graphed(**STAGES), rank=rank)
        assert kept(stage)["get_layer_static_inputs"] == [(TOKENS, 1, HIDDEN)] * 2 * under_way


def test_the_work_is_that_of_a_step_without_graphs(server: TraceServer, whole: Trace) -> None:
    plain = server.run(small(**DENSE))
    assert [(row.module, row.phase, row.flops) for row in whole.work if row.flops] == [
        (row.module, row.phase, row.flops) for row in plain.work if row.flops
    ]


def test_graphs_may_be_captured_before_the_first_step(server: TraceServer, whole: Trace) -> None:
    first = server.run(graphed("--cuda-graph-warmup-steps 0", **DENSE))
    assert [moment.phase for moment in first.ledger.moments][:2] == ["setup", "capture"]
    for static in ("get_layer_static_inputs", "bitwise_not"):
        assert kept(first)[static] == kept(whole)[static]


@pytest.fixture(scope="module")
def own(server: TraceServer) -> Trace:
    """Megatron Core's own graphs of whole layers."""
    return server.run(small(launch={"arguments": ["--cuda-graph-impl local"]}, **DENSE))


def test_megatrons_own_graphs_are_captured_in_the_first_step_and_replayed_without_allocating(own: Trace) -> None:
    phases = [(moment.iteration, moment.phase) for moment in own.ledger.moments]
    assert phases.count((1, "capture")) == 1
    assert [phase for iteration, phase in phases if iteration == 2][:2] == ["forward", "backward"]
    assert steady(own) == []
    assert steady(own, of="output_layer") != []
    assert any(row.flops for row in own.work if row.module.startswith("decoder.layers"))


def test_what_megatrons_own_graphs_hand_on_stays_in_their_pool(own: Trace) -> None:
    handed = [row for row in own.ledger.rows if row.phase == "capture" and row.shape == (LOCAL, 1, HIDDEN)]
    assert handed != []
    assert kept(own) == {}


def test_a_graph_of_a_whole_step_has_its_activations_in_a_pool_of_its_own(server: TraceServer) -> None:
    full = ["--cuda-graph-impl full_iteration", "--no-check-for-nan-in-loss-and-grad", "--optimizer-cuda-graph"]
    trace = server.run(small(launch={"arguments": full}, **DENSE, batch={"seq_length": TOKENS, "global_batch_size": 8}))
    peaks = {(peak.iteration, peak.phase): peak.bytes for peak in trace.ledger.phase_peaks()}
    # The captured step takes all it needs once more; cuBLAS has a workspace for its stream too.
    assert peaks[3, "backward"] - peaks[2, "backward"] >= 2 * trace.workload.training.workspaces.cublas
    assert peaks[4, "backward"] < peaks[3, "backward"]
    assert peaks[4, "optimizer"] - peaks[4, "backward"] <= 512, "replays allocate nothing"
    reserved = trace.peak_reserved_bytes
    assert reserved is not None
    assert reserved > peaks[3, "backward"], "what the pool has let go of stays its own"
    inputs = [row for row in trace.ledger.between_steps().rows if row.tensor == "copy_tensors_in_struct"]
    assert len(inputs) == 4 * 4, "tokens, labels, mask and positions of each micro-batch"


def test_megatrons_own_graphs_have_no_pipeline(server: TraceServer) -> None:
    with pytest.raises(InputError, match=r"--cuda-graph-impl local: .*; use transformer_engine"):
        server.run(small(launch={"arguments": ["--cuda-graph-impl local"]}, **STAGES))
