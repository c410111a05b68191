"""Sweeps: the figures of outlines one by one, and what must hold whatever the lengths and labels are."""

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.memory.estimate import fullest_stage
from labkit.memory.outline import block, outline
from labkit.memory.sweep import sweep, variations
from labkit.memory.units import Unit, chunks
from labkit.workload import RECOMPUTE_MODULES, Batch, Parallelism, Recompute, Workload
from labkit.workload.kernels import length_choices
from tests.memory.grid import FAMILIES, NAMES, workload

LABELS = st.frozensets(st.sampled_from(RECOMPUTE_MODULES))
BASES = [f"{family}: {next(iter(module.CHANGES))}" for family, module in FAMILIES.items()]


def selective(labels: frozenset[str]) -> Recompute:
    return Recompute.model_validate({"recompute_granularity": "selective", "recompute_modules": tuple(sorted(labels))})


def longer(case: Workload, times: int) -> Workload:
    batch = case.batch.model_copy(update={"seq_length": case.batch.seq_length * times})
    return case.model_copy(update={"batch": batch})


@pytest.mark.parametrize(
    "name",
    [
        name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.long)
        for number, name in enumerate(NAMES[1::2])
    ],
)
def test_lengths_priced_together_are_as_those_priced_alone(name: str) -> None:
    case = workload(name)
    cases = [case] if case.batch.packed else [longer(case, times) for times in (1, 3)]
    for row, each in zip(sweep(cases).iter_rows(named=True), cases, strict=True):
        stage = row["stage"]
        tensors, blocks = outline(each, stage), outline(each, stage, block)
        assert row["peak_tensor_bytes"] == tensors.peak_bytes
        assert row["peak_allocated_bytes"] == blocks.peak_bytes
        assert row["between_steps_bytes"] == tensors.between_steps_bytes
        assert row["retained_bytes"] == tensors.retained_bytes
        if each.parallelism.pp > 1:
            assert stage == max(range(each.parallelism.pp), key=lambda other: outline(each, other, block).peak_bytes)
            assert outline(each, fullest_stage(each)).peak_bytes >= tensors.peak_bytes


def test_rows_come_in_the_order_of_the_workloads_with_their_axes() -> None:
    base = workload("moonlight: as published")
    layouts = [base.parallelism, base.parallelism.model_copy(update={"world_size": 16})]
    cases = list(
        variations(
            base,
            parallelism=layouts,
            recompute=[selective(frozenset(labels)) for labels in ((), ("moe_act",), ("moe", "layernorm"))],
            batch=[Batch(seq_length=length, global_batch_size=32) for length in (1024, 2048)],
        )
    )
    mixed = cases[::-1]
    frame = sweep(mixed)
    assert frame.height == 12
    assert frame["world_size"].to_list() == [case.parallelism.world_size for case in mixed]
    assert frame["recompute"].to_list() == [case.recompute.label for case in mixed]
    assert frame["seq_length"].to_list() == [case.batch.seq_length for case in mixed]
    assert frame.reverse().equals(sweep(cases))


def test_variations_leave_out_what_cannot_run() -> None:
    base = workload("moonlight: as published")
    impossible = Parallelism(world_size=8, tensor_model_parallel_size=3)
    labels = [selective(frozenset(labels)) for labels in ((), ("shared_experts",))]  # shared experts overlap here
    assert list(variations(base, parallelism=[base.parallelism, impossible], recompute=labels)) == [
        base.model_copy(update={"recompute": labels[0]})
    ]


def test_nothing_to_sweep_is_an_empty_frame() -> None:
    assert sweep([]).is_empty()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.filter_too_much])
@given(name=st.sampled_from(NAMES), labels=LABELS, lengths=st.sets(st.integers(1, 64), min_size=2, max_size=5))
def test_more_tokens_never_cost_less(name: str, labels: frozenset[str], lengths: set[int]) -> None:
    case = workload(name)
    assume(not case.batch.packed)
    cases = [longer(case, times).model_copy(update={"recompute": selective(labels)}) for times in sorted(lengths)]
    assume(not any(finding.severity == "error" for finding in cases[0].findings))
    # Another kernel may do with less.
    assume(len({length_choices(each)._replace(learned_positions=0) for each in cases}) == 1)
    frame = sweep(cases)
    columns = ["peak_allocated_bytes"]
    if case.parallelism.pp == 1:
        # Of several stages another one may become the fullest.
        columns += ["peak_tensor_bytes", "retained_bytes", "between_steps_bytes"]
    for column in columns:
        assert all(fewer <= more for fewer, more in pairwise(frame[column])), (column, frame[column].to_list())


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.filter_too_much])
@given(name=st.sampled_from(NAMES), labels=LABELS, label=st.sampled_from(RECOMPUTE_MODULES))
def test_a_label_keeps_no_more_than_the_inputs_it_replays_from(name: str, labels: frozenset[str], label: str) -> None:
    case = workload(name)
    without, with_it = (
        case.model_copy(update={"recompute": selective(chosen)}) for chosen in (labels - {label}, labels | {label})
    )
    assume(not any(finding.severity == "error" for each in (without, with_it) for finding in each.findings))
    kept = outline(with_it).retained_bytes - outline(without).retained_bytes
    in_flight = case.distinct_microbatches if case.parallelism.pp > 1 else 1  # at most
    assert kept <= in_flight * sum(_inputs(unit, label) for chunk in chunks(with_it) for unit in chunk.units)


def _inputs(unit: Unit, label: str) -> int:
    """Bytes of what the label's regions of a unit read that was made before them."""
    read = {
        value.storage
        for region in unit.regions
        if region.label == label
        for op in unit.tape.ops[region.first : region.last + 1]
        for value in op.inputs
        if value.storage.made < region.first
    }
    return sum(value.bytes for value in read)


@pytest.mark.parametrize("family", ["attention", "moe"])
@pytest.mark.parametrize(("sequence", "micro_batch"), [(2**54, 1), (2**62, 1), (2**70, 1), (2**12, 2**60)])
def test_more_bytes_than_arrays_count_are_one_sentence(family: str, sequence: int, micro_batch: int) -> None:
    case = workload(next(name for name in NAMES if name.startswith(family)))
    update = {"seq_length": sequence, "micro_batch_size": micro_batch, "global_batch_size": 8 * micro_batch}
    huge = case.model_copy(update={"batch": case.batch.model_copy(update=update)})
    with pytest.raises(InputError, match="larger integers than the 64 bits that a sweep counts in; use shorter"):
        sweep([case, huge])


@pytest.mark.parametrize("family", ["attention", "moe"])
def test_as_much_as_arrays_count_is_exact(family: str) -> None:
    case = longer(workload(next(name for name in NAMES if name.startswith(family))), 2**26)
    assert sweep([case])["peak_tensor_bytes"][0] == outline(case).peak_bytes > 2**43
