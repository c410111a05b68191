"""What an estimate comes to, without its rows: the peak of every phase, in a few milliseconds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import Any, NamedTuple, Self

from labkit.ledger import rounded
from labkit.memory.book import Book, Entry
from labkit.memory.meter import Change, Integers, Meter, Numbers
from labkit.memory.schedule import Boundary
from labkit.memory.script import CALLERS
from labkit.memory.state import State
from labkit.memory.steps import run_steps
from labkit.memory.tape import DTYPE_BYTES
from labkit.memory.units import Chunk, chunks, loss_chunk
from labkit.memory.weights import Act, Alike, Block, Tensors
from labkit.workload import Batch, Model, Parallelism, Training, Workload
from labkit.workload.gpu import MIB
from labkit.workload.kernels import learned_positions

_LARGE = 10 * MIB
"""From here on an allocation gets a segment of its own (`kMinLargeAlloc`, c10/cuda/CUDACachingAllocator)."""
_SEGMENT_UNIT = 2 * MIB
TOKEN_COUNT = rounded(DTYPE_BYTES["int32"])
"""Bytes of a schedule (`total_num_tokens`)."""


def block(nbytes: Any) -> Any:
    """The block that a fresh segment gives for rounded bytes: a remainder of up to 1 MiB is not split off.

    What a cached block leaves over is not foreseen here; `labkit.allocator` plays that through.
    """
    remainder = -nbytes % _SEGMENT_UNIT
    return nbytes + remainder * ((nbytes >= _LARGE) & (remainder <= MIB))


class PhaseLevel(NamedTuple):
    """The peak of a phase of an iteration."""

    iteration: int
    phase: str
    bytes: Any


class Outline(NamedTuple):
    """One pipeline rank's bytes over two steps. Integers, or in a sweep arrays over lengths."""

    phases: list[PhaseLevel]
    between_steps_bytes: Any
    """Alive when the steady iteration begins."""
    retained_bytes: Any
    """What the steady forwards before the first backward leave for theirs."""
    set_up_bytes: Any
    """Alive when the first iteration begins."""

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a phase."""
        peak: int = self.peak_of(max)
        return peak

    def peak_of(self, larger: Callable[[Any, Any], Any]) -> Any:
        """The largest peak by what is the larger of two sizes."""
        return reduce(larger, (phase.bytes for phase in self.phases))


def tensor(nbytes: Any) -> Any:
    """A tensor as it is, rounded already."""
    return nbytes


def outline(workload: Workload, stage: int = 0, size: Callable[[Any], Any] = tensor) -> Outline:
    """Peaks of pipeline rank `stage` in bytes of tensors, or with `size=block` of allocator blocks.

    Agrees with the phases of `labkit.memory.estimate.estimate` to the byte, in tensors.
    """
    return outline_of(chunks(workload, stage), workload, stage, Integers(size))


def outline_of(
    model: list[Chunk], workload: Workload, stage: int, numbers: Numbers, loss: Chunk | None = None
) -> Outline:
    """The same of recorded units; in a sweep their bytes are arrays and `numbers` sums arrays.

    `loss` is what a caller outside the model runs, where that is not the workload's own.
    """
    key = StateKey.of(model, workload, stage)
    books = Levels(_state_changes(key, numbers.size), Meter(numbers), numbers.larger)
    run_steps(workload, stage, model, loss or loss_chunk(workload), books)
    books.end_phase()
    return Outline(
        [PhaseLevel(iteration, phase, peak) for (iteration, phase), peak in books.peaks.items()],
        books.between,
        books.retained,
        books.set_up_level,
    )


class Levels:
    """Keeps levels where `labkit.memory.writer.Writer` keeps rows."""

    def __init__(self, state: "StateChanges", meter: Meter, larger: Callable[[Any, Any], Any]) -> None:
        self.peaks: dict[tuple[int, str], Any] = {}
        self.between: Any = 0
        self.retained: Any = 0
        self.set_up_level: Any = 0
        self._state = state
        self._meter = meter
        self._larger = larger
        self._iteration = 0
        self._now: tuple[int, str] | None = None

    def end_phase(self) -> None:
        """Note the peak since the phase began."""
        if self._now is not None:
            peak = self._meter.peak
            self.peaks[self._now] = self._larger(self.peaks[self._now], peak) if self._now in self.peaks else peak

    def enter(self, iteration: int, phase: str) -> None:
        """A phase begins."""
        self.end_phase()
        if iteration != self._iteration:
            self.between, self.retained = self._meter.level, 0
            if not self._iteration:
                self.set_up_level = self._meter.level
        if phase == "backward" and (iteration, phase) not in self.peaks:
            kept = self._meter.kept_by_schedule.items()
            self.retained = self.retained + sum(nbytes for tensor, nbytes in kept if tensor.is_retained)
        self._meter.start_phase()
        self._iteration, self._now = iteration, (iteration, phase)

    def set_up(self) -> None:
        """Model, gradient buffers and optimizer are built."""
        self._meter.add(self._state.set_up)
        self._meter.taken(self._state.workspaces)

    def zero_gradients(self) -> None:
        """A step begins."""
        if self._iteration:
            self._meter.add(self._state.zero_gradients)

    def count_tokens(self, begins: bool) -> None:
        """A schedule begins or returns."""
        if begins:
            self._meter.add(Change(TOKEN_COUNT, TOKEN_COUNT))
            self.retained = self.retained + TOKEN_COUNT
        else:
            self._meter.add(Change(0, -TOKEN_COUNT))

    def keep(self, chunk: Chunk, tensor: Boundary) -> None:
        """Variables of the schedule keep a tensor."""
        self._meter.keep(chunk, tensor)

    def free(self, tensor: Boundary) -> None:
        """They let go of it."""
        self._meter.free(tensor)

    def forward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Forward pass of a model chunk."""
        left = self._meter.forward(chunk, index, microbatch)
        if self._now == (self._iteration, "forward") and (self._iteration, "backward") not in self.peaks:
            self.retained = self.retained + left

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""
        self._meter.backward(chunk, index, microbatch)

    def caller_lets_go(self, keys: Iterable[str] = CALLERS) -> None:
        """The caller of the model drops what it has kept."""
        self._meter.caller_lets_go(keys)

    def sync_gradients(self) -> None:
        """Gradients are reduced."""
        self._meter.add(self._state.sync_gradients)

    def step(self) -> None:
        """The optimizer steps."""
        self._meter.add(self._state.first_step if self._iteration == 1 else self._state.later_step)


class _Tally(Book):
    """Sums up what `State` opens and closes."""

    def __init__(self, size: Callable[[Any], Any]) -> None:
        super().__init__()
        self._size = size
        self._level = self._peak = 0
        self._opened: list[int] = []
        """Sizes of entries, by number from 1."""

    def during(self, act: Callable[[Book], None]) -> Change:
        """What `act` does to the level."""
        before, self._peak = self._level, self._level
        act(self)
        return Change(self._peak - before, self._level - before)

    def open(self, entry: Entry, goes_on: int | None = None) -> int:  # noqa: ARG002
        self._opened.append(self._size(entry.bytes // entry.number) * entry.number)
        self._level += self._opened[-1]
        self._peak = max(self._peak, self._level)
        return len(self._opened)

    def close(self, number: int) -> None:
        self._level -= self._opened[number - 1]

    def each(self, tensors: Tensors, acts: Sequence[Act]) -> None:
        if not acts or not tensors.sizes:
            return
        if len({act.verb for act in acts}) == 1:
            # All the way up or all the way down: their order does not matter.
            net = sum([self._total(tensors, act) for act in acts])
            change = Change(max(net, 0), net)
        else:
            change = _together(tensors.blocks, {numel: self._of_one(numel, acts) for numel in tensors.sizes})
        self._peak = max(self._peak, self._level + change.peak)
        self._level += change.net

    def _total(self, tensors: Tensors, act: Act) -> int:
        """What an act does to the level."""
        size, width = self._size, DTYPE_BYTES[act.dtype]
        total: int = sum([size(rounded(numel * width)) * count for numel, count in tensors.sizes.items()])
        return total if act.verb == "open" else -total

    def _of_one(self, numel: int, acts: Sequence[Act]) -> Change:
        """What the acts do to the level for a tensor."""
        peak = level = 0
        for verb, _, dtype, _ in acts:
            nbytes = self._size(rounded(numel * DTYPE_BYTES[dtype]))
            level += nbytes if verb == "open" else -nbytes
            peak = max(peak, level)
        return Change(peak, level)


def _together(parts: Iterable[Alike | Block], changes: Mapping[int, Change]) -> Change:
    """What comes of a change for each tensor, by its elements: the first or the last of equal ones has the peak."""
    peak = net = 0
    for part in parts:
        if isinstance(part, Block):
            once, times = _together(part.parts, changes), len(part.repeats)
        else:
            once, times = changes[part.numel], len(part.numbers)
        peak = max(peak, net + once.peak + max(once.net, 0) * (times - 1))
        net += once.net * times
    return Change(peak, net)


class StateChanges(NamedTuple):
    """What the acts of `State` do to the level."""

    set_up: Change
    sync_gradients: Change
    first_step: Change
    zero_gradients: Change
    """At the start of a step that is not the first."""
    later_step: Change
    workspaces: frozenset[str]
    """Keys of those that setup takes."""


@dataclass(frozen=True)
class StateKey:
    """What decides the static state of a rank, and what to make it of."""

    model: Model
    parallelism: Parallelism
    training: Training
    stage: int
    learned_positions: int
    """Rows of their table, which the batch decides."""
    batch: Batch | None
    """Which the `lora` runtime keeps on the device."""
    chunks: list[Chunk] = field(compare=False)
    workload: Workload = field(compare=False)

    @classmethod
    def of(cls, model: list[Chunk], workload: Workload, stage: int) -> Self:
        """Of a pipeline rank with these model chunks."""
        batch = None if workload.training.lora is None else workload.batch
        rest = workload.model, workload.parallelism, workload.training
        return cls(*rest, stage, learned_positions(workload), batch, model, workload)


@lru_cache(maxsize=256)
def _state_changes(key: StateKey, size: Callable[[Any], Any]) -> StateChanges:
    return changes_of(State(key.chunks, key.workload, key.stage), _Tally(size).during)


def changes_of(state: State, during: Callable[[Callable[[Book], None]], Change]) -> StateChanges:
    """The changes of a state; `during` says what one of its acts comes to."""
    # In the order they happen: what is opened in one is closed in another.
    set_up, sync_gradients, first_step, zero_gradients, later_step = map(
        during, (state.set_up, state.sync_gradients, state.step, state.zero_gradients, state.step)
    )
    return StateChanges(set_up, sync_gradients, first_step, zero_gradients, later_step, frozenset(state.workspaces))
