"""Writes scripts into a book: passes of a rank's units, with what outlives them, micro-batch by micro-batch."""

from collections.abc import Iterable
from dataclasses import dataclass

from labkit.ledger import rounded
from labkit.memory.book import Book, Entry
from labkit.memory.schedule import Boundary
from labkit.memory.script import (
    CACHE,
    CALLERS,
    CLOSE,
    DONE,
    FOLLOW,
    GRADIENT_OUT,
    GRAPH,
    HOLD,
    INPUT,
    LEAVE,
    LET_GO,
    ONCE,
    OPEN,
    READ,
    SENT_GRADIENT,
    TAKE,
    Slot,
    once_key,
)
from labkit.memory.state import State
from labkit.memory.tape import DTYPE_BYTES
from labkit.memory.units import Chunk, Unit


@dataclass(slots=True)
class _Shared:
    """A tensor of the batch, and how many keep it: the forward step, units of the chunk."""

    number: int
    references: int = 1


class Writer:
    """One process: its state, its library workspaces, its caches, what its modules hold."""

    def __init__(self, book: Book, state: State) -> None:
        self._book = book
        self._state = state
        self._once: set[str] = set()
        self._caches: dict[str, dict[str, int]] = {}
        self._held: dict[tuple[int, int, str], list[int]] = {}
        """Entries that a module attribute keeps, by chunk, unit and key."""
        self._holds: dict[int, int] = {}
        """How many attributes keep an entry."""
        self._done: set[int] = set()
        """Held entries that their pass is done with."""
        self._frames: dict[tuple[int, int], list[list[int]]] = {}
        """Entries of each slot of each unit, by chunk and micro-batch."""
        self._batches: dict[tuple[int, int], dict[str, _Shared]] = {}
        """Tensors of the batch, by chunk and micro-batch, and name."""
        self._left: dict[int, int] = {}
        """Entry of the weight gradient that a chunk's last unit leaves to its first."""
        self._kept: dict[Boundary, int] = {}
        """Entries that variables of the schedule keep."""
        self._boundaries: dict[Boundary, int] = {}
        """The entry that a tensor at an end of a chunk has, or had last: variables and passes each make their own."""
        self._freed: set[Boundary] = set()
        """Those that variables have let go of since the last pass."""
        self._goes_on: int | None = None
        """The entry with which the first tensor of a pass goes on."""
        self._graphs: list[int] = []
        """Entries that the graph of the pass before has kept, until attributes lead to another."""
        self._ends_graphs = False
        """The unit that runs is the last that has such attributes."""
        self._token_count = -1
        self._handed_on = -1
        """Entry of the last chunk's output, or of its input's gradient."""
        self._modules: dict[tuple[int, str], str] = {}
        self._entries: dict[tuple[int, int], list[Entry | None]] = {}
        """Of each slot of each unit, by chunk and unit, once it was allocated."""

    def enter(self, iteration: int, phase: str) -> None:
        """A phase begins."""
        self._book.enter(iteration, phase)

    def set_up(self) -> None:
        """Build the model, the gradient buffers and the optimizer."""
        self._state.set_up(self._book)
        self._once |= self._state.workspaces

    def zero_gradients(self) -> None:
        """A step begins."""
        self._boundaries.clear()
        self._state.zero_gradients(self._book)

    def sync_gradients(self) -> None:
        """Gradients are reduced."""
        self._state.sync_gradients(self._book)

    def step(self) -> None:
        """The optimizer steps."""
        self._state.step(self._book)

    def count_tokens(self, begins: bool) -> None:
        """A schedule begins or returns."""
        if begins:
            name, nbytes = "total_num_tokens", rounded(DTYPE_BYTES["int32"])
            self._token_count = self._book.open(Entry(name, (), "int32", nbytes, "", "input"))
        else:
            self._book.close(self._token_count)

    def keep(self, chunk: Chunk, tensor: Boundary) -> None:
        """Variables of the schedule keep a tensor at an end of the chunk."""
        unit = chunk.units[0]
        value = unit.script.slots[unit.script.output or 0].on(unit.tape)
        name = tensor.kind.replace(" ", "_")
        entry = Entry(name, value.shape, value.dtype, value.bytes, "pipeline", "pipeline")
        self._kept[tensor] = self._boundaries[tensor] = self._book.open(entry, self._boundaries.get(tensor))

    def free(self, tensor: Boundary) -> None:
        """They let go of it."""
        self._book.close(self._kept.pop(tensor))
        self._freed.add(tensor)

    def forward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Forward pass of chunk `index`, from what the last chunk handed on where it begins in the middle."""
        frames = self._frames[index, microbatch] = []
        batch = self._batches[index, microbatch] = {}
        hidden = self._handed_on
        begins = Boundary("input", index, microbatch)
        self._take_over(begins)
        self._graphs = self._held.pop((index, -1, GRAPH), [])
        last = max((place for place, unit in enumerate(chunk.units) if unit.script.has_graph), default=-1)
        for position, unit in enumerate(chunk.units):
            frame = [0] * len(unit.script.slots)
            frame[INPUT] = hidden
            frames.append(frame)
            self._ends_graphs = position == last
            self._run(unit, unit.script.forward, frame, (index, position), batch)
            if unit.script.output is not None:
                hidden = frame[unit.script.output]
        self._handed_on = self._boundaries[Boundary("output", index, microbatch)] = hidden
        self._boundaries[begins] = frames[0][chunk.units[0].script.output or 0]
        for name in tuple(batch):
            self._done_with(batch, name)

    def backward(self, chunk: Chunk, index: int, microbatch: int) -> None:
        """Backward pass of that forward."""
        gradient = self._handed_on
        frames, batch = self._frames.pop((index, microbatch)), self._batches.pop((index, microbatch))
        self._take_over(Boundary("output gradient", index, microbatch))
        for position in range(len(chunk.units) - 1, -1, -1):
            unit, frame = chunk.units[position], frames[position]
            frame[GRADIENT_OUT] = gradient
            self._run(unit, unit.script.backward, frame, (index, position), batch)
            if unit.script.gradient_in is not None:
                gradient = frame[unit.script.gradient_in]
        self._handed_on = gradient
        sent = self._held.get((-1, -1, SENT_GRADIENT))
        if sent:
            self._boundaries[Boundary("input gradient", index, microbatch)] = sent[-1]

    def _take_over(self, tensor: Boundary) -> None:
        """The first tensor that the pass makes is this one, if variables have just let go of it."""
        self._goes_on = self._boundaries[tensor] if tensor in self._freed else None
        self._freed.clear()

    def caller_lets_go(self, keys: Iterable[str] = CALLERS) -> None:
        """The caller of the model drops what it has kept."""
        for key in keys:
            for number in self._held.pop(self._holder((-1, -1), key), ()):
                self._let_go(number)

    def _run(
        self,
        unit: Unit,
        steps: list[tuple[int, int, str]],
        frame: list[int],
        at: tuple[int, int],
        batch: dict[str, _Shared],
    ) -> None:
        slots = unit.script.slots
        entries = self._entries.setdefault(at, [None] * len(slots))
        for code, slot, key in steps:
            if code == OPEN:
                entry = entries[slot] = entries[slot] or self._entry(unit, slots[slot])
                goes_on, self._goes_on = self._goes_on, None
                frame[slot] = self._book.open(entry, goes_on)
            elif code == CLOSE:
                self._close(frame[slot])
            elif code == HOLD:
                self._hold(frame[slot], self._holder(at, key))
            elif code == FOLLOW:
                self._follow(frame[unit.script.output or 0], frame[slot], self._holder(at, key))
            elif code == LET_GO and key == GRAPH:
                self._let_go_of_graphs()
            elif code == LET_GO:
                for number in self._held.pop(self._holder(at, key), ()):
                    self._let_go(number)
            elif code == ONCE:
                self._open_once(unit, slots[slot], once_key(key, at[0], slots[slot].on(unit.tape).shape))
            elif code == CACHE:
                self._cache(unit, slots[slot], key)
            elif code in (LEAVE, TAKE):
                self._pass_gradient(code, frame[slot], at[0])
            else:
                self._share(code, frame[slot], batch, key)

    def _share(self, code: int, number: int, batch: dict[str, _Shared], name: str) -> None:
        """A unit reads a tensor of the batch, keeps it, or is done with it."""
        if code == READ:
            batch[name] = _Shared(number)
        elif code == DONE:
            self._done_with(batch, name)
        elif name in batch:
            batch[name].references += 1

    def _done_with(self, batch: dict[str, _Shared], name: str) -> None:
        """One less keeps a tensor of the batch, if the chunk has read it."""
        if name in batch:
            batch[name].references -= 1
            if not batch[name].references:
                self._book.close(batch.pop(name).number)

    def _pass_gradient(self, code: int, number: int, index: int) -> None:
        """A weight's gradient goes from the last unit of chunk `index` to its first."""
        if code == LEAVE:
            self._left[index] = number
        else:
            self._book.close(self._left.pop(index))

    def _holder(self, at: tuple[int, int], key: str) -> tuple[int, int, str]:
        if key == GRAPH:
            return at[0], -1, key
        return (-1, -1, key) if key in CALLERS else (*at, key)

    def _let_go_of_graphs(self) -> None:
        """The last attribute that led to the graph of the pass before leads to that of this one."""
        if self._ends_graphs:
            for number in self._graphs:
                self._let_go(number)
            self._graphs = []

    def _hold(self, number: int, holder: tuple[int, int, str]) -> None:
        self._held.setdefault(holder, []).append(number)
        self._holds[number] = self._holds.get(number, 0) + 1

    def _follow(self, leader: int, number: int, holder: tuple[int, int, str]) -> None:
        if leader in self._held.get(holder, ()):
            self._hold(number, holder)

    def _close(self, number: int) -> None:
        if number in self._holds:
            self._done.add(number)
        else:
            self._book.close(number)

    def _let_go(self, number: int) -> None:
        self._holds[number] -= 1
        if not self._holds[number]:
            del self._holds[number]
            if number in self._done:
                self._done.remove(number)
                self._book.close(number)

    def _cache(self, unit: Unit, slot: Slot, key: str) -> None:
        cache = self._caches.setdefault(key, {})
        module = self._module(unit, slot.on(unit.tape).module)
        if module in cache:
            return
        cache[module] = self._make(unit, slot)
        if len(cache) > slot.entries:
            self._book.close(cache.pop(next(iter(cache))))

    def _open_once(self, unit: Unit, slot: Slot, key: str) -> None:
        if key not in self._once:
            self._once.add(key)
            self._make(unit, slot)

    def _make(self, unit: Unit, slot: Slot) -> int:
        parts = [self._open(unit, unit.script.slots[part]) for part in slot.made_of]
        number = self._open(unit, slot, library=True)
        for part in parts:
            self._book.close(part)
        return number

    def _open(self, unit: Unit, slot: Slot, *, library: bool = False) -> int:
        goes_on, self._goes_on = self._goes_on, None
        return self._book.open(self._entry(unit, slot, library=library), goes_on)

    def _entry(self, unit: Unit, slot: Slot, *, library: bool = False) -> Entry:
        value = slot.on(unit.tape)
        return Entry(
            slot.name,
            value.shape,
            value.dtype,
            value.bytes,
            self._module(unit, value.module),
            kind="library" if library else value.kind,
            layer=None if value.layer is None else value.layer + unit.first_layer,
            lifetime="workspace" if library else "transient",
            certainty=value.certainty,
            recompute=slot.recompute,
            stream=slot.stream,
        )

    def _module(self, unit: Unit, module: str) -> str:
        """The module path with the layer's real number."""
        key = unit.first_layer, module
        if key not in self._modules:
            parts = module.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + unit.first_layer)
            self._modules[key] = ".".join(parts)
        return self._modules[key]
