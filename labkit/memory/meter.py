"""Sums scripts up without writing rows: the level of live bytes, and its peak in each phase.

A `Meter` is moved like a `labkit.memory.writer.Writer` and agrees with it to the byte, at the cost of the distinct
kinds of units: a unit's passes are summed once, and equal stretches of the model change the level by equal amounts.
Bytes may be arrays over the lengths of a sweep.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

from labkit.memory.schedule import Boundary
from labkit.memory.script import (
    CALLERS,
    INPUT,
    NO_ATTRIBUTES,
    OUTPUTS,
    SENT_GRADIENT,
    Attributes,
    CacheUse,
    Steps,
    once_key,
)
from labkit.memory.units import Chunk, Unit


class Change(NamedTuple):
    """What a stretch of work does to the level, relative to where it begins: bytes, or arrays of them."""

    peak: Any
    net: Any


NOTHING = Change(0, 0)


_NO_SLOTS = frozenset[int]()
_NO_NAMES = frozenset[str]()


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
        size, tensors = self.size, unit.tape.tensors
        sizes = [size((slot.constant or tensors[slot.source]).bytes) for slot in unit.script.slots]
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
        self.script = unit.script
        self._numbers = numbers
        self._sizes = numbers.sizes(unit)
        self._outcomes: dict[object, _Outcome] = {}
        self._made_once = {
            backward: [(slot, key, unit.script.slots[slot].on(unit.tape).shape) for slot, key in slots.items()]
            for backward, slots in unit.script.once.items()
        }
        self._once: dict[tuple[bool, int], dict[str, int]] = {}

    def once(self, backward: bool, index: int) -> dict[str, int]:
        """Slots of what a pass in chunk `index` allocates if the process has not yet, by key."""
        at = backward, index
        if at not in self._once:
            self._once[at] = {once_key(key, index, shape): slot for slot, key, shape in self._made_once[backward]}
        return self._once[at]

    def go(
        self,
        backward: bool,
        before: Attributes,
        opens: frozenset[int],
        cache: CacheUse,
        frees: frozenset[str],
        graphs: int,
    ) -> "_Outcome":
        """A pass: see `Script.go`."""
        key = backward, before, opens, cache, frees, graphs
        if key not in self._outcomes:
            steps, left, after = self.script.go(*key)
            change = self._numbers.total(self._sizes, steps)
            self._outcomes[key] = _Outcome(change, sum(self._sizes[slot] for slot in left), after)
        return self._outcomes[key]

    @cached_property
    def kept_by_caller(self) -> dict[bool, list[tuple[str, Any]]]:
        """(key, bytes) of what the caller keeps of a pass (False forward, True backward)."""
        kept = self.script.kept_by_caller
        return {backward: [(key, self._sizes[slot]) for key, slot in each] for backward, each in kept.items()}

    def size(self, slot: int) -> Any:
        """Bytes of a slot."""
        return self._sizes[slot]

    @property
    def keeps_output(self) -> bool:
        """A module attribute keeps what the unit puts out."""
        return self.script.keeps_output

    @property
    def output(self) -> Any:
        """Bytes of what the unit puts out."""
        return self._sizes[self.script.output or 0]


class _Outcome(NamedTuple):
    """What a pass of a unit comes to."""

    change: Change
    left: Any
    """Bytes among those it frees of micro-batches that were over before."""
    attributes: Attributes


def _meters(unit: Unit, numbers: Numbers) -> _Meters:
    """Those of a unit, and of all that have its script and its tape, which keeps them."""
    found: dict[object, _Meters] = unit.tape.sums
    key = numbers.size, unit.script
    if key not in found:
        found[key] = _Meters(unit, numbers)
    return found[key]


class _PassOutcome(NamedTuple):
    """What a pass of a chunk comes to: see `_Outcome`."""

    change: Change
    left: Any
    attributes: dict[int, Attributes]
    """By the units' scripts."""


class Meter:
    """The level of one rank's live bytes."""

    def __init__(self, numbers: Numbers) -> None:
        self.level: Any = 0
        self.peak: Any = 0
        self._numbers = numbers
        self._larger = numbers.larger
        self._once: set[str] = set()
        self._used: dict[str, int] = {}
        """Modules that have an entry in a cache, or had."""
        self._warm: set[int] = set()
        """Chunks that have run a forward: their modules have used their caches."""
        self._has_run_backward: set[int] = set()
        self._kept: list[_Kept] = []
        self.kept_by_schedule: dict[Boundary, Any] = {}
        """Bytes that variables of the schedule keep."""
        self._passes: dict[object, _PassOutcome] = {}
        """What passes of a chunk do that are not its first."""
        self._forwards: dict[int, int] = {}
        """How many each chunk has run."""
        self._running: dict[tuple[int, int], int] = {}
        """Chunk and micro-batch of forwards whose backward is to come, and the number of the forward."""
        self._attributes: dict[tuple[int, int], tuple[int, Attributes]] = {}
        """By chunk and script: what attributes keep, as seen from a forward of that number."""

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
        number = self._running[index, microbatch] = self._forwards.get(index, 0)
        self._forwards[index] = number + 1
        before = self.level
        left = self._pass(chunk, index, number, backward=False, again=index in self._warm)
        self._warm.add(index)
        self._caller_keeps(chunk, index, backward=False, latest=True)
        return self.level - before + left

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""
        number = self._running.pop((index, microbatch))
        self._pass(chunk, index, number, backward=True, again=index in self._has_run_backward)
        self._has_run_backward.add(index)
        self._caller_keeps(chunk, index, backward=True, latest=number == self._forwards[index] - 1)

    def _pass(self, chunk: Chunk, index: int, number: int, *, backward: bool, again: bool) -> Any:
        """A pass; one that opens nothing for the first time does `again` what one from the same attributes did.

        Returns the bytes freed of micro-batches that were over.
        """
        before: dict[int, Attributes] = {}
        for script in chunk.scripts_with_attributes:
            seen_from, attributes = self._attributes.get((index, id(script)), (number, NO_ATTRIBUTES))
            before[id(script)] = attributes.later(number - seen_from)
        key = chunk, backward, tuple(before.values())
        outcome = self._passes.get(key) if again else None
        if outcome is None:
            peak, level = self.peak, self.level
            self.peak = level
            left, after = self._stretches(chunk, index, before, backward, warm=again)
            outcome = _PassOutcome(Change(self.peak - level, self.level - level), left, after)
            self.peak = self._larger(peak, self.peak)
            if again:
                self._passes[key] = outcome
        else:
            self.add(outcome.change)
        for script_id, attributes in outcome.attributes.items():
            self._attributes[index, script_id] = number, attributes
        return outcome.left

    def _stretches(
        self, chunk: Chunk, index: int, before: dict[int, Attributes], backward: bool, *, warm: bool
    ) -> tuple[Any, dict[int, Attributes]]:
        """Go through the units; returns the bytes freed of micro-batches that were over, and what attributes keep."""
        freed: Any = 0
        after: dict[int, Attributes] = {}
        step, larger = -1 if backward else 1, self._larger
        for number in range(len(chunk.stretches))[::step]:
            units, left, _ = chunk.stretches[number]
            meters = [_meters(unit, self._numbers) for unit in units][::step]
            last = chunk.keepers[number][::step] if backward and number in chunk.keepers else None
            while left:
                opens = [self._opens(each.once(backward, index)) for each in meters]
                repeats = 1 if any(opens) else self._alike(meters, left, warm or backward)
                if last is not None:
                    repeats = min(repeats, max(left - 1, 1))
                frees = last if last is not None and left == 1 else [_NO_NAMES] * len(meters)
                graphs = [0] * len(meters)
                if not backward and number == chunk.last_graph[0]:
                    repeats = min(repeats, max(left - 1, 1))
                    graphs[chunk.last_graph[1]] = chunk.graphs if left == 1 else 0
                peak: Any = 0
                net: Any = 0
                for each, opened, names, ends in zip(meters, opens, frees, graphs, strict=True):
                    attributes = before.get(id(each.script))
                    use = self._use(each, warm, repeats) if each.script.caches and not backward else None
                    outcome = each.go(backward, attributes or NO_ATTRIBUTES, opened, use, names, ends)
                    peak = larger(peak, net + outcome.change.peak)
                    net = net + outcome.change.net
                    if attributes is not None:
                        freed = freed + outcome.left * repeats
                        after[id(each.script)] = outcome.attributes
                self._repeated(Change(peak, net), repeats)
                left -= repeats
        for slot in () if backward else chunk.passing:
            self.level = self.level - _meters(chunk.ends[0], self._numbers).size(slot)
        if not backward and chunk.graphs > 1:
            after = {script: attributes.of_this_pass for script, attributes in after.items()}
        return freed, after

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
        """Variables of the schedule keep a tensor."""
        nbytes = self.kept_by_schedule[tensor] = _meters(chunk.ends[0], self._numbers).output
        self.add(Change(nbytes, nbytes))

    def free(self, tensor: Boundary) -> None:
        """They let go of it."""
        self.level = self.level - self.kept_by_schedule.pop(tensor)

    def _caller_keeps(self, chunk: Chunk, index: int, *, backward: bool, latest: bool) -> None:
        """Note what the caller keeps of a pass that is over; of the `latest` micro-batch the chunk keeps it too."""
        for unit in chunk.ends:
            for key, nbytes in _meters(unit, self._numbers).kept_by_caller[backward]:
                if key != OUTPUTS:
                    self._drop(key)
                with_input = key == SENT_GRADIENT and latest
                self._kept.append(_Kept(nbytes, {key, index} if with_input else {key}))
        first = _meters(chunk.ends[0], self._numbers)
        if backward and not first.keeps_output:
            self._drop(SENT_GRADIENT)
        if backward and latest and first.keeps_output and not self._keeps_input(chunk.runs[1].units[0], index):
            # The next unit's pass is done with it.
            self.level = self.level + first.output
            self._kept.append(_Kept(first.output, {index}))

    def _keeps_input(self, unit: Unit, index: int) -> bool:
        """Attributes of the unit keep what it has read in the latest pass."""
        _, attributes = self._attributes.get((index, id(unit.script)), (0, NO_ATTRIBUTES))
        return any(tensor == (0, INPUT) for _, tensor in attributes.held)

    def _repeated(self, change: Change, times: int) -> None:
        """A change, `times` over. The peak is linear in the repetition: the first or the last has it."""
        self.add(change)
        if times > 1:
            self.level = self.level + change.net * (times - 2)
            self.add(change)

    def _opens(self, once: Mapping[str, int]) -> frozenset[int]:
        """Those among slots, by key, that the process allocates for the first time."""
        if once.keys() <= self._once:
            return _NO_SLOTS
        opens = frozenset([slot for key, slot in once.items() if key not in self._once])
        self._once.update(once)
        return opens

    def _use(self, meters: _Meters, warm: bool, times: int = 1) -> CacheUse:
        """How a unit's next passes use their caches; modules of a `warm` chunk have used them before."""
        caches = meters.script.caches
        if warm:
            full = any(self._used[key] > cache.entries for key, cache in caches.items())
            return tuple((key, 0) for key in caches) if full else None
        rooms = []
        for key, cache in caches.items():
            used = self._used.get(key, 0)
            rooms.append((key, min(max(cache.entries - used, 0), cache.uses)))
            self._used[key] = used + cache.uses * times
        return tuple(rooms)

    def _alike(self, stretch: Sequence[_Meters], times: int, warm: bool) -> int:
        """How many of `times` repetitions use caches alike: as long as there is room, or once there is none."""
        if warm:
            return times
        caches = [each for meters in stretch for each in meters.script.caches.items()]
        for key, cache in caches:
            room = cache.entries - self._used.get(key, 0)
            if room > 0:
                uses = sum(other.uses for name, other in caches if name == key)
                times = min(times, max(room // uses, 1))
        return times
