"""Sums scripts up without writing rows: the level of live bytes, and its peak in each phase.

A `Meter` is moved like a `labkit.memory.writer.Writer` and agrees with it to the byte, at the cost of the distinct
kinds of units: a unit's passes are summed once, and equal stretches of the model change the level by equal amounts.
Bytes may be arrays over the lengths of a sweep.

Known limitation: of several micro-batches in flight, what a module's attributes keep is taken to go with its backward.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from labkit.memory.schedule import Boundary
from labkit.memory.script import (
    CALLERS,
    LET_GO,
    OUTPUTS,
    SENT_GRADIENT,
    CacheUse,
    Earlier,
    Steps,
    once_key,
)
from labkit.memory.tape import Shape
from labkit.memory.units import Chunk, Unit


class Change(NamedTuple):
    """What a stretch of work does to the level, relative to where it begins: bytes, or arrays of them."""

    peak: Any
    net: Any


NOTHING = Change(0, 0)


class _Kept(NamedTuple):
    """A tensor that outlives its pass."""

    bytes: Any
    holders: set[str | int]


class Numbers(Protocol):
    """How bytes are counted: one number, or in a sweep an array over lengths."""

    def size(self, nbytes: Any) -> Any:
        """What a tensor's bytes count as."""

    def sizes(self, unit: Unit) -> Any:
        """The sizes of the slots of a unit's script; at `~slot` a slot's negative size."""

    def larger(self, one: Any, other: Any) -> Any:
        """The larger one, element by element."""

    def total(self, sizes: Any, steps: Steps) -> Change:
        """What the steps come to."""


class Integers:
    """One workload's bytes."""

    def __init__(self, size: Callable[[int], int]) -> None:
        self.size = size

    def sizes(self, unit: Unit) -> list[int]:
        """See `Numbers`."""
        sizes = [self.size(slot.on(unit.tape).bytes) for slot in unit.script.slots]
        return [*sizes, *(-size for size in reversed(sizes))]

    def larger(self, one: int, other: int) -> int:
        """See `Numbers`."""
        return max(one, other)

    def total(self, sizes: list[int], steps: Steps) -> Change:
        """See `Numbers`."""
        levels = list(accumulate(map(sizes.__getitem__, steps), initial=0))
        return Change(max(levels), levels[-1])


class _Meters:
    """The changes that a unit's passes make, each summed on first use."""

    def __init__(self, unit: Unit, numbers: Numbers) -> None:
        self._script = unit.script
        self._numbers = numbers
        self._sizes = numbers.sizes(unit)
        self._changes: dict[object, Change] = {}
        self.caches = unit.script.caches
        self.once = {
            backward: {slot: (key, unit.script.slots[slot].on(unit.tape).shape) for slot, key in keys.items()}
            for backward, keys in unit.script.once.items()
        }
        """Slots of what a pass (False forward, True backward) allocates if the process has not yet: key and shape."""

    def forward(self, earlier: Earlier, cache: CacheUse, opens: frozenset[int]) -> Change:
        """A forward pass; `opens`: slots of what the process allocates in it for the first time."""
        key = earlier, cache, opens
        if key not in self._changes:
            steps = self._script.forward_steps(earlier, cache, opens)
            self._changes[key] = self._numbers.total(self._sizes, steps)
        return self._changes[key]

    def backward(self, let_go: bool, opens: frozenset[int]) -> Change:
        """A backward pass; `let_go`: a later forward has taken the attributes that held this micro-batch's tensors."""
        key = let_go, opens
        if key not in self._changes:
            steps = self._script.backward_steps(let_go, opens)
            self._changes[key] = self._numbers.total(self._sizes, steps)
        return self._changes[key]

    @cached_property
    def kept_by_caller(self) -> dict[bool, list[tuple[str, Any]]]:
        """(key, bytes) of what the caller keeps of a pass (False forward, True backward)."""
        kept = self._script.kept_by_caller
        return {backward: [(key, self._sizes[slot]) for key, slot in each] for backward, each in kept.items()}

    @property
    def keeps_output(self) -> bool:
        """A module attribute keeps what the unit puts out."""
        return self._script.keeps_output

    @property
    def output(self) -> Any:
        """Bytes of what the unit puts out."""
        return self._sizes[self._script.output or 0]

    @cached_property
    def left_by_attributes(self) -> Any:
        """What a forward pass frees of an earlier micro-batch that is over."""
        frees, forward = self._script.frees[False], self._script.forward
        return sum(self._sizes[slot] for at, freed in frees.items() if forward[at][0] == LET_GO for slot in freed)


class Pool:
    """Meters of scripts, made on first use; several `Meter` objects may share one."""

    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers
        self._meters: dict[tuple[int, int], tuple[Unit, _Meters]] = {}

    def of(self, unit: Unit) -> _Meters:
        """The meters of a unit, and of all that have its script and its sizes."""
        key = id(unit.script), id(unit.tape)
        if key not in self._meters:
            # The unit is kept so that no other's parts can take their ids.
            self._meters[key] = unit, _Meters(unit, self.numbers)
        return self._meters[key][1]


class Meter:
    """The level of one rank's live bytes."""

    def __init__(self, pool: Pool) -> None:
        self.level: Any = 0
        self.peak: Any = 0
        self._larger = pool.numbers.larger
        self._of = pool.of
        self._once: set[str] = set()
        self._used: dict[str, int] = {}
        """Modules that have an entry in a cache, or had."""
        self._warm: set[int] = set()
        """Chunks that have run a forward: their modules have used their caches."""
        self._has_run_backward: set[int] = set()
        self._kept: list[_Kept] = []
        self.kept_by_schedule: dict[Boundary, Any] = {}
        """Bytes that variables of the schedule keep."""
        self._passes: dict[tuple[Chunk, Earlier | bool], Change] = {}
        """What passes of a chunk do that are not its first."""
        self._latest: dict[int, int] = {}
        """Micro-batch of a chunk's latest forward."""
        self._running: set[tuple[int, int]] = set()
        """Chunk and micro-batch of forwards whose backward is to come."""
        self._let_go: set[tuple[int, int]] = set()
        """Those among them whose modules have run another forward since."""

    def start_phase(self) -> None:
        """The peak of what follows counts from here."""
        self.peak = self.level

    def add(self, change: Change) -> None:
        """Something happens to the level."""
        self.peak = self._larger(self.peak, self.level + change.peak)
        self.level = self.level + change.net

    def taken(self, once: frozenset[str]) -> None:
        """What the process allocates once, and has allocated."""
        self._once |= once

    def forward(self, chunk: Chunk, index: int, microbatch: int) -> Any:
        """Forward pass of model chunk `index`; returns the bytes it leaves for its backward."""
        self._drop(index)
        before, latest = self.level, self._latest.get(index)
        earlier: Earlier = "none" if latest is None else "over"
        if latest is not None and (index, latest) in self._running:
            earlier = "running"
            self._let_go.add((index, latest))
        self._latest[index] = microbatch
        self._running.add((index, microbatch))
        if earlier == "over":
            before = before - self._attributes(chunk)
        if index in self._warm:
            self._again((chunk, earlier), lambda: self._stretches_forward(chunk, index, earlier, warm=True))
        else:
            self._stretches_forward(chunk, index, earlier, warm=False)
            self._warm.add(index)
        self._caller_keeps(chunk, index, backward=False, latest=True)
        return self.level - before

    def _stretches_forward(self, chunk: Chunk, index: int, earlier: Earlier, *, warm: bool) -> None:
        for units, times in chunk.stretches:
            meters = [self._of(unit) for unit in units]
            left = times
            while left:
                uses = [(each, self._use(each, warm), self._opens(each.once[False], index)) for each in meters]
                self._together([each.forward(earlier, use, opens) for each, use, opens in uses])
                left -= 1
                alike = self._alike(meters, left, warm)
                uses = [(each, self._use(each, warm, alike), frozenset()) for each in meters]
                self._together([each.forward(earlier, use, opens) for each, use, opens in uses], alike)
                left -= alike

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""
        self._running.remove((index, microbatch))
        let_go = (index, microbatch) in self._let_go
        self._let_go.discard((index, microbatch))
        if index in self._has_run_backward:
            self._again((chunk, let_go), lambda: self._stretches_backward(chunk, index, let_go))
        else:
            self._stretches_backward(chunk, index, let_go)
            self._has_run_backward.add(index)
        self._caller_keeps(chunk, index, backward=True, latest=not let_go)

    def caller_lets_go(self, keys: Iterable[str] = CALLERS) -> None:
        """The caller of the model drops what it has kept."""
        for key in keys:
            self._drop(key)

    def _drop(self, holder: str | int) -> None:
        """Free what no one but `holder` keeps: a key of the caller, or the chunk that keeps its input's gradient."""
        for kept in self._kept:
            kept.holders.discard(holder)
            if not kept.holders:
                self.level = self.level - kept.bytes
        self._kept = [kept for kept in self._kept if kept.holders]

    def keep(self, chunk: Chunk, tensor: Boundary) -> None:
        """Variables of the schedule keep a tensor at an end of the chunk."""
        nbytes = self.kept_by_schedule[tensor] = self._of(chunk.ends[0]).output
        self.add(Change(nbytes, nbytes))

    def free(self, tensor: Boundary) -> None:
        """They let go of it."""
        self.level = self.level - self.kept_by_schedule.pop(tensor)

    def _caller_keeps(self, chunk: Chunk, index: int, *, backward: bool, latest: bool) -> None:
        """Note what the caller keeps of a pass that is over; of the `latest` micro-batch the chunk keeps it too."""
        for unit in chunk.ends:
            for key, nbytes in self._of(unit).kept_by_caller[backward]:
                if key != OUTPUTS:
                    self._drop(key)
                with_input = key == SENT_GRADIENT and latest
                self._kept.append(_Kept(nbytes, {key, index} if with_input else {key}))
        first = self._of(chunk.ends[0])
        if backward and not first.keeps_output:
            self._drop(SENT_GRADIENT)
        if backward and latest and first.keeps_output:
            # The next unit's pass is done with it.
            self.level = self.level + first.output
            self._kept.append(_Kept(first.output, {index}))

    def _stretches_backward(self, chunk: Chunk, index: int, let_go: bool) -> None:
        for units, times in reversed(chunk.stretches):
            meters = [self._of(unit) for unit in reversed(units)]
            self._together([each.backward(let_go, self._opens(each.once[True], index)) for each in meters])
            self._together([each.backward(let_go, frozenset()) for each in meters], times - 1)

    def _again(self, key: tuple[Chunk, Earlier | bool], run: Callable[[], None]) -> None:
        """A pass that opens nothing for the first time changes the level as the last such pass did."""
        if key not in self._passes:
            peak, level = self.peak, self.level
            self.peak = level
            run()
            self._passes[key] = Change(self.peak - level, self.level - level)
            self.peak = self._larger(peak, self.peak)
        else:
            self.add(self._passes[key])

    def _attributes(self, chunk: Chunk) -> Any:
        return sum(times * self._of(unit).left_by_attributes for units, times in chunk.stretches for unit in units)

    def _together(self, changes: Sequence[Change], times: int = 1) -> None:
        """Changes in a row, `times` over. The peak is linear in the repetition: the first or the last has it."""
        if not times:
            return
        once = reduce(self._joined, changes, NOTHING)
        self.add(once)
        if times > 1:
            self.level = self.level + once.net * (times - 2)
            self.add(once)

    def _joined(self, first: Change, second: Change) -> Change:
        return Change(self._larger(first.peak, first.net + second.peak), first.net + second.net)

    def _opens(self, once: Mapping[int, tuple[str, Shape]], index: int) -> frozenset[int]:
        """Slots of what the process allocates for the first time in a pass of chunk `index`."""
        if not once:
            return frozenset()
        keys = {slot: once_key(key, index, shape) for slot, (key, shape) in once.items()}
        opens = frozenset(slot for slot, key in keys.items() if key not in self._once)
        self._once.update(keys.values())
        return opens

    def _use(self, meters: _Meters, warm: bool, times: int = 1) -> CacheUse:
        """How a unit's next passes use their caches; modules of a `warm` chunk have used them before."""
        if not meters.caches:
            return "hit"
        if not warm:
            for key, _ in meters.caches:
                self._used[key] = self._used.get(key, 0) + times
        if any(self._used[key] > entries for key, entries in meters.caches):
            return "churn"
        return "hit" if warm else "grow"

    def _alike(self, stretch: Sequence[_Meters], times: int, warm: bool) -> int:
        """How many of `times` repetitions use caches alike: as long as there is room, or once there is none."""
        caches = [cache for meters in stretch for cache in meters.caches]
        for key, entries in caches:
            room = entries - self._used.get(key, 0)
            if not warm and room > 0:
                times = min(times, room // len(caches))
        return times
