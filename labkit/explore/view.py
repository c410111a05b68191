"""What the explorer shows of a workload, as plain data: at once from the course of a step, then settled by the ledger.

Bytes stay integers, with categories in the order of every chart's stack; what is drawn through the step is in MiB.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from labkit.ledger import rarely_collected
from labkit.memory.course import Course, course
from labkit.memory.estimate import estimate, stage_peaks
from labkit.memory.margin import margin_over
from labkit.memory.outline import outline
from labkit.memory.replay import replay
from labkit.memory.units import chunks
from labkit.report.heading import workload_facts
from labkit.report.theme import FONT, MONOSPACE, PALETTES, STACK, VERDICTS, category_colour, category_number, text_on
from labkit.summary import CATEGORIES, Summary
from labkit.workload import Workload
from labkit.workload.gpu import GPUS, MIB
from labkit.workload.stages import fullest_stages, stage_layers

_COMPARED = ("h100-80gb", "h200-141gb")
PHASES = {"grad_sync": "gradient sync"}
"""Of the ledger's phases, those that people call otherwise."""


class Held(NamedTuple):
    """A peak and what makes it."""

    iteration: int
    phase: str
    nbytes: int
    breakdown: Mapping[str, int]
    margin_bytes: int
    """What an estimate sets aside above it."""


@rarely_collected()
def picture(workload: Workload) -> dict[str, Any]:
    """Everything that is shown of a workload that can run, within a tenth of a second.

    The peak is in blocks of fresh segments: `settled` has those that cached ones give, usually less than 1 % away, and
    the stages that cannot be the fullest.
    """
    peaks = {stage: outline(workload, stage).peak_bytes for stage in fullest_stages(workload)}
    stage = max(peaks, key=peaks.__getitem__)
    found = course(workload, stage)
    peak, layout, facts = found.peak, workload.parallelism, workload_facts(workload)
    margin = margin_over(workload, found.phases, found.set_up_bytes)
    return {
        "hash": workload.content_hash,
        "name": workload.model.name,
        "layout": facts["Layout"],
        "batch": facts["Batch"],
        "recompute": workload.recompute.label,
        "stage": stage,
        "rank": layout.first_rank(stage),
        "stages": _stages(workload, peaks),
        "microbatches": workload.num_microbatches,
        "replay_ms": round(1e3 * replay(chunks(workload, stage), workload).seconds, 2),
        "timeline": _timeline(found),
        **_figures(workload, Held(peak.iteration, peak.phase, peak.bytes, peak.breakdown, margin)),
        "reserved": None,
        "settled": False,
    }


def settled(workload: Workload) -> dict[str, Any]:
    """The parts of the picture that the ledger says better: as `labkit.estimate`, in a second or so."""
    summary = estimate(workload).summary
    return {
        "hash": workload.content_hash,
        **_figures(workload, held_of(summary)),
        "reserved": summary.peak_reserved_bytes,
        "settled": True,
        "stages": _stages(workload, {each.stage: each.peak_tensor_bytes for each in stage_peaks(workload)}),
        "warnings": list(summary.warnings),
    }


def _stages(workload: Workload, peaks: Mapping[int, int]) -> list[list[int | None]]:
    """[stage, layers, bytes of tensors] of each stage of a pipeline; None where a stage's peak is not there."""
    if workload.parallelism.pp == 1:
        return []
    return [
        [stage, sum(map(len, stage_layers(workload, stage))), peaks.get(stage)]
        for stage in range(workload.parallelism.pp)
    ]


def held_of(summary: Summary) -> Held:
    """The peak of an estimate or a trace."""
    parts = {share.category: share.bytes for share in summary.breakdown}
    nbytes, margin = summary.peak_allocated_bytes, summary.margin_bytes
    return Held(summary.peak_iteration, summary.peak_phase, nbytes, parts, margin)


def stacked(breakdown: Mapping[str, int]) -> list[list[Any]]:
    """[category, bytes] in the order of the stack."""
    return [[name, breakdown[name]] for name in STACK if breakdown.get(name)]


def _figures(workload: Workload, held: Held) -> dict[str, Any]:
    return {
        "peak": held.nbytes,
        "iteration": held.iteration,
        "phase": PHASES.get(held.phase, held.phase),
        "held": stacked(held.breakdown),
        "margin": held.margin_bytes,
        "fits": list(_fits(workload, held)),
    }


def _fits(workload: Workload, held: Held) -> Iterator[dict[str, Any]]:
    """The workload's own GPU first, then those that are always compared."""
    for key in dict.fromkeys((workload.training.gpu, *_COMPARED)):
        memory = GPUS[key].total_memory_bytes
        covered = held.nbytes + held.margin_bytes
        verdict = "fits" if covered < memory else "tight" if held.nbytes < memory else "no"
        yield {"gpu": key, "name": GPUS[key].name, "memory": memory, "verdict": verdict, "room": memory - covered}


def _timeline(found: Course) -> dict[str, Any]:
    """MiB by category, positions in ten-thousandths of the step."""
    present = [place for place, name in enumerate(CATEGORIES) if any(held[place] for held in found.holdings)]
    present.sort(key=lambda place: STACK.index(CATEGORIES[place]))
    return {
        "iteration": found.iteration,
        "categories": [CATEGORIES[place] for place in present],
        "at": [round(1e4 * position) for position in found.positions],
        "mib": [[round(held[place] / MIB) for held in found.holdings] for place in present],
        "phases": [
            [PHASES.get(each.phase, each.phase), round(1e4 * each.start), round(1e4 * each.end)]
            for each in found.stretches
        ],
    }


def theme() -> dict[str, Any]:
    """The colours of every chart, with the number of each category and what is readable on it."""
    return {
        "palettes": {mode: palette._asdict() for mode, palette in PALETTES.items()},
        "verdicts": VERDICTS,
        "fonts": {"font": FONT, "mono": MONOSPACE},
        "categories": {
            name: {
                "number": category_number(name),
                "colour": category_colour(name),
                "ink": text_on(category_colour(name)),
            }
            for name in STACK
        },
    }


def listed(findings: Sequence[Any]) -> list[dict[str, str]]:
    """Findings in the words of `labkit check`."""
    return [
        {
            "severity": each.severity,
            "field": each.field,
            "reason": each.reason,
            "remedy": each.remedy,
            "authority": f"{each.authority} ({each.authority_file})" if each.authority_file else each.authority,
        }
        for each in findings
    ]
