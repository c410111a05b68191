"""`sweep`: thousands of workloads at once, as one frame.

Workloads that differ only in lengths are priced together, their bytes being arrays; those that differ only in recompute
share what is recorded; those that share a layout share their state. Peaks are those of `labkit.memory.outline`.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.errors import InputError
from labkit.memory.layers.sizes import Sizes
from labkit.memory.meter import NOTHING, Change, Numbers
from labkit.memory.outline import block, outline, outline_of, tensor
from labkit.memory.script import Steps
from labkit.memory.units import Recorder, Unit
from labkit.workload import Batch, Parallelism, Recompute, Workload
from labkit.workload.attention_backends import attention_backend
from labkit.workload.kernels import length_choices
from labkit.workload.routing import FINEST_SHARE

if TYPE_CHECKING:
    import polars as pl


def sweep(workloads: Iterable[Workload]) -> "pl.DataFrame":
    """One row a workload, in their order: its axes, and the bytes of its fullest pipeline stage.

    Columns: `model`, the layout (`world_size, tp, cp, ep, etp, pp, vpp, dp, sequence_parallel`), the batch
    (`seq_length, micro_batch_size, global_batch_size`), `recompute` (its label), `stage`, `peak_phase`,
    `peak_iteration`, `peak_allocated_bytes` (blocks of fresh segments, see `labkit.memory.outline.block`),
    `peak_tensor_bytes`, `between_steps_bytes`, `retained_bytes`.

    Raises:
        InputError: a workload's bytes are more than 64-bit integers count.
    """
    import polars as pl

    cases = list(workloads)
    found: list[Row | None] = [None] * len(cases)
    for numbers in _alike(cases):
        for number, row in zip(numbers, _priced([cases[number] for number in numbers]), strict=True):
            found[number] = row
    columns: dict[str, list[Any]] = {name: [read(case) for case in cases] for name, read in _AXES.items()}
    columns |= dict(zip(Row._fields, map(list, zip(*found, strict=True)), strict=True)) if cases else {}
    return pl.DataFrame(columns)


class Row(NamedTuple):
    """Bytes of a workload."""

    stage: int
    peak_iteration: int
    peak_phase: str
    peak_allocated_bytes: int
    peak_tensor_bytes: int
    between_steps_bytes: int
    retained_bytes: int


_AXES: dict[str, Callable[[Workload], Any]] = {
    "model": lambda case: case.model.name,
    "world_size": lambda case: case.parallelism.world_size,
    "tp": lambda case: case.parallelism.tp,
    "cp": lambda case: case.parallelism.cp,
    "ep": lambda case: case.parallelism.ep,
    "etp": lambda case: case.parallelism.etp,
    "pp": lambda case: case.parallelism.pp,
    "vpp": lambda case: case.parallelism.vpp,
    "dp": lambda case: case.parallelism.dp,
    "sequence_parallel": lambda case: case.parallelism.sequence_parallel,
    "seq_length": lambda case: case.batch.seq_length,
    "micro_batch_size": lambda case: case.batch.micro_batch_size,
    "global_batch_size": lambda case: case.batch.global_batch_size,
    "recompute": lambda case: case.recompute.label,
}

_TOGETHER = ("seq_length", "global_batch_size")
"""Fields of the batch that may differ among workloads that are priced together."""


class _Numbering:
    """Equal parts get equal numbers; each part object is hashed once."""

    def __init__(self) -> None:
        self._of_value: dict[Hashable, int] = {}
        self._of_object: dict[int, int] = {}

    def __call__(self, part: Hashable) -> int:
        number = self._of_object.get(id(part))
        if number is None:
            number = self._of_object[id(part)] = self._of_value.setdefault(part, len(self._of_value))
        return number


_LIMIT, _CLOSE = 2**62, 2**52
"""Integers that a sweep counts in stay below the limit. A crude product of sizes that is not even close needs no look:
bytes of a number, tensors of a layer and copies of a tensor are a thousand at most."""


def _check_magnitude(case: Workload) -> None:
    """Refuse a workload whose bytes, or rows times the numerator of a share, do not fit an array's integers."""
    model, batch = case.model, case.batch
    tokens, moe = batch.micro_batch_size * batch.seq_length, model.mixture_of_experts
    squares = batch.create_attention_mask_in_dataloader or attention_backend(case) == "unfused"
    pairs = tokens * batch.seq_length if squares else tokens
    largest = max(_integers(model.model_dump()))
    chosen = 1 if moe is None else moe.num_moe_experts
    if model.num_layers * largest * chosen * max(pairs, largest) < _CLOSE:
        return
    rows = 0 if moe is None else tokens * moe.moe_router_topk * FINEST_SHARE
    stages = range(case.parallelism.pp)
    if rows >= _LIMIT or any(outline(case, stage).peak_bytes >= _LIMIT for stage in stages):
        shape = f"{batch.micro_batch_size} x {batch.seq_length}"
        reason = f"{model.name} at {shape} tokens needs larger integers than the 64 bits that a sweep counts in"
        raise InputError(f"{reason}; use shorter sequences or `labkit.estimate`")


def _integers(value: Any) -> Iterator[int]:
    """All integers in plain data."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _integers(each)


def _alike(cases: Sequence[Workload]) -> list[list[int]]:
    """Positions of workloads that differ in lengths and recompute alone."""
    number = _Numbering()
    rest = [name for name in Workload.model_fields if name not in ("batch", "recompute")]
    rest_of_batch = [name for name in Batch.model_fields if name not in _TOGETHER]
    found: dict[Hashable, list[int]] = {}
    for position, case in enumerate(cases):
        parts = [number(getattr(case, name)) for name in rest]
        batch = [getattr(case.batch, name) for name in rest_of_batch]
        learned = case.model.position_embedding_type == "learned_absolute"
        if learned or attention_backend(case) != "fused":
            batch.append(length_choices(case))
        if not _has_arrays(case):
            batch.append(case.batch.seq_length)
        found.setdefault((*parts, *batch, case.distinct_microbatches), []).append(position)
    return list(found.values())


def _has_arrays(case: Workload) -> bool:
    """Lengths of a workload may be arrays; packed sequences, as which the `lora` runtime takes all, may not."""
    return case.training.runtime == "megatron" and case.batch.packed is None


def _priced(cases: Sequence[Workload]) -> Iterator[Row]:
    """Rows of workloads that differ in lengths and recompute alone."""
    _check_magnitude(max(cases, key=lambda case: case.batch.seq_length))
    lengths = sorted({case.batch.seq_length for case in cases})
    batch = cases[0].batch.model_copy(update={"seq_length": np.array(lengths, dtype=np.int64)})
    # Where all lengths are alike they are no arrays.
    sweeping = cases[0].model_copy(update={"batch": batch}) if _has_arrays(cases[0]) else cases[0]
    recorder = Recorder(sweeping, Sizes.of(sweeping))
    numbers = [Arrays(size, len(lengths)) for size in (tensor, block)]
    priced: dict[Recompute, list[Row]] = {}
    for case in cases:
        if case.recompute not in priced:
            priced[case.recompute] = _rows(recorder, case, numbers, len(lengths))
        yield priced[case.recompute][lengths.index(case.batch.seq_length)]


def _rows(recorder: Recorder, case: Workload, numbers: Sequence[Numbers], count: int) -> list[Row]:
    """One row for each length, of the stage that is fullest there."""
    best: list[Row | None] = [None] * count
    for stage in range(case.parallelism.pp):
        model = recorder.chunks(case.recompute, stage)
        tensors, blocks = (outline_of(model, case, stage, each) for each in numbers)
        levels = _table([phase.bytes for phase in blocks.phases], count)
        peaks = _table([phase.bytes for phase in tensors.phases], count).max(axis=0)
        other = _table([tensors.between_steps_bytes, tensors.retained_bytes], count)
        for index, at in enumerate(levels.argmax(axis=0)):
            phase, before = blocks.phases[at], best[index]
            level = int(levels[at, index])
            if before is None or level > before.peak_allocated_bytes:
                between, retained = map(int, other[:, index])
                peak = int(peaks[index])
                best[index] = Row(stage, phase.iteration, phase.phase, level, peak, between, retained)
    return [row for row in best if row is not None]


def _table(rows: Sequence[Any], count: int) -> NDArray[np.int64]:
    """Sizes as rows of `count` integers; an integer holds for all."""
    table = np.empty((len(rows), count), dtype=np.int64)
    for index, row in enumerate(rows):
        table[index] = row
    return table


class Arrays:
    """The bytes of a workload at `count` lengths (see `labkit.memory.meter.Numbers`)."""

    larger = staticmethod(np.maximum)

    def __init__(self, size: Callable[[int], int], count: int) -> None:
        self.size: Callable[[Any], Any] = size
        self._count = count

    def sizes(self, unit: Unit) -> NDArray[np.int64]:
        """One row a slot, and the negative ones in reverse."""
        sizes = [slot.on(unit.tape).bytes for slot in unit.script.slots]
        table: NDArray[np.int64] = self.size(_table(sizes, self._count))
        return np.concatenate([table, -table[::-1]])

    def total(self, sizes: NDArray[np.int64], steps: Steps) -> Change:
        """See `Numbers`."""
        if not steps:
            return NOTHING
        levels = np.cumsum(sizes[np.asarray(steps)], axis=0)
        return Change(np.maximum(levels.max(axis=0), 0), levels[-1])


def variations(
    base: Workload,
    *,
    parallelism: Sequence[Parallelism] = (),
    recompute: Sequence[Recompute] = (),
    batch: Sequence[Batch] = (),
) -> Iterator[Workload]:
    """Every combination of the given parts with the rest of `base`, those that break a rule left out."""
    for layout, choice, lengths in product(
        parallelism or (base.parallelism,), recompute or (base.recompute,), batch or (base.batch,)
    ):
        case = base.model_copy(update={"parallelism": layout, "recompute": choice, "batch": lengths})
        if case.can_run:
            yield case
