import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from labkit.drivers.trace.routing import balanced


@given(tokens=st.integers(1, 500), topk=st.integers(1, 8), local=st.integers(1, 8), ranks=st.integers(1, 8))
def test_every_row_is_sent_once_and_every_sent_row_is_worked_on(tokens: int, topk: int, local: int, ranks: int) -> None:
    experts = local * ranks
    plans = [balanced(tokens, topk, experts, ranks, rank) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        assert plan.input_splits.sum() == tokens * topk
        assert plan.output_splits.sum() == plan.tokens_per_expert.sum()
        # What rank 0 sends to this rank is what this rank receives from rank 0.
        assert plan.output_splits[0] == plans[0].input_splits[rank]
    worked = np.concatenate([plan.tokens_per_expert for plan in plans])
    assert worked.sum() == tokens * topk * ranks
    assert worked.max() - worked.min() <= ranks


def test_moonlight_splits_evenly() -> None:
    plan = balanced(tokens=2048, topk=6, num_experts=64, expert_parallel=8, rank=3)
    assert plan.input_splits.tolist() == plan.output_splits.tolist() == [1536] * 8
    assert plan.tokens_per_expert.tolist() == [1536] * 8
