"""Layouts of one rank: what only several ranks need costs nothing where there is one."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labkit.memory.outline import outline
from labkit.workload import RECOMPUTE_MODULES, Recompute, Workload
from tests.memory.grid import NAMES, workload

ALONE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
}
IDLE: list[dict[str, Any]] = [
    {"parallelism": {"sequence_parallel": True}},
    {"parallelism": {"expert_tensor_parallel_size": None}},
    {"parallelism": {"cp_comm_type": "all_gather"}},
    {"routing": {"kind": "balanced"}},
    {"routing": {"kind": "allowance"}},
    {"routing": {"kind": "worst"}},
]
"""What decides nothing on one rank."""


def alone(name: str, labels: frozenset[str], change: dict[str, Any]) -> Workload:
    """The grid's workload with every group but the pipeline of one rank."""
    data = workload(name).model_dump()
    data["parallelism"] |= ALONE | change.get("parallelism", {})
    data["routing"] = change.get("routing")
    case = Workload.model_validate(data)
    if case.recompute.recompute_granularity != "full":
        chosen = {"recompute_granularity": "selective", "recompute_modules": tuple(sorted(labels))}
        case = case.model_copy(update={"recompute": Recompute.model_validate(chosen)})
    return case


@settings(deadline=None, max_examples=120)
@given(
    name=st.sampled_from(NAMES), labels=st.frozensets(st.sampled_from(RECOMPUTE_MODULES)), change=st.sampled_from(IDLE)
)
def test_one_rank_is_the_plain_case(name: str, labels: frozenset[str], change: dict[str, Any]) -> None:
    plain, changed = alone(name, labels, {}), alone(name, labels, change)
    assume(not any(finding.severity == "error" for each in (plain, changed) for finding in each.findings))
    assert outline(changed) == outline(plain)


@pytest.mark.parametrize("name", NAMES[::8])
def test_data_parallel_ranks_hold_the_same_activations(name: str) -> None:
    case = workload(name)
    more = case.parallelism.model_copy(update={"world_size": 2 * case.parallelism.world_size})
    batch = case.batch.model_copy(update={"global_batch_size": 2 * case.batch.global_batch_size})
    twice = case.model_copy(update={"parallelism": more, "batch": batch})
    assert outline(twice).retained_bytes == outline(case).retained_bytes
