"""Measured cells beside their estimate or trace: what each phase takes, how far off that is, and by group.

For every measured phase of a cell (`data/published/README.md`): bytes above the baseline, the raw estimate and the
estimate with its margin row, the rule of thumb it replaces and the publisher's own estimator. Nothing here knows a
case: a cell becomes a workload by its columns alone.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Self

from labkit.calibration.cells import CHOSEN_FROM, DEFAULT_CELLS, PHASES, Cell, read
from labkit.memory.estimate import BlockPeaks, fullest_stage
from labkit.memory.margin import margin_bytes, tuning_bytes
from labkit.summary import Result
from labkit.workload import Routing, Workload

MANY_ROWS = 1000
"""Rows per rank from which accuracy is claimed: below, blocks and workspaces outweigh the tensors."""


@dataclass(frozen=True)
class Comparison:
    """One phase of one cell."""

    case: str
    group: str
    rows: int
    phase: str
    measured_bytes: int
    estimate_raw_bytes: int
    estimate_bytes: int
    """With the margin."""
    worst_case_bytes: int
    """With the margin, and where there are experts every token's on one rank."""
    old_heuristic_bytes: int
    reference_estimate_bytes: int | None

    @property
    def error(self) -> float:
        """Relative, above zero where the raw estimate is higher."""
        return self.estimate_raw_bytes / self.measured_bytes - 1

    @property
    def headroom(self) -> float:
        """What the estimate with its margin has above the measured."""
        return self.estimate_bytes / self.measured_bytes - 1


def compared(cell: Cell) -> list[Comparison]:
    """A cell's measured phases beside what is estimated of them."""
    estimated = increments(cell, _levels(cell.workload))
    worst = estimated
    if cell.workload.model.mixture_of_experts is not None:
        routed = cell.workload.model_copy(update={"routing": Routing(kind="worst")})
        worst = increments(cell, _levels(routed))
    return [
        Comparison(
            case=cell.case,
            group=cell.group,
            rows=cell.rows,
            phase=phase,
            measured_bytes=measured,
            estimate_raw_bytes=estimated[phase].raw,
            estimate_bytes=estimated[phase].covering,
            worst_case_bytes=worst[phase].covering,
            old_heuristic_bytes=old_heuristic(cell.workload),
            reference_estimate_bytes=cell.reference_estimate_bytes,
        )
        for phase, measured in cell.measured_bytes.items()
    ]


@cache
def shipped() -> tuple[tuple[Cell, tuple[Comparison, ...]], ...]:
    """The cells that ship with labkit, compared: half a second of work each, done once a process."""
    return tuple((cell, tuple(compared(cell))) for cell in read(DEFAULT_CELLS))


class Increment(NamedTuple):
    """Block bytes above the baseline before forward."""

    raw: int
    covering: int
    """With the margin, and in a process's first backward the tuning allowance."""


class Levels(NamedTuple):
    """Block bytes by iteration and phase."""

    before: Mapping[tuple[int, str], int]
    """Alive when a phase begins."""
    peaks: Mapping[tuple[int, str], int]

    @classmethod
    def of(cls, result: Result) -> Self:
        """Those of an estimate or a trace."""
        peaks = {(peak.iteration, peak.phase): peak.bytes for peak in result.ledger.phase_peaks()}
        before = {key: result.ledger.at(result.ledger.start(*key) - 1).total(blocks=True) for key in peaks}
        return cls(before, peaks)


def _levels(workload: Workload) -> Levels:
    """The estimate's, for which no rows are needed."""
    found = BlockPeaks(workload, fullest_stage(workload))
    return Levels(found.before, {(each.iteration, each.phase): each.bytes for each in found.phases})


def increments(cell: Cell, levels: Levels) -> dict[str, Increment]:
    """What each phase takes, of an estimate's levels or of a trace's.

    A cold cell is its first step, a warm one its second. What a MoE process holds
    from an earlier cell (the dispatchers' attributes) forward frees as it goes: it counts against the cell as far as it
    was measured.
    """
    iteration = 1 if cell.cold else 2
    before, peaks = levels
    baseline = before[iteration, "forward"]
    if not cell.cold and cell.held_bytes is not None and cell.workload.model.mixture_of_experts is not None:
        baseline = before[1, "forward"] + cell.held_bytes
    forward, backward = (peaks[iteration, phase] - baseline for phase in ("forward", "backward"))
    repeat = peaks[2, "forward"] - before[2, "forward"]
    tuned = backward + (tuning_bytes(cell.workload) if cell.cold else 0)
    taken = {
        "retained": (before[iteration, "backward"] - baseline,) * 2,
        "forward": (forward, forward),
        "repeat_forward": (repeat, repeat),
        "forward_backward": (max(forward, backward), max(forward, tuned)),
    }
    return {phase: Increment(raw, most + margin_bytes(cell.workload, most)) for phase, (raw, most) in taken.items()}


def old_heuristic(workload: Workload) -> int:
    """The rule of thumb that admitted the failure labkit began with (figures: bf16, outputs added).

    max(4, min(16, layers // 4 + 4)) x packed tokens x hidden x 2 bytes x 1.10, whatever is recomputed or split.
    """
    model, batch = workload.model, workload.batch
    outputs = batch.sequences.logical_rows * model.hidden_size * 2
    tensors = max(4, min(16, model.num_layers // 4 + 4))
    return round(tensors * batch.seq_length * model.hidden_size * 2 * 1.10) + outputs


def summary(found: Sequence[Comparison], repeats: Sequence[Comparison]) -> dict[str, dict[str, float | int | None]]:
    """Errors by group, phase and number of rows; warm repetitions in groups of their own."""
    groups: dict[str, list[Comparison]] = {}
    for each in (*found, *repeats):
        size = f"{MANY_ROWS}+ rows" if each.rows >= MANY_ROWS else f"below {MANY_ROWS} rows"
        groups.setdefault(f"{each.group}, {size}, {each.phase}", []).append(each)
    many = [each for each in found if each.rows >= MANY_ROWS]
    for name, members in (
        (f"dense and hybrid, {MANY_ROWS}+ rows", [each for each in many if each.group in {"dense", "hybrid"}]),
        (f"moe, {MANY_ROWS}+ rows", [each for each in many if each.group.startswith("moe")]),
        (f"all, {MANY_ROWS}+ rows", many),
        (f"held out, {MANY_ROWS}+ rows", [each for each in many if each.case not in CHOSEN_FROM]),
        ("all", list(found)),
    ):
        for phases, label in ((("retained", "forward"), "retained and forward"), (tuple(PHASES), "all phases")):
            chosen = [each for each in members if each.phase in phases]
            if chosen:
                groups[f"{name}, {label}"] = chosen
    return {name: _errors(members) for name, members in groups.items()}


def _errors(members: Sequence[Comparison]) -> dict[str, float | int | None]:
    errors = [each.error for each in members]
    return {
        "cells": len(members),
        "mean_absolute_error": _rounded(statistics.mean(map(abs, errors))),
        "lowest_error": _rounded(min(errors)),
        "highest_error": _rounded(max(errors)),
        "mean_headroom": _rounded(statistics.mean(each.headroom for each in members)),
        "covered": sum(each.headroom >= 0 for each in members),
        "worst_case_lowest": _rounded(min(each.worst_case_bytes / each.measured_bytes - 1 for each in members)),
        "worst_case_highest": _rounded(max(each.worst_case_bytes / each.measured_bytes - 1 for each in members)),
        "old_heuristic_mean_absolute_error": _mean_error(members, lambda each: each.old_heuristic_bytes),
        "reference_mean_absolute_error": _mean_error(members, lambda each: each.reference_estimate_bytes),
    }


def _mean_error(members: Iterable[Comparison], figure: Callable[[Comparison], int | None]) -> float | None:
    errors = [abs(value / each.measured_bytes - 1) for each in members if (value := figure(each)) is not None]
    return _rounded(statistics.mean(errors)) if errors else None


def _rounded(value: float) -> float:
    return round(value, 6)
