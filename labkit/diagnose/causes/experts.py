"""Routing that gives one expert rank more rows than the others."""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from labkit.diagnose.case import Case, size
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Evidence

_SPREAD = 0.05
"""By which ranks of one pipeline stage differ where routing is balanced: less."""


class _Said(NamedTuple):
    """A sentence, and the lines that it rests on."""

    sentence: str
    evidence: tuple[Evidence, ...]


def imbalance(case: Case) -> Iterator[Finding]:
    """Routing that gives one expert rank more rows than the others."""
    if not case.experts or case.stages not in (1, None):
        return
    said = [*_place(case), *(list(_spread_of_failures(case)) or _spread_of_reports(case))]
    if said:
        sentences, evidence = zip(*said, strict=True)
        yield _imbalanced(case, " ".join(sentences), tuple(dict.fromkeys(line for lines in evidence for line in lines)))


def _place(case: Case) -> Iterator[_Said]:
    """A failure in experts after steps that had room."""
    first = case.first
    if first is not None and "moe/" in first.place and first.iteration is not None and first.iteration > 1:
        yield _Said(
            f"It failed in {first.place} of iteration {first.iteration}, after {first.iteration - 1} that had room: "
            "what an expert rank holds changes with each batch's routing.",
            (first.evidence,),
        )


def _spread_of_failures(case: Case) -> Iterator[_Said]:
    held = {each.rank: each for each in case.facts.out_of_memory if each.rank is not None and each.allocated}
    ranks = sorted(held.values(), key=lambda each: each.allocated or 0)
    if len(ranks) > 1 and (ranks[-1].allocated or 0) > (1 + _SPREAD) * (ranks[0].allocated or 0):
        yield _Said(
            f"Rank {ranks[-1].rank} had {size(ranks[-1].allocated or 0)} allocated when it failed, rank "
            f"{ranks[0].rank} {size(ranks[0].allocated or 0)}.",
            (ranks[-1].evidence, ranks[0].evidence),
        )


def _spread_of_reports(case: Case) -> Iterator[_Said]:
    """Of the iteration whose ranks differ most."""
    reports = sorted((each for each in case.facts.memory if each.max_allocated), key=lambda each: each.iteration or 0)
    spreads = []
    for iteration, same in groupby(reports, key=lambda each: each.iteration):
        ranks = sorted({each.rank: each for each in same}.values(), key=lambda each: each.peak)
        spreads.append((ranks[-1].peak - ranks[0].peak, iteration, ranks[-1], ranks[0]))
    most = max(spreads, key=lambda each: each[0], default=None)
    if most is not None and most[0] > _SPREAD * most[3].peak:
        _, iteration, high, low = most
        yield _Said(
            f"After {iteration} iterations rank {high.rank} had allocated at most {size(high.peak)}, rank {low.rank} "
            f"{size(low.peak)}.",
            (high.evidence, low.evidence),
        )


def _imbalanced(case: Case, happened: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        cause="expert imbalance",
        weight="contributes" if case.first is not None else "note",
        happened=f"{happened} Expert ranks receive different numbers of rows; the busiest one sets the peak.",
        evidence=evidence,
        confirm=(
            "Count tokens per expert (--moe-per-layer-logging), or run once with --moe-router-force-load-balancing: "
            "if the "
            "ranks then hold the same, routing it was.",
        ),
        remedies=(
            "Recompute what grows with routed rows (moe_act, then moe): the saving is largest on the busiest rank.",
            "A capacity (--moe-expert-capacity-factor) bounds the busiest rank; so do a larger auxiliary loss and a "
            "smaller "
            "expert_model_parallel_size.",
            "Price it: routing: {kind: worst} or measured routing in the workload (docs/workload.md).",
        ),
    )
