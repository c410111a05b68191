"""A unit of the model as a script: what its forward and its backward allocate and free, in order.

A unit is a stretch of the model between two points of the residual stream: the embedding, a layer's mixer, a layer's
MLP, the head, or a run of whole layers that one checkpoint covers. Units of one kind have one script, played once
(`labkit.memory.player`) however many layers there are; `labkit.memory.estimate` writes a ledger from scripts,
`labkit.memory.meter` sums them up without one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from labkit.memory.tape import Shape, Tape, Value

OPEN, CLOSE, HOLD, FOLLOW, LET_GO, ONCE, CACHE, LEAVE, TAKE, READ, KEEP, DONE = range(12)
"""What a step does.

OPEN slot, CLOSE slot: the pass allocates a tensor, or is done with it.
HOLD slot, key: the module's attribute `key` keeps the slot until a LET_GO of `key` in a later forward.
FOLLOW slot, key: the slot is kept too if `key` still keeps what this pass of the unit has put out.
LET_GO key: the module gives up what `key` has held since an earlier forward.
ONCE slot, key: allocated unless the process has `key` already; kept for good.
CACHE slot, key: an entry of the cache `key` of this unit's module, which all modules share (`Slot.entries` fit).
LEAVE slot: a weight's gradient stays for the chunk's first unit. TAKE slot: that unit is done with it.
READ slot, key: the slot is the batch's tensor `key`, which the forward step keeps until the chunk's forward returns.
KEEP slot, key: the unit keeps the batch's tensor `key` for its backward, if the chunk has read it. DONE slot, key: no
longer; whoever of the chunk is last frees it.
"""

CALLER, SENT_GRADIENT, OUTPUTS = "caller", "caller: sent gradient", "caller: outputs"
"""Keys of what the caller of the model holds: arguments of backward until it returns, the gradient sent until there is
the next one, outputs until all is done."""
CALLERS = frozenset((CALLER, SENT_GRADIENT, OUTPUTS))

GRAPH = "graph of the chunk"
"""Key of what autograd's graph of a chunk's pass keeps beyond its backward: in each forward the chunk's last unit with
this key lets go, at its LET_GO, of all that the units have held since the forward before."""

OF_CHUNK = "chunk: "
"""Begins the keys of what every model chunk of the process allocates once (a module outside the layers)."""
DUMMY = "dummy weight gradient"
"""Key of what the process allocates once for each shape."""


def once_key(key: str, chunk: int, shape: Shape) -> str:
    """The key within the process of what a unit of model chunk number `chunk` allocates once."""
    if key == DUMMY:
        return f"{key} {shape}"
    return f"{chunk} {key}" if key.startswith(OF_CHUNK) else key


INPUT, GRADIENT_OUT = 0, 1
"""Slots that the unit's neighbours allocate: the residual stream it reads, the gradient of the one it writes."""


class Slot(NamedTuple):
    """A tensor of a script."""

    source: int
    """Number of the tape's tensor whose sizes it has."""
    name: str
    recompute: str | None
    """Label of the region in whose replay it is made."""
    entries: int = 0
    """For a cache: how many fit."""
    constant: Value | None = None
    """What it is where no tape has it: a library's workspace."""
    made_of: tuple[int, ...] = ()
    """For what is made once or cached: slots that are alive only while it is made."""
    stream: int = 0
    """Whose block it takes."""

    def on(self, tape: Tape) -> Value:
        """The tensor, as a tape has it."""
        return self.constant or tape.tensors[self.source]


type CacheUse = tuple[tuple[str, int], ...] | None
"""For each cache how many modules still find room: they add an entry, the others evict the oldest for theirs. None: all
find their own."""
type Tensor = tuple[int, int]
"""Micro-batch, counted from the one at hand, and slot."""
type Steps = Sequence[int]
"""Slots as they are allocated, and `~slot` as they are freed."""


class Attributes(NamedTuple):
    """What the module attributes of a unit keep; equal units of a chunk keep alike."""

    held: tuple[tuple[str, Tensor], ...] = ()
    """By the attributes' keys."""
    done: frozenset[Tensor] = frozenset()
    """Those among them that their pass is done with."""
    over: frozenset[int] = frozenset()
    """Micro-batches among theirs whose backward has run."""

    @property
    def of_this_pass(self) -> "Attributes":
        """The same without what the graphs of earlier passes have kept."""
        held = tuple((key, tensor) for key, tensor in self.held if key != GRAPH or tensor[0] == 0)
        if len(held) == len(self.held):
            return self
        tensors = {tensor for _, tensor in held}
        return Attributes(held, self.done & tensors, self.over & {microbatch for microbatch, _ in tensors})

    def later(self, by: int) -> "Attributes":
        """The same seen from `by` micro-batches later."""
        if not self.held or not by:
            return self
        return Attributes(
            tuple((key, (microbatch - by, slot)) for key, (microbatch, slot) in self.held),
            frozenset((microbatch - by, slot) for microbatch, slot in self.done),
            frozenset(microbatch - by for microbatch in self.over),
        )


NO_ATTRIBUTES = Attributes()


class Cache(NamedTuple):
    """A cache that all modules share, as a script uses it."""

    entries: int
    """How many fit."""
    uses: int
    """Of a forward."""


class Passed(NamedTuple):
    """What a pass does to memory."""

    steps: Steps
    left: Sequence[int]
    """Slots among those it frees of micro-batches that were over before."""
    attributes: Attributes


@dataclass(eq=False)
class Script:
    """What one pass of a unit does, for all tapes of one form; steps are (code, slot, key)."""

    slots: list[Slot]
    forward: list[tuple[int, int, str]] = field(default_factory=list)
    backward: list[tuple[int, int, str]] = field(default_factory=list)
    output: int | None = None
    """Slot of the residual stream it writes; None: it ends in the loss, or hands on nothing."""
    output_held: bool = False
    """Its backward needs what it writes, and frees it."""
    input_held: bool = False
    """That is so of the unit before."""
    gradient_in: int | None = None
    """Slot of the gradient of the residual stream it reads."""
    gradient_out_held: bool = False
    """The unit behind holds the gradient it hands over, see `gradient_in_held`."""
    gradient_in_held: bool = False
    """A module attribute of this unit holds that gradient too: the unit before cannot overwrite it."""
    gradient_out_viewed: bool = False
    """The gradient that the unit behind hands over is a view, see `gradient_in_viewed`."""
    gradient_in_viewed: bool = False
    """That gradient is a view of a new tensor: the unit before cannot add another into it."""

    @cached_property
    def caches(self) -> dict[str, Cache]:
        """The caches that a forward uses."""
        keys = Counter(key for code, _, key in self.forward if code == CACHE)
        entries = {key: self.slots[slot].entries for code, slot, key in self.forward if code == CACHE}
        return {key: Cache(entries[key], uses) for key, uses in keys.items()}

    @cached_property
    def once(self) -> dict[bool, dict[int, str]]:
        """Slots of what a pass (False forward, True backward) allocates if the process has not yet, and their keys."""
        return {
            backward: {slot: key for code, slot, key in steps if code == ONCE}
            for backward, steps in ((False, self.forward), (True, self.backward))
        }

    @cached_property
    def reads(self) -> dict[str, int]:
        """Slots of the tensors of the batch that it reads, by name."""
        return {key: slot for code, slot, key in self.forward if code == READ}

    @cached_property
    def keeps(self) -> frozenset[str]:
        """Names of the batch's tensors that its backward needs."""
        return frozenset(key for code, _, key in self.forward if code == KEEP)

    @cached_property
    def _passed(self) -> dict[object, Passed]:
        return {}

    @cached_property
    def has_graph(self) -> bool:
        """Its forward holds something as `GRAPH`."""
        return any(code == HOLD and key == GRAPH for code, _, key in self.forward)

    def go(
        self,
        backward: bool,
        before: Attributes,
        opens: frozenset[int],
        cache: CacheUse,
        frees: frozenset[str],
        graphs: int = 0,
    ) -> Passed:
        """A pass.

        Args:
            backward: its backward, not its forward.
            before: what attributes keep.
            opens: slots of what the process allocates in it for the first time.
            cache: how it uses caches.
            frees: names of the batch's tensors that nothing keeps but this pass.
            graphs: of how many units it lets go of what they have held as `GRAPH`, each as much as this one.
        """
        key = backward, before, opens, cache, frees, graphs
        if key not in self._passed:
            run = _Run(self, before, graphs)
            run.go(self.backward if backward else self.forward, opens, cache, frees)
            after = run.after_backward() if backward else run.attributes
            self._passed[key] = Passed(run.steps, run.left, after)
        return self._passed[key]

    @cached_property
    def kept_by_caller(self) -> dict[bool, list[tuple[str, int]]]:
        """(key, slot) of what the caller keeps of a pass (False forward, True backward)."""
        return {
            backward: [(key, slot) for code, slot, key in steps if code == HOLD and key in CALLERS]
            for backward, steps in ((False, self.forward), (True, self.backward))
        }

    @cached_property
    def keeps_output(self) -> bool:
        """A module attribute keeps what the unit puts out (what a pipeline stage receives)."""
        return any(code == HOLD and slot == self.output for code, slot, _ in self.forward)

    @cached_property
    def freed_by_others(self) -> frozenset[int]:
        """Slots that the passes are done with and others keep: the caller, or the unit behind."""
        kept = {slot for each in self.kept_by_caller.values() for _, slot in each}
        return frozenset(kept | {GRADIENT_OUT} if self.gradient_out_held else kept)

    @cached_property
    def has_attributes(self) -> bool:
        """Module attributes keep something."""
        return any(code == HOLD and key not in CALLERS for code, _, key in (*self.forward, *self.backward))


class _Run:
    """Goes through a pass of a script, as `labkit.memory.writer.Writer` does with entries."""

    def __init__(self, script: Script, before: Attributes, graphs: int) -> None:
        self.steps: list[int] = []
        self.left: list[int] = []
        """Slots freed of micro-batches that were over."""
        self._script = script
        self._graphs = graphs
        self._held: dict[str, list[Tensor]] = {}
        self._holders: Counter[Tensor] = Counter()
        """Of each tensor, how many times attributes hold it."""
        for key, tensor in before.held:
            self._hold(key, tensor)
        self._done = set(before.done)
        self._over = before.over

    def go(
        self,
        steps: Sequence[tuple[int, int, str]],
        opens: frozenset[int],
        cache: CacheUse,
        frees: frozenset[str],
    ) -> None:
        """Forward or backward."""
        rooms = dict(cache or ())
        for code, slot, key in steps:
            if code == OPEN:
                self.steps.append(slot)
            elif code == ONCE and slot in opens:
                self._make(slot)
            elif code == TAKE or (code == DONE and key in frees):
                self.steps.append(~slot)
            elif code == CLOSE and slot not in self._script.freed_by_others:
                self._close(slot)
            elif code == HOLD and key not in CALLERS:
                self._hold(key, (0, slot))
            elif code == LET_GO and key == GRAPH:
                self._let_go_of_graphs()
            elif code == LET_GO:
                for tensor in self._no_longer_held(key):
                    self._let_go(tensor)
            elif code == CACHE and cache is not None:
                self._make(slot)
                rooms[key] -= 1
                if rooms[key] < 0:
                    self.steps.append(~slot)

    def _make(self, slot: int) -> None:
        made_of = self._script.slots[slot].made_of
        self.steps += [*made_of, slot, *(~part for part in made_of)]

    def after_backward(self) -> Attributes:
        """What attributes keep when the micro-batch is over; the unit before is done with the gradient it got."""
        if self._script.gradient_in is not None:
            self._done.add((0, self._script.gradient_in))
        self._over |= {0}
        return self.attributes

    @property
    def attributes(self) -> Attributes:
        """What attributes keep now."""
        held = tuple((key, tensor) for key in sorted(self._held) for tensor in self._held[key])
        if not held:
            return NO_ATTRIBUTES
        tensors = {tensor for _, tensor in held}
        over = self._over & {microbatch for microbatch, _ in tensors}
        return Attributes(held, frozenset(self._done & tensors), over)

    def _hold(self, key: str, tensor: Tensor) -> None:
        self._held.setdefault(key, []).append(tensor)
        self._holders[tensor] += 1

    def _close(self, slot: int) -> None:
        if (0, slot) in self._holders:
            self._done.add((0, slot))
        else:
            self.steps.append(~slot)

    def _no_longer_held(self, key: str) -> list[Tensor]:
        held = self._held.pop(key, [])
        self._holders -= Counter(held)
        return held

    def _let_go_of_graphs(self) -> None:
        if not self._graphs:
            return
        held = self._no_longer_held(GRAPH)
        for tensor in held:
            if tensor[0] == 0:
                self._hold(GRAPH, tensor)
        for tensor in held:
            if tensor[0]:
                self._let_go(tensor, self._graphs)

    def _let_go(self, tensor: Tensor, times: int = 1) -> None:
        if tensor in self._done and tensor not in self._holders:
            self._done.remove(tensor)
            self.steps += [~tensor[1]] * times
            if tensor[0] in self._over:
                self.left += [tensor[1]] * times
