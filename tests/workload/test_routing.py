"""Routing as part of a workload: how many rows the busiest rank's experts get."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from labkit.errors import InputError
from labkit.workload import Workload
from labkit.workload.routing import ExpertRows, busiest_share, default_imbalance, expert_rows
from tests.small import MODEL, small

MOE = "model__mixture_of_experts__"


def routed(**routing: object) -> Workload:
    """4 expert-parallel ranks of 2 experts, 2 of them a token."""
    return small(routing=routing)


def rows_of(workload: Workload, layer: int | None, tokens: Any) -> ExpertRows:
    """Rows of a layer when each rank has `tokens`."""
    return expert_rows(workload, busiest_share(workload, layer), tokens)


def test_the_allowance_is_the_table_and_goes_on_by_a_stated_rule() -> None:
    assert [default_imbalance(ep) for ep in (1, 2, 4, 8)] == [1.0, 1.4, 1.6, 2.0]
    assert [default_imbalance(ep) for ep in (16, 64)] == [2.4, 3.2]
    assert 1.6 < default_imbalance(6) < 2.0


def test_rows_of_the_busiest_rank() -> None:
    sent = {kind: rows_of(routed(kind=kind), 1, 100) for kind in ("balanced", "allowance", "worst")}
    assert {rows.sent for rows in sent.values()} == {200}
    assert [rows.received for rows in sent.values()] == [4 * 50, 4 * 80, 4 * 200]
    assert rows_of(routed(kind="allowance", imbalance=1.2), 1, 100).received == 4 * 60
    assert rows_of(routed(kind="concentrated", share=0.75), 1, 100).received == 4 * 150


def test_a_token_never_chooses_an_expert_twice() -> None:
    one_a_rank = small(**{f"{MOE}num_moe_experts": 4}, routing={"kind": "worst"})
    assert rows_of(one_a_rank, 1, 100).received == 4 * 100


def test_a_histogram_decides_by_layer_on_the_rank_busiest_overall() -> None:
    three = {**MODEL["mixture_of_experts"], "moe_layer_freq": [0, 1, 1]}
    model = {**MODEL, "num_layers": 3, "mixture_of_experts": three}
    first, second = [10, 10, 20, 20, 15, 15, 5, 5], [10, 10, 10, 10, 30, 10, 10, 10]
    both = small(model=model, routing={"kind": "measured", "rows_per_expert": [first, second]})
    assert rows_of(both, 1, 100).to_busiest == 60  # rank 2: 30 of 100, rank 1 has 40
    assert rows_of(both, 2, 100).to_busiest == 80
    assert rows_of(both, None, 100).to_busiest == 80
    one = small(model=model, routing={"kind": "measured", "rows_per_expert": [first]})
    assert rows_of(one, 1, 100).to_busiest == rows_of(one, 2, 100).to_busiest == 80


@pytest.mark.parametrize("kind", ["balanced", "allowance", "worst"])
def test_arrays_of_tokens_give_arrays_of_rows(kind: str) -> None:
    tokens = np.array([3, 100, 257])
    rows = rows_of(routed(kind=kind), 1, tokens)
    assert rows.received.tolist() == [rows_of(routed(kind=kind), 1, int(each)).received for each in tokens]


def test_skew_is_a_number_and_layers_may_have_shares_of_their_own() -> None:
    assert busiest_share(routed(kind="skewed", imbalance=1.5), 1) == Fraction(3, 8)  # of 4 ranks
    model = {**MODEL, "mixture_of_experts": {**MODEL["mixture_of_experts"], "moe_layer_freq": [1, 1]}}
    layers = small(model=model, routing={"kind": "per_layer", "shares": [0.4, 0.2]})
    assert [busiest_share(layers, layer) for layer in (0, 1, None)] == [Fraction(2, 5), Fraction(1, 5), Fraction(1, 5)]
    with pytest.raises(InputError, match="over all layers they are below the even share"):
        small(model=model, routing={"kind": "per_layer", "shares": [0.3, 0.1]})


@pytest.mark.parametrize(
    ("routing", "sentence"),
    [
        ({"kind": "concentrated"}, "concentrated routing needs it"),
        ({"kind": "concentrated", "share": 0.1}, "below the even share"),
        ({"kind": "worst", "share": 0.5}, "worst routing does not use it"),
        ({"kind": "skewed"}, "skewed routing needs it"),
        ({"kind": "skewed", "imbalance": 5.0}, "more than one rank can get .* use at most 4"),
        ({"kind": "per_layer"}, "per-layer routing needs it"),
        ({"kind": "per_layer", "shares": [0.3, 0.3]}, "2 shares do not fit 1 MoE layers; give 1"),
        ({"kind": "per_layer", "shares": [0.2]}, "below the even share"),
        ({"kind": "per_layer", "shares": [0.0]}, "greater than 0"),
        ({"kind": "balanced", "shares": [0.3]}, "balanced routing does not use it"),
        ({"kind": "measured"}, "measured routing needs it"),
        ({"kind": "measured", "rows_per_expert": [[1] * 7]}, "does not name each of the 8 experts"),
        ({"kind": "measured", "rows_per_expert": [[1] * 8] * 2}, "2 histograms do not fit 1 MoE layers"),
        ({"kind": "measured", "rows_per_expert": [[0] * 8]}, "has no rows"),
        ({"kind": "measured", "rows_per_expert": [[9] + [1] * 7]}, "more than 1/2 of the rows"),
        ({"kind": "allowance", "imbalance": 0.9}, "greater than or equal to 1"),
    ],
)
def test_routing_that_cannot_be_is_refused(routing: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        small(routing=routing)


def test_one_rank_cannot_get_more_than_it_has_experts_for() -> None:
    with pytest.raises(InputError, match=r"use at most 0\.5"):
        small(**{f"{MOE}num_moe_experts": 4}, routing={"kind": "concentrated", "share": 0.6})


def test_routing_of_a_model_without_experts_is_idle() -> None:
    dense = {key: value for key, value in MODEL.items() if key != "mixture_of_experts"}
    alone = {"world_size": 1}
    workload = small(model=dense, parallelism=alone, routing={"kind": "worst"})
    assert "no experts to route to" in str(workload.findings[0])
