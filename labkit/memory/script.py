"""A unit of the model as a script: what its forward and its backward allocate and free, in order.

A unit is a stretch of the model between two points of the residual stream: the embedding, a layer's mixer, a layer's
MLP, the head, or a run of whole layers that one checkpoint covers. Units of one kind have one script, played once
(`labkit.memory.player`) however many layers there are; `labkit.memory.estimate` writes a ledger from scripts,
`labkit.memory.levels` sums them up without one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from labkit.memory.tape import Shape, Tape, Value

OPEN, CLOSE, HOLD, FOLLOW, LET_GO, ONCE, CACHE, LEAVE, TAKE = range(9)
"""What a step does.

OPEN slot, CLOSE slot: the pass allocates a tensor, or is done with it.
HOLD slot, key: the module's attribute `key` keeps the slot until a LET_GO of `key` in a later forward.
FOLLOW slot, key: the slot is kept too if `key` still keeps what this pass of the unit has put out.
LET_GO key: the module gives up what `key` has held since an earlier forward.
ONCE slot, key: allocated unless the process has `key` already; kept for good.
CACHE slot, key: an entry of the cache `key` of this unit's module, which all modules share (`Slot.entries` fit).
LEAVE slot: a weight's gradient stays for the chunk's first unit. TAKE slot: that unit is done with it.
"""

CALLER, SENT_GRADIENT, OUTPUTS = "caller", "caller: sent gradient", "caller: outputs"
"""Keys of what the caller of the model holds: arguments of backward until it returns, the gradient sent until there is
the next one, outputs until all is done."""
CALLERS = frozenset((CALLER, SENT_GRADIENT, OUTPUTS))

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

    def on(self, tape: Tape) -> Value:
        """The tensor, as a tape has it."""
        return self.constant or tape.tensors[self.source]


CacheUse = Literal["hit", "grow", "churn"]
"""A module finds its entry; adds one; adds one and evicts the oldest."""
Earlier = Literal["none", "running", "over"]
"""How far an earlier micro-batch is whose tensors module attributes keep."""
type Steps = Sequence[int]
"""Slots as they are allocated, and `~slot` as they are freed."""


@dataclass(eq=False)
class Script:
    """What one pass of a unit does, for all tapes of one form; steps are (code, slot, key)."""

    slots: list[Slot]
    forward: list[tuple[int, int, str]] = field(default_factory=list)
    backward: list[tuple[int, int, str]] = field(default_factory=list)
    output: int | None = None
    """Slot of the residual stream it writes; None: it ends in the loss, or hands on nothing."""
    gradient_in: int | None = None
    """Slot of the gradient of the residual stream it reads."""
    gradient_out_held: bool = False
    """The unit behind holds the gradient it hands over, see `gradient_in_held`."""
    gradient_in_held: bool = False
    """A module attribute of this unit holds that gradient too: the unit before cannot overwrite it."""

    @cached_property
    def caches(self) -> list[tuple[str, int]]:
        """Cache and number of entries of each use of one in a forward."""
        return [(key, self.slots[slot].entries) for code, slot, key in self.forward if code == CACHE]

    @cached_property
    def once(self) -> dict[bool, dict[int, str]]:
        """Slots of what a pass (False forward, True backward) allocates if the process has not yet, and their keys."""
        return {
            backward: {slot: key for code, slot, key in steps if code == ONCE}
            for backward, steps in ((False, self.forward), (True, self.backward))
        }

    @cached_property
    def frees(self) -> dict[bool, dict[int, list[int]]]:
        """Slots that each step of a pass (False forward, True backward) frees when passes follow one another.

        What a LET_GO in forward frees is the last micro-batch's. Found by going through two micro-batches.
        """
        if not any(code in (HOLD, FOLLOW) for code, _, _ in (*self.forward, *self.backward)):
            behind = GRADIENT_OUT if self.gradient_out_held else None
            return {
                backward: {at: [slot] for at, (code, slot, _) in enumerate(steps) if code == CLOSE and slot != behind}
                for backward, steps in ((False, self.forward), (True, self.backward))
            }
        held: dict[str, list[tuple[int, int]]] = {}
        holds: Counter[tuple[int, int]] = Counter()
        done: set[tuple[int, int]] = set()
        found: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
        for microbatch in range(2):
            for backward, steps in ((False, self.forward), (True, self.backward)):
                for position, (code, slot, key) in enumerate(steps):
                    tensor = microbatch, slot
                    if code in (HOLD, FOLLOW):
                        held.setdefault(key, []).append(tensor)
                        holds[tensor] += 1
                    elif code == CLOSE:
                        kept = holds[tensor] or (self.gradient_out_held and slot == GRADIENT_OUT)
                        if kept:
                            done.add(tensor)
                        found[backward][position] = [] if kept else [slot]
                    elif code == LET_GO and key not in CALLERS:
                        let_go = held.pop(key, [])
                        holds.subtract(let_go)
                        found[backward][position] = [each[1] for each in let_go if not holds[each] and each in done]
            if self.gradient_in is not None:
                # The unit before is done with it.
                done.add((microbatch, self.gradient_in))
        return found

    @cached_property
    def _steps(self) -> dict[object, Steps]:
        return {}

    def forward_steps(self, earlier: Earlier, cache: CacheUse, opens: frozenset[int]) -> Steps:
        """What a forward pass does to memory; `opens`: slots of what the process allocates for the first time."""
        key = earlier, cache, opens
        if key not in self._steps:
            self._steps[key] = list(self._forward_steps(earlier, cache, opens))
        return self._steps[key]

    def backward_steps(self, let_go: bool, opens: frozenset[int]) -> Steps:
        """What a backward pass does; `let_go`: a later forward has taken the attributes that held its tensors."""
        key = let_go, opens
        if key not in self._steps:
            self._steps[key] = list(self._backward_steps(let_go, opens))
        return self._steps[key]

    def _forward_steps(self, earlier: Earlier, cache: CacheUse, opens: frozenset[int]) -> Iterator[int]:
        frees = self.frees[False]
        for position, (code, slot, _) in enumerate(self.forward):
            if code == OPEN or (code == ONCE and slot in opens):
                yield slot
            elif code == CLOSE or (code == LET_GO and earlier == "over"):
                for freed in frees.get(position, ()):
                    yield ~freed
            elif code == LET_GO and earlier == "running":
                # What its own forward is done with; the rest its backward still needs.
                for freed in frees.get(position, ()):
                    if freed in self.closed_in_forward:
                        yield ~freed
            elif code == CACHE and cache != "hit":
                yield slot
                if cache == "churn":
                    yield ~slot

    def _backward_steps(self, let_go: bool, opens: frozenset[int]) -> Iterator[int]:
        frees = self.frees[True]
        for position, (code, slot, _) in enumerate(self.backward):
            if code == OPEN or (code == ONCE and slot in opens):
                yield slot
            elif code == TAKE:
                yield ~slot
            elif code == CLOSE and let_go:
                if slot not in self.kept_behind:
                    yield ~slot
            elif code == CLOSE or (code == LET_GO and not let_go):
                for freed in frees.get(position, ()):
                    yield ~freed

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
    def kept_behind(self) -> frozenset[int]:
        """Slots that backward closes and others still keep: the caller, or the unit behind."""
        kept = {slot for _, slot in self.kept_by_caller[True]}
        return frozenset(kept | {GRADIENT_OUT} if self.gradient_out_held else kept)

    @cached_property
    def closed_in_forward(self) -> frozenset[int]:
        """Slots that the forward pass is done with."""
        return frozenset(slot for code, slot, _ in self.forward if code == CLOSE)
