"""The estimate's clock and entries: what a rank allocates and frees, in order; becomes ledger rows."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from labkit.ledger import Certainty, Lifetime, Moment, Row, rounded
from labkit.memory.tape import DTYPE_BYTES, Shape
from labkit.memory.weights import Act, Tensors

RECEIVED_GRADIENT = "output_gradient"
"""A tensor that a pipeline stage receives for its next backward: no forward pass leaves it."""


@dataclass(slots=True)
class Entry:
    """A tensor being written down; becomes a ledger row."""

    phase: str
    layer: int | None
    kind: str
    module: str
    tensor: str
    shape: Shape
    dtype: str
    bytes: int
    lifetime: Lifetime
    certainty: Certainty
    recompute: str | None
    born: int
    dies: int | None = None
    count: int = 1


class Book:
    """The clock, the phases and the entries of one rank."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.events: list[tuple[int, int]] = []
        """Allocations `(entry number, bytes)` and frees `(-entry number, 0)`, entry numbers from 1."""
        self.streams: list[int] = []
        """The stream of each entry's block: 0 but for what Megatron makes on a stream of its own."""
        self.moments: list[Moment] = []
        self.phase = ""
        self._clock = 0
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

    def open(
        self,
        tensor: str,
        shape: Shape,
        dtype: str,
        nbytes: int,
        *,
        module: str,
        kind: str,
        layer: int | None = None,
        lifetime: Lifetime = "transient",
        certainty: Certainty = "exact",
        recompute: str | None = None,
        count: int = 1,
        stream: int = 0,
        goes_on: int | None = None,
    ) -> int:
        """Write down a new tensor; returns its number.

        `goes_on`: an entry that is or was the same tensor by another name. Its block stays where it is.
        """
        self._clock += 1
        self.entries.append(
            Entry(
                self.phase,
                layer,
                kind,
                module,
                tensor,
                shape,
                dtype,
                nbytes,
                lifetime,
                certainty,
                recompute,
                self._clock,
                None,
                count,
            )
        )
        number = len(self.entries)
        if goes_on is None:
            self.events.append((number, nbytes))
        else:
            self._share(goes_on, number)
        self.streams.append(stream)
        return number

    def close(self, number: int) -> None:
        """The tensor is free from now on."""
        self._clock += 1
        self.entries[number - 1].dies = self._clock
        block = self._blocks.get(number, number)
        if block in self._users:
            self._users[block] -= 1
            if self._users[block]:
                return
        self.events.append((-block, 0))

    def _share(self, earlier: int, number: int) -> None:
        """A new entry has the block of an earlier one, which is not freed before it."""
        block = self._blocks[number] = self._blocks.get(earlier, earlier)
        users = self._users.setdefault(block, int(self.entries[earlier - 1].dies is None))
        if not users:
            freed = next(index for index in range(-1, -len(self.events) - 1, -1) if self.events[index][0] == -block)
            del self.events[freed]
        self._users[block] += 1

    def each(self, tensors: Tensors, acts: Sequence[Act]) -> None:
        """Do all the acts to one tensor after the other."""
        for parameter, numel in (each for block in tensors.blocks for each in block.tensors()):
            for act in acts:
                if act.verb == "close":
                    self.close(self._open.pop((act.name, parameter.name)))
                    continue
                about = tensors.about(parameter, numel, act)
                self._open[act.name, parameter.name] = self.open(
                    about.tensor,
                    about.shape,
                    act.dtype,
                    rounded(numel * DTYPE_BYTES[act.dtype]),
                    module=about.module,
                    kind=about.kind,
                    layer=about.layer,
                    lifetime=about.lifetime,
                )

    def levels(self, block_bytes: dict[int, int]) -> list[int]:
        """The sum of the live rows' blocks from each clock on, with the size of the block each entry got."""
        changes = [0] * (self._clock + 1)
        for number, entry in enumerate(self.entries, start=1):
            nbytes = block_bytes[self._blocks.get(number, number)]
            changes[entry.born] += nbytes
            if entry.dies is not None:
                changes[entry.dies] -= nbytes
        return list(accumulate(changes))

    def at(self, clock: int, block_bytes: dict[int, int]) -> Iterator[tuple[Entry, int]]:
        """The entries alive at a clock, each with its block's bytes."""
        for number, entry in enumerate(self.entries, start=1):
            if entry.born <= clock and (entry.dies is None or entry.dies > clock):
                yield entry, block_bytes[self._blocks.get(number, number)]

    def rows(self, rank: int, block_bytes: dict[int, int]) -> Iterator[Row]:
        """The ledger rows, with the size of the block each entry got.

        What a forward pass leaves for its backward is `retained`.
        """
        starts = [moment.clock for moment in self.moments if moment.phase == "backward"]
        for number, entry in enumerate(self.entries, start=1):
            if entry.phase == "forward" and entry.lifetime == "transient" and entry.tensor != RECEIVED_GRADIENT:
                backward = starts[bisect_left(starts, entry.born)]
                if entry.dies is None or entry.dies >= backward:
                    entry.lifetime = "retained"
            yield Row(
                rank,
                entry.phase,
                entry.layer,
                entry.kind,
                entry.module,
                entry.tensor,
                entry.shape,
                entry.dtype,
                entry.count,
                entry.bytes,
                block_bytes[self._blocks.get(number, number)],
                entry.lifetime,
                entry.certainty,
                entry.recompute,
                entry.born,
                entry.dies,
            )
