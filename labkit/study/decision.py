"""Which recompute choice to try first, and why, in plain language.

Peaks are those measured on GPUs where every choice was, else the traced ones. What a choice costs is the increase of
the step time where every choice has one (measured, else published), else a lower bound: for what backward replays, the
trace's, or the estimator's where a trace has not counted it; for the whole step where a choice is another one than the
recompute choice. The sentences say which.

With a target (stated, or the GPU's memory when the control does not fit it): the cheapest choice that meets it.
Without: a choice that another one undercuts at no higher peak is out; the rest are ranked by bytes saved per second.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.ledger import MATERIAL, WITHOUT_ACTIVATIONS
from labkit.workload.gpu import GIB

if TYPE_CHECKING:
    import polars as pl

_REPLAY = {"traced": "traced replay at the GPU's full speed", "estimated": "estimated replay time"}
_NOTHING_SAVED = "next to nothing saved"
_STEP = "the traced step at the GPU's full speed"


class Decision(NamedTuple):
    """A ranking with its reasons."""

    frame: "pl.DataFrame"
    """One row per candidate in study order; rank 1 is to be tried first, null is not to be tried."""
    sentences: tuple[str, ...]
    """What to try first, what it saves and costs, what the others lack, where the floor is, what fits."""


class Limit(NamedTuple):
    """What a peak has to stay below."""

    name: str
    bytes: int
    stated: bool
    """The study names it; else it is the GPU's memory, which decides only when the control exceeds it."""

    def __str__(self) -> str:
        return f"{self.name} ({_gib(self.bytes)})"


@dataclass
class _Choice:
    """A candidate that passed, beside a control that passed."""

    label: str
    is_control: bool
    peak: int
    reserved: int
    """Segments the allocator holds, 0 where nothing says."""
    phase: str
    saved: int
    cost: float
    """Seconds a step beyond the control's."""
    price: str
    """The same in words, with its source."""
    warnings: str
    """Of its workload; they say why it saves nothing, where that is known."""
    verdict: str = ""
    rank: int | None = None


def decide(cells: "pl.DataFrame", limit: Limit) -> Decision:
    """Rank the candidates of a study.

    Args:
        cells: `labkit.study.frames.cells`.
        limit: What a peak has to stay below.
    """
    rows = _figures(cells)
    control = next(row for row in rows if row["is_control"])
    choices: list[_Choice] = []
    if control["outcome"] != "ok":
        said = [f"The control {control['candidate']} has no {control['evidence']} result: nothing can be compared yet."]
    else:
        choices = _choices(rows, control)
        constrained = limit.stated or control["peak_allocated_bytes"] >= limit.bytes
        if constrained:
            said = _within(choices, limit)
        else:
            evidence = control["evidence"]
            said = [*_by_efficiency(choices, evidence), _fitting(choices, limit, evidence)]
        said[1:1] = _tight(choices, limit)
    decided = {choice.label: choice for choice in choices}
    for row in rows:
        choice = decided.get(row["candidate"])
        row["fits"] = None if row["peak_allocated_bytes"] is None else row["peak_allocated_bytes"] < limit.bytes
        row["tight"] = row["fits"] and (row["peak_reserved_bytes"] or 0) >= limit.bytes
        row["rank"] = None if choice is None else choice.rank
        row["verdict"] = _unfinished(row) if choice is None else choice.verdict
        if row["differs_in"]:
            row["verdict"] += f"; not matched, changes several choices at once ({row['differs_in']})"
    said += [f"{warnings}." for warnings in dict.fromkeys(row["warnings"] for row in rows) if warnings]
    said += _alike((row["candidate"], row["verdict"]) for row in rows if row["outcome"] != "ok" or row["differs_in"])
    unmatched = [row["candidate"] for row in rows if row["differs_in"]]
    if unmatched:
        said.append(
            f"This study is not matched: {len(unmatched)} of its {len(rows) - 1} candidates change more than one "
            "choice against the control, so that their differences have no single cause."
        )
    return Decision(_frame(rows), tuple(said))


def _figures(cells: "pl.DataFrame") -> list[dict[str, Any]]:
    """The figures of each candidate side by side, in study order."""
    by_source = {(row["candidate"], row["source"]): row for row in cells.iter_rows(named=True)}
    labels = list(dict.fromkeys(cells["candidate"]))
    evidence = _evidence(by_source, labels)
    passed = [row for (_, source), row in by_source.items() if source == "traced" and row["outcome"] == "ok"]
    # One source for all, or they could not be ranked.
    replayed = "traced" if passed and all(row["replay_seconds"] is not None for row in passed) else "estimated"
    rows = []
    for label in labels:
        found, estimated = by_source[label, evidence], by_source[label, "estimated"]
        traced, measured, recorded, published = (
            by_source.get((label, name), {}) for name in ("traced", "measured", "recorded", "published")
        )
        replay = estimated if replayed == "estimated" else traced
        rows.append(
            {
                "candidate": label,
                "setting": found["setting"],
                "is_control": found["is_control"],
                "evidence": evidence,
                "outcome": found["outcome"],
                "peak_allocated_bytes": found["peak_allocated_bytes"],
                "estimated_bytes": estimated["peak_allocated_bytes"],
                "traced_bytes": traced.get("peak_allocated_bytes"),
                "measured_bytes": measured.get("peak_allocated_bytes"),
                "recorded_bytes": recorded.get("peak_allocated_bytes"),
                "published_bytes": published.get("peak_allocated_bytes"),
                "peak_reserved_bytes": found["peak_reserved_bytes"],
                "saved_bytes": found["saved_bytes"],
                "peak_phase": found["peak_phase"],
                "measured_ms": measured.get("step_time_ms"),
                "recorded_ms": recorded.get("step_time_ms"),
                "published_ms": published.get("step_time_ms"),
                "replay_source": replayed,
                "replay_seconds": replay.get("replay_seconds"),
                "replay_flops": replay.get("replay_flops"),
                "replay_checkpoints": replay.get("replay_checkpoints"),
                "step_seconds": replay.get("step_seconds"),
                "changes": found["changes"],
                "differs_in": found["differs_in"],
                "warnings": found["warnings"],
            }
        )
    control = next(row for row in rows if row["is_control"])
    clocks = ("measured", "recorded", "published")
    clock = next((name for name in clocks if _complete(rows, f"{name}_ms")), "published")
    for row in rows:
        row["step_time_source"], row["step_time_ms"] = clock, row[f"{clock}_ms"]
        for change, time in (("step_time_change", "step_time_ms"), ("step_bound_change", "step_seconds")):
            row[change] = row[time] / control[time] - 1 if row[time] and control[time] else None
    return rows


def _evidence(by_source: dict[tuple[str, str], dict[str, Any]], labels: Sequence[str]) -> str:
    """Whose peaks decide: the GPUs' if they have run every choice, or nothing has been traced."""
    if (labels[0], "traced") not in by_source:
        return "measured"
    measured = [by_source.get((label, "measured"), {}).get("outcome", "missing") for label in labels]
    return "traced" if "missing" in measured else "measured"


def _complete(rows: Sequence[dict[str, Any]], figure: str) -> bool:
    """Every choice that passed has the figure, and some did."""
    passed = [row for row in rows if row["outcome"] == "ok"]
    return bool(passed) and all(row[figure] for row in passed)


def _choices(rows: Sequence[dict[str, Any]], control: dict[str, Any]) -> list[_Choice]:
    """What passed, priced; one source of cost for all, or they could not be ranked."""
    passed = [row for row in rows if row["outcome"] == "ok"]
    timed = _complete(rows, "step_time_ms")
    # What another layout or length costs is not in what backward replays.
    whole_step = any(row["changes"] not in (None, "recompute") for row in passed) and _complete(rows, "step_seconds")
    choices = []
    for row in passed:
        if timed:
            milliseconds = row["step_time_ms"] - control["step_time_ms"]
            source = f"{row['step_time_source']} step time"
            price = f"{milliseconds:.1f} ms a step ({row['step_time_change']:+.1%}, {source})"
        else:
            time, source = ("step_seconds", _STEP) if whole_step else ("replay_seconds", _REPLAY[row["replay_source"]])
            milliseconds = (row[time] - control[time]) * 1e3
            price = f"{milliseconds:.1f} ms a step ({source}, a lower bound)"
        choices.append(
            _Choice(
                label=row["candidate"],
                is_control=row["is_control"],
                peak=row["peak_allocated_bytes"],
                reserved=row["peak_reserved_bytes"] or 0,
                phase=row["peak_phase"],
                saved=row["saved_bytes"],
                cost=milliseconds / 1e3,
                price=price,
                warnings=row["warnings"],
            )
        )
    return choices


def _within(choices: Sequence[_Choice], limit: Limit) -> list[str]:
    """Rank what stays below the limit by cost."""
    meeting = sorted((choice for choice in choices if choice.peak < limit.bytes), key=lambda choice: choice.cost)
    for choice in choices:
        choice.verdict = f"misses {limit.name} by {_gib(choice.peak - limit.bytes)}"
    for position, choice in enumerate(meeting):
        choice.rank = position + 1
        choice.verdict = f"meets {limit.name}, {'try first' if position == 0 else 'at a higher price'}"
    if not meeting:
        lowest = min(choices, key=lambda choice: choice.peak)
        said = f"No choice stays below {limit}: the lowest, {lowest.label}, {lowest.verdict}."
        return [said, *_floor(lowest, choices)]
    best = meeting[0]
    if best.is_control:
        return [f"The control {best.label} stays below {limit} at {_gib(best.peak)}: recompute nothing more."]
    return [
        f"Try {best.label} first: of the {len(meeting)} that stay below {limit} it costs least, {best.price}, "
        f"and peaks at {_gib(best.peak)}."
    ]


def _by_efficiency(choices: Sequence[_Choice], evidence: str) -> list[str]:
    """Drop what saves nothing or is undercut, rank the rest by bytes saved per second."""
    control = next(choice for choice in choices if choice.is_control)
    margin = MATERIAL * control.peak
    control.verdict = "control"
    candidates = [choice for choice in choices if not choice.is_control]
    savers = [choice for choice in candidates if choice.saved > margin]
    for choice in candidates:
        better = [other for other in savers if _undercuts(other, choice, margin)]
        if choice not in savers:
            choice.verdict = "a higher peak than the control's" if choice.saved < -margin else _NOTHING_SAVED
        elif better:
            cheapest = min(better, key=lambda other: other.cost)
            choice.verdict = f"dearer than {cheapest.label} and not materially lower"
    front = [choice for choice in savers if not choice.verdict]
    if not front:
        said = f"No choice lowers the control's peak of {_gib(control.peak)} by more than {MATERIAL:.1%}."
        return [said, *_floor(control, [])]
    front.sort(key=lambda choice: choice.saved / choice.cost if choice.cost > 0 else float("inf"), reverse=True)
    best = front[0]
    for position, choice in enumerate(front):
        choice.rank = position + 1
        choice.verdict = "try first" if choice is best else f"fewer bytes saved per second than {best.label}"
    return [
        f"Try {best.label} first: it lowers the {evidence} peak from {_gib(control.peak)} to {_gib(best.peak)} "
        f"(-{_gib(best.saved)}) for {best.price}.",
        *(f"{choice.label} saves {_gib(choice.saved)} for {choice.price}." for choice in front[1:]),
        *_alike(
            (choice.label, choice.verdict)
            for choice in candidates
            if choice not in front and not (choice.warnings and choice.verdict == _NOTHING_SAVED)
        ),
        *_floor(best, savers),
    ]


def _undercuts(other: _Choice, choice: _Choice, margin: float) -> bool:
    """`other` costs no more and ends no higher, and is better in one of the two."""
    if other.cost > choice.cost or other.peak > choice.peak + margin:
        return False
    return other.cost < choice.cost or other.peak < choice.peak - margin


def _floor(lowest: _Choice, savers: Sequence[_Choice]) -> list[str]:
    """Where no recompute choice can lower the peak any more, and why."""
    if lowest.phase not in WITHOUT_ACTIVATIONS:
        return []
    shared = len(savers) > 1 and all(choice.phase == lowest.phase for choice in savers)
    who = f"All {len(savers)} choices that save end" if shared else f"{lowest.label} ends"
    where = WITHOUT_ACTIVATIONS[lowest.phase]
    return [
        f"{who} on a floor: {where}, in which no activation is alive, holds the peak; more labels will not lower it."
    ]


def _fitting(choices: Sequence[_Choice], limit: Limit, evidence: str) -> str:
    too_large = [choice.label for choice in choices if choice.peak >= limit.bytes]
    if too_large:
        return f"{_and(too_large)}: larger than {limit}."
    spare = limit.bytes - next(choice.peak for choice in choices if choice.is_control)
    return (
        f"Every {evidence} choice fits {limit}, the control with {_gib(spare)} to spare: unless that memory is needed, "
        "nothing has to be recomputed."
    )


def _tight(choices: Sequence[_Choice], limit: Limit) -> list[str]:
    """Choices that stay below the limit only if the allocator gives cached blocks back."""
    tight = [choice for choice in choices if choice.peak < limit.bytes <= choice.reserved]
    if not tight:
        return []
    segments = _gib(max(choice.reserved for choice in tight))
    return [
        f"{_and([choice.label for choice in tight])}: tight by fragmentation, since the allocator would hold "
        f"{segments} in segments, more than {limit}, unless it gives cached blocks back."
    ]


def _unfinished(row: dict[str, Any]) -> str:
    if row["outcome"] == "ok":
        return "not compared, the control is missing"
    return (
        f"not {row['evidence']}" if row["outcome"] == "missing" else f"{row['outcome'].replace('_', ' ')}, not compared"
    )


def _frame(rows: Sequence[dict[str, Any]]) -> "pl.DataFrame":
    import polars as pl

    schema = {
        "candidate": pl.String,
        "setting": pl.String,
        "is_control": pl.Boolean,
        "evidence": pl.String,
        "outcome": pl.String,
        "peak_allocated_bytes": pl.Int64,
        "estimated_bytes": pl.Int64,
        "traced_bytes": pl.Int64,
        "measured_bytes": pl.Int64,
        "recorded_bytes": pl.Int64,
        "published_bytes": pl.Int64,
        "saved_bytes": pl.Int64,
        "peak_phase": pl.String,
        "step_time_source": pl.String,
        "step_time_change": pl.Float64,
        "step_bound_change": pl.Float64,
        "replay_source": pl.String,
        "replay_seconds": pl.Float64,
        "replay_flops": pl.Int64,
        "replay_checkpoints": pl.Int64,
        "fits": pl.Boolean,
        "tight": pl.Boolean,
        "verdict": pl.String,
        "rank": pl.Int64,
    }
    return pl.DataFrame([{name: row[name] for name in schema} for row in rows], schema=schema)


def _alike(verdicts: Iterable[tuple[str, str]]) -> list[str]:
    """One sentence per verdict, naming all that share it."""
    shared: dict[str, list[str]] = {}
    for label, verdict in verdicts:
        shared.setdefault(verdict, []).append(label)
    return [f"{_and(labels)}: {verdict}." for verdict, labels in shared.items()]


def _and(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
