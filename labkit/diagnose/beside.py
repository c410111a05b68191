"""labkit's estimate beside what the log says was allocated, pipeline stage by pipeline stage."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from labkit.diagnose.case import Case, size
from labkit.diagnose.facts import Evidence, MemoryReport
from labkit.workload import Workload
from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_MOST_STAGES = 16


class StageBeside(Part):
    """One pipeline stage."""

    stage: int
    moment: Literal["first step", "all steps", "failure"]
    """first step: the log's figure is from after one iteration. failure: what was allocated, and what was asked for."""
    rank: int | None
    """Whose figure it is; None where the log does not say."""
    logged_bytes: int
    estimated_bytes: int
    evidence: Evidence

    @property
    def difference(self) -> float:
        """Of the estimate from the log."""
        return self.estimated_bytes / self.logged_bytes - 1

    @property
    def verdict(self) -> str:
        """How they differ, in words: a failure needed at least what it had and asked for."""
        if self.moment != "failure":
            return f"{self.difference:+.1%}"
        short = self.logged_bytes - self.estimated_bytes
        return f"too low by {size(short)} at least" if short > 0 else "not reached: it failed before"


class Beside(Part):
    """An estimate beside a log."""

    workload: Workload
    stages: Many[StageBeside]
    margin_bytes: int
    """What the estimate sets aside above its peak."""

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        label = f"{self.workload.model.name}, recompute {self.workload.recompute.label}"
        table = Table(title=Text(f"labkit's estimate beside the log ({label})"), title_justify="left")
        table.add_column("stage", justify="right")
        table.add_column("moment")
        for name in ("log", "estimate", "differs by"):
            table.add_column(name, justify="right")
        table.add_column("where the log says it", overflow="fold")
        for each in self.stages:
            logged = size(each.logged_bytes)
            place = Text(each.evidence.place)
            table.add_row(str(each.stage), each.moment, logged, size(each.estimated_bytes), each.verdict, place)
        yield table


def beside(case: Case) -> Beside | None:
    """The comparison; None without a workload that has a price, or a log that says what was allocated."""
    if case.stated is None or case.estimate is None:
        return None
    workload = case.stated.workload
    rows = [*_reported(case), *_failed(case)]
    if not rows:
        return None
    return Beside(workload=workload, stages=tuple(rows), margin_bytes=case.estimate.summary.margin_bytes)


def _reported(case: Case) -> Iterator[StageBeside]:
    fullest: dict[tuple[int, bool], MemoryReport] = {}
    for report in case.facts.memory:
        if report.max_allocated is None:
            continue
        key = (case.stage_of(report.rank), report.iteration == 1)
        if key not in fullest or report.peak > fullest[key].peak:
            fullest[key] = report
    for (stage, first), report in sorted(fullest.items())[: 2 * _MOST_STAGES]:
        if report.peak:
            yield StageBeside(
                stage=stage,
                moment="first step" if first else "all steps",
                rank=report.rank,
                logged_bytes=report.peak,
                estimated_bytes=case.estimated(stage, first=first),
                evidence=report.evidence,
            )


def _failed(case: Case) -> Iterator[StageBeside]:
    message, needed = case.first, case.needed
    if message is None or needed is None:
        return
    stage = case.stage_of(message.rank)
    yield StageBeside(
        stage=stage,
        moment="failure",
        rank=message.rank,
        logged_bytes=needed,
        estimated_bytes=case.estimated(stage),
        evidence=message.evidence,
    )
