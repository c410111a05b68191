"""The estimate's clock and entries: what a rank allocates and frees, in order; becomes ledger rows."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from labkit.ledger import Certainty, Lifetime, Moment, Row, rounded
from labkit.memory.tape import DTYPE_BYTES, Shape
from labkit.memory.weights import Act, Tensors

RECEIVED_GRADIENT = "output_gradient"
"""A tensor that a pipeline stage receives for its next backward: no forward pass leaves it."""


class Entry(NamedTuple):
    """What is written down of a tensor; becomes a ledger row once it is known when it was born and died.

    Passes of one unit write the same entries again and again.
    """

    tensor: str
    shape: Shape
    dtype: str
    bytes: int
    module: str
    kind: str
    layer: int | None = None
    lifetime: Lifetime = "transient"
    certainty: Certainty = "exact"
    recompute: str | None = None
    number: int = 1
    """How many equal ones it stands for."""
    stream: int = 0


class Book:
    """The clock, the phases and the entries of one rank."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.phases: list[str] = []
        """In which each entry is born."""
        self.events: list[tuple[int, int]] = []
        """Allocations `(entry number, bytes)` and frees `(-entry number, 0)`, entry numbers from 1."""
        self.streams: list[int] = []
        """The stream of each entry's block: 0 but for what Megatron makes on a stream of its own."""
        self.moments: list[Moment] = []
        self.phase = ""
        self._clock = 0
        self._born: list[int] = []
        self._dies: list[int | None] = []
        self._blocks: dict[int, int] = {}
        """The entry that got the block, for entries that go on with one."""
        self._users: dict[int, int] = {}
        """How many entries are open on such a block."""
        self._open: dict[tuple[str, str], int] = {}
        """Entries of tensors of parameters, by the names of the tensor and of the parameter."""

    def enter(self, iteration: int, phase: str) -> None:
        """A phase begins."""
        self.phase = phase
        self.moments.append(Moment(self._clock + 1, iteration, phase))

    def open(self, entry: Entry, goes_on: int | None = None) -> int:
        """Write down a new tensor; returns its number.

        `goes_on`: an entry that is or was the same tensor by another name. Its block stays where it is.
        """
        self._clock += 1
        self.entries.append(entry)
        self.phases.append(self.phase)
        self.streams.append(entry.stream)
        self._born.append(self._clock)
        self._dies.append(None)
        number = len(self.entries)
        if goes_on is None:
            self.events.append((number, entry.bytes))
        else:
            self._share(goes_on, number)
        return number

    def close(self, number: int) -> None:
        """The tensor is free from now on."""
        self._clock += 1
        self._dies[number - 1] = self._clock
        block = self._blocks.get(number, number)
        if block in self._users:
            self._users[block] -= 1
            if self._users[block]:
                return
        self.events.append((-block, 0))

    def _share(self, earlier: int, number: int) -> None:
        """A new entry has the block of an earlier one, which is not freed before it."""
        block = self._blocks[number] = self._blocks.get(earlier, earlier)
        users = self._users.setdefault(block, int(self._dies[earlier - 1] is None))
        if not users:
            freed = next(index for index in range(-1, -len(self.events) - 1, -1) if self.events[index][0] == -block)
            del self.events[freed]
        self._users[block] += 1

    def each(self, tensors: Tensors, acts: Sequence[Act]) -> None:
        """Do all the acts to one tensor after the other."""
        for parameter, numel in tensors.each:
            for act in acts:
                if act.verb == "close":
                    self.close(self._open.pop((act.name, parameter.name)))
                    continue
                about = tensors.about(parameter, numel, act)
                nbytes = rounded(numel * DTYPE_BYTES[act.dtype])
                entry = Entry(
                    about.tensor, about.shape, act.dtype, nbytes, about.module, about.kind, about.layer, about.lifetime
                )
                self._open[act.name, parameter.name] = self.open(entry)

    def levels(self, block_bytes: dict[int, int]) -> list[int]:
        """The sum of the live rows' blocks from each clock on, with the size of the block each entry got."""
        changes = [0] * (self._clock + 1)
        for number, (born, dies) in enumerate(zip(self._born, self._dies, strict=True), start=1):
            nbytes = block_bytes[self._blocks.get(number, number)]
            changes[born] += nbytes
            if dies is not None:
                changes[dies] -= nbytes
        return list(accumulate(changes))

    def at(self, clock: int, block_bytes: dict[int, int]) -> Iterator[tuple[Entry, int]]:
        """The entries alive at a clock, each with its block's bytes."""
        for number, (born, dies) in enumerate(zip(self._born, self._dies, strict=True), start=1):
            if born <= clock and (dies is None or dies > clock):
                yield self.entries[number - 1], block_bytes[self._blocks.get(number, number)]

    def rows(self, rank: int, block_bytes: dict[int, int]) -> Iterator[Row]:
        """The ledger rows, with the size of the block each entry got.

        What a forward pass leaves for its backward is `retained`.
        """
        starts = [moment.clock for moment in self.moments if moment.phase == "backward"]
        written = zip(self.entries, self.phases, self._born, self._dies, strict=True)
        for number, (entry, phase, born, dies) in enumerate(written, start=1):
            lifetime = entry.lifetime
            if phase == "forward" and lifetime == "transient" and entry.tensor != RECEIVED_GRADIENT:
                backward = starts[bisect_left(starts, born)]
                if dies is None or dies >= backward:
                    lifetime = "retained"
            yield Row(
                rank,
                phase,
                entry.layer,
                entry.kind,
                entry.module,
                entry.tensor,
                entry.shape,
                entry.dtype,
                entry.number,
                entry.bytes,
                block_bytes[self._blocks.get(number, number)],
                lifetime,
                entry.certainty,
                entry.recompute,
                born,
                dies,
            )
