"""The estimate of Moonlight's study: peaks, ledger, recompute rules."""

import subprocess
import sys

import pytest

from labkit.errors import InputError
from labkit.ledger import Ledger
from labkit.memory.estimate import Estimate, estimate
from labkit.memory.ranges import ranged
from labkit.summary import breakdown
from labkit.workload import Workload
from labkit.workload.files import data_directory
from tests.memory.grid import workload
from tests.published import PEAKS_GB
from tests.small import small

MOONLIGHT = data_directory() / "workloads" / "moonlight-16b.yaml"


def selective(*labels: str) -> Workload:
    return Workload.load(MOONLIGHT).with_recompute(recompute_granularity="selective", recompute_modules=list(labels))


def smaller(workload: Workload, layers: int) -> Workload:
    data = workload.model_dump()
    data["model"]["num_layers"] = layers
    data["model"]["mixture_of_experts"]["moe_layer_freq"] = [0] + [1] * (layers - 1)
    return Workload.from_mapping(data)


@pytest.fixture(scope="module")
def control() -> Estimate:
    return estimate(selective())


@pytest.mark.parametrize("labels", PEAKS_GB)
def test_peaks_are_within_one_percent_of_the_published(labels: tuple[str, ...]) -> None:
    peak = estimate(selective(*labels)).peak_allocated_bytes / 1e9
    assert peak == pytest.approx(PEAKS_GB[labels], rel=0.01)


def test_savings_have_the_published_sign_and_size(control: Estimate) -> None:
    for labels, published in PEAKS_GB.items():
        saved = (control.peak_allocated_bytes - estimate(selective(*labels)).peak_allocated_bytes) / 1e9
        assert saved == pytest.approx(PEAKS_GB[()] - published, abs=0.12)


def test_every_byte_of_the_peak_is_explained(control: Estimate) -> None:
    summary = control.summary
    assert sum(share.bytes for share in summary.breakdown) == summary.peak_allocated_bytes
    assert control.ledger.at(control.ledger.peak().clock).total(blocks=True) == summary.peak_allocated_bytes


def test_ends_the_step_as_it_began(control: Estimate) -> None:
    """Nothing leaks: what is alive before the last step is alive when its gradients are reduced, no more."""
    ledger = control.ledger
    after = ledger.at(ledger.start(2, "optimizer") - 1)
    assert after.total() == ledger.between_steps().total()


def test_parameters_and_optimizer_state_are_exact(control: Estimate) -> None:
    """5.2 B bytes of parameters: bf16 weights and gradients, fp32 main parameters, bf16 moments of one rank's shard."""
    state = breakdown(control.ledger.between_steps())
    experts = 26 * 8 * 3 * 2048 * 1408
    dense_shard = (5_199_465_472 // 2 - experts) // 4
    assert state["parameters"] == state["gradient buffers"] == pytest.approx(5_199_465_472, rel=1e-4)
    assert state["optimizer state"] == pytest.approx((experts + dense_shard) * (4 + 2 + 2), rel=1e-4)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("moe", "moe_act"), ("full", "moe")],
)
def test_an_outer_region_swallows_an_inner_one(outer: str, inner: str) -> None:
    if outer == "full":
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        alone = estimate(smaller(Workload.load(MOONLIGHT).with_recompute(**full), 4))
        both = estimate(smaller(Workload.load(MOONLIGHT).with_recompute(**full, recompute_modules=[inner]), 4))
    else:
        alone, both = estimate(smaller(selective(outer), 4)), estimate(smaller(selective(outer, inner), 4))
    assert both.retained_bytes == alone.retained_bytes
    assert both.replay == alone.replay


def test_each_label_keeps_less_and_replays_something(control: Estimate) -> None:
    for label in ("mla_up_proj", "mlp", "layernorm", "moe_act", "moe"):
        result = estimate(selective(label))
        assert result.retained_bytes < control.retained_bytes, label
        assert result.replay.seconds > control.replay.seconds == 0, label
    # Fused attention keeps no scores: the label frees a few bytes of RNG state and costs a whole attention.
    assert control.retained_bytes - estimate(selective("core_attn")).retained_bytes < 5e6


def test_full_recompute_keeps_layer_inputs_alone() -> None:
    full = Workload.load(MOONLIGHT).with_recompute(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    retained = estimate(full).ledger.retained()
    hidden = 2048 * 2048 * 2
    in_layers = [row for row in retained.rows if row.layer is not None and row.bytes >= hidden]
    assert {row.bytes for row in in_layers} == {hidden}
    assert len(in_layers) == 27


def test_block_recompute_frees_its_first_layers_alone() -> None:
    block = Workload.load(MOONLIGHT).with_recompute(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=5
    )
    rows = estimate(block).ledger.retained().rows
    kept = {layer: sum(row.bytes for row in rows if row.layer == layer) for layer in (1, 4, 5, 26)}
    assert kept[1] == kept[4] < kept[5] / 10
    assert kept[5] == kept[26]


def test_micro_batches_do_not_add_up() -> None:
    """Without pipelining a rank holds one micro-batch at a time."""
    data = selective().model_dump()
    data["batch"]["global_batch_size"] = 12
    more = estimate(smaller(Workload.from_mapping(data), 3))
    one = estimate(smaller(selective(), 3))
    assert more.retained_bytes == one.retained_bytes
    assert more.peak_allocated_bytes == pytest.approx(one.peak_allocated_bytes, rel=0.01)


def test_a_norm_linear_keeps_its_whole_input_gradient_until_it_returns() -> None:
    """`layernorm_linear.py`: `gemm_out` is a variable of its own, what is reduce-scattered of it gives way at once."""
    for sequence_parallel in (False, True):
        case = {
            "model__mixture_of_experts": None,
            "model__ffn_hidden_size": 640,
            "parallelism__expert_model_parallel_size": 1,
        }
        rows = estimate(small(**case, parallelism__sequence_parallel=sequence_parallel)).ledger.rows
        linear = [row for row in rows if row.module == "decoder.layers.1.mlp.linear_fc1" and row.phase == "backward"]
        dummy = next(row for row in linear if row.tensor == "dummy weight gradient")
        gradient = next(row for row in linear if row.tensor == "norm_output gradient" and row.born < dummy.born)
        assert gradient.dies is not None
        assert (gradient.dies < dummy.born) == sequence_parallel


def test_attention_run_again_for_nothing_is_said_with_its_cost() -> None:
    changes = {"model__multi_latent_attention": None, "batch__seq_length": 2048}
    without = estimate(small(**changes))
    estimated = estimate(small(**changes, recompute__recompute_modules=["core_attn"]))
    more = estimated.outline.peak_bytes - without.outline.peak_bytes
    assert more > 0
    assert f"core_attn adds {more / 2**30:.3f} GiB to the peak and runs" in estimated.summary.warnings[-1]
    assert not without.summary.warnings


def test_handles_live_until_the_last_layer_leads_to_another_graph() -> None:
    """HybridEP's nodes keep them, and the last layer's probabilities lead to the nodes of all layers before it."""
    rows = estimate(workload("moe: flex")).ledger.rows
    maps = sorted((row for row in rows if row.tensor == "dense_to_expert_map"), key=lambda row: row.born)
    layers = len({row.module for row in maps})
    assert layers == 2
    for earlier, later in zip(maps, maps[layers:], strict=False):
        last = next(row for row in maps if row.born >= later.born and row.module == maps[layers - 1].module)
        assert earlier.dies is not None
        assert last.born < earlier.dies < last.born + 20


def test_rows_that_depend_on_routing_say_so(control: Estimate) -> None:
    by_certainty: dict[str, int] = {}
    for row in control.ledger.retained().rows:
        by_certainty[row.certainty] = by_certainty.get(row.certainty, 0) + row.bytes
    assert set(by_certainty) == {"exact", "allowance"}
    assert all(row.kind == "moe" for row in control.ledger.rows if row.certainty == "allowance")


def test_needs_no_torch_and_no_polars() -> None:
    code = (
        "import sys; from labkit.memory.estimate import estimate; from labkit.workload import Workload; "
        f"estimate(Workload.load({str(MOONLIGHT)!r})).summary.model_dump_json(); "
        "print({'torch', 'numpy', 'polars', 'altair'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_shows_itself_in_jupyter_and_escapes(control: Estimate) -> None:
    data = control.workload.model_dump()
    data["model"]["name"] = "<script>alert(1)</script>"
    html = estimate(smaller(Workload.from_mapping(data), 2))._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_ledger_frame_has_every_row(control: Estimate) -> None:
    frame = control.ledger.frame
    assert frame.height == len(control.ledger)
    assert Ledger.from_frame(frame, control.ledger.moments).peak() == control.ledger.peak()


def test_open_routing_gives_a_range_that_names_it() -> None:
    workload = smaller(selective(), 3)
    (found,) = ranged(estimate(workload)).ranges
    assert found.field == "routing"
    assert [case.value for case in found.cases] == ["balanced", "allowance", "worst"]
    assert found.low_bytes == estimate(workload).peak_allocated_bytes < found.high_bytes
    stated = Workload.from_mapping({**workload.model_dump(), "routing": {"kind": "worst"}})
    assert estimate(stated).peak_allocated_bytes == pytest.approx(found.high_bytes, rel=0.01)
    assert ranged(estimate(stated)).ranges == ()


def test_the_margin_is_rows_of_its_own(control: Estimate) -> None:
    """Nothing of it is in the estimate; a peak with its rows is the peak and what the summary says is set aside."""
    assert not [row for row in control.ledger.rows if row.lifetime in {"margin", "allowance"}]
    margin = [row for row in control.covering.rows if row.lifetime == "margin"]
    assert [row.certainty for row in margin] == ["allowance"]
    covered = control.covering.peak().bytes
    assert covered == control.peak_allocated_bytes + control.summary.margin_bytes > control.peak_allocated_bytes


def test_more_weights_than_can_be_counted_are_one_sentence() -> None:
    huge = small(model__make_vocab_size_divisible_by=2**62)
    with pytest.raises(InputError, match="weights on a rank are more than labkit counts"):
        _ = estimate(huge).peak_allocated_bytes
