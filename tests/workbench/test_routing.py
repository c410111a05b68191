"""The frames of expert routing: shares as a workload's own routing has them, peaks as the estimate has them."""

import json
from pathlib import Path

import polars as pl
import pytest

from labkit import Workload, estimate
from labkit.errors import InputError
from labkit.workbench.histograms import EXAMPLE, read_histograms
from labkit.workbench.routing import ExpertRouting
from labkit.workload import Routing
from tests.workbench.experts import COUNTED, GPUS, small


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counted") / "rows.json"
    path.write_text(json.dumps({"rows_per_expert": COUNTED}), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(counted: Path) -> ExpertRouting:
    return ExpertRouting(small(), counted, 0.5, 1, GPUS)


@pytest.fixture(scope="module")
def drawn() -> ExpertRouting:
    return ExpertRouting(small(), None, 0.5, 1, GPUS)


def row(frame: pl.DataFrame, **values: object) -> dict[str, object]:
    return frame.row(
        by_predicate=pl.all_horizontal(pl.col(name) == value for name, value in values.items()), named=True
    )


def test_every_size_that_divides_experts_and_ranks_is_priced(found: ExpertRouting) -> None:
    assert found.peaks["ep"].unique().to_list() == [1, 2, 4]
    allowed = found.shares.filter(pl.col("plan") == "allowance")
    assert allowed["mean"].to_list() == [1.0, 1.4, 1.6]
    # A token's two choices are both on one rank as long as it has two experts.
    assert found.shares.filter(pl.col("plan") == "worst")["most"].to_list() == [1.0, 2.0, 4.0]
    assert found.shares.filter(pl.col("plan") == "concentrated 50%")["most"].to_list() == [1.0, 1.0, 2.0]


def test_peaks_are_those_of_the_estimate(found: ExpertRouting) -> None:
    for kind in ("balanced", "allowance", "worst"):
        routed = small().model_copy(update={"routing": Routing(kind=kind)})
        assert row(found.peaks, ep=4, plan=kind)["peak_bytes"] == estimate(routed).peak_allocated_bytes
    alone = small().model_copy(
        update={"parallelism": small().parallelism.model_copy(update={"expert_model_parallel_size": 2})}
    )
    routed = alone.model_copy(update={"routing": Routing(kind="worst")})
    assert row(found.peaks, ep=2, plan="worst")["peak_bytes"] == estimate(routed).peak_allocated_bytes


def test_a_histogram_is_priced_as_the_workload_that_states_it(found: ExpertRouting) -> None:
    rows = tuple(map(tuple, COUNTED))
    stated = small().model_copy(update={"routing": Routing(kind="measured", rows_per_expert=rows)})
    assert row(found.peaks, ep=4, plan="measured: rows.json")["peak_bytes"] == estimate(stated).peak_allocated_bytes


def test_the_fullest_rank_need_not_be_the_one_with_most_rows(counted: Path) -> None:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found = ExpertRouting(small(recompute=recompute), counted, 0.5, 1, GPUS)
    busiest, fullest = (found.ranks.filter(pl.col(name))["rank"].to_list() for name in ("busiest", "fullest"))
    assert (busiest, fullest) == ([1], [3])
    assert "on rank 3 layer 3 decides most" in found.deciding[0]
    # One layer at a time holds its rows.
    saved = dict(found.by_layer.select("layer", "saved_bytes").iter_rows())
    assert saved[3] > 0
    assert saved[1] <= 0
    assert saved[2] <= 0


def test_rows_are_counted_in_the_layer_with_most(found: ExpertRouting) -> None:
    sent = 2048 * 2
    balanced = row(found.rows, plan="balanced")
    assert (balanced["sent"], balanced["to_busiest"], balanced["received"], balanced["per_expert"]) == (
        sent,
        sent // 4,
        sent,
        sent / 2,
    )
    own = row(found.rows, plan="measured: rows.json")
    assert (own["layer"], own["to_busiest"]) == (1, 1639)  # 400 of 1000 go to rank 1


def test_loads_are_over_the_even_share(found: ExpertRouting) -> None:
    last = row(found.loads, expert=7)
    assert (last["rank"], last["least"], last["most"]) == (3, 0.8, 2.0)
    assert found.loads["mean"].mean() == pytest.approx(1)
    cell = row(found.strip, layer=3, rank=3)
    assert cell["over_even"] == 2.0
    assert found.strip.height == 3 * 4


def test_capacities_drop_what_experts_cannot_take(found: ExpertRouting) -> None:
    # Of the first layer's 1000 rows experts 2 and 3 have 200 each; the even share is 125.
    dropped = row(found.options, option="capacity 1", plan="measured: rows.json")["dropped"]
    assert dropped == pytest.approx(2 * 75 / 1000)
    assert row(found.options, option="capacity 1", plan="balanced")["dropped"] == 0
    assert row(found.options, option="capacity 1", plan="worst")["dropped"] == pytest.approx(0.75)
    padded = found.options.filter(pl.col("option") == "capacity 1.5, padded")
    peaks = {plan: row(found.peaks, ep=4, plan=plan)["peak_bytes"] for plan in ("balanced", "worst")}
    held = {plan: peaks[plan] + row(padded, plan=plan)["change_bytes"] for plan in peaks}  # type: ignore[operator]
    assert held["worst"] == pytest.approx(held["balanced"], rel=0.01)  # whatever the router does


def test_what_nobody_counted_is_called_an_example(drawn: ExpertRouting) -> None:
    assert {each.basis for each in drawn.histograms} == {EXAMPLE}
    assert all("example, not measured" in each.name for each in drawn.histograms)
    assert "Nobody counted these rows" in drawn.source[0]
    again = ExpertRouting(small(), None, 0.5, 1, GPUS)
    assert again.histograms == drawn.histograms
    for each in drawn.histograms:
        for rows in each.rows:
            assert sum(rows) == 2048 * 2 * 4
            assert max(rows) <= 2048 * 4  # a token goes to an expert once


def test_the_workloads_own_histograms_are_used(found: ExpertRouting) -> None:
    stated = small(routing={"kind": "measured", "rows_per_expert": COUNTED})
    own = ExpertRouting(stated, None, 0.5, 1, GPUS)
    assert own.histograms[0].rows == found.histograms[0].rows
    assert "as the workload states" in own.source[0]


def test_routing_that_the_workload_states_is_a_plan_of_its_own() -> None:
    skewed = ExpertRouting(small(routing={"kind": "skewed", "imbalance": 1.3}), None, 0.5, 1, GPUS)
    assert row(skewed.shares, ep=4, plan="stated: skewed")["mean"] == 1.3
    assert "stated: skewed" not in skewed.shares.filter(pl.col("ep") == 2)["plan"].to_list()


def test_the_answer_gives_figures_and_what_fits(found: ExpertRouting) -> None:
    said = " ".join(found.answer)
    assert "(forward) with the allowance (1.6 times the even share)" in said
    assert "a rank gets up to 2.00 times the even share in a layer" in said
    assert "NVIDIA H200: what fits is EP 1, 2, 4, however rows lie." in said
    tight = ExpertRouting(small(batch={"seq_length": 2**19, "global_batch_size": 4}), None, 0.5, 1, ("a100-40gb",))
    fits = "EP 1, 2, 4 with balanced rows, EP 1 with the allowance, EP 1 at worst"
    assert tight.answer[-1] == f"NVIDIA A100-SXM4-40GB: what fits is {fits}."


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.yaml", "rows_per_expert: [[1, 2], [3, 4]]"),
        ("rows.json", '{"routing": {"kind": "measured", "rows_per_expert": [[1, 2], [3, 4]]}}'),
        ("rows.csv", "1,2\n3,4\n"),
        ("rows.csv", "layer,expert,rows\n5,1,4\n2,0,1\n2,1,2\n5,0,3\n"),
    ],
)
def test_histograms_are_read_as_people_have_them(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_histograms(tmp_path / name) == ((1, 2), (3, 4))


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("rows.csv", "1,2\n3,<script>\n", "rows.csv: line 2: '<script>' is no number of rows"),
        ("rows.csv", "1,2\n3,-4\n", "'-4' is no number of rows"),
        ("rows.csv", "layer,expert,rows\n1,1,1\n1,1,2\n", "line 3: expert 1 of layer 1 is given twice"),
        ("rows.csv", "layer,expert,rows\n1,1\n", "line 2: should be layer, expert and rows"),
        ("rows.yaml", "rows: [[1]]", "rows.yaml: has no rows_per_expert"),
        ("rows.yaml", "rows_per_expert: 3", "rows_per_expert: should be a list (got 3)"),
    ],
)
def test_what_is_no_histogram_is_refused(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_histograms(tmp_path / name)
    assert sentence in str(raised.value)


def test_a_histogram_of_other_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("1,2,3\n", encoding="utf-8")
    with pytest.raises(InputError, match="does not name each of the 8 experts"):
        ExpertRouting(small(), tmp_path / "rows.csv", 0.5, 1, GPUS)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(InputError, match="has no experts to route to"):
        ExpertRouting(Workload.load("qwen3.8-27b-lora"), None, 0.5, 1, GPUS)
