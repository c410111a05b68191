"""Policies of admission: what the rule of thumb makes, priced; what the floor and full recompute make of the same."""

import json
from pathlib import Path

import polars as pl
import pytest

from labkit import estimate
from labkit.admission import Admission, Request
from labkit.errors import InputError
from labkit.workbench.admission import FLOOR, FULL, RULE, Planning
from labkit.workbench.rule_of_thumb import RuleOfThumb, example_requests
from tests.workbench.adapters import BUDGET, small


@pytest.fixture(scope="module")
def planning() -> Planning:
    return Planning(small(), None, BUDGET, count=22)


def of(frame: pl.DataFrame, policy: str) -> pl.DataFrame:
    return frame.filter(pl.col("policy") == policy)


def test_the_rule_is_one_point_in_proportion() -> None:
    known = estimate(small())
    rest = known.outline.between_steps_bytes
    rule = RuleOfThumb.of(small(), 3 * 2**30, None)
    assert rule.tokens == (3 * 2**30 - rest) * 2048 // (known.peak_allocated_bytes - rest)
    assert "2,048 tokens peak at" in rule.words
    assert RuleOfThumb.of(small(), 3 * 2**30, 5000).tokens == 5000


def test_the_rule_keeps_groups_together_and_passes_apart() -> None:
    asked = [
        Request(length=60),
        Request(length=50, group="pair"),
        Request(length=40, group="pair"),
        Request(length=30, no_grad=True),
        Request(length=101),
        Request(length=40),
    ]
    assert RuleOfThumb(100, "").spread(asked) == ([[1, 2], [0, 5], [3]], [4])


def test_every_request_is_somewhere_once(planning: Planning) -> None:
    for plan in planning.planned:
        placed = [at for made in plan.made for at in made.requests] + list(plan.refused)
        assert sorted(placed) == list(range(len(planning.requests))), plan.policy


def test_what_the_rule_makes_is_priced_by_the_estimate(planning: Planning) -> None:
    rule = of(planning.micro_batches, RULE)
    over = rule.filter(pl.col("verdict") != "fits")
    assert over.height
    assert set(over["certainty"]) == {"estimate"}
    plan = planning.planned[0]
    made = plan.made[over["number"][0]]
    assert made.batch.figures.peak_bytes == estimate(made.batch.workload).peak_allocated_bytes
    assert over["reserved_bytes"].min() > planning.budget.bytes  # type: ignore[operator]


def test_the_others_are_what_admission_decides(planning: Planning) -> None:
    for policy in (FLOOR, FULL):
        own = of(planning.micro_batches, policy)
        assert set(own["verdict"]) == {"fits"}
        assert own["reserved_bytes"].max() <= planning.budget.bytes  # type: ignore[operator]
    last = len(planning.requests) - 1
    decision = Admission(small(), BUDGET).decide(planning.requests)
    assert [each.requests for each in decision.refused] == [(last,)]
    assert planning.planned[1].refused == (last,)
    assert f"request {last} cannot be divided" in planning.planned[1].why[0]
    works = planning.remedies.filter(pl.col("policy") == FLOOR)
    assert works["change"].to_list() == [each.change.rstrip(",") for each in decision.remedies]
    assert "full recompute (uniform, 1 layer)" in works["change"].to_list()
    assert works["reserved_bytes"].max() <= planning.budget.bytes  # type: ignore[operator]
    again = Admission(small(), BUDGET).decide(planning.requests[:-1])
    assert len(again.micro_batches) == len(planning.planned[1].made)


def test_the_policies_are_summed_up(planning: Planning) -> None:
    rows = {row["policy"]: row for row in planning.policies.iter_rows(named=True)}
    assert rows[RULE]["over"] == of(planning.micro_batches, RULE).filter(pl.col("verdict") != "fits").height
    assert rows[RULE]["least"] is None
    assert rows[FLOOR]["over"] == rows[FULL]["over"] == 0
    assert rows[FULL]["micro_batches"] <= rows[FLOOR]["micro_batches"]
    assert rows[FULL]["replay_seconds"] > rows[FLOOR]["replay_seconds"]
    used = of(planning.micro_batches, FLOOR)["reserved_bytes"] / planning.budget.bytes
    assert rows[FLOOR]["used"] == pytest.approx(used.mean())
    for (policy,), own in planning.lengths.group_by("policy"):
        assert own["count"].sum() == len(planning.requests), policy
    assert "that the rule of thumb makes" in planning.answer[0]


def test_boundaries_are_those_of_decisions(planning: Planning) -> None:
    admission = Admission(small(), BUDGET)
    own = of(planning.boundary, FLOOR).filter(pl.col("sharing") == "nothing shared")
    length, count = own.filter(pl.col("length") == 512).select("length", "sequences").row(0)
    assert admission.decide([length] * count).outcome == "admit"
    assert admission.decide([length] * (count + max(count // 20, 1))).outcome == "split"  # bounds are that near
    shared = of(planning.boundary, FLOOR).filter(pl.col("sharing") == "three quarters shared", pl.col("length") == 512)
    together = [
        Request(length=512, prefix="prompt", shared_prefix=384, group="all") for _ in range(shared["sequences"][0])
    ]
    assert admission.decide(together).outcome == "admit"
    assert shared["sequences"][0] > 2 * count
    longest = dict(planning.longest.select("policy", "tokens").iter_rows())
    assert admission.decide([longest[FLOOR]]).outcome == "admit"
    assert longest[FULL] > longest[FLOOR]


def test_the_rule_s_boundary_says_what_would_not_fit(planning: Planning) -> None:
    own = of(planning.boundary, RULE).filter(pl.col("sharing") == "nothing shared")
    assert own["logical_tokens"].max() <= planning.rule.tokens  # type: ignore[operator]
    row = own.filter(~pl.col("fits")).row(0, named=True)
    refused = Admission(small(), BUDGET).decide(
        [Request(length=row["length"], group="all") for _ in range(row["sequences"])]
    )
    assert refused.outcome == "refuse"


def test_requests_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    path.write_text(json.dumps([100, {"length": 200, "group": "<script>"}]), encoding="utf-8")
    planning = Planning(small(), path, BUDGET)
    assert [each.length for each in planning.requests] == [100, 200]
    assert planning.facts["Requests"] == "2, from a file"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="should be a list of requests"):
        Planning(small(), path, BUDGET)


def test_examples_are_called_so_and_come_again_from_their_seed(planning: Planning) -> None:
    assert "Nobody sent these" in planning.requested[1]
    again = example_requests(1000, 22, 1, prefixes=True)
    assert again == example_requests(1000, 22, 1, prefixes=True)
    assert again != example_requests(1000, 22, 2, prefixes=True)
    assert len(again) == 22
    assert again[-1].length == 1500
    assert sum(each.prefix is not None for each in again) == 4
    assert sum(each.group is not None for each in again) == 2
    assert not any(each.prefix for each in example_requests(1000, 22, 1, prefixes=False))


def test_where_the_template_recomputes_everything_the_floor_does_not() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    planning = Planning(small(recompute=full), None, BUDGET, count=3)
    assert planning.template.recompute.recompute_granularity is None
    longest = dict(planning.longest.select("policy", "tokens").iter_rows())
    assert longest[FULL] > longest[FLOOR] > 0


def test_a_budget_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(InputError, match="nothing fits: small needs more than"):
        Planning(small(), None, "100MiB")
