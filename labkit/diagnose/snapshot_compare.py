"""Two memory snapshots side by side: which source lines have come to hold more, which are new, which are gone."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from labkit.diagnose.snapshot_live import Group, Origin
from labkit.diagnose.snapshot_page import gib
from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_LINES, _SHOWN = 200, 15


class Held(NamedTuple):
    """What a snapshot has of one device."""

    device: int
    at_peak: tuple[Group, ...]
    at_end: tuple[Group, ...]


class ComparedLine(Part):
    """A source line in both."""

    site: str
    caller: str
    phase: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int

    @property
    def change(self) -> int:
        """Bytes more."""
        return self.after_bytes - self.before_bytes

    @property
    def state(self) -> str:
        """`new`, `gone`, or nothing where both have some."""
        return "new" if not self.before_count else "gone" if not self.after_count else ""


class ComparedMoment(Part):
    """A device at one moment of both."""

    device: int
    moment: Literal["peak", "end"]
    before_bytes: int
    """Allocated."""
    after_bytes: int
    lines: Many[ComparedLine]
    """Those that differ, most first."""
    left_out: int
    left_out_bytes: int
    """By which these differ together."""

    def table(self) -> "Table":
        """The moment, for a terminal."""
        from rich.table import Table
        from rich.text import Text

        change = self.after_bytes - self.before_bytes
        title = (
            f"GPU {self.device} at the {self.moment}: {gib(self.before_bytes)} before, {gib(self.after_bytes)} after "
            f"({change / max(1, self.before_bytes):+.1%})"
        )
        table = Table(title=title, title_justify="left", caption_justify="left")
        for name in ("before", "after", "change", "tensors"):
            table.add_column(name, justify="right")
        for name in ("", "phase", "by", "called by"):
            table.add_column(name)
        for line in self.lines[:_SHOWN]:
            style = "red" if line.change > 0 else "green"
            table.add_row(
                gib(line.before_bytes),
                gib(line.after_bytes),
                Text(f"{'+' if line.change > 0 else '-'}{gib(abs(line.change))}", style=style),
                f"{line.before_count:,} to {line.after_count:,}",
                line.state,
                line.phase.replace("_", " "),
                Text(line.site),
                Text(line.caller),
            )
        rest = self.lines[_SHOWN:]
        left_out = len(rest) + self.left_out
        nbytes = sum(line.change for line in rest) + self.left_out_bytes
        if left_out:
            table.caption = f"{left_out:,} more lines that differ, {gib(nbytes)} together"
        return table


class SnapshotComparison(Part):
    """What the second snapshot has that the first has not."""

    kind: Literal["two memory snapshots"] = "two memory snapshots"
    before: str
    after: str
    moments: Many[ComparedMoment]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text.assemble(("from ", ""), (self.before, "bold"), (" to ", ""), (self.after, "bold"))
        for moment in self.moments:
            if moment.lines:
                yield moment.table()
            else:
                yield Text(f"GPU {moment.device} at the {moment.moment}: every line holds the same")


def compared(before: tuple[str, Sequence[Held]], after: tuple[str, Sequence[Held]]) -> SnapshotComparison:
    """Two snapshots, each a name and its devices; of one device each, these are compared whatever their numbers."""
    (first, old), (second, new) = before, after
    if len(old) == len(new) == 1:
        pairs = [(old[0], new[0])]
    else:
        numbered = {held.device: held for held in new}
        pairs = [(held, numbered[held.device]) for held in old if held.device in numbered]
    moments: list[ComparedMoment] = []
    for one, other in pairs:
        moments.append(_moment(other.device, "peak", one.at_peak, other.at_peak))
        moments.append(_moment(other.device, "end", one.at_end, other.at_end))
    return SnapshotComparison(before=first, after=second, moments=tuple(moments))


def _moment(
    device: int, moment: Literal["peak", "end"], before: Sequence[Group], after: Sequence[Group]
) -> ComparedMoment:
    old, new = _by_origin(before), _by_origin(after)
    lines = [_line(origin, old.get(origin), new.get(origin)) for origin in old | new]
    lines = sorted((line for line in lines if line.change), key=lambda line: (-abs(line.change), line.site))
    return ComparedMoment(
        device=device,
        moment=moment,
        before_bytes=sum(group.nbytes for group in before),
        after_bytes=sum(group.nbytes for group in after),
        lines=tuple(lines[:_LINES]),
        left_out=len(lines[_LINES:]),
        left_out_bytes=sum(line.change for line in lines[_LINES:]),
    )


def _by_origin(groups: Sequence[Group]) -> dict[Origin, Group]:
    return {group.origin: group for group in groups}


def _line(origin: Origin, before: Group | None, after: Group | None) -> ComparedLine:
    return ComparedLine(
        site=origin.site.place,
        caller=origin.site.caller,
        phase=origin.moment,
        before_bytes=before.nbytes if before else 0,
        after_bytes=after.nbytes if after else 0,
        before_count=before.tensors if before else 0,
        after_count=after.tensors if after else 0,
    )
