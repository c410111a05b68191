"""Traces of pipeline stages: what a stage builds, what it has under way, and that few micro-batches show it all."""

from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.workload.stages import differing_stages
from tests.small import MODEL

DENSE: dict[str, Any] = {**MODEL, "num_layers": 4, "mixture_of_experts": None}
SEQUENCE, HIDDEN = 256, 256


def pipeline(stages: int, micro_batches: int = 16, **layout: Any) -> Workload:
    """A dense model on one rank a stage; not checked, so that the trace can be tried before the estimate."""
    return Workload.unchecked(
        {
            "model": {**DENSE, "num_layers": layout.pop("num_layers", 4)},
            "parallelism": {"world_size": stages, "pipeline_model_parallel_size": stages, **layout},
            "batch": {"seq_length": SEQUENCE, "global_batch_size": micro_batches},
        }
    )


def layers(trace: Trace) -> list[int]:
    """Decoder layers whose parameters a rank holds."""
    return sorted({row.layer for row in trace.ledger.rows if row.kind == "parameters" and row.layer is not None})


def under_way(trace: Trace) -> dict[int, int]:
    """How many micro-batches each layer keeps its statistics for when the first backward begins."""
    found: dict[int, int] = {}
    for row in trace.ledger.retained().rows:
        if row.tensor == "fused_attn_fwd" and row.shape[-1] == 1 and row.layer is not None:
            found[row.layer] = found.get(row.layer, 0) + 1
    return found


def test_a_stage_has_its_layers_and_as_many_micro_batches_under_way_as_follow_it(server: TraceServer) -> None:
    stages = [server.run(pipeline(4), rank=rank) for rank in range(4)]
    assert [layers(stage) for stage in stages] == [[0], [1], [2], [3]]
    assert [under_way(stage) for stage in stages] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]
    embeddings = [any(row.kind == "embedding" for row in stage.ledger.rows) for stage in stages]
    assert embeddings == [True, False, False, False]
    logits = [any(row.module == "output_layer" for row in stage.ledger.rows) for stage in stages]
    assert logits == [False, False, False, True]
    assert [stage.rank for stage in stages] == [0, 1, 2, 3]


def test_by_default_every_stage_that_can_differ_is_traced_and_the_fullest_shown(server: TraceServer) -> None:
    workload = pipeline(4)
    shown = server.run_stages(workload)
    alone = [server.run(workload, rank=rank) for rank in range(4)]
    assert [record.stages for record in shown.measurement.ranks] == [(0,), (1,), (2,), (3,)]
    assert list(shown.measurement.ranks) == [each.measurement.ranks[0] for each in alone]
    fullest = max(alone, key=lambda each: each.peak_allocated_bytes)
    assert (shown.rank, shown.ledger.rows) == (fullest.rank, fullest.ledger.rows)
    assert shown.measurement.worst_rank == fullest.measurement.ranks[0]
    for record, each in zip(shown.summary.ranks, alone, strict=True):
        # Norms, MLA and MLP of a layer; the embedding comes first, the final norm and the head last.
        held = {row.tensor: row.bytes for row in each.ledger.rows if row.tensor.endswith("param_data")}
        assert record.parameters is not None
        assert record.parameter_bytes == 2 * record.parameters <= sum(held.values())
        phases = [(phase.iteration, phase.peak_allocated_bytes) for phase in each.summary.phases]
        assert record.first_step_peak_bytes == max(peak for iteration, peak in phases if iteration <= 1)
        assert record.steady_peak_bytes == max(peak for iteration, peak in phases if iteration == 2)
        assert record.between_steps_bytes == each.summary.between_steps_bytes
        assert record.peak_reserved_bytes == each.peak_reserved_bytes
    sizes = [record.parameters for record in shown.summary.ranks]
    assert sizes[0] > sizes[1] == sizes[2] < sizes[3]  # type: ignore[operator]


def test_middle_stages_that_hold_the_same_are_traced_once(server: TraceServer) -> None:
    few = pipeline(6, micro_batches=2, num_layers=6)
    assert differing_stages(few) == [(0,), (1, 2, 3), (4,), (5,)]
    assert [(record.rank, record.stages) for record in server.run_stages(few).summary.ranks] == [
        (0, (0,)),
        (1, (1, 2, 3)),
        (4, (4,)),
        (5, (5,)),
    ]
    first, third = (server.run(few, rank=rank).summary for rank in (1, 3))
    assert (first.phases, first.breakdown) == (third.phases, third.breakdown)
    interleaved = pipeline(4, micro_batches=4, num_layers=16, virtual_pipeline_model_parallel_size=4)
    assert differing_stages(interleaved) == [(0,), (1,), (2,), (3,)]
    assert len(differing_stages(pipeline(6, num_layers=6))) == 6
    marked = [pipeline(4, 1, pipeline_model_parallel_layout=text) for text in ("Et|t|t|tL", "Et|t|tm|tL")]
    assert [len(differing_stages(each)) for each in marked] == [3, 4]


def test_a_step_with_few_micro_batches_has_no_more_than_those_under_way(server: TraceServer) -> None:
    assert under_way(server.run(pipeline(4, micro_batches=2), rank=0)) == {0: 2}


def test_interleaved_stages_keep_the_numbers_of_their_layers(server: TraceServer) -> None:
    interleaved = pipeline(2, virtual_pipeline_model_parallel_size=2)
    first, last = (server.run(interleaved, rank=rank) for rank in range(2))
    assert (layers(first), layers(last)) == ([0, 2], [1, 3])
    # 2 (pp - rank - 1) + (vpp - 1) pp forward passes come first, in groups of pp, and then one more.
    assert under_way(first) == {0: 3, 2: 2}
    assert under_way(last) == {1: 2, 3: 1}


def test_stages_may_be_uneven(server: TraceServer) -> None:
    uneven = pipeline(2, num_layers=5, num_layers_in_first_pipeline_stage=2)
    assert [layers(server.run(uneven, rank=rank)) for rank in range(2)] == [[0, 1], [2, 3, 4]]
    weighted = pipeline(2, num_layers=5, account_for_loss_in_pipeline_split=True)
    assert [layers(server.run(weighted, rank=rank)) for rank in range(2)] == [[0, 1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        ({}, 3),
        ({"virtual_pipeline_model_parallel_size": 2}, 6),
        ({"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 3}, 8),
    ],
)
def test_few_micro_batches_show_what_many_hold(server: TraceServer, layout: dict[str, Any], shown: int) -> None:
    many = pipeline(2, micro_batches=80, **layout)
    assert many.distinct_microbatches == shown
    more = pipeline(2, micro_batches=shown + 6, **layout)
    peaks = [
        {(phase.iteration, phase.phase): phase.peak_tensor_bytes for phase in server.run(each, rank=0).summary.phases}
        for each in (many, more)
    ]
    assert peaks[0] == peaks[1]


def test_a_received_input_is_retained_until_its_backward(server: TraceServer) -> None:
    rows = server.run(pipeline(2, micro_batches=4), rank=1).ledger.rows
    received = [row for row in rows if row.shape == (SEQUENCE, 1, HIDDEN) and row.tensor == "create_tensor_recv_prev"]
    # Three micro-batches are shown in each of two steps; the first arrives before forward, the others after a backward.
    assert [row.phase for row in received] == ["forward", "backward", "backward"] * 2
    # The decoder's `input_tensor` keeps the last one until the next step's first.
    assert [row.lifetime for row in received] == ["retained", "retained", "state", "retained", "retained", "retained"]


def test_there_is_no_rank_beyond_the_world(server: TraceServer) -> None:
    with pytest.raises(InputError, match=r"^rank 2 does not exist; use one from 0 to 1$"):
        server.run(pipeline(2), rank=2)


def test_predictions_before_the_last_stage_are_refused_in_a_sentence(server: TraceServer) -> None:
    case = pipeline(4, pipeline_model_parallel_layout="Et|tt|tm|L")
    with pytest.raises(Unfinished, match="put m beside L"):
        server.run(case)
