"""A unit of the model as a script: what its forward and its backward allocate and free, in order.

A unit is a stretch of the model between two points of the residual stream: the embedding, a layer's mixer, a layer's
MLP, the head, or a run of whole layers that one checkpoint covers. Units of one kind have one script, played once
(`labkit.memory.player`) however many layers there are; `labkit.memory.estimate` writes a ledger from scripts,
`labkit.memory.levels` sums them up without one.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from labkit.ledger import Certainty
from labkit.memory.tape import Parameter, Shape

OPEN, CLOSE, HOLD, LET_GO, ONCE, CACHE = range(6)
"""What a step does.

OPEN slot, CLOSE slot: the pass allocates a tensor, or is done with it.
HOLD slot, key: the module's attribute `key` keeps the slot until a LET_GO of `key` in a later forward.
LET_GO key: the module gives up what `key` has held since an earlier forward.
ONCE slot, key: allocated unless the process has `key` already; kept for good.
CACHE slot, key: an entry of the cache `key` of this unit's module, which all modules share (`Slot.entries` fit).
"""

CALLER = "caller"
"""Key of what the caller of the model holds until backward is done."""

INPUT, GRADIENT_OUT = 0, 1
"""Slots that the unit's neighbours allocate: the residual stream it reads, the gradient of the one it writes."""


class Slot(NamedTuple):
    """A tensor of a unit's script. Bytes may be an array over the lengths of a sweep."""

    name: str
    shape: Shape
    dtype: str
    bytes: int
    module: str
    kind: str
    layer: int | None
    """Counted from the unit's first layer."""
    certainty: Certainty
    recompute: str | None
    """Label of the region in whose replay it is made."""
    entries: int = 0
    """For a cache: how many fit."""


@dataclass(slots=True)
class Script:
    """What one pass of a unit does; steps are (code, slot, key)."""

    slots: list[Slot]
    forward: list[tuple[int, int, str]] = field(default_factory=list)
    backward: list[tuple[int, int, str]] = field(default_factory=list)
    output: int | None = None
    """Slot of the residual stream it writes; None: it ends in the loss, or hands on nothing."""
    gradient_in: int | None = None
    """Slot of the gradient of the residual stream it reads."""
    gradient_in_held: bool = False
    """A module attribute of this unit holds that gradient too: the unit before cannot overwrite it."""
    parameters: list[Parameter] = field(default_factory=list)
