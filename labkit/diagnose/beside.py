"""labkit's estimate beside what the log says was allocated, pipeline stage by pipeline stage."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from labkit.diagnose.case import Case, size
from labkit.diagnose.facts import Evidence, MemoryReport
from labkit.memory.estimate import estimate
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
            differs = f"{each.difference:+.1%}" if each.moment != "failure" else "it needed more"
            logged = size(each.logged_bytes)
            place = Text(each.evidence.place)
            table.add_row(str(each.stage), each.moment, logged, size(each.estimated_bytes), differs, place)
        yield table


def beside(case: Case) -> Beside | None:
    """The comparison; None without a workload that has a price, or a log that says what was allocated."""
    if case.stated is None or case.estimate is None:
        return None
    workload = case.stated.workload
    rows = [*_reported(case, workload), *_failed(case, workload)]
    if not rows:
        return None
    return Beside(workload=workload, stages=tuple(rows), margin_bytes=case.estimate.summary.margin_bytes)


def _stage(workload: Workload, rank: int | None, default: int) -> int:
    """The pipeline stage of a rank: ranks of a stage are consecutive (`parallel_state`, order tp-cp-ep-dp-pp)."""
    layout = workload.parallelism
    if rank is None or rank >= layout.world_size:
        return default
    return rank // (layout.world_size // layout.pp)


def _reported(case: Case, workload: Workload) -> Iterator[StageBeside]:
    assert case.estimate is not None
    fullest: dict[tuple[int, bool], MemoryReport] = {}
    for report in case.facts.memory:
        if report.max_allocated is None:
            continue
        key = (_stage(workload, report.rank, case.estimate.stage), report.iteration == 1)
        if key not in fullest or report.peak > fullest[key].peak:
            fullest[key] = report
    for (stage, first), report in sorted(fullest.items())[: 2 * _MOST_STAGES]:
        if report.peak:
            yield StageBeside(
                stage=stage,
                moment="first step" if first else "all steps",
                rank=report.rank,
                logged_bytes=report.peak,
                estimated_bytes=_estimated(workload, stage, first=first),
                evidence=report.evidence,
            )


def _estimated(workload: Workload, stage: int, *, first: bool) -> int:
    phases = estimate(workload, stage).summary.phases
    return max(phase.peak_allocated_bytes for phase in phases if not first or phase.iteration <= 1)


def _failed(case: Case, workload: Workload) -> Iterator[StageBeside]:
    assert case.estimate is not None
    message = case.first
    if message is None or message.allocated is None or message.requested is None:
        return
    stage = _stage(workload, message.rank, case.estimate.stage)
    yield StageBeside(
        stage=stage,
        moment="failure",
        rank=message.rank,
        logged_bytes=message.allocated + message.requested,
        estimated_bytes=_estimated(workload, stage, first=False),
        evidence=message.evidence,
    )
