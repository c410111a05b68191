"""The estimate against peaks measured on H200: the figures that `benchmarks/accuracy_h200.py` prints for its groups."""

import dataclasses
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from labkit.calibration.accuracy import MANY_ROWS, Comparison, compared, old_heuristic
from labkit.calibration.cells import CHOSEN_FROM, DEFAULT_CELLS, PHASES, Cell, read
from labkit.memory.estimate import estimate
from labkit.workload import Workload

CELLS = read(DEFAULT_CELLS)


@pytest.fixture(scope="module")
def everything() -> list[Comparison]:
    return [each for cell in CELLS for each in compared(cell)]


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
    ledger = estimate(cell.workload).ledger
    weights = ledger.at(ledger.start(1, "forward") - 1).total(blocks=True)
    assert 0.95 * cell.baseline_bytes <= weights <= cell.baseline_bytes


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
