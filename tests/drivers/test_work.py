"""Work is counted as the formulas say, and recompute's replay is what the labels name."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from labkit.drivers.trace import gdn_flops
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.server import TraceServer
from labkit.drivers.trace.te_shapes import attention_flops, seen_pairs
from labkit.drivers.trace.tracker import StorageTracker
from labkit.drivers.trace.work import WorkCounter, counted_by, launched
from labkit.work import WorkRow, by_phase, replay, total
from labkit.workload.gpu import GPUS
from tests.small import full, selective, small

HIDDEN, FFN, HEADS, SEQUENCE, VOCABULARY, LAYERS, BATCH = 256, 512, 4, 256, 1024, 2, 1
DENSE: dict[str, Any] = {
    "model__multi_latent_attention": None,
    "model__mixture_of_experts": None,
    "parallelism": {"world_size": 1},
    "batch__global_batch_size": BATCH,
}


def of(rows: Iterable[WorkRow], phase: str, *, replayed: bool = False) -> list[WorkRow]:
    return [row for row in rows if row.phase == phase and row.replayed is replayed]


def counted(program: Any) -> tuple[int, int, int]:
    """(launches, FLOPs, bytes) of a program on the device."""
    counter = WorkCounter(Origin(), GPUS["h100-80gb"], iteration=1)
    with StorageTracker(Origin(), work=counter) as tracker:
        inputs = [torch.zeros(8, 16, device="meta", dtype=torch.bfloat16) for _ in range(2)]
        tracker.phase(1, "forward")
        program(*inputs)
    work = total(counter.rows())
    return work.launches, work.flops, work.hbm_bytes


def test_traffic_is_what_a_launch_reads_and_writes() -> None:
    each = 8 * 16 * 2
    assert counted(lambda a, b: a + b) == (1, 0, 3 * each)
    assert counted(lambda a, b: a.add_(b)) == (1, 0, 3 * each)
    assert counted(lambda a, b: a.copy_(b)) == (1, 0, 2 * each)
    assert counted(lambda a, b: a @ b.t()) == (1, 2 * 8 * 8 * 16, 2 * each + 8 * 8 * 2)
    assert counted(lambda a, b: a.view(-1).unsqueeze(0)) == (0, 0, 0), "views move nothing"
    assert counted(lambda a, b: torch.empty_like(a)) == (0, 0, 0), "nor do allocations"
    assert counted(lambda a, b: a[:1].expand(8, 16) * b) == (1, 0, 3 * each), "a view's own storage bounds it"
    assert counted(lambda a, b: torch._foreach_mul_([a, b], 2.0)) == (1, 0, 4 * each)


def test_a_product_runs_at_the_speed_of_its_operands() -> None:
    def seconds(program: Any, dtype: torch.dtype) -> float:
        counter = WorkCounter(Origin(), GPUS["h100-80gb"], iteration=1)
        with StorageTracker(Origin(), work=counter) as tracker, counted_by(counter):
            matrix = torch.zeros(8192, 8192, device="meta", dtype=dtype)
            tracker.phase(1, "forward")
            program(matrix)
        return total(counter.rows()).seconds

    flops = 2 * 8192**3
    for dtype, peak in ((torch.bfloat16, 989e12), (torch.float32, 67e12), (torch.float64, 67e12)):
        assert seconds(lambda matrix: matrix @ matrix, dtype) == pytest.approx(flops / peak, rel=1e-4)
    # Transformer Engine's GEMM: FP8 in bytes, fp32 as TF32.
    for dtype, peak in ((torch.uint8, 1979e12), (torch.bfloat16, 989e12), (torch.float32, 494.5e12)):
        assert seconds(lambda matrix: launched(flops, matrix), dtype) == pytest.approx(flops / peak, rel=1e-4)


def test_a_dense_model_does_what_the_formula_says(server: TraceServer) -> None:
    rows = server.run(small(**DENSE)).work
    width = HIDDEN // HEADS
    weights = LAYERS * (HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN + HIDDEN * 2 * FFN + FFN * HIDDEN) + HIDDEN * VOCABULARY
    attention = LAYERS * BATCH * HEADS * SEQUENCE * SEQUENCE // 2
    assert total(of(rows, "forward")).flops == 2 * weights * SEQUENCE + 4 * attention * width
    assert total(of(rows, "forward")).hbm_bytes > 2 * weights, "stand-ins tell of their traffic"
    assert total(of(rows, "backward")).flops == 4 * weights * SEQUENCE + 10 * attention * width


def test_every_micro_batch_counts(server: TraceServer) -> None:
    once = server.run(small(**DENSE)).work
    often = server.run(small(**DENSE | {"batch__global_batch_size": 5})).work
    for phase in ("forward", "backward"):
        assert total(of(often, phase)).flops == 5 * total(of(once, phase)).flops
    assert total(of(often, "optimizer")).hbm_bytes == pytest.approx(total(of(once, "optimizer")).hbm_bytes, rel=1e-3)


def test_nothing_is_replayed_without_recompute(server: TraceServer) -> None:
    rows = server.run(small()).work
    assert not any(row.replayed or row.checkpoints for row in rows)
    assert [part.phase for part in by_phase(rows)] == ["forward", "backward", "grad_sync", "optimizer"]


def test_full_recompute_replays_the_layers_forward(server: TraceServer) -> None:
    none, recomputed = (server.run(small(recompute=choice)).work for choice in ({}, full("uniform", 1)))
    layers = total(row for row in of(none, "forward") if row.module.startswith("decoder.layers."))
    again = replay(recomputed)
    assert again.flops == layers.flops
    assert again.communicated_bytes == layers.communicated_bytes
    assert again.hbm_bytes == pytest.approx(layers.hbm_bytes, rel=1e-3)
    assert again.checkpoints == 2
    extra = total(recomputed).seconds - total(none).seconds
    assert again.seconds == pytest.approx(extra, rel=0.01), "nothing but the replay sets the steps apart"


@pytest.mark.parametrize(
    ("label", "modules", "multiplies"),
    [
        ("core_attn", {"decoder.layers.*.self_attention.core_attention.fused_attention"}, True),
        ("mlp", {"decoder.layers.*.mlp.linear_fc1", "decoder.layers.*.mlp.linear_fc2", "decoder.layers.*.mlp"}, True),
        ("layernorm", {"decoder.layers.*.input_layernorm", "decoder.layers.*.pre_mlp_layernorm"}, False),
        ("moe_act", {"decoder.layers.*.mlp.experts.linear_fc2"}, False),
    ],
)
def test_a_label_replays_what_it_names(server: TraceServer, label: str, modules: set[str], multiplies: bool) -> None:
    control, candidate = (server.run(small(recompute=selective(*labels))).work for labels in ([], [label]))
    assert {row.module for row in candidate if row.replayed and row.launches} == modules
    again, forward = replay(candidate), {row.module: row for row in of(control, "forward")}
    assert bool(again.flops) is multiplies
    assert again.hbm_bytes > 0
    for row in candidate:
        if row.replayed:
            assert row.flops <= forward[row.module].flops
    assert total(candidate).flops - total(control).flops == again.flops
    assert total(candidate).hbm_bytes - total(control).hbm_bytes == pytest.approx(again.hbm_bytes, rel=0.01)


def test_messages_follow_the_ring(server: TraceServer) -> None:
    trace = server.run(small(**DENSE | {"parallelism": {"world_size": 2, "tensor_model_parallel_size": 2}}))
    dense = server.run(
        small(**DENSE | {"parallelism": {"world_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}})
    )
    stream = SEQUENCE * HIDDEN * 2
    reduced = messages(trace, "forward", "all_reduce", "decoder")
    assert reduced == (2 * LAYERS, 2 * LAYERS * 2 * stream // 2), "an all-reduce sends twice its half"
    gathered = messages(dense, "forward", "all_gather", "decoder")
    assert gathered == (2 * LAYERS, 2 * LAYERS * stream // 2)
    assert messages(dense, "forward", "reduce_scatter", "decoder") == gathered


def messages(trace: Trace, phase: str, kind: str, module: str) -> tuple[int, int]:
    """(calls, bytes)."""
    found = [
        exchange
        for row in of(trace.work, phase)
        for exchange in row.exchanges
        if exchange.kind == kind and row.module.startswith(module)
    ]
    return sum(each.calls for each in found), sum(each.bytes for each in found)


def test_causal_attention_counts_the_pairs_it_sees() -> None:
    assert seen_pairs(8 * 4, 8, 8, causal=False) == 8 * 8 * 4
    assert seen_pairs(8 * 4, 8, 8, causal=True) == 8 * 8 * 4 // 2
    assert seen_pairs(4, 4, 8, causal=True) == 4 * 4 + 4 * 4 // 2, "the last query sees every key"
    assert seen_pairs(64, 64, 64, causal=True, window=7) == 64 * 8
    assert attention_flops(10, 3, 2) == 2 * 10 * (3 + 2)
    assert attention_flops(10, 3, 2, backward=True) == 2 * 10 * (3 * 3 + 2 * 2)


def test_the_delta_rule_counts_its_products() -> None:
    keys = torch.empty(1, 128, 2, 16, device="meta")
    arguments = {"k": keys, "K": 16, "V": 32, "BT": 64, "HV": 4}
    assert gdn_flops.of("chunk_fwd_kernel_o", arguments) == 2 * 128 * 4 * (16 * 32 + 64 * 16 + 64 * 32)
    assert gdn_flops.of("causal_conv1d_fwd_kernel", arguments) == 0
