"""DDP's buffers: how parameters lie in them, in buckets, and the shards of them that a rank's optimizer steps.

Sources: Megatron Core `distributed/param_and_grad_buffer.py`, `optimizer/param_layout.py`,
`optimizer/distrib_optimizer.py`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import NamedTuple

from labkit.memory.tape import Parameter
from labkit.memory.weights import Alike, Block, elements, those
from labkit.workload import Workload

_PARAMETER_ALIGNMENT = 64
"""Elements; `pad_param_start`."""
_BUCKET_ALIGNMENT = 128
"""Elements; `bucket_end_divisor`, with the data-parallel size."""
_ENDLESS = 2**62
"""Elements; no bucket is filled with them."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous DDP buffer: gradients, and parameters too if they are gathered, of one reduction group."""

    name: str
    """Path of the attribute of `DistributedDataParallel` that holds it."""
    expert: bool
    """Its parameters are reduced over the expert data-parallel group."""
    numel: int
    """With padding."""
    parameters: Sequence[Block]
    """In the order in which they lie in it."""
    groups: tuple[Sequence[Block], Sequence[Block]]
    """Shards that the optimizer of this rank steps: of matrices (which have weight decay), of vectors."""


def buffers(weights: Sequence[Block], workload: Workload, *, bucketed: bool = True) -> list[Buffer]:
    """The DDP buffers of a model chunk on data-parallel rank 0, dense parameters apart from expert ones.

    In Megatron's order. `bucketed`: it is the first chunk of the first pipeline stage, others reduce in one piece.
    """
    layout, ddp = workload.parallelism, workload.training.data_parallel
    trained = those(weights, lambda each: each.trainable)
    ranks, instances = layout.dp * layout.cp, ddp.num_distributed_optimizer_instances
    bucket_size = _ENDLESS
    if bucketed and ddp.overlap_grad_reduce:
        # `megatron.training.training.resolve_ddp_bucket_size`
        bucket_size = max(40_000_000, 1_000_000 * ranks)
    found = []
    for expert in dict.fromkeys(part.parameter.expert for block in trained for part in block.flat):
        name, wanted = _GROUPS[expert]
        members = those(trained, wanted)
        if ddp.use_distributed_optimizer:
            # Each instance has the whole state; buckets are sized by all ranks.
            shards = (layout.edp if expert else ranks) // instances
            found.append(sharded(name, expert, members, shards, bucket_size))
        else:
            # No padding (`_compute_default_per_buffer_param_layout`), whole parameters.
            found.append(Buffer(name, expert, elements(members), members, _groups(members)))
    return found


_GROUPS: dict[bool, tuple[str, Callable[[Parameter], bool]]] = {
    False: ("buffers.0", lambda each: not each.expert),
    True: ("expert_parallel_buffers.0", lambda each: each.expert),
}


@lru_cache(maxsize=64)
def sharded(name: str, expert: bool, members: tuple[Block, ...], ranks: int, bucket_size: int) -> Buffer:
    """Lay parameters out in reverse order, padded, in buckets of about `bucket_size` elements.

    Source: `DistributedOptimizer._compute_per_buffer_param_layout`; rank 0 owns the first part of each bucket.
    """
    unit = lcm(ranks, _BUCKET_ALIGNMENT)
    laid_out = [_backwards(block) for block in reversed(members)]
    line = _Line(laid_out)
    numel, owned, begin = 0, list[Alike | Block](), 0
    seen: dict[Hashable, tuple[int, int, int]] = {}
    """What there was of them where a bucket began."""
    while begin < line.length:
        around = line.around(begin)
        for repeated in around:
            begin_then, numel_then, owned_then = seen.get(repeated.place, (-1, 0, 0))
            stride = begin - begin_then
            repeats = (repeated.end - begin) // stride if begin_then >= 0 else 0
            if repeats:
                # The buckets since then come again and again.
                count = stride // repeated.length
                again = Block(
                    tuple(owned[owned_then:]), range(repeats + 1), count * repeated.layers, count * repeated.numbers
                )
                owned[owned_then:] = [again]
                numel += repeats * (numel - numel_then)
                begin += repeats * stride
                break
        else:
            seen |= {repeated.place: (begin, numel, len(owned)) for repeated in around}
            end = line.bucket_end(begin, bucket_size)
            padded = _aligned(end - begin, unit)
            owned += line.between(begin, min(end, begin + padded // ranks))
            numel += padded
            begin = end
    return Buffer(name, expert, numel, laid_out, _groups([Block(tuple(owned))]))


def _groups(shards: Sequence[Block]) -> tuple[Sequence[Block], Sequence[Block]]:
    return those(shards, lambda each: len(each.shape) > 1), those(shards, lambda each: len(each.shape) <= 1)


def _backwards(block: Block) -> Block:
    """The last tensor first."""
    parts = [
        Alike(parameter, numbers[::-1], numel, first_layer)
        for parameter, numbers, numel, first_layer in reversed(block.flat)
    ]
    return Block(tuple(parts), block.repeats[::-1], block.layers)


class _Repeated(NamedTuple):
    """Something that comes several times in a row in a line."""

    place: Hashable
    """Where in one repetition a position is."""
    end: int
    """Of the last repetition."""
    length: int
    """Of one."""
    layers: int
    """From one to the next."""
    numbers: int


class _Line:
    """Parameters one behind the other, each aligned, as if a buffer had one bucket; positions are elements.

    Buckets begin at multiples of the alignment, so that within one nothing is different.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._laid: list[_Laid] = []
        self.length = 0
        for block in blocks:
            self._laid.append(_Laid(block, self.length))
            self.length = self._laid[-1].end
        self._begins = [laid.begin for laid in self._laid]
        self._lasts = [laid.last for laid in self._laid]
        self._cuts = sorted({self.length, *(cut for laid in self._laid for cut in laid.cuts)})
        """Where a bucket ends in any case: a parameter that another stage has too has one to itself."""

    def around(self, position: int) -> list[_Repeated]:
        """What repeats around a position where a parameter begins."""
        return self._laid[bisect_right(self._begins, position) - 1].around(position)

    def bucket_end(self, begin: int, size: int) -> int:
        """Where the bucket from `begin` on ends: with the parameter that fills it."""
        cut, full = self._cuts[bisect_right(self._cuts, begin)], begin + size
        index = bisect_left(self._lasts, full)
        return cut if full >= cut or index == len(self._lasts) else min(cut, self._laid[index].filled(full))

    def between(self, begin: int, end: int) -> list[Alike | Block]:
        """What lies from `begin`, where a parameter begins, to `end`, which may cut one."""
        found, index = list[Alike | Block](), bisect_right(self._begins, begin) - 1
        while begin < end:
            laid = self._laid[index]
            found += laid.between(begin, min(end, laid.end))
            begin, index = laid.end, index + 1
        return found


class _Laid:
    """A block of a line, from position `begin` on."""

    def __init__(self, block: Block, begin: int) -> None:
        self._block = block
        self.begin = begin
        self._parts = block.flat
        self._pitches = [_aligned(part.numel, _PARAMETER_ALIGNMENT) for part in block.flat]
        """From one parameter of a part to the next."""
        lengths = [pitch * len(part.numbers) for pitch, part in zip(self._pitches, block.flat, strict=True)]
        self._begins = list(accumulate(lengths, initial=0))
        """Of the parts in a repetition, and of the next repetition."""
        self._length = self._begins[-1]
        nexts = zip(self._begins[1:], self._pitches, block.flat, strict=True)
        self._lasts = [following - pitch + part.numel for following, pitch, part in nexts]
        """Where in a repetition the parts' last parameters end."""
        self.end = begin + len(block.repeats) * self._length
        self.last = self.end - self._length + self._lasts[-1]
        """Where the last parameter ends."""

    @property
    def cuts(self) -> list[int]:
        """Where a parameter begins or ends that another stage has too: none of those repeats."""
        shared = [index for index, part in enumerate(self._parts) if part.parameter.shared_embedding]
        return [self.begin + self._begins[bound] for index in shared for bound in (index, index + 1)]

    def around(self, position: int) -> list[_Repeated]:
        """See `_Line.around`."""
        repetition, rest = divmod(position - self.begin, self._length)
        index = bisect_right(self._begins, rest) - 1
        numbers, found = self._parts[index].numbers, []
        if len(numbers) > 1:
            end = position - rest + self._begins[index + 1]
            found.append(_Repeated((self.begin, repetition, index), end, self._pitches[index], 0, numbers.step))
        if len(self._block.repeats) > 1:
            layers = self._block.layers * self._block.repeats.step
            found.append(_Repeated((self.begin, rest), self.end, self._length, layers, 0))
        return found

    def filled(self, position: int) -> int:
        """Where what follows the first parameter begins that ends at a position or behind it."""
        repetition, rest = divmod(max(position - self.begin, 1) - 1, self._length)
        rest += 1
        index = bisect_left(self._lasts, rest)
        if index == len(self._lasts):
            repetition, rest, index = repetition + 1, 0, 0
        pitch, begin = self._pitches[index], self._begins[index]
        number = max(0, -((begin + self._parts[index].numel - rest) // pitch))
        return self.begin + repetition * self._length + begin + (number + 1) * pitch

    def between(self, begin: int, end: int) -> list[Alike | Block]:
        """See `_Line.between`."""
        first, begin = divmod(begin - self.begin, self._length)
        last, end = divmod(end - self.begin, self._length)
        if first == last:
            return self._within(first, begin, end)
        found = list[Alike | Block]()
        if begin:
            found += self._within(first, begin, self._length)
            first += 1
        if first < last:
            found.append(Block(self._parts, self._block.repeats[first:last], self._block.layers))
        return [*found, *self._within(last, 0, end)] if end else found

    def _within(self, repetition: int, begin: int, end: int) -> list[Alike | Block]:
        """What lies between two positions in a repetition."""
        found, index = list[Alike | Block](), bisect_right(self._begins, begin) - 1
        layers = self._block.repeats[repetition] * self._block.layers
        while begin < end:
            (parameter, numbers, numel, first_layer), pitch = self._parts[index], self._pitches[index]
            numbers = numbers[(begin - self._begins[index]) // pitch :]
            whole = max(0, min((end - begin - numel) // pitch + 1, len(numbers)))
            if whole:
                found.append(Alike(parameter, numbers[:whole], numel, first_layer + layers))
            begin += whole * pitch
            if begin < end and whole < len(numbers):
                found.append(Alike(parameter, numbers[whole : whole + 1], end - begin, first_layer + layers))
                break
            index += 1
        return found


def _aligned(numel: int, unit: int) -> int:
    return -(-numel // unit) * unit
