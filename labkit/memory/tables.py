"""The peak of every micro-batch of Megatron's own runtime, at once: tables over lengths, exact at their points.

What its kernels hold is not linear in lengths everywhere, but it only grows with them, so that the next point is never
below. A table has one number of sequences and many lengths, priced together as `labkit.memory.sweep` does:

- of whole sequences the rows of the micro-batch are all as long as the longest, and lengths are the table's axis;
- of packed sequences the rows they make together are: one sequence has them all and the others a token each, which
  starts more chunks of a delta net and fills a longer rotary table than any other lengths with that sum.

Where kernels decide by lengths what they allocate, more rows may hold less, and only the points may be run: `step` says
what lengths are multiples of.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.memory.extent import Extent, Levels, Peaks, covering, known_blocks, with_margin
from labkit.memory.layers.sizes import Sizes
from labkit.memory.margin import tuning_bytes
from labkit.memory.outline import outline, outline_of, tensor
from labkit.memory.sweep import Arrays
from labkit.memory.units import Recorder
from labkit.workload import Workload
from labkit.workload.attention_backends import attention_backend
from labkit.workload.batch import Packed
from labkit.workload.kernels import length_choices
from labkit.workload.stages import fullest_stages

_POINTS = 384
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384)
"""Of packed sequences, rounded up to: each adds a few numbers and, in places, rows of padding."""
_LONGEST = 2**24


class _Table(NamedTuple):
    """One number of sequences."""

    lengths: NDArray[np.int64]
    peak: Levels
    covered: Levels
    increment: Levels
    phases: list[tuple[int, str]]


class Tables:
    """The peaks of what a template of the `megatron` runtime may be given, as far as they matter for a limit."""

    def __init__(self, template: Workload, limit_bytes: int, *, upper: bool) -> None:
        """Of blocks, and never below the estimate, with `upper`; else of tensors, and never above it."""
        self._template, self._limit, self._upper = template, limit_bytes, upper
        self._packs = template.batch.packed is not None
        self._size = covering(template.training.allocator) if upper else tensor
        self._tables: dict[int, _Table] = {}
        layout = template.parallelism
        self.unit = lcm(layout.tp * layout.cp, 2 * layout.cp if layout.cp > 1 else 1)
        """What lengths are multiples of."""
        self._known = known_blocks(self.workload(1, self.unit)) if upper else 0
        self._reach = self._reached()
        self.step = self.unit
        self.grows = not _decides_by_length(template)
        """More sequences or longer ones never hold less."""
        if not self.grows:
            self.step = self.unit * -(-self._reach // (self.unit * _POINTS))

    def workload(self, sequences: int, length: int) -> Workload:
        """The plain workload of so many whole sequences, or of packed ones of so many tokens together."""
        template, dp = self._template, self._template.parallelism.dp
        size = 1 if self._packs else sequences
        packed = (
            Packed(lengths=(*(1 for _ in range(sequences - 1)), max(length - sequences + 1, 1)))
            if self._packs
            else None
        )
        update = {
            "seq_length": length,
            "micro_batch_size": size,
            "global_batch_size": template.num_microbatches * size * dp,
            "packed": packed,
        }
        return template.model_copy(update={"batch": template.batch.model_copy(update=update)})

    def peaks(self, extents: Extent) -> Peaks:
        """Of extents, an array for each field: packed rows, or the longest sequence and the number of sequences."""
        sequences, lengths = np.asarray(extents.sequences), np.asarray(extents.rows if self._packs else extents.longest)
        peak, cover, increment = (np.full(len(lengths), np.inf) for _ in range(3))
        phases: dict[int, tuple[int, str]] = {}
        numbers = self._numbers(sequences) if self._packs else sequences
        for number in np.unique(numbers):
            which = np.flatnonzero(numbers == number)
            table = self._table(int(number))
            at = np.searchsorted(table.lengths, lengths[which], side="left" if self._upper else "right")
            if not self._upper:
                at = np.maximum(at - 1, 0)
            inside = at < len(table.lengths)  # what is longer is above the limit
            which, at = which[inside], at[inside]
            peak[which], cover[which], increment[which] = table.peak[at], table.covered[at], table.increment[at]
            for position, place in zip(which, at, strict=True):
                phases[int(position)] = table.phases[place]
        return Peaks(peak, cover, increment, lambda at: phases.get(at, (2, "forward")))

    def _numbers(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        known = np.array(_NUMBERS)
        at = np.searchsorted(known, sequences, side="left" if self._upper else "right")
        return known[np.minimum(at, len(known) - 1)] if self._upper else known[np.maximum(at - 1, 0)]

    def _reached(self) -> int:
        """A length whose peak is above the limit."""
        length = self.unit
        while length < _LONGEST and self._least(length) <= self._limit:
            length *= 2
        return length

    def _least(self, length: int) -> int:
        case = self.workload(1, length)
        return max(outline(case, stage).peak_bytes for stage in fullest_stages(case))

    def _table(self, number: int) -> _Table:
        if number not in self._tables:
            self._tables[number] = self._made(number)
        return self._tables[number]

    def _made(self, number: int) -> _Table:
        reach = self._reach if self._packs else -(-self._reach // number)
        step = max(self.step, self.unit * -(-reach // (self.unit * _POINTS)))
        lengths = np.arange(step, reach + step, step, dtype=np.int64)
        if not self._upper:
            lengths = np.union1d(self.unit, lengths)
        peak, cover, increment = (np.empty(len(lengths)) for _ in range(3))
        table = _Table(lengths, peak, cover, increment, [(0, "")] * len(lengths))
        for alike in self._alike(number, lengths):
            self._fill(table, number, alike)
        return table

    def _alike(self, number: int, lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Positions of lengths that kernels take alike."""
        if attention_backend(self._template) == "fused":
            return [np.arange(len(lengths))]
        choices = [length_choices(self.workload(number, int(length))) for length in lengths]
        kinds = {choice: [] for choice in choices}  # type: dict[object, list[int]]
        for position, choice in enumerate(choices):
            kinds[choice].append(position)
        return [np.array(each) for each in kinds.values()]

    def _fill(self, table: _Table, number: int, alike: NDArray[np.int64]) -> None:
        lengths = table.lengths[alike]
        case = self.workload(number, int(lengths[-1]))
        recorder = Recorder(case, self._sizes(case, number, lengths))
        numbers = Arrays(self._size, len(lengths))
        opposite = tensor if self._upper else covering(case.training.allocator)
        peak, cover, increment = (np.full(len(lengths), -np.inf) for _ in range(3))
        for stage in fullest_stages(case):
            model = recorder.chunks(case.recompute, stage)
            found = outline_of(model, case, stage, numbers)
            before = outline_of(model, case, stage, Arrays(opposite, len(lengths))).set_up_bytes
            rows = np.array([np.broadcast_to(each.bytes, len(lengths)) for each in found.phases], dtype=np.float64)
            rows -= self._known if case.parallelism.pp == 1 else 0
            first = np.array([(each.iteration, each.phase) == (1, "backward") for each in found.phases])
            highest = rows.max(axis=0)
            tuned = rows[first].max(axis=0, initial=0) + tuning_bytes(case)
            above = highest - before
            larger = highest > peak
            for position in np.flatnonzero(larger):
                phase = found.phases[int(rows[:, position].argmax())]
                table.phases[alike[position]] = phase.iteration, phase.phase
            peak, increment = np.maximum(peak, highest), np.where(larger, above, increment)
            cover = np.maximum(cover, with_margin(case, highest, tuned, above))
        table.peak[alike], table.covered[alike], table.increment[alike] = peak, cover, increment

    def _sizes(self, case: Workload, number: int, lengths: NDArray[np.int64]) -> Sizes:
        sizes, layout = Sizes.of(case), case.parallelism
        sequence: Any = lengths // layout.cp
        tokens = sequence * case.batch.micro_batch_size
        packed: Sequence[Any] = sizes.packed
        if packed:
            # The least is of sequences that are as short as there may be.
            packed = (*packed[:-1], lengths) if self._upper else (self.unit,) * number
        choices = sizes.choices._replace(flash_sums=length_choices(self.workload(1, int(lengths[-1]))).flash_sums)
        return replace(
            sizes,
            tokens=tokens,
            shard=tokens // layout.sp,
            sequence=sequence,
            packed=tuple(packed),
            choices=choices if packed and self._upper else sizes.choices,
        )


def _decides_by_length(template: Workload) -> bool:
    """Kernels take some lengths in ways that hold more than longer ones."""
    return attention_backend(template) != "fused" or any(layer.mixer == "mamba" for layer in template.model.kinds)
