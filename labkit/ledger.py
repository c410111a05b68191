"""The one table: what a rank holds, tensor by tensor, and when. Estimator, trace and GPU runs all write it.

A row is a tensor (or a group of equal tensors) with the interval of a *clock* in which it is alive. The clock is
a count of events: schedule steps in an estimate, allocations and frees in a trace. A peak is therefore a query:
the largest sum of the rows alive at one moment. Phases are stretches of the clock.

`bytes` are the tensor's, rounded to the allocator's 512-byte unit; `block_bytes` are those of the allocator's
block that holds it (`torch.cuda.memory_allocated` counts blocks: a remainder of up to 1 MiB is not split off).
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

if TYPE_CHECKING:
    import polars as pl

Lifetime = Literal["state", "retained", "transient", "workspace", "allowance", "margin"]
"""state: alive between steps; retained: from a layer's forward to its backward; transient: within one of them;
workspace: of a library, once a process; allowance and margin: set aside, not seen."""
Certainty = Literal["exact", "traced", "measured", "allowance"]

PHASES = ("setup", "capture", "forward", "backward", "grad_sync", "optimizer")
"""Phases of a step in order; setup builds model, gradient buffers and optimizer; before one step CUDA graphs are
captured, if at all."""

WITHOUT_ACTIVATIONS = {"setup": "setup", "grad_sync": "gradient synchronisation", "optimizer": "the optimizer step"}
"""Phases in which no activation is alive, in words: no recompute choice lowers their peaks."""

MATERIAL = 1e-3
"""Peaks closer than this fraction of a control's count as equal: remainders of allocator blocks alone, which depend on
the order of requests, move a peak by as much."""

UNIT = 512
"""The CUDA caching allocator rounds every request up to this (`kMinBlockSize`)."""


def rounded(nbytes: int) -> int:
    """`nbytes` as the allocator hands them out."""
    return -(-nbytes // UNIT) * UNIT


_RARELY = 70_000
"""Objects between collections: a hundred times Python's own number."""


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Garbage is collected a hundredth as often: what is recorded is small objects that stay, looked at in vain."""
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, _RARELY) if first else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


class Row(NamedTuple):
    """One line of the ledger; field order is column order."""

    rank: int
    phase: str
    """Phase in which it is born."""
    layer: int | None
    """Decoder layer, from 0; None outside the layers."""
    kind: str
    """What holds it: parameters, gradients, optimizer, attention, mlp, moe, norm, embedding, head, input, pipeline,
    library."""
    module: str
    """Module path below the model, e.g. `decoder.layers.3.mlp.router`."""
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    """bf16, fp16, fp32, fp64; else PyTorch's name."""
    count: int  # type: ignore[assignment]  # the column's name; tuple.count is not used
    bytes: int
    block_bytes: int
    lifetime: Lifetime
    certainty: Certainty
    recompute: str | None
    """Label of the recompute rule that touched it, if any."""
    born: int
    dies: int | None
    """Clock at which it is free again; None never."""


class Moment(NamedTuple):
    """The start of a stretch of a phase on the clock: micro-batches make forward and backward alternate."""

    clock: int
    iteration: int
    """0 for setup, then 1, 2, ..."""
    phase: str


class Peak(NamedTuple):
    """The largest sum of live rows in a stretch of the clock."""

    bytes: int
    clock: int
    iteration: int
    phase: str


class Ledger:
    """Rows with their clock. Immutable; frames are made on first use so that no reader pays for polars in vain."""

    def __init__(self, rows: Iterable[Row], moments: Sequence[Moment]) -> None:
        self.rows = tuple(rows)
        self.moments = tuple(moments)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def frame(self) -> "pl.DataFrame":
        """The rows as a polars frame, one column per `Row` field."""
        import polars as pl

        schema: dict[str, pl.DataType | type[pl.DataType]] = {
            "rank": pl.Int32,
            "phase": pl.String,
            "layer": pl.Int32,
            "kind": pl.String,
            "module": pl.String,
            "tensor": pl.String,
            "shape": pl.List(pl.Int64),
            "dtype": pl.String,
            "count": pl.Int64,
            "bytes": pl.Int64,
            "block_bytes": pl.Int64,
            "lifetime": pl.String,
            "certainty": pl.String,
            "recompute": pl.String,
            "born": pl.Int64,
            "dies": pl.Int64,
        }
        columns = zip(*self.rows, strict=True) if self.rows else ([] for _ in schema)
        return pl.DataFrame(dict(zip(schema, map(list, columns), strict=True)), schema=schema)

    @classmethod
    def from_frame(cls, frame: "pl.DataFrame", moments: Sequence[Moment]) -> Self:
        """The ledger whose `frame` this is."""
        rows = (Row(*values)._replace(shape=tuple(values[6])) for values in frame.iter_rows())
        return cls(rows, moments)

    def live(self, *, blocks: bool = True) -> list[tuple[int, int]]:
        """(clock, live bytes from that clock on), the timeline of the whole ledger; at one clock, frees come first."""
        if blocks:
            changes = [(row.born, row.block_bytes) for row in self.rows]
            changes += [(row.dies, -row.block_bytes) for row in self.rows if row.dies is not None]
        else:
            changes = [(row.born, row.bytes) for row in self.rows]
            changes += [(row.dies, -row.bytes) for row in self.rows if row.dies is not None]
        changes.sort()
        return list(zip((clock for clock, _ in changes), accumulate(change for _, change in changes), strict=True))

    def phase_peaks(self, *, blocks: bool = True) -> list[Peak]:
        """The peak of each phase of each iteration, over all its stretches, in the order in which phases first begin.

        A stretch begins with whatever is alive when it begins.
        """
        peaks: dict[tuple[int, str], Peak] = {}
        levels = self.live(blocks=blocks)
        position, level = 0, 0
        for index, moment in enumerate(self.moments):
            end = self.moments[index + 1].clock if index + 1 < len(self.moments) else None
            while position < len(levels) and levels[position][0] < moment.clock:
                level = levels[position][1]
                position += 1
            best, at = level, moment.clock
            while position < len(levels) and (end is None or levels[position][0] < end):
                clock, level = levels[position]
                position += 1
                if level > best:
                    best, at = level, clock
            peak, key = Peak(best, at, moment.iteration, moment.phase), (moment.iteration, moment.phase)
            peaks[key] = max(peaks.get(key, peak), peak, key=lambda each: each.bytes)
        return list(peaks.values())

    def peak(self, *, blocks: bool = True) -> Peak:
        """The largest phase peak (the first of equals)."""
        return max(self.phase_peaks(blocks=blocks), key=lambda peak: peak.bytes)

    def at(self, clock: int) -> "Ledger":
        """Only the rows alive at `clock` (after the frees and births of that clock)."""
        return self.where(lambda row: row.born <= clock and (row.dies is None or row.dies > clock))

    def where(self, keep: Callable[[Row], bool]) -> "Ledger":
        """Only the rows for which `keep` holds, on the same clock."""
        return Ledger((row for row in self.rows if keep(row)), self.moments)

    def total(self, *, blocks: bool = False) -> int:
        """Sum of the rows' bytes (or block bytes)."""
        return sum(row.block_bytes if blocks else row.bytes for row in self.rows)

    def steady_iteration(self) -> int:
        """The last iteration on the clock: the one whose optimizer state exists from its start."""
        return max((moment.iteration for moment in self.moments), default=0)

    def start(self, iteration: int, phase: str) -> int:
        """Clock at which a phase first begins.

        Raises:
            KeyError: no such phase.
        """
        for moment in self.moments:
            if (moment.iteration, moment.phase) == (iteration, phase):
                return moment.clock
        raise KeyError((iteration, phase))

    def end(self, iteration: int, phase: str) -> int | None:
        """Clock at which the last stretch of a phase ends; None if the ledger ends with it."""
        last = max(
            (
                index
                for index, moment in enumerate(self.moments)
                if (moment.iteration, moment.phase) == (iteration, phase)
            ),
        )
        return self.moments[last + 1].clock if last + 1 < len(self.moments) else None

    def between_steps(self) -> "Ledger":
        """What is alive when the steady iteration begins."""
        return self.at(self.start(self.steady_iteration(), "forward") - 1)

    def retained(self) -> "Ledger":
        """What the steady iteration's forward passes leave for their backward, when its first backward begins.

        Under pipelining those are as many as the schedule has under way.
        """
        iteration = self.steady_iteration()
        start, end = self.start(iteration, "forward"), self.start(iteration, "backward")
        return self.where(
            lambda row: start <= row.born < end and row.lifetime == "retained" and (row.dies is None or row.dies >= end)
        )
