"""The peak of every micro-batch that the `lora` runtime could pack, at once: the largest of a few linear functions.

A peak is the largest of many sums of tensors, and a tensor's bytes are linear in what an `Extent` has, up to rounding.
So is every such sum, a *face* of the peak. `labkit.memory.meter` goes through the steps with tensors that are lines
instead of numbers (`_Lines`): where it would take the larger of two levels it keeps both, and of all those found only
the ones that no other exceeds everywhere.

What is not linear is bounded, so that `Faces.most` is never below the estimate and `Faces.least` never above:

- a tensor is rounded up, by less than a unit of the allocator, and with experts by a row or two of each sender;
- a block of the caching allocator may be larger than the tensor it holds by what it does not split off (`covering`);
- lines hold from some number of rows to twice as many, in which no tensor passes the size from which blocks may be
  larger unnoticed; `Faces` has them for every such span, made when first asked for;
- sequences in the caller's loss are alive at once in fp32, and one of them is worked on: the longest, and the last,
  which is the most that any order of any lengths with this sum and this longest can come to; the least has none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import lcm, prod
from typing import Any, NamedTuple

import numpy as np

from labkit.ledger import UNIT
from labkit.memory.extent import Extent, Levels, Peaks, covering, known_blocks, with_margin
from labkit.memory.layers.prefix_tree import tensors_of_tree
from labkit.memory.layers.sizes import Sizes
from labkit.memory.margin import tuning_bytes
from labkit.memory.meter import NOTHING, Change
from labkit.memory.outline import outline, outline_of, tensor
from labkit.memory.script import Steps
from labkit.memory.tape import DTYPE_BYTES, Value
from labkit.memory.units import Chunk, Recorder, Unit, recorded_loss
from labkit.workload import Workload
from labkit.workload.batch import Packed
from labkit.workload.gpu import MIB

_LEAST = {"padded_rows": 64, "segments": 1, "logical_rows": 96, "longest": 32}
_STEP = {"padded_rows": 2**20, "segments": 2**9, "logical_rows": 2**20, "longest": 2**14}
"""From one sample to the next; multiples of whatever a tensor is rounded to, so that differences are exact."""
_FREE = tuple(_LEAST)
_PARTS = (1, 4, 16, 64)
"""Into how many equal sequences all but the longest are cut: as many as there are, or more."""
_FORESEEN = np.array(_PARTS) + 1
_OF_A_SEQUENCE = 8
"""Tensors of a sequence that the caller's loss has at once, at most: in fp32, squared, its mean, their gradients."""


@dataclass(frozen=True)
class _Tree:
    """Stands where `labkit.workload.batch.Packed` does, with arrays of sizes."""

    extent: Extent
    parts: int

    @property
    def lengths(self) -> tuple[Any, ...]:
        longest = self.extent.longest
        return (*((self.extent.logical_rows - longest) // self.parts for _ in range(self.parts)), longest)

    @property
    def logical_rows(self) -> Any:
        return self.extent.logical_rows

    @property
    def num_segments(self) -> Any:
        return self.extent.segments

    @property
    def busiest_rank_rows(self) -> Any:
        return self.extent.busiest

    def padded_rows(self, multiple: int) -> Any:  # noqa: ARG002 (64 in both)
        return self.extent.padded_rows


class _Lines:
    """Tensors' bytes as values at samples (see `labkit.memory.meter.Numbers`); a peak is rows of such values."""

    def __init__(self, samples: "_Samples", workload: Workload, size: Callable[[Any], Any], *, upper: bool) -> None:
        self._samples = samples
        self.size = size
        self._upper = upper
        moe, layout = workload.model.mixture_of_experts, workload.parallelism
        self._routed_rows = 0 if moe is None else 2 * layout.ep * layout.etp

    def sizes(self, unit: Unit) -> Levels:
        """One row a slot, and the negative ones in reverse."""
        table = np.array([self._line(slot.on(unit.tape)) for slot in unit.script.slots])
        return np.concatenate([table, -table[::-1]])

    def _line(self, value: Value) -> Levels:
        nbytes: Any = value.bytes
        if isinstance(nbytes, int):
            return np.full(self._samples.count, float(self.size(nbytes)))
        line: Levels = nbytes.astype(np.float64)
        slack = UNIT
        if self._routed_rows:
            slack += self._routed_rows * prod(filter(_is_number, value.shape[1:])) * DTYPE_BYTES[value.dtype]
        if not self._upper:
            return line - 2 * slack  # of which one is for extents below the span's
        largest = self._samples.largest(line)
        covered: Levels = line + (slack + self.size(largest) - largest)
        return covered

    def larger(self, one: Any, other: Any) -> Levels:
        """Both, without what the other exceeds everywhere."""
        return self._samples.highest(np.concatenate([self._samples.rows_of(one), self._samples.rows_of(other)]))

    def total(self, sizes: Levels, steps: Steps) -> Change:
        """See `Numbers`."""
        if not steps:
            return NOTHING
        levels = np.cumsum(sizes[np.asarray(steps)], axis=0)
        return Change(self._samples.highest(np.concatenate([levels, np.zeros_like(levels[:1])])), levels[-1])


def _is_number(side: object) -> bool:
    return isinstance(side, int)


class _Samples:
    """Extents from `rows` to twice as many, at which tensors are looked at: a first, then a step in each direction."""

    def __init__(self, rows: int, cp: int) -> None:
        self.rows = rows
        self._least = Extent(rows=rows, busiest=rows // cp, sequences=1, **_LEAST)
        self._steps = {"rows": rows, "busiest": 2 * rows - rows // cp, **_STEP}
        if cp == 1:
            del self._steps["busiest"]
        self._bounded = len(self._steps) - len(_FREE)
        """Directions that end, at the sample."""
        self.count = 1 + len(self._steps)

    @property
    def extent(self) -> Extent:
        """All of them."""
        columns = {name: np.full(self.count, value, dtype=np.int64) for name, value in self._least._asdict().items()}
        for number, (name, step) in enumerate(self._steps.items(), start=1):
            columns[name][number] += step
        if "busiest" not in self._steps:
            columns["busiest"] = columns["rows"]
        return Extent(**columns)

    def rows_of(self, levels: Any) -> Levels:
        """Levels, or a single one, or a number for all samples, as rows."""
        rows = np.atleast_2d(np.asarray(levels, dtype=np.float64))
        return rows if rows.shape[1] == self.count else np.broadcast_to(rows, (1, self.count))

    def largest(self, line: Levels) -> float:
        """What a tensor can come to: it decides whether its block may be larger than it."""
        ends = line[0] + np.maximum(line[1 : 1 + self._bounded] - line[0], 0).sum()
        # Without an end, but for sequences one reaches 32 times the rows.
        grows = np.maximum(line[1 + self._bounded :] - line[0], 0)
        reach = np.array([64 * self.rows / _STEP[name] for name in _FREE])
        return float(ends + (grows * reach).sum())

    def highest(self, levels: Levels) -> Levels:
        """Those that no other is at least as large as everywhere."""
        corners = [levels[:, :1]]
        for number in range(1, 1 + self._bounded):
            corners += [corner + levels[:, number : number + 1] - levels[:, :1] for corner in corners]
        looked_at = np.concatenate([*corners, levels[:, 1 + self._bounded :] - levels[:, :1]], axis=1)
        order = np.argsort(-looked_at.sum(axis=1), kind="stable")
        kept = []
        while order.size:
            first, order = order[0], order[1:]
            kept.append(first)
            order = order[(looked_at[order] > looked_at[first]).any(axis=1)]
        return levels[kept]

    def coefficients(self, levels: Levels) -> Levels:
        """(faces, 1 + fields): what is multiplied by 1 and an extent's fields but for the number of sequences."""
        found = np.zeros((len(levels), len(Extent._fields)))
        constant = levels[:, 0].copy()
        for number, (name, step) in enumerate(self._steps.items(), start=1):
            slope = (levels[:, number] - levels[:, 0]) / step
            found[:, 1 + Extent._fields.index(name)] = slope
            constant -= slope * getattr(self._least, name)
        found[:, 0] = constant
        return found


class Span(NamedTuple):
    """The faces from some number of rows to twice as many."""

    faces: Levels
    """(faces, 1 + fields but sequences)."""
    phases: tuple[tuple[int, str], ...]
    """Iteration and phase of each."""
    tuned: Levels
    """What tuning kernels may take in its phase."""
    least: Levels
    """The extent from which on the faces hold, with 1 before it; smaller ones are taken for it."""


class Faces:
    """The peaks of what a template of the `lora` runtime may be given."""

    def __init__(self, template: Workload, *, upper: bool) -> None:
        """Of blocks, and never below the estimate, with `upper`; else of tensors, and never above it."""
        lora, layout = template.training.lora, template.parallelism
        if lora is None:
            raise ValueError("only the lora runtime packs trees")
        replaced = not upper and lora.outputs != "hidden_states"
        if replaced:
            # Those are there, in the forward pass, before anything else is made of them.
            hidden = lora.model_copy(update={"outputs": "hidden_states", "top_k": None})
            template = template.model_copy(update={"training": template.training.model_copy(update={"lora": hidden})})
        self._upper = upper
        self._unit = lcm(_LEAST["padded_rows"], layout.tp * layout.cp)
        covers = covering(template.training.allocator)
        self._size: Callable[[Any], Any] = covers if upper else tensor
        opposite: Callable[[Any], Any] = tensor if upper else covers
        # What is alive between steps does not depend on the batch, but for the batch itself.
        least = template.batch.model_copy(update={"packed": Packed(lengths=(self._unit,)), "seq_length": self._unit})
        self._base = template.model_copy(update={"batch": least})
        known, batch = known_blocks(self._base), self._batch(self._unit, self._unit, self._unit)
        self._known = (known if upper else 0) + sum(map(self._size, batch))
        self._before = (
            outline(self._base, size=opposite).set_up_bytes - (0 if upper else known) - sum(map(opposite, batch))
        )
        self._opposite = opposite
        self._tuning = 0 if replaced else tuning_bytes(template)
        self._recorded: dict[int, tuple[_Samples, list[Chunk], _Lines, Workload]] = {}
        self._spans: dict[tuple[int, int], Span] = {}

    def peaks(self, extents: Extent) -> Peaks:
        """Of extents, an array for each field."""
        rows = np.asarray(extents.rows)
        spans = np.ceil(np.log2(np.maximum(rows / self._unit, 2))).astype(np.int64) - 1
        parts = (
            np.searchsorted(_FORESEEN, np.minimum(extents.sequences, _FORESEEN[-1])) if self._upper else len(_PARTS) - 1
        )
        kinds = spans * len(_PARTS) + parts
        table = np.ones((len(rows), len(Extent._fields)))
        table[:, 1:] = np.transpose(extents[:-1])
        if not self._upper:
            table[:, -1] = _LEAST["longest"]
        peak, tuned = np.empty(len(rows)), np.empty(len(rows))
        highest = np.empty(len(rows), dtype=np.int64)
        for kind in np.unique(kinds):
            which = np.flatnonzero(kinds == kind)
            span = self._span(*divmod(int(kind), len(_PARTS)))
            looked_up = np.maximum(table[which], span.least) if self._upper else table[which]
            levels = looked_up @ span.faces.T
            peak[which], highest[which] = levels.max(axis=1), levels.argmax(axis=1)
            tuned[which] = (levels + span.tuned).max(axis=1)
        batch = self._batch(rows, extents.logical_rows, extents.padded_rows)
        extra = sum(map(self._size, batch)) - self._known + self._of_sequences(extents)
        increment = peak + extra - (self._before + sum(map(self._opposite, batch)))

        def phase_of(at: int) -> tuple[int, str]:
            return self._span(*divmod(int(kinds[at]), len(_PARTS))).phases[highest[at]]

        return Peaks(peak + extra, with_margin(self._base, peak + extra, tuned + extra, increment), increment, phase_of)

    def _batch(self, rows: Any, logical_rows: Any, padded_rows: Any) -> list[Any]:
        """The sizes of what the caller has on the device before a step."""
        return [each.bytes for each in tensors_of_tree(rows, logical_rows, padded_rows)]

    def _of_sequences(self, extents: Extent) -> Any:
        """What sequences beyond those that are foreseen are rounded up by at most; less what is worked on."""
        if not self._base.training.differentiates:
            return 0.0
        if not self._upper:
            worked_on = self._base.model.hidden_size * DTYPE_BYTES["fp32"] / _PARTS[-1]
            return -_OF_A_SEQUENCE * worked_on * np.asarray(extents.logical_rows)
        beyond = np.maximum(np.asarray(extents.sequences) - _FORESEEN[-1], 0)
        return beyond * float(_OF_A_SEQUENCE * (self._size(2 * MIB) - 2 * MIB + UNIT))

    def _span(self, number: int, parts: int) -> Span:
        if (number, parts) not in self._spans:
            self._spans[number, parts] = self._made(self._unit << number, _PARTS[parts])
        return self._spans[number, parts]

    def _made(self, rows: int, parts: int) -> Span:
        if rows not in self._recorded:
            self._recorded[rows] = self._record(rows)
        samples, model, lines, sweeping = self._recorded[rows]
        batch = sweeping.batch.model_copy(update={"packed": _Tree(samples.extent, parts)})
        loss = recorded_loss(sweeping.model_copy(update={"batch": batch}), Sizes.of(sweeping))
        faces: list[Levels] = []
        phases: list[tuple[int, str]] = []
        for iteration, phase, level in outline_of(model, self._base, 0, lines, loss).phases:
            faces.append(samples.rows_of(level))
            phases += [(iteration, phase)] * len(faces[-1])
        tuned = np.array([self._tuning if phase == (1, "backward") else 0.0 for phase in phases])
        least = np.array((1, rows, 1, *_LEAST.values()))
        return Span(samples.coefficients(np.concatenate(faces)), tuple(phases), tuned, least)

    def _record(self, rows: int) -> tuple[_Samples, list[Chunk], _Lines, Workload]:
        samples = _Samples(rows, self._base.parallelism.cp)
        batch = self._base.batch.model_copy(
            update={"packed": _Tree(samples.extent, 1), "seq_length": samples.extent.rows}
        )
        sweeping = self._base.model_copy(update={"batch": batch})
        model = Recorder(sweeping, Sizes.of(sweeping)).chunks(self._base.recompute, 0)
        return samples, model, _Lines(samples, sweeping, self._size, upper=self._upper), sweeping
