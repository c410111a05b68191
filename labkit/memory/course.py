"""The course of a step: what holds memory from moment to moment, by category, without rows.

Goes through the steps as `labkit.memory.outline` does, with a vector over `labkit.summary.CATEGORIES` for every size:
a peak then says what it is made of, and each repetition of a stretch of layers is a moment. Tens of milliseconds where
the ledger takes a second. Sizes are allocator blocks of fresh segments (`labkit.memory.outline.block`); in tensors it
sums to the rows' bytes (`tests/memory/test_course.py`), though at a pipeline's ends and in a caller's loss a tensor may
stand in another category than its row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.ledger import MATERIAL, Lifetime, rounded
from labkit.memory.book import Book, Entry
from labkit.memory.meter import Change, Meter
from labkit.memory.outline import TOKEN_COUNT, Levels, StateChanges, StateKey, block, changes_of
from labkit.memory.schedule import Boundary
from labkit.memory.script import CACHE, CLOSE, DONE, HOLD, INPUT, KEEP, ONCE, OPEN, READ, Script, Steps
from labkit.memory.state import State
from labkit.memory.steps import run_steps
from labkit.memory.tape import DTYPE_BYTES
from labkit.memory.units import Chunk, Unit, chunks, loss_chunk
from labkit.memory.weights import Act, Alike, Block, Tensors
from labkit.summary import CATEGORIES, category
from labkit.workload import Workload

type Holding = NDArray[np.float64]
"""Bytes of each category. Floats: exact below 2**53, and beyond that they do not wrap around."""

_REMAINDERS = CATEGORIES.index("allocator remainders")
_MOST_MOMENTS = 160


class PhaseHolding(NamedTuple):
    """What is held at the peak of a phase of an iteration."""

    iteration: int
    phase: str
    held: Holding

    @property
    def bytes(self) -> int:
        """The peak."""
        return round(self.held.sum())

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes of each category that holds some, in their order."""
        return {name: round(nbytes) for name, nbytes in zip(CATEGORIES, self.held, strict=True) if round(nbytes)}


class Stretch(NamedTuple):
    """A phase of a step, from one position to another."""

    phase: str
    start: float
    end: float


class Course(NamedTuple):
    """One pipeline rank over two steps, and moment by moment through the one that has the peak.

    Each layer of a pass is two moments, its peak and what it leaves, and so is each act of the optimizer. Positions run
    from 0 to 1 and count moments, not time.
    """

    phases: tuple[PhaseHolding, ...]
    set_up_bytes: int
    """Alive when the first iteration begins."""
    positions: tuple[float, ...]
    """Of about 160 moments, those of the peaks among them."""
    holdings: tuple[Holding, ...]
    """What is held from each of them on."""
    stretches: tuple[Stretch, ...]
    iteration: int
    """Whose moments those are."""

    @property
    def peak(self) -> PhaseHolding:
        """The largest, the first of equals."""
        return max(self.phases, key=lambda phase: phase.bytes)


def course(workload: Workload, stage: int = 0, size: Callable[[Any], Any] = block) -> Course:
    """What the first rank of pipeline stage `stage` holds, and when.

    `size`: what a tensor's bytes count as, see `labkit.memory.outline.outline`.
    """
    model = chunks(workload, stage)
    kept = frozenset(name for chunk in model for stretch in chunk.stretches for name in _kept(stretch.units))
    numbers = _Holdings(_Sizes(size, kept))
    meter = _Recorder(numbers)
    books = _Books(_state_changes(StateKey.of(model, workload, stage), size), meter, numbers.larger)
    run_steps(workload, stage, model, loss_chunk(workload), books)
    books.end_phase()
    phases = tuple(PhaseHolding(*when, held) for when, held in books.peaks.items())
    iteration = _iteration(phases)
    through = _through(iteration, books.begun, meter.moments)
    return Course(phases, round(books.set_up_level.sum()), *through, iteration)


def _iteration(phases: Sequence[PhaseHolding]) -> int:
    """The step that has the peak: the steady one, unless the first is higher by what matters."""
    highest = max(phases, key=lambda phase: phase.bytes).bytes
    return max((phase.iteration for phase in phases if phase.bytes >= (1 - MATERIAL) * highest), default=1) or 1


def _kept(units: Iterable[Unit]) -> Iterable[str]:
    """Names of the batch's tensors that backward needs."""
    return (name for unit in units for name in unit.script.keeps)


@dataclass(frozen=True)
class _Sizes:
    """How sizes count; names of the batch's tensors that outlive the forward step."""

    size: Callable[[Any], Any]
    kept: frozenset[str]

    def __call__(self, nbytes: Any) -> Any:
        return self.size(nbytes)


class _What(NamedTuple):
    """What decides a category."""

    lifetime: Lifetime
    kind: str
    phase: str

    @property
    def place(self) -> int:
        """Of its category."""
        return CATEGORIES.index(category(self))


def _holding(nbytes: int, what: _What, size: Callable[[Any], Any], count: int = 1) -> Holding:
    held = np.zeros(len(CATEGORIES))
    held[what.place] = nbytes * count
    held[_REMAINDERS] += (size(nbytes) - nbytes) * count
    return held


class _Holdings:
    """A rank's bytes by category (see `labkit.memory.meter.Numbers`)."""

    def __init__(self, size: _Sizes) -> None:
        self.size = size

    def larger(self, one: Any, other: Any) -> Any:
        """See `_more`."""
        return _more(one, other)

    def sizes(self, unit: Unit) -> Holding:
        """One row a slot, and the negative ones in reverse."""
        whats = _whats(unit.script, self.size.kept)
        slots = [(slot.on(unit.tape), what) for slot, what in zip(unit.script.slots, whats, strict=True)]
        table = np.stack(
            [_holding(value.bytes, what._replace(kind=what.kind or value.kind), self.size) for value, what in slots]
        )
        return np.concatenate([table, -table[::-1]])

    def total(self, sizes: Holding, steps: Steps) -> Change:
        """See `Numbers`."""
        nothing = np.zeros(len(CATEGORIES))
        if not steps:
            return Change(nothing, nothing)
        levels = np.cumsum(sizes[np.asarray(steps)], axis=0)
        highest = levels[levels.sum(axis=1).argmax()]
        return Change(_more(nothing, highest), levels[-1])


@lru_cache(maxsize=512)
def _whats(script: Script, kept: frozenset[str]) -> list[_What]:
    """What each slot is, its kind left open where the tape has it."""
    opened = {slot for code, slot, _ in script.forward if code == OPEN}
    held = {slot for code, slot, _ in script.forward if code == HOLD}
    closed = {slot for code, slot, _ in script.forward if code == CLOSE}
    batch = {slot: key for code, slot, key in (*script.forward, *script.backward) if code in (READ, KEEP, DONE)}
    retained = (opened | batch.keys()) - (closed - held) - {slot for slot, key in batch.items() if key not in kept}
    made = {slot for code, slot, _ in (*script.forward, *script.backward) if code in (ONCE, CACHE)}
    whats = {slot: _What("retained", "", "forward") for slot in retained}
    whats |= {slot: _What("workspace", "library", "forward") for slot in made}
    # The residual stream, which one unit makes and the next one frees: in backward, for it has saved it.
    whats |= {slot: _What("retained", "stream", "forward") for slot in (INPUT, script.output) if slot is not None}
    return [whats.get(slot, _What("transient", "", "forward")) for slot in range(len(script.slots))]


class _Recorder(Meter):
    """Notes what is held at every moment."""

    def __init__(self, numbers: _Holdings) -> None:
        super().__init__(numbers)
        self.level = self.peak = np.zeros(len(CATEGORIES))
        self.moments: list[Holding] = []
        self._size = numbers.size

    def add(self, change: Change) -> None:
        """Two moments: the highest of it, and what it leaves."""
        self.moments.append(self.level + change.peak)
        super().add(change)
        self.moments.append(self.level)

    def keep(self, chunk: Chunk, tensor: Boundary) -> None:
        """Variables of the schedule keep a tensor, whatever the unit's own is."""
        super().keep(chunk, tensor)
        whole = self.kept_by_schedule[tensor]
        self.level = self.level - whole
        what = _What("retained" if tensor.is_retained else "transient", "pipeline", "forward")
        nbytes = self.kept_by_schedule[tensor] = _moved(whole, what)
        self.level = self.level + nbytes

    def _pass(self, chunk: Chunk, index: int, number: int, *, backward: bool, again: bool) -> Any:
        self._passes.clear()  # every pass is gone through: each of its layers is a moment
        return super()._pass(chunk, index, number, backward=backward, again=again)

    def _repeated(self, change: Change, times: int) -> None:
        for _ in range(times):
            self.add(change)


def _moved(held: Holding, what: _What) -> Holding:
    """The same bytes in another category, remainders as they are."""
    moved = np.zeros(len(CATEGORIES))
    moved[_REMAINDERS] = held[_REMAINDERS]
    moved[what.place] += held.sum() - held[_REMAINDERS]
    return moved


class _Books(Levels):
    """Also notes where phases begin."""

    def __init__(self, state: StateChanges, meter: _Recorder, larger: Callable[[Any, Any], Any]) -> None:
        super().__init__(state, meter, larger)
        self.begun: list[tuple[int, int, str]] = []
        """(number of the moment, iteration, phase)"""
        self._recorder = meter

    def enter(self, iteration: int, phase: str) -> None:
        """A phase begins."""
        super().enter(iteration, phase)
        self.begun.append((len(self._recorder.moments), iteration, phase))

    def count_tokens(self, begins: bool) -> None:
        """A scalar that forward leaves."""
        held = _holding(TOKEN_COUNT, _What("retained", "input", "forward"), lambda nbytes: nbytes)
        self._recorder.add(Change(held, held) if begins else Change(0 * held, -held))


class _Tally(Book):
    """Sums up what `State` opens and closes."""

    def __init__(self, size: Callable[[Any], Any]) -> None:
        super().__init__()
        self._size = size
        self._level = self._peak = np.zeros(len(CATEGORIES))
        self._entries: list[Holding] = []
        """By number from 1."""
        self._named: dict[tuple[str, str], _What] = {}
        """What the tensor of this name of a parameter is."""

    def during(self, act: Callable[[Book], None]) -> Change:
        """What an act comes to."""
        self.phase = "optimizer" if act.__name__ == State.step.__name__ else "setup"
        before = self._peak = self._level
        act(self)
        return Change(self._peak - before, self._level - before)

    def open(self, entry: Entry, goes_on: int | None = None) -> int:  # noqa: ARG002
        what = _What(entry.lifetime, entry.kind, self.phase)
        held = _holding(entry.bytes // entry.number, what, self._size, entry.number)
        self._entries.append(held)
        self._change(Change(held, held))
        return len(self._entries)

    def close(self, number: int) -> None:
        self._level = self._level - self._entries[number - 1]

    def each(self, tensors: Tensors, acts: Sequence[Act]) -> None:
        if acts and tensors.sizes:
            self._change(self._together(tensors.blocks, tensors, acts))

    def _change(self, change: Change) -> None:
        self._peak = _more(self._peak, self._level + change.peak)
        self._level = self._level + change.net

    def _together(self, parts: Iterable[Alike | Block], tensors: Tensors, acts: Sequence[Act]) -> Change:
        """What comes of the acts for each tensor: of equal ones the first or the last has the peak."""
        peak = net = np.zeros(len(CATEGORIES))
        for part in parts:
            if isinstance(part, Block):
                once, times = self._together(part.parts, tensors, acts), len(part.repeats)
            else:
                once, times = self._of_one(part, tensors, acts), len(part.numbers)
            before_last = once.net * (times - 1) if once.net.sum() > 0 else 0
            peak = _more(peak, net + once.peak + before_last)
            net = net + once.net * times
        return Change(peak, net)

    def _of_one(self, part: Alike, tensors: Tensors, acts: Sequence[Act]) -> Change:
        peak = level = np.zeros(len(CATEGORIES))
        for act in acts:
            name = act.name, part.parameter.name
            if act.verb == "open":
                about = tensors.about(part.parameter, part.numel, act)
                self._named[name] = _What(about.lifetime, about.kind, self.phase)
            held = _holding(rounded(part.numel * DTYPE_BYTES[act.dtype]), self._named[name], self._size)
            level = level + held if act.verb == "open" else level - held
            peak = _more(peak, level)
        return Change(peak, level)


def _more(one: Any, other: Any) -> Any:
    """The one that is more in all, the first of equals; a meter begins with plain zeros."""
    return one if np.sum(one) >= np.sum(other) else other


@lru_cache(maxsize=256)
def _state_changes(key: StateKey, size: Callable[[Any], Any]) -> StateChanges:
    return changes_of(State(key.chunks, key.workload, key.stage), _Tally(size).during)


def _through(
    iteration: int, begun: Sequence[tuple[int, int, str]], moments: Sequence[Holding]
) -> tuple[tuple[float, ...], tuple[Holding, ...], tuple[Stretch, ...]]:
    """Positions, holdings and phases of an iteration, its moments thinned."""
    bounds = [(first, last, phase) for (first, of, phase), (last, *_) in pairwise([*begun, (len(moments), 0, "")])]
    mine = [bound for bound, (_, of, _) in zip(bounds, begun, strict=True) if of == iteration]
    start, end = mine[0][0], mine[-1][1]
    span = max(end - start, 1)
    stretches = list[Stretch]()
    for first, last, phase in mine:
        if stretches and stretches[-1].phase == phase:
            stretches[-1] = stretches[-1]._replace(end=(last - start) / span)
        elif last > first:
            stretches.append(Stretch(phase, (first - start) / span, (last - start) / span))
    numbers = _thinned([moment.sum() for moment in moments[start:end]])
    return (
        tuple(number / span for number in numbers),
        tuple(moments[start + number] for number in numbers),
        tuple(stretches),
    )


def _thinned(totals: Sequence[float]) -> list[int]:
    """Numbers of moments that keep the outline: the highest and the last of equal stretches."""
    length = max(1, 2 * len(totals) // _MOST_MOMENTS)
    kept = set[int]()
    for first in range(0, len(totals), length):
        stretch = range(first, min(first + length, len(totals)))
        kept |= {max(stretch, key=totals.__getitem__), stretch[-1]}
    return sorted(kept)
