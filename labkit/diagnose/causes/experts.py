"""Routing that gives one expert rank more rows than the others."""

from collections.abc import Iterator
from itertools import groupby

from labkit.diagnose.case import Case, size
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Evidence

_SPREAD = 0.05
"""By which ranks of one pipeline stage differ where routing is balanced: less."""


def imbalance(case: Case) -> Iterator[Finding]:
    """Routing that gives one expert rank more rows than the others."""
    if not case.experts or case.stages not in (1, None):
        return
    yield from _spread_of_failures(case) or _spread_of_reports(case)


def _spread_of_failures(case: Case) -> "list[Finding]":
    held = {each.rank: each for each in case.facts.out_of_memory if each.rank is not None and each.allocated}
    ranks = sorted(held.values(), key=lambda each: each.allocated or 0)
    first = case.first
    in_experts = first is not None and "moe/" in first.place
    if len(ranks) > 1 and (ranks[-1].allocated or 0) > (1 + _SPREAD) * (ranks[0].allocated or 0):
        happened = (
            f"Rank {ranks[-1].rank} had {size(ranks[-1].allocated or 0)} allocated when it failed, rank "
            f"{ranks[0].rank} "
            f"{size(ranks[0].allocated or 0)}."
        )
        return [_imbalanced(happened, (ranks[-1].evidence, ranks[0].evidence))]
    if in_experts and first is not None and (first.iteration or 0) > 1:
        happened = (
            f"It failed in {first.place} of iteration {first.iteration}, after {(first.iteration or 1) - 1} that had "
            "room: "
            "what an expert rank holds changes with each batch's routing."
        )
        return [_imbalanced(happened, (first.evidence,))]
    return []


def _spread_of_reports(case: Case) -> "list[Finding]":
    reports = sorted((each for each in case.facts.memory if each.max_allocated), key=lambda each: each.iteration or 0)
    for iteration, same in groupby(reports, key=lambda each: each.iteration):
        ranks = sorted({each.rank: each for each in same}.values(), key=lambda each: each.peak)
        if len(ranks) > 1 and ranks[-1].peak > (1 + _SPREAD) * ranks[0].peak:
            happened = (
                f"After {iteration} iterations rank {ranks[-1].rank} had allocated at most {size(ranks[-1].peak)}, "
                "rank "
                f"{ranks[0].rank} {size(ranks[0].peak)}."
            )
            return [_imbalanced(happened, (ranks[-1].evidence, ranks[0].evidence))]
    return []


def _imbalanced(happened: str, evidence: tuple[Evidence, ...]) -> Finding:
    return Finding(
        cause="expert imbalance",
        weight="contributes",
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
