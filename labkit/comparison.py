"""Two ledgers of the same work laid side by side, row by row: which tensors both have, and which only one.

The sides name tensors differently (a trace's names are the functions that made them), so rows are matched by what
they are: module path, dtype and bytes. What is left over is then matched within its layer, whatever the module
(`elsewhere`: the same bytes, attributed to another path), then within its module by dtype alone (`differs`); the rest
is alone on its side. Layers that are alike are folded into one line.

Every byte of both ledgers is in exactly one line, so the lines' differences add up to the difference of the totals.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import NonNegativeInt, PositiveInt

from labkit.ledger import Ledger, Peak, Row
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

Match = Literal["equal", "elsewhere", "differs", "estimate only", "trace only"]
"""equal: same module, dtype and bytes; elsewhere: the same but for the module, within one layer; differs: same module
and dtype, other bytes."""

_SHOWN_LINES = 12
"""Lines a section shows in a terminal unless all are wanted."""


class Line(Part):
    """Tensors that are alike: one of each side, or of one side alone, as often as `count` says."""

    match: Match
    module: str
    """Module path of the estimate's tensor (of the trace's where the estimate has none); `*` for a folded layer."""
    trace_module: str | None
    """Where the trace has it, if elsewhere."""
    layers: Many[NonNegativeInt]
    """Decoder layers it stands for; empty outside the layers."""
    count: PositiveInt
    """How many such tensors (or pairs) there are in all."""
    estimate_tensor: str | None
    trace_tensor: str | None
    shape: Many[NonNegativeInt]
    """Of the estimate's tensor (of the trace's where the estimate has none)."""
    dtype: str
    estimate_bytes: NonNegativeInt
    """Of all `count` together."""
    trace_bytes: NonNegativeInt

    @property
    def difference_bytes(self) -> int:
        """Estimate less trace."""
        return self.estimate_bytes - self.trace_bytes


class Section(Part):
    """One moment, on both sides."""

    moment: str
    """`between steps`, `retained`, or `peak in PHASE of iteration N`."""
    estimate_bytes: NonNegativeInt
    """Sum of the tensors, rounded to 512 bytes each."""
    trace_bytes: NonNegativeInt
    estimate_block_bytes: NonNegativeInt
    """Sum of the allocator's blocks that hold them: at a peak, the peak allocated."""
    trace_block_bytes: NonNegativeInt
    lines: Many[Line]
    """The largest difference first, then by size."""

    @property
    def difference_bytes(self) -> int:
        """Estimate less trace."""
        return self.estimate_bytes - self.trace_bytes


class Comparison(Part):
    """The documented `--json` object of `labkit compare` (see docs/json.md)."""

    schema_name: Literal["labkit.comparison/1"] = "labkit.comparison/1"
    workload: str
    """Model and recompute choice, in words."""
    workload_hash: str
    sections: Many[Section]

    def only_differences(self) -> "Comparison":
        """Without the lines on which the sides agree; totals stay."""
        sections = [
            section.model_copy(
                update={"lines": tuple(line for line in section.lines if line.match not in ("equal", "elsewhere"))}
            )
            for section in self.sections
        ]
        return self.model_copy(update={"sections": tuple(sections)})

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        yield Text(self.workload, style="bold")
        yield _totals(self.sections)
        for section in self.sections:
            shown = section.lines[:_SHOWN_LINES]
            if not shown:
                yield Text(f"{section.moment}: the same rows on both sides", style="green")
                continue
            yield _lines(f"{section.moment}: rows that differ", shown)
            rest = section.lines[_SHOWN_LINES:]
            if rest:
                largest = max(abs(line.difference_bytes) for line in rest)
                more = f"and {len(rest)} more, each at most {largest:,} bytes apart (--json has every row)"
                yield Text(more, style="dim")


def compare(estimate: Ledger, trace: Ledger) -> tuple[Section, ...]:
    """Both ledgers between steps, after the steady forward, and at the peak of each.

    The sides are compared in the phase in which the trace has its peak, each at its own largest moment there, and
    also in the estimate's phase if that is another.
    """
    sections = [
        _section("between steps", estimate.between_steps(), trace.between_steps()),
        _section("retained", estimate.retained(), trace.retained()),
    ]
    phases = dict.fromkeys((peak.iteration, peak.phase) for peak in (trace.peak(), estimate.peak()))
    for iteration, phase in phases:
        peaks = [_peak_in(ledger, iteration, phase) for ledger in (estimate, trace)]
        if peaks[0] is not None and peaks[1] is not None:
            moment = f"peak in {phase} of iteration {iteration}"
            sections.append(_section(moment, estimate.at(peaks[0].clock), trace.at(peaks[1].clock)))
    return tuple(sections)


def _peak_in(ledger: Ledger, iteration: int, phase: str) -> Peak | None:
    """The largest moment of a phase; None if the ledger has no such phase."""
    peaks = ledger.phase_peaks()
    return next((peak for peak in peaks if (peak.iteration, peak.phase) == (iteration, phase)), None)


def _section(moment: str, estimate: Ledger, trace: Ledger) -> Section:
    return Section(
        moment=moment,
        estimate_bytes=estimate.total(),
        trace_bytes=trace.total(),
        estimate_block_bytes=estimate.total(blocks=True),
        trace_block_bytes=trace.total(blocks=True),
        lines=tuple(lines(estimate.rows, trace.rows)),
    )


class _Tensor(NamedTuple):
    """One tensor of a row."""

    module: str
    layer: int | None
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class _Pair(NamedTuple):
    match: Match
    estimate: _Tensor | None
    trace: _Tensor | None


def lines(estimate: Iterable[Row], trace: Iterable[Row]) -> list[Line]:
    """Rows of one moment, matched and folded; see the module."""
    left, right = list(_tensors(estimate)), list(_tensors(trace))
    pairs: list[_Pair] = []
    for match, key in _PASSES:
        found, left, right = _matched(match, key, left, right)
        pairs += found
    pairs += [_Pair("estimate only", tensor, None) for tensor in left]
    pairs += [_Pair("trace only", None, tensor) for tensor in right]
    return sorted(_folded(pairs), key=_order)


_PASSES: tuple[tuple[Match, Callable[[_Tensor], object]], ...] = (
    ("equal", lambda tensor: (tensor.module, tensor.dtype, tensor.bytes)),
    ("elsewhere", lambda tensor: (tensor.layer, tensor.dtype, tensor.bytes)),
    ("differs", lambda tensor: (tensor.module, tensor.dtype)),
)
"""What rows must share to be matched, the strictest first."""


def _tensors(rows: Iterable[Row]) -> Iterator[_Tensor]:
    for row in rows:
        each, rest = divmod(row.bytes, row.count)
        for index in range(row.count):
            # A group that does not divide evenly keeps its bytes: the first tensors take the rest.
            yield _Tensor(row.module, row.layer, row.tensor, row.shape, row.dtype, each + (index < rest))


def _matched(
    match: Match, key: Callable[[_Tensor], object], left: list[_Tensor], right: list[_Tensor]
) -> tuple[list[_Pair], list[_Tensor], list[_Tensor]]:
    """Pairs that share a key, the largest with the largest, and what is left of each side."""
    buckets: defaultdict[object, tuple[list[_Tensor], list[_Tensor]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((left, right)):
        for tensor in tensors:
            buckets[key(tensor)][side].append(tensor)
    pairs: list[_Pair] = []
    remaining: tuple[list[_Tensor], list[_Tensor]] = ([], [])
    for sides in buckets.values():
        ours, theirs = (sorted(side, key=lambda tensor: -tensor.bytes) for side in sides)
        pairs += [_Pair(match, *pair) for pair in zip(ours, theirs, strict=False)]
        paired = min(len(ours), len(theirs))
        remaining[0].extend(ours[paired:])
        remaining[1].extend(theirs[paired:])
    return pairs, *remaining


def _folded(pairs: Iterable[_Pair]) -> Iterator[Line]:
    """One line for pairs that differ in nothing but their layer (or their place among equal experts)."""
    found: dict[Line, Counter[int | None]] = defaultdict(Counter)
    for match, ours, theirs in pairs:
        place = ours or theirs
        assert place is not None
        # One tensor's line; validated values need no second look.
        line = Line.model_construct(
            match=match,
            module=_pattern(place),
            trace_module=_pattern(theirs) if match == "elsewhere" and theirs is not None else None,
            layers=(),
            count=1,
            estimate_tensor=None if ours is None else ours.name,
            trace_tensor=None if theirs is None else theirs.name,
            shape=place.shape,
            dtype=place.dtype,
            estimate_bytes=0 if ours is None else ours.bytes,
            trace_bytes=0 if theirs is None else theirs.bytes,
        )
        found[line][place.layer] += 1
    for line, layers in found.items():
        count = layers.total()
        yield line.model_copy(
            update={
                "layers": tuple(sorted(layer for layer in layers if layer is not None)),
                "count": count,
                "estimate_bytes": count * line.estimate_bytes,
                "trace_bytes": count * line.trace_bytes,
            }
        )


_LAYER = re.compile(r"(?<=\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.weight)\d+")


def _pattern(tensor: _Tensor) -> str:
    """`decoder.layers.*.mlp.experts.linear_fc1.weight*` for each layer's and each expert's path."""
    module = tensor.module if tensor.layer is None else _LAYER.sub("*", tensor.module, count=1)
    return _EXPERT.sub("*", module)


def _order(line: Line) -> tuple[int, int, str]:
    return -abs(line.difference_bytes), -max(line.estimate_bytes, line.trace_bytes), line.module


def _totals(sections: Sequence[Section]) -> "Table":
    from rich.table import Table

    table = Table(title="Estimate against trace (GiB; the difference is the estimate's)", title_justify="left")
    table.add_column("moment")
    for heading in ("estimate", "trace", "difference", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for section in sections:
        sums = [("", section.estimate_bytes, section.trace_bytes)]
        if section.moment.startswith("peak"):
            sums.append((", blocks", section.estimate_block_bytes, section.trace_block_bytes))
        for what, ours, theirs in sums:
            relative = f"{ours / theirs - 1:+.3%}" if theirs else "-"
            table.add_row(
                section.moment + what, f"{ours / GIB:.3f}", f"{theirs / GIB:.3f}", relative, f"{ours - theirs:+,}"
            )
    return table


def _lines(title: str, shown: Sequence[Line]) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for heading in ("module", "tensor (estimate / trace)", "shape", "dtype"):
        table.add_column(heading, overflow="fold")
    for heading in ("n", "estimate", "trace", "difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in shown:
        names = " / ".join(name or "-" for name in (line.estimate_tensor, line.trace_tensor))
        where = line.module or "(model)"
        if len(line.layers) > 1:
            where += f"  [{_ranges(line.layers)}]"
        elif line.layers:
            where = where.replace("*", str(line.layers[0]), 1)
        if line.trace_module is not None:
            where += f" / {line.trace_module or '(model)'}"
        table.add_row(
            Text(where),
            Text(names),
            "x".join(map(str, line.shape)) or "scalar",
            line.dtype,
            str(line.count),
            f"{line.estimate_bytes:,}",
            f"{line.trace_bytes:,}",
            f"{line.difference_bytes:+,}" if line.difference_bytes else "=",
        )
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
