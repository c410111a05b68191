from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace import cublas
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.drivers.trace.versions import trace_versions
from labkit.ledger import Row, rounded
from labkit.memory.estimate import estimate
from labkit.work import replay, total
from labkit.workload import Software
from labkit.workload.behaviour import cross_entropy_gradient
from labkit.workload.gpu import MIB
from tests.published import PEAKS_GB
from tests.small import full, selective, small

TENSORS_GB = {
    (): 35.759,
    ("core_attn",): 35.756,
    ("mla_up_proj",): 35.087,
    ("mla_up_proj", "mlp"): 35.087,
    ("moe_act",): 35.087,
    ("layernorm", "moe_act"): 35.087,
}
"""The same without allocator remainders and cuBLAS workspaces, from an independent trace over fake tensors."""


SHORT = ((), ("moe_act",))
"""Labels that are traced in `make test`; a trace of Moonlight takes seconds."""
LABELS = [
    pytest.param(labels, marks=[] if labels in SHORT else pytest.mark.long, id="-".join(labels)) for labels in PEAKS_GB
]

Moonlight = Callable[[tuple[str, ...]], Trace]


@pytest.fixture
def moonlight(server: TraceServer) -> Moonlight:
    """Moonlight's trace with given labels."""
    workload = Workload.load("data/workloads/moonlight-16b.yaml")
    return lambda labels: server.run(
        workload.with_recompute(recompute_granularity="selective", recompute_modules=list(labels))
    )


@pytest.mark.slow
@pytest.mark.parametrize("labels", LABELS)
def test_peaks_are_the_published_ones(moonlight: Moonlight, labels: tuple[str, ...]) -> None:
    published, peak = PEAKS_GB[labels], moonlight(labels).peak_allocated_bytes / 1e9
    assert abs(peak / published - 1) < 0.01
    difference, measured = peak - moonlight(()).peak_allocated_bytes / 1e9, published - PEAKS_GB[()]
    assert abs(difference - measured) < 0.12
    assert difference * measured >= 0


@pytest.mark.slow
@pytest.mark.parametrize("labels", LABELS)
def test_tensors_are_those_of_an_independent_trace(moonlight: Moonlight, labels: tuple[str, ...]) -> None:
    workspaces = 2 * 32 * MIB / 1e9
    peak = max(phase.peak_tensor_bytes for phase in moonlight(labels).summary.phases) / 1e9
    assert peak - workspaces == pytest.approx(TENSORS_GB[labels], abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("labels", SHORT)
def test_segments_are_those_of_the_estimate(moonlight: Moonlight, labels: tuple[str, ...]) -> None:
    """Shared experts beside the dispatch have blocks of a stream of their own, in both."""
    trace = moonlight(labels)
    assert estimate(trace.workload).peak_reserved_bytes == pytest.approx(trace.peak_reserved_bytes, rel=3e-3)


REPLAYS: dict[tuple[str, ...], int] = {
    (): 0,
    ("core_attn",): 27,
    ("mla_up_proj",): 27,
    ("mla_up_proj", "mlp"): 28,
    ("moe_act",): 26,
    ("layernorm", "moe_act"): 26 + 26 + 27,
}
"""Regions that backward replays."""


@pytest.mark.slow
@pytest.mark.parametrize("labels", LABELS)
def test_moonlights_labels_replay_what_they_name(moonlight: Moonlight, labels: tuple[str, ...]) -> None:
    trace = moonlight(labels)
    again = replay(trace.work)
    assert again.checkpoints == REPLAYS[labels]
    step = total(moonlight(()).work).seconds
    assert total(trace.work).seconds - step == pytest.approx(again.seconds, rel=1e-3)
    if labels == ("core_attn",):
        # 8 heads a rank, keys 192 wide and values 128, half of all pairs, 27 layers.
        assert again.flops == 27 * 8 * 4096 * 4096 * (192 + 128)
        # Queries, keys, values and output once.
        assert again.hbm_bytes == 27 * 8 * 4096 * (2 * 192 + 2 * 128) * 2
    elif "moe_act" in labels:
        assert again.flops == 0
    elif "mlp" in labels:
        dense = again.flops - replay(moonlight(("mla_up_proj",)).work).flops
        assert dense == 2 * 4096 * 3 * 2048 * 11264 // 2


@pytest.mark.slow
def test_moonlight_holds_what_its_sizes_say(moonlight: Moonlight) -> None:
    held = moonlight(()).ledger.between_steps()

    def total(kind: str) -> int:
        return sum(row.bytes for row in held.rows if row.kind == kind and row.lifetime == "state")

    # 26 layers of 8 experts here, each with a gated up and a down projection; everything else by tensor parallel 2.
    experts = 26 * 8 * (2048 * 2 * 1408 + 1408 * 2048)
    q, kv_down, kv_up, out = 2048 * 16 * 192 // 2, 2048 * 576, 512 * 16 * 256 // 2, 16 * 128 * 2048 // 2
    attention = 27 * (q + kv_down + kv_up + out)
    dense, shared, router = 2048 * 3 * 11264 // 2, 26 * 2048 * 3 * 2816 // 2, 26 * 2048 * 64
    vocabulary, norms = 2 * 163840 * 2048 // 2, (2 * 27 + 1) * 2048 + 27 * 512
    expected = 2 * (experts + attention + dense + shared + router + vocabulary + norms)
    assert total("parameters") == pytest.approx(expected, rel=1e-4)  # buckets are padded
    assert total("gradients") == pytest.approx(expected, rel=1e-4)
    library = [row for row in held.rows if row.kind == "library"]
    assert {row.lifetime for row in library} == {"workspace"}
    gemms = [row.bytes for row in library if row.tensor.startswith((cublas.PRODUCER, "get_cublas_workspace"))]
    assert sorted(gemms) == [32 * MIB] * 2 + [rounded(32 * MIB + 1024)] * 5
    dummies = [row.shape for row in library if row.tensor == "get_dummy_wgrad"]
    assert len(dummies) == len(set(dummies)) == 9  # one a shape of weight


def test_measurement_and_ledger_say_the_same(server: TraceServer) -> None:
    result = server.run(small())
    measurement, summary = result.measurement, result.summary
    assert (measurement.driver, measurement.outcome, measurement.steady_iterations) == ("trace", "ok", 1)
    assert measurement.peak_allocated_bytes == result.peak_allocated_bytes == summary.peak_allocated_bytes
    assert measurement.versions == trace_versions()
    assert measurement.environment["routing"] == "balanced"
    (rank,) = measurement.ranks
    assert [(p.iteration, p.phase, p.peak_allocated_bytes) for p in rank.phases] == [
        (p.iteration, p.phase, p.peak_allocated_bytes) for p in summary.phases
    ]
    reserved = [phase.peak_reserved_bytes for phase in rank.phases]
    assert reserved == sorted(reserved)  # type: ignore[type-var]
    assert reserved[-1] == result.peak_reserved_bytes
    for phase in rank.phases:
        assert phase.peak_reserved_bytes is not None
        assert phase.peak_reserved_bytes >= phase.peak_allocated_bytes
    assert rank.retained_bytes == result.retained_bytes > 0
    assert sum(share.bytes for share in summary.breakdown) == summary.peak_allocated_bytes


def test_every_row_says_what_it_is(server: TraceServer) -> None:
    ledger = server.run(small()).ledger
    kinds = set("parameters gradients optimizer attention mlp moe norm embedding head input library".split())
    assert {row.kind for row in ledger.rows} == kinds
    end = max(moment.clock for moment in ledger.moments)
    for row in ledger.rows:
        assert row.bytes % 512 == 0
        assert row.bytes <= row.block_bytes < row.bytes + 2 * MIB
        assert row.dies is None or row.dies > row.born
        assert (row.layer is not None) == row.module.startswith("decoder.layers.")
        if row.lifetime == "workspace":
            assert row.dies is None
    assert ledger.moments[-1].clock == end
    start = ledger.start(2, "backward")

    def of(row: Row) -> bool:
        return row.layer == 1 and row.phase == "backward" and row.born >= start and row.lifetime == "transient"

    made = {row.module for row in ledger.where(of).rows}
    assert {"decoder.layers.1.mlp.experts.linear_fc1", "decoder.layers.1.self_attention.linear_proj"} <= made


def retained(result: Trace, kind: str) -> int:
    return sum(row.bytes for row in result.ledger.retained().rows if row.kind == kind)


@pytest.mark.parametrize(
    ("label", "kind"),
    [("mla_up_proj", "attention"), ("mlp", "mlp"), ("moe", "moe"), ("moe_act", "moe"), ("shared_experts", "moe")],
)
def test_a_label_lets_go_of_what_it_names(server: TraceServer, label: str, kind: str) -> None:
    control, candidate = server.run(small()), server.run(small(recompute=selective(label)))
    assert retained(candidate, kind) < retained(control, kind)
    for other in {"attention", "mlp", "moe", "norm"} - {kind}:
        assert retained(candidate, other) == pytest.approx(retained(control, other), abs=140_000)


def test_full_recompute_keeps_layer_boundaries_only(server: TraceServer) -> None:
    none = server.run(small(recompute={}))
    uniform, pairs, block = (
        server.run(small(recompute=choice)) for choice in (full("uniform", 1), full("uniform", 2), full("block", 1))
    )
    assert pairs.retained_bytes < uniform.retained_bytes < block.retained_bytes < none.retained_bytes
    for kind in ("attention", "mlp"):
        assert retained(uniform, kind) == 0
    replayed = {row.module for row in uniform.ledger.rows if row.phase == "backward" and row.tensor == "fused_attn_fwd"}
    assert len(replayed) == 2, "both layers run again in backward"


VARIANTS: dict[str, dict[str, Any]] = {
    "no experts": {
        "model__mixture_of_experts": None,
        "parallelism": {"world_size": 4, "tensor_model_parallel_size": 2},
    },
    "compressed queries": {"model__multi_latent_attention__q_lora_rank": 48, "model__qk_layernorm": True},
    "one rank": {"parallelism": {"world_size": 1}, "batch__global_batch_size": 1},
    "experts without tensor parallel": {
        "parallelism": {"world_size": 4, "expert_model_parallel_size": 4},
        "batch__global_batch_size": 4,
    },
    "every second layer": {"model__mixture_of_experts__moe_layer_freq": 2},
    "no shared experts": {"model__mixture_of_experts__moe_shared_expert_intermediate_size": None},
    "shared experts beside the dispatch": {"training__kernels__moe_shared_expert_overlap": True},
    "sigmoid router with groups": {
        "model__mixture_of_experts__moe_router_score_function": "sigmoid",
        "model__mixture_of_experts__moe_router_enable_expert_bias": True,
        "model__mixture_of_experts__moe_router_num_groups": 4,
        "model__mixture_of_experts__moe_router_group_topk": 2,
        "model__mixture_of_experts__moe_router_dtype": "fp32",
    },
    "rows that do not divide": {"model__mixture_of_experts__moe_router_topk": 3, "batch__seq_length": 250},
    "no overlap": {
        "training__data_parallel__overlap_grad_reduce": False,
        "training__data_parallel__overlap_param_gather": False,
    },
    "many labels": {"recompute": selective("layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts")},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_other_workloads_run(server: TraceServer, changes: dict[str, Any]) -> None:
    result = server.run(small(**changes))
    assert 0 < result.retained_bytes < result.peak_allocated_bytes <= (result.peak_reserved_bytes or 0)
    steady = [p for p in result.summary.phases if p.iteration == 2]
    assert [p.phase for p in steady] == ["forward", "backward", "grad_sync", "optimizer"]


def test_micro_batches_follow_each_other(server: TraceServer) -> None:
    one, two = server.run(small()), server.run(small(batch__global_batch_size=4))
    assert [moment.phase for moment in two.ledger.moments if moment.iteration == 2] == [
        *["forward", "backward"] * 2,
        "grad_sync",
        "optimizer",
    ]
    assert two.retained_bytes == one.retained_bytes
    assert two.peak_allocated_bytes == pytest.approx(one.peak_allocated_bytes, rel=0.001)


def test_dtypes_decide_the_state(server: TraceServer) -> None:
    def between(**changes: Any) -> int:
        return server.run(small(**changes)).summary.between_steps_bytes

    base = between()
    gradients = sum(row.bytes for row in server.run(small()).ledger.between_steps().rows if row.kind == "gradients")
    assert between(training__data_parallel__grad_reduce_in_fp32=True) - base == pytest.approx(gradients, rel=0.001)
    lean = {
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": "bf16",
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "bf16",
    }
    assert between(training__optimizer=lean) < base


@pytest.mark.parametrize("distributed", [False, True])
def test_parameters_in_fp32_are_their_own_main_parameters(server: TraceServer, distributed: bool) -> None:
    trace = server.run(
        small(
            training={
                "precision": "fp32",
                "kernels": {"attention_backend": "unfused"},
                "data_parallel": {"use_distributed_optimizer": distributed, "overlap_param_gather": distributed},
            }
        )
    )
    rows = trace.ledger.between_steps().rows
    state = [row for row in rows if row.kind in ("parameters", "gradients", "optimizer")]
    assert {row.dtype for row in state if row.bytes > 512} == {"fp32"}
    kept = {row.tensor for row in state if row.kind == "optimizer" and row.bytes > 512}
    assert kept == {"exp_avg", "exp_avg_sq"}
    numel = trace.measurement.ranks[0].parameters
    assert numel is not None
    # The dense parameters' state is sharded over two ranks of data, the experts' over none: at most 16 bytes each.
    assert sum(row.bytes for row in state) == pytest.approx(16 * numel, rel=0.25 if distributed else 0.02)


def test_cross_entropy_of_the_stated_version(server: TraceServer) -> None:
    # 256 rows, 1024 / 2 columns of bf16 logits
    logits = 256 * 512 * 2
    runs = {
        stated: server.run(small(training__software__transformer_engine=stated))
        for stated in ("2.17.0", "2.18.0", "2.20.2")
    }

    def kept(stated: str) -> list[tuple[str, int]]:
        rows = runs[stated].ledger.retained().rows
        return sorted((row.dtype, row.bytes) for row in rows if row.kind == "head" and row.bytes >= logits)

    assert kept("2.17.0") == [("bf16", logits)]
    assert kept("2.18.0") == [("fp32", 2 * logits)]
    assert kept("2.20.2") == [("bf16", logits)]
    peaks = {stated: run.peak_allocated_bytes for stated, run in runs.items()}
    assert peaks["2.17.0"] < peaks["2.20.2"] < peaks["2.18.0"]


def test_the_installed_version_behaves_as_its_profile_says(server: TraceServer) -> None:
    """Runs the installed Python unchanged: its logits and their copy are both alive while the loss is computed."""
    installed = version("transformer-engine")
    assert cross_entropy_gradient(Software(transformer_engine=installed)) == "input_copy"
    ledger = server.run(small(training__software__transformer_engine=installed)).ledger
    logits = 256 * 512 * 2
    head = [row for row in ledger.rows if row.kind == "head" and row.bytes == logits and row.phase == "forward"]
    products = [row for row in head if row.tensor == "mm"]
    copies = [row for row in head if row.tensor == "cross_entropy_forward"]
    assert len(products) == len(copies) == 2
    for product, copy in zip(products, copies, strict=True):
        assert product.dies is not None
        assert product.born < copy.born < product.dies


def test_a_trace_says_where_its_gpu_would_run_out_of_memory_and_goes_on(server: TraceServer) -> None:
    tight = small(training__allocator={"per_process_memory_fraction": 0.0025})
    trace, roomy = server.run(tight), server.run(small())
    assert trace.peak_allocated_bytes == roomy.peak_allocated_bytes
    assert roomy.measurement.out_of_memory is None
    short = trace.measurement.out_of_memory
    assert short is not None
    may_have = 0.0025 * trace.summary.gpu_memory_bytes
    assert short.requested_bytes is not None
    assert short.allocated_bytes is not None
    assert short.reserved_bytes is not None
    assert short.allocated_bytes <= short.reserved_bytes <= may_have < short.reserved_bytes + 2 * short.requested_bytes
    assert short.free_bytes == trace.summary.gpu_memory_bytes - short.reserved_bytes
    assert (short.rank, short.phase) == (0, "forward")
    assert short.message.startswith("rank 0 would run out of memory in forward of iteration 1: it asks for ")
    said = [*trace.summary.warnings, trace.summary.verdict]
    assert any("out of memory in forward" in each for each in said)
