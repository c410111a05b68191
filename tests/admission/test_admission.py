"""What an admission may say: nothing is admitted above its budget, splits are whole, refusals needed and helpful."""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.admission import failure
from labkit import Workload, estimate
from labkit.admission import Admission, Decision, Request
from labkit.admission.decision import positions
from labkit.admission.passes import Pass, columns
from labkit.errors import InputError
from labkit.memory.estimate import BlockPeaks
from labkit.memory.outline import outline
from labkit.memory.profiles import Observation, Profiles
from labkit.plan import Budget
from labkit.workload import Recompute, Routing
from labkit.workload.gpu import GIB, MIB
from tests.memory import grid
from tests.memory.test_lora import tuned

EXAMPLES = int(os.environ.get("LABKIT_EXAMPLES", "2"))
"""Of each property; `make admission` tries more."""
PLENTY = 2**40
PADDED = grid.workload("attention: grouped queries")
TEMPLATES = {
    "trees": tuned(),
    "trees, optimizer, full": tuned(
        training__lora__optimizer_step=True, recompute=grid.workload("lora: full uniform 1").recompute.model_dump()
    ),
    "trees of experts": grid.workload("lora: experts, all-to-all"),
    "trees without gradients": tuned(
        training__lora__no_grad=True, training__lora__outputs="log_probs", training__lora__output_chunk_rows=512
    ),
    "packed": grid.workload("packed: delta nets, two contexts"),
    "padded": PADDED,
}
"""Of both runtimes."""


@cache
def prices(name: str) -> Pass:
    return Pass(TEMPLATES[name], (None, None), 4 * GIB, None)


@cache
def admission(name: str, megabytes: int) -> Admission:
    return Admission(TEMPLATES[name], Budget("a budget", megabytes * MIB))


def covered(workload: Workload) -> int:
    """The peak with its margin, of the fullest stage."""
    results = [estimate(workload, stage) for stage in range(workload.parallelism.pp)]
    return max(each.peak_allocated_bytes + each.summary.margin_bytes for each in results)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, deadline=None)
@given(lengths=st.lists(st.integers(2, 1500), min_size=1, max_size=12), shares=st.booleans())
def test_no_price_is_below_the_estimate(name: str, lengths: list[int], shares: bool) -> None:
    run = prices(name)
    shared = min(lengths) // 2 if shares and run.packs_trees and len(lengths) > 1 else 0
    load = run.load(lengths, shared)
    workload = run.workload(load).checked()
    found = run.prices([(load.sums, shared)])
    assert found.peak[0] >= estimate(workload).peak_allocated_bytes
    assert found.covered[0] >= covered(workload) >= run.least([run.extent(load.sums, shared)])[0]


@pytest.mark.parametrize("lengths", [[3000], [700, 800, 900], [64] * 40, [2, 5000]])
def test_a_price_is_near_the_estimate_where_blocks_are_their_tensors(lengths: list[int]) -> None:
    run = Pass(tuned(training__allocator__expandable_segments=True), (None, None), PLENTY, None)
    load = run.load(lengths)
    assert (
        run.upper.peaks(columns([run.extent(load.sums, 0)])).bytes[0] <= 1.02 * outline(run.workload(load)).peak_bytes
    )


TUNING = {"trees": 256, "packed": 256, "padded": 0}
"""MiB that the margin sets aside for the tuning of kernels."""
LENGTHS = st.lists(st.integers(16, 900), min_size=1, max_size=6)


@pytest.mark.parametrize("name", ["trees", "padded"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(lengths=LENGTHS, budget=st.integers(200, 420), grouped=st.booleans())
def test_a_split_is_whole_and_within_the_budget(name: str, lengths: list[int], budget: int, grouped: bool) -> None:
    requests = [Request(length=each, group=f"g{at // 2}" if grouped else None) for at, each in enumerate(lengths)]
    budget += TUNING[name]
    decision = admission(name, budget).decide(requests)
    if decision.outcome == "refuse":
        for each in decision.refused:
            figures = each.figures
            assert max(figures.covered_bytes, figures.reserved_bytes) > budget * MIB
            assert figures.certainty == "estimate"
        return
    seen = [at for each in decision.micro_batches for at in each.requests]
    assert sorted(seen) == list(range(len(requests)))
    for each in decision.micro_batches:
        groups = {requests[at].group for at in each.requests}
        assert all(at in each.requests for at, other in enumerate(requests) if other.group and other.group in groups)
        assert covered(each.workload.checked()) <= budget * MIB
        assert BlockPeaks(each.workload, 0).runs_within(budget * MIB)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to spread items over bins."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for each in partitions(rest):
        yield [[first], *each]
        for at in range(len(each)):
            yield [*each[:at], [first, *each[at]], *each[at + 1 :]]


@pytest.mark.parametrize("name", ["trees", "packed", "padded"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(lengths=st.lists(st.integers(16, 900), min_size=2, max_size=5), budget=st.integers(220, 330))
def test_what_is_called_fewest_is(name: str, lengths: list[int], budget: int) -> None:
    here = admission(name, budget + TUNING[name])
    run, decision = here.run((None, None)), here.decide(lengths)
    if decision.outcome == "refuse":
        return
    fewest = min(len(each) for each in partitions(range(len(lengths))) if all(fits(run, lengths, one) for one in each))
    assert decision.least_micro_batches <= fewest <= len(decision.micro_batches)
    assert not decision.is_fewest or len(decision.micro_batches) == fewest


def test_one_short_request_does_not_keep_long_ones_apart() -> None:
    run = admission("trees", 300)
    lengths = [1, *[400] * 12]
    alone, beside = run.decide(lengths[1:]), run.decide(lengths)
    assert len(beside.micro_batches) <= len(alone.micro_batches) + 1


def test_padded_sequences_go_with_those_of_their_length() -> None:
    """Which is proven to take fewest micro-batches."""
    lengths = [900, 30, 880, 40, 35, 890, 870, 25]
    decision = admission("padded", 360).decide(lengths)
    assert decision.is_fewest
    for each in decision.micro_batches:
        alike = [lengths[at] > 800 for at in each.requests]
        assert len(set(alike)) == 1 or each.workload.batch.seq_length * len(alike) < 900 * 5


def fits(run: Pass, lengths: Sequence[int], chosen: Sequence[int]) -> bool:
    load = run.load([lengths[at] for at in chosen])
    if run.prices([(load.sums, 0)]).needed[0] <= run.limit:
        return True
    return len(chosen) == 1 and max(run.exactly(load)[1:3]) <= run.limit


@settings(max_examples=EXAMPLES, deadline=None)
@given(lengths=st.lists(st.integers(16, 700), min_size=1, max_size=8))
def test_more_budget_never_needs_more_micro_batches(lengths: list[int]) -> None:
    counts = []
    for budget in (420, 460, 520, 640):
        decision = admission("trees", budget).decide(lengths)
        counts.append(len(decision.micro_batches) or 10**6)
    assert all(less >= more for less, more in pairwise(counts))


def test_profiles_only_raise(tmp_path: Path) -> None:
    template = tuned()
    plain = Admission(template, "2GiB")
    before = plain.decide([256, 256]).micro_batches[0]
    seen = before.workload
    high = Observation(workload=seen, peak_allocated_bytes=GIB, certainty="measured", source="a test")
    Profiles(tmp_path).learn(high.model_copy(update={"peak_allocated_bytes": 1000}))
    low = Admission(template, "2GiB", profiles=tmp_path).decide([256, 256])
    assert low.micro_batches[0].peak_bytes == before.peak_bytes
    Profiles(tmp_path).learn(high)
    learned = Admission(template, "2GiB", profiles=tmp_path)
    assert learned.decide([256, 256]).micro_batches[0].peak_bytes == GIB
    assert learned.decide([300, 300]).micro_batches[0].peak_bytes == GIB
    assert "measured" in str(learned.decide([256, 256]))
    assert (learned.decide([128, 128]).micro_batches[0].peak_bytes or PLENTY) < (before.peak_bytes or 0)
    assert Admission(template, "1GiB", profiles=tmp_path).decide([512]).outcome == "admit"


def test_a_prefix_is_shared_where_that_helps() -> None:
    here = admission("trees", 900)
    family = [Request(length=600 + at, prefix="a", shared_prefix=500) for at in range(4)]
    together = here.decide(family).micro_batches
    assert [each.shared_prefix for each in together] == [500]
    assert together[0].workload.batch.packed is not None
    assert together[0].workload.batch.packed.rows == 500 + 100 + 101 + 102 + 103
    short = [Request(length=600 + at, prefix="a", shared_prefix=1) for at in range(4)]
    assert [each.shared_prefix for each in here.decide(short).micro_batches] == [0]  # a segment more, and a token less
    mixed = here.decide([*family, Request(length=300, prefix="b", shared_prefix=200)])
    for each in mixed.micro_batches:
        prefixes = {"a" if at < 4 else "b" for at in each.requests}
        assert not each.shared_prefix or len(prefixes) == 1


def test_passes_of_two_kinds_are_two_micro_batches() -> None:
    here = admission("trees", 900)
    decision = here.decide([Request(length=200), Request(length=200, no_grad=True, outputs="log_probs")])
    assert decision.outcome == "split"
    trained, scored = sorted(decision.micro_batches, key=lambda each: each.requests)
    assert (scored.figures.no_grad, scored.figures.outputs) == (True, "log_probs")
    assert not trained.figures.no_grad
    assert scored.workload.training.lora is not None
    assert scored.workload.training.lora.outputs == "log_probs"


def test_a_pass_without_gradients_has_the_trainers_state_beside_it() -> None:
    trains = Admission(tuned(training__lora__optimizer_step=True, training__lora__rank=64), "2GiB")
    alone = Admission(tuned(training__lora__no_grad=True, training__lora__rank=64), "2GiB")
    request = Request(length=256, no_grad=True)
    beside, without = (each.decide([request]).micro_batches[0].peak_bytes for each in (trains, alone))
    assert beside is not None
    assert without is not None
    assert beside > without + 8 * MIB  # gradients and moments of the adapters


def test_fragmentation_is_named() -> None:
    """Where what is allocated fits and what is reserved does not."""
    template = tuned(training__lora__no_grad=True)
    load = prices("trees").load([200_000])
    peak, with_margin, reserved, _ = Pass(template, (None, None), PLENTY, None).exactly(load)
    assert reserved > with_margin > peak
    decision = Admission(template, Budget("between", (9 * reserved + with_margin) // 10)).decide([200_000])
    assert decision.outcome == "refuse"
    said = str(decision)
    assert "Fragmentation: " in said
    assert "expandable_segments: true fits at" in said


def test_the_failure_that_started_all_this_is_refused_with_what_would_work() -> None:
    """27B dense, 32,710 packed tokens, selective: 5.9 GB by the old heuristic, out of memory above 107.2 GB at TP 2."""
    (refused,) = failure(2).refused
    figures = refused.figures
    assert (figures.packed_tokens, figures.logical_tokens, figures.recompute) == (32_710, 38_443, "[core_attn]")
    assert figures.peak_bytes > 107_192_000_000
    full = Recompute(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    other = refused.workload.model_copy(update={"recompute": full})
    assert BlockPeaks(other, 0).peak.bytes / GIB == pytest.approx(41, abs=1)  # measured


def test_a_refusal_says_what_would_work() -> None:
    template = tuned(parallelism__world_size=8, batch__global_batch_size=4, model__num_layers=16)
    group = [Request(length=6000 + at, group="g", prefix="p", shared_prefix=1000) for at in range(2)]
    decision = Admission(template, "1500MiB").decide([*group, Request(length=10)])
    assert (decision.outcome, decision.micro_batches) == ("refuse", ())
    figures = decision.refused[0].figures
    said = str(decision)
    for word in (
        "group 'g' cannot be divided",
        f"recompute none, {figures.packed_tokens:,} packed and 12,001 logical tokens",
        f"predicted peak {figures.peak_bytes / GIB:.2f} GiB",
        "usable 1.46 GiB (1500MiB)",
        "full recompute (uniform, 1 layer) fits at",
        "a group of 2 of at most",
    ):
        assert word in said
    largest = next(each for each in decision.remedies if each.kind == "tokens")
    tokens = int(largest.change.split()[-2].replace(",", ""))
    half = [Request(length=tokens // 2, group="g") for _ in range(2)]
    assert Admission(template, "1500MiB").decide(half).outcome == "admit"
    layouts = [each.change for each in decision.remedies if each.kind == "layout"]
    assert all(each.startswith(("TP ", "CP ")) for each in layouts)


MESSAGE = (
    "CUDA out of memory. Tried to allocate 10.62 GiB. GPU 0 has a total capacity of 139.81 GiB of which 3.27 GiB is "
    "free. Including non-PyTorch memory, this process has 136.5 GiB memory in use. Of the allocated memory {} GiB is "
    "allocated by PyTorch, and {} GiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(scope="module")
def admitted() -> Decision:
    return Admission(tuned(), "100GiB").decide([100_000, 100_000])


def test_a_later_error_is_explained_by_the_same_figures(admitted: Decision) -> None:
    figures = admitted.micro_batches[0].figures
    held = figures.peak_bytes / GIB
    fragmented = admitted.explain(RuntimeError(MESSAGE.format(f"{held - 11:.2f}", "30.5")))
    assert fragmented.cause == "fragmentation"
    assert fragmented.numbers.unallocated_bytes == round(30.5 * GIB)
    for word in ("recompute none", "200,000 packed", "predicted peak", "usable 100.00 GiB", "expandable_segments"):
        assert word in str(fragmented)
    assert admitted.explain(MESSAGE.format(f"{held + 3:.2f}", "0.1")).cause == "above the price"
    old = (
        "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 39.39 GiB total capacity; 9.00 GiB already allocated; "
    )
    others = admitted.explain(old + "1.00 GiB free; 10.00 GiB reserved in total by PyTorch)")
    assert others.cause == "device smaller than the budget"
    assert others.numbers.unallocated_bytes == GIB


@pytest.mark.parametrize("error", ["", "Segmentation fault", {"requested": 1}, {"requested_bytes": "x"}, None])
def test_what_is_no_such_error_is_said(admitted: Decision, error: Any) -> None:
    with pytest.raises(InputError, match="the error: "):
        admitted.explain(error)
    with pytest.raises(InputError, match="micro-batch 7: there is none"):
        admitted.explain({"requested_bytes": 1}, 7)


WRONG: dict[str, Any] = {
    "requests: should be a list of lengths": 5,
    "prefix 'a' has 3 tokens here and 2 in": [
        {"length": 9, "prefix": "a", "shared_prefix": 2},
        {"length": 9, "prefix": "a", "shared_prefix": 3},
    ],
    "there are none": [],
    "should be a length or a mapping": [True],
    "length: input should be greater than 0": [0],
    "unknown key 'lenght'; did you mean 'length'": [{"lenght": 3}],
    "prefix, its name, and shared_prefix": [{"length": 3, "prefix": "a"}],
    "use at most 2": [{"length": 3, "prefix": "a", "shared_prefix": 3}],
    "passes of two kinds": [{"length": 3, "group": "a"}, {"length": 3, "group": "a", "no_grad": True}],
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_request_is_one_sentence(sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        admission("trees", 420).decide(WRONG[sentence])


def test_megatron_has_no_other_passes() -> None:
    with pytest.raises(InputError, match="the megatron runtime trains with its own loss"):
        admission("padded", 420).decide([{"length": 16, "no_grad": True}])


def test_a_decision_is_data_and_reads_well() -> None:
    decision = admission("trees", 500).decide([300] * 6)
    assert decision.outcome == "split"
    data = decision.to_dict()
    assert data["schema_name"] == "labkit.admission/1"
    assert sorted(at for each in data["micro_batches"] for at in each["requests"]) == list(range(6))
    assert "<table>" in decision._repr_html_()
    assert str(decision).startswith("Split 6 requests into")
    assert "priced by the floor" in str(decision)


def test_what_is_no_template_is_said() -> None:
    with pytest.raises(InputError, match="the template: should be a Workload"):
        Admission("data/workloads/moonlight-16b.yaml")  # type: ignore[arg-type]


def test_routing_that_is_not_stated_is_allowed_for_and_named() -> None:
    template = grid.workload("lora: experts, all-to-all")
    template = template.model_copy(update={"routing": None})
    balanced = template.model_copy(update={"routing": Routing()})
    open_, stated = (Admission(each, "4GiB").decide([700] * 2) for each in (template, balanced))
    assert "does not state routing: the busiest of" in str(open_)
    assert "routing" in {each["field"] for each in open_.to_dict()["unstated"]}
    assert "routing" not in {each["field"] for each in stated.to_dict()["unstated"]}
    (held,), (even,) = open_.micro_batches, stated.micro_batches
    assert held.workload.routing == Routing(kind="allowance")
    assert (held.peak_bytes or 0) > (even.peak_bytes or PLENTY)
    assert (held.peak_bytes or 0) >= estimate(held.workload).peak_allocated_bytes


def test_the_length_that_a_refusal_names_is_the_longest_that_is_admitted() -> None:
    here = admission("trees", 700)
    (remedy,) = [each for each in here.decide([30_000]).remedies if each.kind == "tokens"]
    assert remedy.peak_bytes < remedy.covered_bytes < remedy.reserved_bytes <= here.budget.bytes
    tokens = int(remedy.change.split()[-2].replace(",", ""))
    assert [here.decide([tokens + more]).outcome for more in (0, 1)] == ["admit", "refuse"]


def test_positions_are_shown_in_short() -> None:
    assert positions((0, 2, 3, 4, 5, 9)) == "0, 2-5, 9"
