"""Runs of one workload on GPUs, as a person reads them. Imports no torch."""

from statistics import median
from typing import TYPE_CHECKING

from labkit.drivers.contract import Measurement, RankRecord
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_PHASES = ("setup", "forward", "backward", "grad_sync", "optimizer", "capture")


class Runs(Part):
    """Repetitions of one workload, each by processes of its own: cold in its first step, warm after it."""

    runs: Many[Measurement]
    estimated_peak_bytes: int | None = None
    """What the estimate says of the fullest rank; None of a workload that has no price."""

    @property
    def passed(self) -> bool:
        """Whether every run did."""
        return bool(self.runs) and all(run.outcome == "ok" for run in self.runs)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        first = self.runs[0]
        yield Text.assemble(
            (first.workload.model.name, "bold"),
            f"  recompute {first.workload.recompute.label}, {first.workload.parallelism.world_size} ranks, ",
            f"measured on {first.environment.get('device', 'no GPU')}",
        )
        for number, run in enumerate(self.runs, 1):
            named = f"run {number} of {len(self.runs)}: " if len(self.runs) > 1 else ""
            yield Text(f"{named}{_sentence(run)}")
            if run.ranks:
                yield _table(run.ranks, run.outcome == "ok")
        yield from map(Text, self._compared())
        versions = ", ".join(f"{name} {version}" for name, version in first.versions.items() if name != "cuda driver")
        yield Text(versions, style="dim")

    def _compared(self) -> "Iterator[str]":
        peaks = [run.peak_allocated_bytes for run in self.runs if run.peak_allocated_bytes is not None]
        if len(peaks) > 1:
            yield f"peaks of {len(peaks)} runs: {_gib(min(peaks))} to {_gib(max(peaks))} GiB"
        if peaks and self.estimated_peak_bytes is not None:
            error = self.estimated_peak_bytes / max(peaks) - 1
            yield f"estimated: {_gib(self.estimated_peak_bytes)} GiB ({error:+.2%} of the measured peak)"


def _sentence(run: Measurement) -> str:
    """How one run ended, in a line."""
    if run.failure is not None:
        failure = run.failure
        where = f"in {failure.phase}" + (f" of rank {failure.rank}" if failure.rank is not None else "")
        asked = (
            ("requested", failure.requested_bytes),
            ("allocated", failure.allocated_bytes),
            ("reserved", failure.reserved_bytes),
            ("free on the GPU", failure.free_bytes),
        )
        figures = ", ".join(f"{_gib(value)} GiB {name}" for name, value in asked if value is not None)
        return f"{run.outcome.replace('_', ' ')} {where}: {failure.message}" + (f" ({figures})" if figures else "")
    worst, times = run.worst_rank, run.step_times_ms
    assert worst is not None
    spread = f" ({min(times):.1f} to {max(times):.1f} over {len(times)} steps)"
    return (
        f"peak {_gib(worst.peak.peak_allocated_bytes)} GiB allocated, {_gib(worst.peak_reserved_bytes)} reserved, "
        f"rank {worst.rank} in {worst.peak.phase} of step {worst.peak.iteration}; "
        f"{median(times):.1f} ms a step{spread}, {run.tflops_per_gpu:.1f} TFLOP/s a GPU, "
        f"loss {run.losses[0]:.3f} to {run.losses[-1]:.3f}"
    )


def _table(ranks: tuple[RankRecord, ...], passed: bool) -> "Table":
    """Each rank's largest allocated bytes, phase by phase: the first step's, cold, and the later ones', warm."""
    from rich.table import Table

    caption = "GiB: the most allocated in each phase of the first step (cold) and of later ones (warm), reserved"
    table = Table(caption=caption if passed else f"{caption}; as far as each rank came", caption_justify="left")
    table.add_column("rank", justify="right")
    shown = [
        (name, warm)
        for name in _PHASES
        for warm in (False, True)
        if any(_peak(record, name, warm) is not None for record in ranks)
    ]
    for name, warm in shown:
        table.add_column(name if name == "setup" else f"{name}\n{'warm' if warm else 'cold'}", justify="right")
    table.add_column("reserved", justify="right")
    table.add_column("between\nsteps", justify="right")
    for record in ranks:
        peaks = (_gib(_peak(record, name, warm)) for name, warm in shown)
        table.add_row(str(record.rank), *peaks, _gib(record.peak_reserved_bytes), _gib(record.between_steps_bytes))
    return table


def _peak(record: RankRecord, name: str, warm: bool) -> int | None:
    found = (each.peak_allocated_bytes for each in record.phases if each.phase == name and warm == (each.iteration > 1))
    return max(found, default=None)


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / GIB:.2f}"
