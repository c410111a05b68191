import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.drivers.trace.routing import splits
from labkit.workload import Workload
from tests.small import small


def routed(topk: int, local: int, ranks: int) -> Workload:
    """The small workload over some expert-parallel ranks, routing balanced."""
    return small(
        parallelism={"world_size": ranks, "expert_model_parallel_size": ranks},
        batch={"seq_length": 64, "global_batch_size": ranks},
        model__mixture_of_experts__num_moe_experts=local * ranks,
        model__mixture_of_experts__moe_router_topk=topk,
        model__mixture_of_experts__moe_router_pre_softmax=True,
    )


@given(tokens=st.integers(1, 500), topk=st.integers(1, 8), local=st.integers(1, 8), ranks=st.sampled_from([1, 2, 3, 8]))
def test_balanced_plans_send_every_row_once(tokens: int, topk: int, local: int, ranks: int) -> None:
    workload = routed(min(topk, local * ranks), local, ranks)
    topk = min(topk, local * ranks)
    for rank in range(ranks):
        plan = splits(workload, 1, tokens, rank)
        assert plan.input_splits.sum() == plan.num_out_tokens == tokens * topk
        assert plan.output_splits.sum() == plan.tokens_per_expert.sum() == plan.input_splits[rank] * ranks
        assert plan.input_splits.max() - plan.input_splits.min() <= 1
        assert plan.input_splits[rank] == plan.input_splits.max()
        assert np.ptp(plan.from_each_sender) <= 1


def test_moonlight_splits_evenly() -> None:
    workload = Workload.load("data/workloads/moonlight-16b.yaml")
    plan = splits(workload, 1, 2048, 3)
    assert plan.input_splits.tolist() == plan.output_splits.tolist() == [1536] * 8
    assert plan.tokens_per_expert.tolist() == [1536] * 8


@pytest.mark.parametrize(
    ("routing", "busiest"),
    [
        ({"kind": "balanced"}, 64),
        ({"kind": "allowance"}, 103),
        ({"kind": "worst"}, 256),
        ({"kind": "skewed", "imbalance": 1.25}, 80),
        ({"kind": "per_layer", "shares": [0.5]}, 128),
    ],
)
def test_the_busiest_rank_gets_the_stated_share_and_the_others_the_rest(routing: object, busiest: int) -> None:
    plan = splits(small(routing=routing), 1, 128, 2)  # 4 ranks of 2 experts, 2 of them a token
    assert plan.input_splits[2] == busiest
    assert plan.input_splits.sum() == 256
    assert plan.tokens_per_expert.sum() == 4 * busiest
