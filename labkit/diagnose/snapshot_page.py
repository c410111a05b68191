"""What `labkit diagnose` shows of a memory snapshot, as data and for people."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB, MIB

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table

_SHOWN = 15
"""Rows of a table in a terminal."""
_WIDTH, _HEIGHT = 76, 8
"""Characters of the chart."""
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LETTERS = {
    "setup": "s", "forward": "f", "backward": "b", "recompute": "r", "grad_sync": "g", "optimizer": "o",
    "evaluation": "e", "saving": "w",
}  # fmt: skip


class Point(Part):
    """A moment of the timeline."""

    entry: int
    """Of the device's trace, from 0; -1 is before the first."""
    seconds: float | None
    """Since the first entry; None where PyTorch wrote no times."""
    phase: str
    """Of a step: `setup`, `forward`, `backward`, `recompute`, `grad_sync`, `optimizer`; `evaluation`, `saving`,
    `unknown`."""
    allocated_bytes: int
    """Asked for by tensors."""
    reserved_bytes: int
    awaiting_bytes: int
    """Freed, and perhaps still used by another stream."""

    @property
    def sentence(self) -> str:
        """The moment in words."""
        awaiting = f", {gib(self.awaiting_bytes)} waiting for a stream" if self.awaiting_bytes else ""
        return f"{_when(self)}: {gib(self.allocated_bytes)} allocated{awaiting}, {gib(self.reserved_bytes)} reserved"


class PhasePeak(Part):
    """The most that was allocated while the step was in a phase."""

    phase: str
    allocated_bytes: int
    reserved_bytes: int


class Line(Part):
    """Memory that one source line asked for."""

    site: str
    """The innermost line that is no plumbing of PyTorch, Megatron or Transformer Engine."""
    caller: str
    phase: str
    """When it was allocated."""
    bytes: int
    count: int
    stack: Many[str]
    """That of the largest part, innermost first."""


class Failure(Part):
    """A request that PyTorch's allocator could not fulfil."""

    at: Point
    requested_bytes: int
    stream: int
    device_free_bytes: int
    unallocated_bytes: int
    """Free inside segments, of all streams and pools."""
    usable_bytes: int
    """Of these what requests on this stream could have."""
    largest_usable_bytes: int
    """In one piece."""
    private_bytes: int
    """Free in private pools."""
    site: str
    """Empty where no stack trace was recorded."""
    caller: str

    @property
    def sentence(self) -> str:
        """The failure in words."""
        phase = "" if self.at.phase == "unknown" else f" in {self.at.phase.replace('_', ' ')}"
        by = f" by {self.site}" if self.site else ", no stack trace was recorded"
        by += f", called by {self.caller}" if self.caller else ""
        return (
            f"entry {self.at.entry:,}: no memory for {gib(self.requested_bytes)} on stream {self.stream}, asked for"
            f"{phase}{by}; {gib(self.at.allocated_bytes)} allocated, "
            f"{gib(self.at.reserved_bytes)} reserved, {gib(self.unallocated_bytes)} free in segments, "
            f"{gib(self.usable_bytes)} of it for this stream, at most {gib(self.largest_usable_bytes)} in one piece; "
            f"{gib(self.device_free_bytes)} left on the GPU"
        )


class Pool(Part):
    """Segments of one private pool at the end (`segment_pool_id`): a CUDA graph's, or of `torch.cuda.MemPool`."""

    pool: str
    reserved_bytes: int
    allocated_bytes: int


class Grown(Part):
    """A source line that holds more from step to step."""

    site: str
    caller: str
    bytes: int
    """More than at the first step's end."""


class Growth(Part):
    """What is allocated behind the optimizer rises from step to step."""

    steps: int
    first: Point
    last: Point
    lines: Many[Grown]


class DevicePage(Part):
    """One device of a snapshot."""

    device: int
    entries: int
    seconds: float | None
    start: Point
    peak: Point
    end: Point
    blocks_bytes: int
    """Allocated at the end in whole blocks: what `torch.cuda.memory_allocated` says."""
    expandable_segments: bool
    phases: Many[PhasePeak]
    live: Many[Line]
    """At the peak, those with most bytes first."""
    left_out: int
    """Lines of `live` beyond those listed."""
    left_out_bytes: int
    failures: Many[Failure]
    """The last ones."""
    growth: Growth | None
    pools: Many[Pool]
    timeline: Many[Point]
    """Of equal stretches of the trace the moment with most allocated; the peak and the end are among them."""

    def rows(self) -> "list[RenderableType]":
        """The page, for a terminal."""
        from rich.text import Text

        recorded = f"{self.entries:,} entries" + ("" if self.seconds is None else f" over {_time(self.seconds)}")
        head = Text.assemble((f"GPU {self.device}", "bold"), f"  {recorded if self.entries else 'no history recorded'}")
        return [head, *(self._history() if self.entries else ()), *map(Text, self._sentences()), _lines(self)]

    def _history(self) -> "list[RenderableType]":
        from rich.text import Text

        chart = chart_rows(self.timeline)
        phases = ", ".join(f"{each.phase.replace('_', ' ')} {gib(each.allocated_bytes)}" for each in self.phases)
        return [*map(Text, chart), Text(f"most allocated in each phase: {phases}")]

    def _sentences(self) -> list[str]:
        peak = [f"peak {self.peak.sentence}"] if self.entries else []
        failures = [failure.sentence for failure in self.failures]
        pools = sum(pool.reserved_bytes for pool in self.pools)
        private = f", {gib(pools)} of them in private pools" if pools else ""
        end = self.end
        held = (
            f"at the end {gib(end.allocated_bytes)} allocated in blocks of {gib(self.blocks_bytes)} and segments of "
            f"{gib(end.reserved_bytes)}{private}"
        )
        before = f"before the first entry {gib(self.start.allocated_bytes)} allocated; " if self.entries else ""
        return [*peak, *failures, f"{before}{held}"]


class SnapshotPage(Part):
    """A snapshot's devices."""

    kind: Literal["memory snapshot"] = "memory snapshot"
    source: str
    devices: Many[DevicePage]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(self.source, style="bold underline")
        for device in self.devices:
            yield from device.rows()


def gib(nbytes: int) -> str:
    """Bytes for people."""
    if not nbytes:
        return "0 B"
    if abs(nbytes) >= GIB / 10:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{nbytes / MIB:.1f} MiB" if abs(nbytes) >= MIB else f"{nbytes / 1024:.1f} KiB"


def _when(point: Point) -> str:
    if point.entry < 0:
        return "before the first entry"
    seconds = "" if point.seconds is None else f", {_time(point.seconds)} after the first"
    return f"in {point.phase.replace('_', ' ')} (entry {point.entry:,}{seconds})"


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _lines(page: DevicePage) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title="live at the peak" if page.entries else "live at the end", title_justify="left")
    for name in ("allocated", "share", "tensors"):
        table.add_column(name, justify="right")
    for name in ("phase", "by", "called by"):
        table.add_column(name)
    total = max(1, page.peak.allocated_bytes)
    for line in page.live[:_SHOWN]:
        table.add_row(
            gib(line.bytes), f"{line.bytes / total:.0%}", f"{line.count:,}",
            Text(line.phase.replace("_", " ")), Text(line.site), Text(line.caller),
        )  # fmt: skip
    rest = page.live[_SHOWN:]
    left_out, nbytes = len(rest) + page.left_out, sum(line.bytes for line in rest) + page.left_out_bytes
    if left_out:
        table.caption = f"{left_out:,} more lines with {gib(nbytes)}" + (
            "" if page.left_out else " (all are in --json)"
        )
        table.caption_justify = "left"
    return table


def chart_rows(points: Sequence[Point]) -> list[str]:
    """A chart in text, from the first entry to the last: allocated as blocks, reserved dotted above, phases below."""
    if not points:
        return []
    columns = [points[len(points) * place // _WIDTH : len(points) * (place + 1) // _WIDTH] for place in range(_WIDTH)]
    columns = [column for column in columns if column]
    allocated = [max(point.allocated_bytes for point in column) for column in columns]
    reserved = [max(point.reserved_bytes for point in column) for column in columns]
    top = max(1, *reserved, *allocated)
    rows = []
    for row in reversed(range(_HEIGHT)):
        cells = ""
        for full, outer in zip(allocated, reserved, strict=True):
            eighths = max(0, min(8, round((full / top * _HEIGHT - row) * 8)))
            dotted = not eighths and min(_HEIGHT - 1, int(outer / top * _HEIGHT)) == row
            cells += "·" if dotted else _EIGHTHS[eighths]
        label = gib(top * (row + 1) // _HEIGHT) if row in (_HEIGHT - 1, _HEIGHT // 2 - 1) else ""
        rows.append(f"{label:>10} ┤{cells}")
    peak = allocated.index(max(allocated))
    rows.append(f"{'':>10} └{'─' * peak}▲{'─' * (len(columns) - peak - 1)}  █ allocated · reserved ▲ peak")
    fullest = [max(column, key=lambda point: point.allocated_bytes) for column in columns]
    named = [phase for phase in _LETTERS if any(point.phase == phase for point in fullest)]
    legend = ", ".join(f"{_LETTERS[phase]} {phase.replace('_', ' ')}" for phase in named)
    rows.append(f"{'':>10}  {''.join(_LETTERS.get(point.phase, ' ') for point in fullest)}  {legend}")
    return rows
