"""The estimate against peaks measured on H200: what `make accuracy` prints, and what the notebook shows of it."""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from labkit.calibration.accuracy import (
    MANY_ROWS,
    Comparison,
    Levels,
    compared,
    increments,
    old_heuristic,
    shipped,
    summary,
)
from labkit.calibration.cells import CHOSEN_FROM, DEFAULT_CELLS, PHASES, Cell, read
from labkit.calibration.jobs import DEFAULT_JOBS, read_rows
from labkit.calibration.kept import CELLS as KEPT_COLUMNS
from labkit.calibration.kept import KEPT_CELLS, keep, read_kept
from labkit.calibration.known import Known
from labkit.errors import InputError
from labkit.memory.estimate import BlockPeaks, estimate, fullest_stage
from labkit.report.parameters import Calibration as Parameters
from labkit.workbench import calibration
from labkit.workbench.calibration import CALIBRATED, H200, HELD_OUT, JOB, OWN, Calibration
from labkit.workload import Workload

CELLS = read(DEFAULT_CELLS)
HOSTILE = "<script>alert(1)</script>\u202e" + "w" * 150


@pytest.fixture(scope="module")
def everything() -> list[Comparison]:
    return [each for _, phases in shipped() for each in phases]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    """With a file of one's own: the first published cell under a hostile name."""
    return Calibration.of(altered(tmp_path_factory.mktemp("cells"), case=HOSTILE))


@pytest.fixture(scope="module")
def found(everything: list[Comparison]) -> list[Comparison]:
    return [each for each in everything if each.phase in PHASES]


def many(found: list[Comparison], keep: Callable[[Comparison], bool]) -> list[Comparison]:
    return [each for each in found if each.rows >= MANY_ROWS and keep(each)]


def mean_absolute_error(members: list[Comparison]) -> float:
    return statistics.mean(abs(each.error) for each in members)


def test_every_measured_phase_is_compared(found: list[Comparison]) -> None:
    assert len(CELLS) == 51
    assert len(found) == 51 * 3 - 9
    """Cells under context parallelism have no retained bytes."""


def test_dense_and_hybrid_models(found: list[Comparison]) -> None:
    members = many(found, lambda each: each.group in {"dense", "hybrid"})
    assert mean_absolute_error(members) <= 0.005
    assert all(-0.01 <= each.error <= 0.015 for each in members)


def test_warm_repetitions_have_their_workspaces(everything: list[Comparison]) -> None:
    """96 MiB and more of a small cell's first repetition are libraries': the second is priced without."""
    repeats = [each for each in everything if each.phase == "repeat_forward"]
    assert len(repeats) == len(CELLS) - 9
    assert all(abs(each.error) <= (0.035 if each.group.startswith("moe") else 0.011) for each in repeats)


def test_mixtures_of_experts(found: list[Comparison]) -> None:
    members = many(found, lambda each: each.group.startswith("moe"))
    assert mean_absolute_error(members) <= 0.02
    assert all(abs(each.error) <= 0.035 for each in members)


def test_worst_routing_covers_concentrated_routing(found: list[Comparison]) -> None:
    members = many(found, lambda each: each.group == "moe concentrated")
    assert members
    assert all(each.measured_bytes <= each.worst_case_bytes <= 1.15 * each.measured_bytes for each in members)


def test_the_margin_covers_every_cell_with_little_headroom(found: list[Comparison]) -> None:
    assert all(each.headroom >= 0 for each in found)
    assert statistics.mean(each.headroom for each in many(found, lambda each: True)) <= 0.04


def test_choices_without_a_source_carry_over_to_held_out_cells(found: list[Comparison]) -> None:
    held_out = many(found, lambda each: each.case not in CHOSEN_FROM)
    chosen = many(found, lambda each: each.case in CHOSEN_FROM)
    assert len(held_out) > 4 * len(chosen) > 0
    assert mean_absolute_error(held_out) <= 0.005


def test_beats_the_publishers_estimator_and_the_rule_of_thumb(found: list[Comparison]) -> None:
    for each in many(found, lambda each: True):
        assert each.reference_estimate_bytes is not None
        assert abs(each.error) < abs(each.reference_estimate_bytes / each.measured_bytes - 1)
        assert abs(each.error) < abs(each.old_heuristic_bytes / each.measured_bytes - 1)


FRESH = [cell for cell in CELLS if cell.cold and cell.baseline_bytes is not None]


@pytest.mark.parametrize("cell", FRESH, ids=lambda cell: cell.case)
def test_weights_are_those_of_a_fresh_process(cell: Cell) -> None:
    """It holds 1 to 4 % more, which the cells do not itemise."""
    assert cell.baseline_bytes is not None
    weights = BlockPeaks(cell.workload, fullest_stage(cell.workload)).before_bytes
    assert 0.95 * cell.baseline_bytes <= weights <= cell.baseline_bytes


@pytest.mark.parametrize("case", ["h200-01", "h200-22"])
def test_levels_are_those_of_the_rows(case: str) -> None:
    cell = next(cell for cell in CELLS if cell.case == case)
    written = increments(cell, Levels.of(estimate(cell.workload)))
    (phases,) = (phases for found, phases in shipped() if found.case == case)
    assert {each.phase: each.estimate_raw_bytes for each in phases} == {
        phase: written[phase].raw for phase in cell.measured_bytes
    }


def test_old_heuristic_gives_the_figure_that_was_admitted() -> None:
    """5.894 GB without outputs, where 107 GB were not enough."""
    cell = next(cell for cell in CELLS if cell.case == "h200-07")
    batch = cell.workload.batch
    outputs = batch.sequences.logical_rows * 5120 * 2
    assert old_heuristic(cell.workload) - outputs == pytest.approx(5.894e9, rel=1e-3)


def altered(tmp_path: Path, **columns: str) -> Path:
    """The first cell alone, some columns changed; a column set to the empty string stays."""
    names, first = DEFAULT_CELLS.read_text(encoding="utf-8").splitlines()[:2]
    row = dict(zip(names.split(","), first.split(","), strict=True)) | columns
    path = tmp_path / "cells.csv"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n", encoding="utf-8")
    return path


def test_full_recompute_goes_layer_by_layer(tmp_path: Path) -> None:
    (cell,) = read(altered(tmp_path, recompute="full", recompute_modules=""))
    assert cell.workload.recompute.label == "full uniform 1"


def test_nothing_is_keyed_by_case(tmp_path: Path) -> None:
    (renamed,) = read(altered(tmp_path, case="other"), DEFAULT_CELLS)
    (first, *_) = CELLS
    assert isinstance(renamed, Cell)
    assert renamed == first._replace(case="other")
    assert isinstance(renamed.workload, Workload)
    raw = [each.estimate_raw_bytes for each in compared(renamed)]
    assert raw == [each.estimate_raw_bytes for each in compared(first)]
    assert dataclasses.is_dataclass(compared(first)[0])


def test_every_figure_of_make_accuracy_is_shown(everything: list[Comparison], shown: Calibration) -> None:
    rows = shown.figures.filter(collection=H200)
    assert rows["case"].to_list() == [each.case for each in everything]
    assert rows["measured_bytes"].to_list() == [each.measured_bytes for each in everything]
    assert rows["estimated_bytes"].to_list() == [each.estimate_raw_bytes for each in everything]
    assert rows["covering_bytes"].to_list() == [each.estimate_bytes for each in everything]
    assert rows["estimated_error"].to_list() == pytest.approx([each.error for each in everything])


def test_statistics_are_those_of_make_accuracy(found: list[Comparison], shown: Calibration) -> None:
    printed = summary(found, [])
    answers = {(row["size"], row["basis"]): row for row in shown.answers.filter(collection=H200).iter_rows(named=True)}
    row = answers["1000 rows and more", HELD_OUT]
    expected = printed["held out, 1000+ rows, all phases"]
    assert (row["figures"], row["covered"]) == (expected["cells"], expected["covered"])
    for ours, theirs in (
        ("estimated_mean", "mean_absolute_error"),
        ("estimated_lowest", "lowest_error"),
        ("estimated_highest", "highest_error"),
        ("headroom", "mean_headroom"),
    ):
        assert row[ours] == pytest.approx(expected[theirs], abs=1e-6)
    assert sum(row["figures"] for row in answers.values()) == printed["all, all phases"]["cells"]
    groups = shown.groups.filter(collection=H200, facet="models and routing", group="experts, routing even")
    (even,) = groups.iter_rows(named=True)
    assert even["estimated_mean"] == pytest.approx(
        statistics.mean(abs(each.error) for each in many(found, lambda each: each.group == "moe"))
    )


def test_held_out_and_calibrated_are_never_mixed(shown: Calibration) -> None:
    calibrated = shown.figures.filter(collection=H200, basis=CALIBRATED)["case"].unique()
    assert set(calibrated) == CHOSEN_FROM
    chosen = {row.case for row in read_rows(DEFAULT_JOBS) if row.chosen_from}
    assert set(shown.figures.filter(collection=JOB, basis=CALIBRATED)["case"]) == chosen
    assert 0 < len(chosen) < 40
    assert "basis" in shown.answers.columns
    assert "basis" in shown.groups.columns
    assert any("no proof for others" in sentence for sentence in shown.sentences)


def test_the_document_says_the_same(found: list[Comparison]) -> None:
    text = (DEFAULT_CELLS.parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for start, members in (
        ("| dense and hybrid (TP", many(found, lambda each: each.group in {"dense", "hybrid"})),
        ("| mixture of experts, routing concentrated", many(found, lambda each: each.group == "moe concentrated")),
        ("| mixture of experts, routing taken as balanced", many(found, lambda each: each.group == "moe")),
    ):
        line = next(line for line in text.splitlines() if line.startswith(start))
        low, high = min(each.error for each in members), max(each.error for each in members)
        assert f"| {len(members)} | {mean_absolute_error(members):.2%} |".replace("%", " %") in line
        assert f"| {low:+.1%}, {high:+.1%} |".replace("%", " %") in line


def test_the_document_says_how_far_the_kept_traces_are(shown: Calibration) -> None:
    text = (DEFAULT_CELLS.parents[2] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    traced = shown.large.filter(pl.col("traced_bytes").is_not_null(), collection=H200)
    experts = traced["models"].str.starts_with("experts")
    for name, rows in (("dense and hybrid", traced.filter(~experts)), ("mixture of experts", traced.filter(experts))):
        ours, theirs = (statistics.mean(rows[f"{source}_error"].abs()) for source in ("estimated", "traced"))
        assert f"| {name} | {len(rows)} | {ours:.2%} | {theirs:.2%} |".replace("%", " %") in text


def test_what_the_headline_leaves_out_stands_beside_it(found: list[Comparison], shown: Calibration) -> None:
    place = next(place for place, said in enumerate(shown.sentences) if said.startswith("Held-out H200 cells from"))
    beside = shown.sentences[place + 1]
    repeats = shown.figures.filter(collection=H200, phase="second forward", size="1000 rows and more")
    small = [each.error for each in found if each.rows < MANY_ROWS]
    for errors in (repeats["estimated_error"].to_list(), repeats["traced_error"].drop_nulls().to_list(), small):
        assert f" {min(errors) * 100:+.1f} to {max(errors) * 100:+.1f} %" in beside


def test_kept_traces_say_when_they_were_made_and_whether_todays_may_differ(
    shown: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**changed: str) -> list[str]:
        row = shown.made.filter(source="traced", collection=H200).row(0, named=True)
        then = dict(each.split(" ") for each in row["versions"].split(", ")) | {"trace driver": row["driver"]}
        monkeypatch.setattr(calibration, "trace_versions", lambda: then | changed)
        return [each for each in shown.sentences if each.startswith("Traces of the H200 cells were made on 20")]

    assert said() == []
    (older,) = said(torch="2.15.0")
    assert "with labkit 0.1.0, torch 2.14.1, " in older
    assert "torch is 2.15.0 now, so that traces made today may give other figures (make cells tells)" in older
    (edited,) = said(**{"trace driver": "other"})
    assert "files of labkit that take part have changed since" in edited


def test_cells_of_ones_own_are_held_out_and_come_first(shown: Calibration) -> None:
    own = shown.figures.filter(collection=OWN)
    assert own["case"].unique().to_list() == [HOSTILE]
    assert own["basis"].unique().to_list() == [HELD_OUT]
    assert own["trace"].unique().to_list() == ["not traced"]
    first = shown.figures.filter(collection=H200).head(len(own))
    assert own["estimated_bytes"].to_list() == first["estimated_bytes"].to_list()
    assert shown.sentences[0].startswith("Your cells from 1000 rows a rank: estimated 0.02 % off on average")
    assert shown.cells["case"][0] == HOSTILE
    assert own["known"].is_null().all(), "a reason is a published case's"


def test_a_file_with_other_columns_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("case,peak\nx,1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"cells\.csv: no column 'model'$"):
        Calibration.of(path)
    with pytest.raises(InputError, match="calibration parameters: cells: there is no such file"):
        Parameters.checked(cells=str(tmp_path / "none.csv"))


def test_a_trace_of_other_work_is_stale_and_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(cell for cell in CELLS if cell.case == "h200-02")
    fresh = [{"case": cell.case, "work_hash": cell.work_hash, "phase": "forward", "traced_bytes": 7}]
    path = tmp_path / "kept.csv"
    monkeypatch.setattr(calibration, "KEPT_CELLS", path)
    monkeypatch.setattr(calibration, "STUDIES", ())
    keep(path, KEPT_COLUMNS, [*fresh, {"case": "h200-03", "work_hash": "other", "phase": "forward", "traced_bytes": 7}])
    figures = Calibration.of().figures
    assert figures.filter(case=cell.case, phase="forward")["traced_bytes"].to_list() == [7]
    stale = figures.filter(case="h200-03")
    assert stale["trace"].unique().to_list() == ["stale"]
    assert stale["traced_bytes"].is_null().all()
    assert figures.filter(case="h200-04")["why"].unique().to_list() == ["no trace of it is kept"]


def test_what_is_kept_replaces_only_its_own_cases(tmp_path: Path) -> None:
    path = tmp_path / "kept.csv"
    row = {"work_hash": "x", "phase": "forward", "traced_bytes": 1}
    keep(path, KEPT_COLUMNS, [{"case": "b", **row}, {"case": "a", **row}])
    keep(path, KEPT_COLUMNS, [{"case": "b", **row, "traced_bytes": 2}])
    kept = read_kept(path, KEPT_COLUMNS)
    assert kept.select("case", "traced_bytes").rows() == [("a", 1), ("b", 2)]
    assert kept["transformer-engine"].is_not_null().all()
    path.write_text("case\na\n", encoding="utf-8")
    with pytest.raises(InputError, match="its columns should be case, work_hash"):
        read_kept(path, KEPT_COLUMNS)


def test_shipped_traces_are_of_today_s_work() -> None:
    """Otherwise `make cells` and `make jobs` trace them anew."""
    kept = read_kept(KEPT_CELLS, KEPT_COLUMNS)
    works = {cell.case: cell.work_hash for cell in CELLS}
    assert kept["case"].n_unique() > 0
    assert all(works[case] == work for case, work in kept.select("case", "work_hash").iter_rows())


def test_every_known_reason_is_of_some_case() -> None:
    names = [cell.case for cell in CELLS] + [row.case for row in read_rows(DEFAULT_JOBS)]
    known = Known.load()
    for each in known.reasons:
        assert any(known.of(name) == each.reason for name in names), each
