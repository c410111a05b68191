"""Plays a unit's tape forward and backward, with recompute, and writes down what is allocated and freed.

The rules are autograd's: a tensor lives while the forward pass, a Python variable or a saved reference needs it; an
operation's backward makes the gradients of its inputs, then lets go of its output's gradient and of what it saved;
gradients that meet are added in place where nothing else needs the one that came first (`InputBuffer::accumulate`).
"""

from collections.abc import Iterator, Sequence

from labkit.memory.library import workspaces
from labkit.memory.recompute import Region
from labkit.memory.script import (
    CACHE,
    CALLER,
    CLOSE,
    DONE,
    DUMMY,
    FOLLOW,
    GRADIENT_OUT,
    GRAPH,
    HOLD,
    INPUT,
    KEEP,
    LEAVE,
    LET_GO,
    OF_CHUNK,
    ONCE,
    OPEN,
    OUTPUTS,
    READ,
    SENT_GRADIENT,
    TAKE,
    Script,
    Slot,
    once_key,
)
from labkit.memory.tape import GRADIENTS, NOTHING, Free, Op, Tape, Value
from labkit.workload.training import WorkspaceBytes


class _Storage:
    """Memory with a reference count; `slot` is None while it is discarded."""

    __slots__ = ("held", "name", "references", "slot", "viewed")

    def __init__(self, slot: int, name: str = "") -> None:
        self.slot: int | None = slot
        self.references = 1
        self.held = 0
        """References that outlive the pass: module attributes and their graphs."""
        self.viewed = False
        """A gradient known by a view, whose base autograd does not see."""
        self.name = name
        """Of a tensor of the batch."""


def play(
    tape: Tape,
    found: list[Region],
    *,
    workspaces: WorkspaceBytes,
    fused_weight_gradients: bool,
    gradient_held: bool = False,
    gradient_viewed: bool = False,
    input_held: bool = False,
    differentiates: bool = True,
) -> Script:
    """The script of one forward and one backward pass of a unit.

    Args:
        tape: the unit's operations.
        found: its recompute regions, outer before inner.
        workspaces: sizes of the libraries' workspaces.
        fused_weight_gradients: weight gradients are added straight into the gradient buffer.
        gradient_held: the unit behind holds the gradient it hands over (`Script.gradient_in_held`).
        gradient_viewed: that gradient is a view, no other is added into it (`Script.gradient_in_viewed`).
        input_held: the unit before holds what it hands over (`Script.output_held`).
        differentiates: False under `torch.no_grad`: nothing is saved, and the backward pass is empty.
    """
    player = _Player(tape, found, workspaces, fused_weight_gradients=fused_weight_gradients)
    player.forward(keep=differentiates, input_held=input_held)
    if differentiates:
        player.backward(gradient_held=gradient_held, gradient_viewed=gradient_viewed)
    return player.script


def holds_output(
    tape: Tape, found: list[Region], *, workspaces: WorkspaceBytes, fused_weight_gradients: bool, differentiates: bool
) -> bool:
    """What the unit's script has as `Script.output_held`: its forward pass alone decides."""
    player = _Player(tape, found, workspaces, fused_weight_gradients=fused_weight_gradients)
    player.forward(keep=differentiates, input_held=False)
    return player.script.output_held


class _Player:
    def __init__(self, tape: Tape, found: list[Region], sizes: WorkspaceBytes, *, fused_weight_gradients: bool) -> None:
        self.script = Script([])
        self._workspaces = sizes
        self._steps = self.script.forward
        self._tape = tape
        self._fused_weight_gradients = fused_weight_gradients
        self._starting: dict[int, list[Region]] = {}
        """Regions by their first operation, outer before inner."""
        self._ending: dict[int, list[Region]] = {}
        """Checkpoints by their last operation, outer before inner."""
        self._consumed: dict[int, list[Region]] = {}
        """Discards by their consumer's last operation."""
        self._dropped: dict[int, list[Region]] = {}
        """Discards by their own last operation."""
        for region in found:
            self._starting.setdefault(region.first, []).append(region)
            table = self._ending if region.verb == "checkpoint" else self._consumed
            table.setdefault(region.until, []).append(region)
            if region.verb == "discard":
                self._dropped.setdefault(region.last, []).append(region)
        self._bounds = {bound for region in found for bound in (region.first, region.last, region.until)}
        """Operations where something happens to a region in backward."""
        in_graph = (at for at, op in enumerate(tape.ops) if op.node_keeps and self._innermost(at) is None)
        self._last_of_graph = max(in_graph, default=-1)
        """The last operation whose node keeps something in the chunk's graph."""
        self._order = tape.backward_order()
        self._ends: dict[int, list[Value]] = {}
        kept, batch = None if tape.exit is None else tape.exit.storage, set(tape.batch.values())
        made = [
            value
            for op in tape.ops
            for value in op.outputs
            if value.base is None and value is not kept and not op.caches and value not in batch
        ]
        for value in made if tape.entry is None else (tape.entry, *made):
            self._ends.setdefault(value.last_use, []).append(value)
        self._batch = {value: name for name, value in tape.batch.items()}
        self._storages: dict[Value, _Storage] = {}
        self._saved: dict[int, list[_Storage]] = {}
        self._inputs: dict[Region, list[_Storage]] = {}
        self._discarded: dict[Region, list[_Storage]] = {}
        self._restored: dict[int, list[_Storage]] = {}
        """What restored regions hold, by their first operation."""
        self._gradients: dict[Value, _Storage] = {}
        self._late: tuple[Op, list[int], list[_Storage]] | None = None
        """An operation whose backward ends with that of the norm before it, what that still holds, its gradients."""
        self._left: list[int] = []
        self._dummy = _Storage(-1)
        """The gradient of a weight whose true one is added straight into the gradient buffer."""
        self._taken = -1
        """Slot of the weight gradient that another unit has left."""
        self._once: set[str] = set()
        """Keys of what this script allocates once a process."""
        self._label: str | None = None
        self._stream = 0
        """Of the operation that runs."""
        self._replayed_from = -1
        """First operation of the region being replayed; -1 outside replays."""

    def forward(self, *, keep: bool, input_held: bool) -> None:
        """One micro-batch's forward pass; `keep` what its backward needs."""
        tape = self._tape
        for neighbour, name in ((tape.entry, "hidden_states"), (tape.exit, "gradient")):
            # Slots INPUT and GRADIENT_OUT, even where the unit has no such neighbour.
            if neighbour is None:
                self.script.slots.append(Slot(-1, name, None, constant=NOTHING))
            else:
                self._slot(neighbour, name)
        if tape.entry is not None:
            entry = self._storages[tape.entry] = _Storage(INPUT)
            entry.references += input_held
            self.script.input_held = input_held
        if tape.exit is not None:
            tape.exit.storage.last_use = len(tape.ops)
        for name, value in tape.batch.items():
            if value.made < 0:
                self._storages[value] = _Storage(self._slot(value, name), name)
        self._run(0, len(tape.ops) - 1, frozenset(), keep=keep)
        for name, value in tape.batch.items():
            storage = self._storages[value]
            storage.references -= 1  # the forward step's variable
            if storage.references and storage.slot is not None:
                self._steps.append((KEEP, storage.slot, name))
        if tape.exit is not None:
            output = self._storages[tape.exit.storage]
            self.script.output = output.slot
            self.script.output_held = output.references - output.held > 1
            output.references -= self.script.output_held  # its own reference: the unit that needs it longest frees it

    def backward(self, *, gradient_held: bool, gradient_viewed: bool) -> None:
        """The backward pass of that forward."""
        tape = self._tape
        self._steps = self.script.backward
        self.script.gradient_out_held, self.script.gradient_out_viewed = gradient_held, gradient_viewed
        if tape.exit is not None:
            gradient = self._gradients[tape.exit] = _Storage(GRADIENT_OUT)
            gradient.held, gradient.viewed = int(gradient_held), gradient_viewed
            gradient.references += gradient.held
        elif tape.ops:
            loss = tape.ops[-1].outputs[0]
            self._gradients[loss] = self._new(loss, "gradient")
            if tape.ops[-1].keeps_gradient:
                self._hold(self._gradients[loss], CALLER)
        if tape.takes is not None:
            self._taken = self._slot(tape.takes, f"{tape.takes.name} gradient")
            self._gradients[tape.takes] = _Storage(self._taken)
        self._reverse(0, len(tape.ops) - 1, frozenset())
        if tape.leaves is not None:
            self._steps.append((LEAVE, self._gradients[tape.leaves].slot or 0, ""))
        if tape.entry is None and not tape.ops[0].persists:
            # It received nothing: the schedule's variable holds no gradient of an input now.
            self._steps.append((LET_GO, -1, SENT_GRADIENT))
        if tape.entry is not None:
            gradient = self._gradients[tape.entry]
            self.script.gradient_in = gradient.slot
            self.script.gradient_in_held = gradient.held > 0
            self.script.gradient_in_viewed = gradient.viewed

    # -- forward -------------------------------------------------------------------------------------------------

    def _run(self, first: int, last: int, inside: frozenset[Region], *, keep: bool) -> None:
        """Run operations; `keep` what they save, except in regions entered here (not those already `inside`)."""
        index = first
        while index <= last:
            region = self._entered(index, inside) if index in self._starting else None
            if region is None:
                self._forward_op(index, keep)
                if index in self._consumed:
                    self._discard_after(index, keep)
                index += 1
                continue
            if keep:
                storages = {self._storages[value.storage]: None for value in self._region_values(region)}
                self._inputs[region] = [self._retain(storage) for storage in storages]
            self._run(region.first, region.last, inside | {region}, keep=False)
            if region.verb == "checkpoint":
                self._discard_after(region.last, keep)
            index = region.last + 1

    def _entered(self, index: int, inside: frozenset[Region]) -> Region | None:
        return next((region for region in self._starting[index] if region not in inside), None)

    def _region_values(self, region: Region) -> list[Value]:
        """Values the region reads that were made before it, each once."""
        found: dict[Value, None] = {}
        made: set[Value] = set()
        for op in self._tape.ops[region.first : region.last + 1]:
            found.update(dict.fromkeys(value for value in op.inputs if value.storage not in made))
            made.update(op.outputs)
        return list(found)

    def _forward_op(self, index: int, keep: bool) -> None:
        op = self._tape.ops[index]
        self._stream = op.stream
        self._libraries(op, backward=self._replayed_from >= 0)  # a replay runs in autograd's thread
        if op.caches:
            self._cache(op)
            return
        temporaries: list[tuple[str, int]] = []
        self._scratch(op.temporaries, temporaries)
        for value in op.outputs:
            if value.base is None:
                self._make(value)
        if keep:
            self._saved[index] = [self._retain(self._storages[value.storage]) for value in op.saves]
        self._set_attributes(index, keep)
        for _, slot in temporaries:
            self._steps.append((CLOSE, slot, ""))
        for value in self._ends.get(index, ()):
            # In a replay, what was made before the region belongs to the pass outside it.
            if value.made >= self._replayed_from:
                self._release(self._storages[value])

    def _set_attributes(self, index: int, keep: bool) -> None:
        """What outlives the pass: the module's attributes, instead of those of its last forward, and the caller's."""
        op = self._tape.ops[index]
        if op.persists:
            self._steps.append((LET_GO, -1, f"{index} graph"))
        if index == self._last_of_graph:
            self._steps.append((LET_GO, -1, GRAPH))
        for value in op.persists:
            key = f"{index} {value.name}"
            self._steps.append((LET_GO, -1, key))
            self._hold(self._storages[value], key)
        for storage, key in self._kept_by_nodes(index) if keep and op.node_keeps else ():
            self._hold(storage, key)
        for value in op.keeps:
            self._hold(self._storages[value.storage], OUTPUTS)

    def _kept_by_nodes(self, index: int) -> Iterator[tuple[_Storage, str]]:
        """What the operation's attributes lead to: its node in the graph, and those of the same graph before it.

        A checkpoint's replay has a graph of its own, everything else is in the chunk's.
        """
        region = self._innermost(index)
        if region is None:
            for value in self._tape.ops[index].node_keeps:
                yield self._storages[value], GRAPH
            return
        for before in range(region.first, index + 1):
            if self._innermost(before) is region:
                for value in self._tape.ops[before].node_keeps:
                    yield self._storages[value], f"{index} graph"

    def _make(self, value: Value) -> None:
        """Give an output its memory: its discarded storage again if it has one, else a new one."""
        storage = self._storages.get(value)
        if storage is not None and storage.slot is None and storage.references > storage.held:
            storage.slot = self._open(value, value.name)
        else:
            storage = self._storages[value] = self._new(value, value.name)
            storage.name = self._batch.get(value, "")
            if storage.name and storage.slot is not None:
                self._steps.append((READ, storage.slot, storage.name))

    def _cache(self, op: Op) -> None:
        for value in op.outputs:
            made_of = tuple([self._slot(each, each.name) for each in op.temporaries if isinstance(each, Value)])
            if op.layer is None:
                # One module of the model chunk: its one entry stays.
                self._open_once(f"{OF_CHUNK}{op.module} {value.name}", value, value.name, made_of)
                continue
            slot = self._slot(value, value.name)
            self.script.slots[slot] = self.script.slots[slot]._replace(entries=op.caches, made_of=made_of)
            self._steps.append((CACHE, slot, f"{op.name} {value.name}"))

    def _discard_after(self, index: int, keep: bool) -> None:
        """Drop the outputs of discard regions whose consumer has just run; its context holds on to them."""
        for region in self._consumed.get(index, ()) if keep else ():
            if region in self._inputs and region not in self._discarded:
                outputs = [self._storages[value] for value in self._region_outputs(region)]
                self._discarded[region] = [self._retain(storage) for storage in outputs]
                for storage in outputs:
                    self._drop(storage)

    def _region_outputs(self, region: Region) -> list[Value]:
        """Values made in the region and needed after it."""
        return [
            value
            for op in self._tape.ops[region.first : region.last + 1]
            for value in op.outputs
            if value.base is None and value.last_use > region.last
        ]

    # -- backward ------------------------------------------------------------------------------------------------

    def _reverse(self, first: int, last: int, inside: frozenset[Region]) -> None:
        """Backward of operations `last..first`, replaying regions not already `inside`.

        A reordered backward stays within the innermost region around it, so that a region is a stretch of both orders.
        """
        position = last
        while position >= first:
            index = self._order[position]
            if index not in self._bounds:
                self._backward_op(index)
                position -= 1
                continue
            for region in self._consumed.get(index, ()):
                if region in self._discarded and region not in inside:
                    self._restore(region, inside)
            ending = (region for region in self._ending.get(index, ()) if region not in inside)
            checkpoint = next((region for region in ending if region in self._inputs), None)
            if checkpoint is None:
                for region in self._dropped.get(index, ()):
                    if region.first in self._restored:
                        self._restored[region.first] += self._incoming(region)
                self._backward_op(index)
                for storage in self._restored.pop(index, ()):
                    self._release(storage)
                position -= 1
                continue
            within = inside | {checkpoint}
            incoming = self._incoming(checkpoint)
            held = [*incoming, *self._replay(checkpoint, within)]
            # The region's inputs are leaves, whose gradients meet those from outside once the checkpoint is done.
            values = [value for value in self._region_values(checkpoint) if value in self._gradients]
            outside = {value: self._gradients.pop(value) for value in values}
            self._reverse(checkpoint.first, checkpoint.last, within)
            self._copy_gradients(checkpoint, incoming)
            self._part_gradients(checkpoint)
            self._keep_graph(checkpoint)
            for storage in (*held, *self._inputs.pop(checkpoint)):
                self._release(storage)
            for value, gradient in outside.items():
                inside_gradient = self._gradients.get(value)
                self._gradients[value] = gradient
                if inside_gradient is not None:
                    self._accumulate(value, inside_gradient)
            position = checkpoint.first - 1

    def _copy_gradients(self, region: Region, incoming: list[_Storage]) -> None:
        """A leaf takes no gradient that others hold as it is, like one that a region hands straight on."""
        for value in self._region_values(region):
            gradient = self._gradients.get(value)
            if gradient in incoming:
                self._gradients[value] = self._new(value, f"{value.name} gradient")
                self._release(gradient)

    def _part_gradients(self, region: Region) -> None:
        """Give each view its own gradient where one tensor holds those of all the views of another.

        A checkpoint's inputs are leaves, and a leaf takes a gradient as it is only if it is laid out like itself
        (`accumulate_grad.h`, `obeys_layout_contract`); the parts of a packed gradient are not.
        """
        views: dict[Value, list[Value]] = {}
        for value in self._region_values(region):
            if value.base is not None and value in self._gradients:
                views.setdefault(value.base, []).append(value)
        for parts in views.values():
            packed = self._gradients[parts[0]]
            if len(parts) > 1 and all(self._gradients[part] is packed for part in parts):
                for part in parts:
                    self._gradients[part] = self._new(part, f"{part.name} gradient")
                    self._release(packed)

    def _keep_graph(self, region: Region) -> None:
        """Keep what module attributes made in a replay hold on to until their modules' next forward replaces them.

        Their autograd graph is the replay's, which holds the region's detached inputs and their gradients (MoE
        dispatchers: `self.probs`).
        """
        persisting = [index for index in range(region.first, region.last + 1) if self._persists_graph(index, region)]
        if not persisting:
            return
        leaves = [value for value in self._region_values(region) if value.differentiable]
        inputs = dict.fromkeys(self._storages[value.storage] for value in leaves)
        gradients = [self._gradients[value] for value in leaves if value in self._gradients]
        for storage in (*inputs, *gradients):
            for index in persisting:
                self._hold(storage, f"{index} graph")

    def _persists_graph(self, index: int, region: Region) -> bool:
        """An operation's attributes lead to a graph, that of the replay of `region`."""
        persists = self._tape.ops[index].persists
        return any(value.differentiable for value in persists) and self._innermost(index) is region

    def _innermost(self, index: int) -> Region | None:
        """The innermost checkpoint around an operation."""
        around = (region for regions in self._ending.values() for region in regions)
        return min(
            (each for each in around if each.first <= index <= each.last),
            key=lambda each: each.last - each.first,
            default=None,
        )

    def _replay(self, region: Region, within: frozenset[Region]) -> list[_Storage]:
        """Run a checkpointed region again, keeping what it saves; its outputs are held until its backward is done."""
        self._run_again(region, within)
        return [self._storages[value] for value in self._region_outputs(region)]

    def _incoming(self, region: Region) -> list[_Storage]:
        """Gradients of a region's outputs: arguments of its checkpoint function's backward, held until that returns."""
        values = (value for op in self._tape.ops[region.first : region.last + 1] for value in op.outputs)
        return [self._retain(self._gradients[value]) for value in values if value in self._gradients]

    def _restore(self, region: Region, inside: frozenset[Region]) -> None:
        """Run a region again to refill its discarded outputs; its own backward comes later.

        Until that is done the checkpoint's context holds its inputs and outputs (`CheckpointWithoutOutput._recompute`).
        """
        outputs = self._discarded.pop(region)
        self._run_again(region, inside | {region})
        self._restored.setdefault(region.first, []).extend((*outputs, *self._inputs.pop(region)))

    def _run_again(self, region: Region, within: frozenset[Region]) -> None:
        outer = self._label, self._replayed_from
        self._label, self._replayed_from = region.label, region.first
        self._run(region.first, region.last, within, keep=True)
        self._label, self._replayed_from = outer

    def _backward_op(self, index: int) -> None:
        op = self._tape.ops[index]
        self._stream = op.stream
        saved = self._saved.pop(index, [])
        flowing = [self._gradients.pop(value) for value in op.outputs if value in self._gradients]
        gradients: list[tuple[Value, _Storage]] = []
        if flowing or (op.outputs and not op.inputs and not op.caches):
            self._libraries(op, backward=True)
            gradients = self._backward_work(op, flowing)
        if not op.inputs and op.persists:
            flowing = [self._leaf_gradient(op, index, storage) for storage in flowing]
        late, self._late = self._late, None
        if late is not None:
            linear, left, gradients_out = late
            if linear.reduces_gradient:
                # Its variable takes the norm's gradient: a reduced one is free before the function returns.
                for storage in flowing:
                    self._release(storage)
                flowing = []
            self._end_backward(linear, left, [*flowing, *gradients_out])
        elif op.norms_first and flowing:
            self._late = op, self._left, flowing
        else:
            for storage in flowing:
                self._release(storage)
        for storage in saved:
            self._release(storage)
        # The engine adds up gradients when the node has let go of what it had (`Engine::evaluate_function`).
        for value, gradient in gradients:
            self._accumulate(value, gradient)

    def _backward_work(self, op: Op, flowing: list[_Storage]) -> list[tuple[Value, _Storage]]:
        """What an operation's backward allocates; returns the gradients of its inputs."""
        temporaries: list[tuple[str, int]] = []
        weights: list[int] = []
        listed, fused = op.backward_temporaries, self._fused_weight_gradients
        here = listed.index(GRADIENTS) if GRADIENTS in listed else len(listed)
        self._scratch(listed[:here], temporaries)
        gradients = [(each, self._gradient(op, each, flowing)) for each in op.inputs if each.differentiable]
        if op.weight_gradient is not None and not fused:
            weights = self._weight_gradients(op, op.weight_gradient)
        self._scratch(listed[here + 1 :], temporaries)
        left = [*(slot for _, slot in temporaries), *weights]
        if op.norms_first:
            self._left = left
        else:
            self._end_backward(op, left, [])
        return gradients

    def _end_backward(self, op: Op, left: list[int], flowing: list[_Storage]) -> None:
        """What a backward function still has when it returns."""
        if op.weight_gradient is not None and self._fused_weight_gradients:
            # Fused into the gradient buffer a weight's gradient leaves autograd a cached dummy of the weight's shape
            # (`transformer_engine/pytorch/module/base.py`, `get_dummy_wgrad`).
            self._open_once(DUMMY, op.weight_gradient, DUMMY)
        for slot in left:
            self._steps.append((CLOSE, slot, ""))
        for storage in flowing:
            self._release(storage)

    def _scratch(self, listed: Sequence[Value | Free], opened: list[tuple[str, int]]) -> None:
        """Open temporaries into `opened`, names and slots, and free them, in order."""
        for each in listed:
            if isinstance(each, Value):
                opened.append((each.name, self._open(each, each.name)))
            else:
                done = next(entry for entry in opened if entry[0] == each.name)
                opened.remove(done)
                self._steps.append((CLOSE, done[1], ""))

    def _leaf_gradient(self, op: Op, index: int, gradient: _Storage) -> _Storage:
        """A received tensor is a leaf: its gradient stays with it (`.grad`), a copy where others hold it.

        It is sent on from there; the variable of the schedule that held the last one is free then.
        """
        (leaf,) = op.persists
        if gradient.held:
            copy = self._new(leaf, f"{leaf.name} gradient")
            self._release(gradient)
            gradient = copy
        self._hold(gradient, f"{index} {leaf.name}", FOLLOW)
        self._steps.append((LET_GO, -1, SENT_GRADIENT))
        self._hold(gradient, SENT_GRADIENT)
        return gradient

    def _gradient(self, op: Op, value: Value, flowing: list[_Storage]) -> _Storage:
        if op.weight is not None and value.is_weight and self._fused_weight_gradients:
            return self._retain(self._dummy)
        if op.aliases and all(each is flowing[0] for each in flowing):
            return self._retain(flowing[0])
        if op.gradient_in is not None:
            return self._retain(self._storages[op.gradient_in.storage])
        gradient = self._new(value, f"{value.name} gradient")
        gradient.viewed = op.views_gradient
        return gradient

    def _accumulate(self, value: Value, gradient: _Storage) -> None:
        before = self._gradients.get(value)
        if before is None:
            self._gradients[value] = gradient
        elif before.references == 1 and not before.viewed:
            self._release(gradient)
        else:
            self._gradients[value] = self._new(value, f"{value.name} gradient")
            self._release(before)
            self._release(gradient)

    def _weight_gradients(self, op: Op, gradient: Value) -> list[int]:
        """Open a weight's gradient, a tensor until it is added; that of a `Tape.weight` flows on to it."""
        if any(value.is_weight for value in op.inputs):
            return []
        return [self._open(gradient, gradient.name) for _ in range(op.weights)]

    # -- storages ------------------------------------------------------------------------------------------------

    def _libraries(self, op: Op, *, backward: bool) -> None:
        if op.once is not None:
            self._open_once(op.once.name, op.once, op.once.name)
        if op.library is not None:
            for key, workspace in workspaces(op.library, self._workspaces, backward=backward):
                self._open_once(key, workspace, workspace.name)

    def _open_once(self, key: str, value: Value, name: str, made_of: tuple[int, ...] = ()) -> None:
        within = once_key(key, 0, value.shape)
        if within not in self._once:
            self._once.add(within)
            self._steps.append((ONCE, len(self.script.slots), key))
            constant = value if value.number < 0 else None
            slot = Slot(value.number, name, None, constant=constant, made_of=made_of, stream=self._stream)
            self.script.slots.append(slot)

    def _new(self, value: Value, name: str) -> _Storage:
        return _Storage(self._open(value, name))

    def _open(self, value: Value, name: str) -> int:
        slot = self._slot(value, name)
        self._steps.append((OPEN, slot, ""))
        return slot

    def _slot(self, value: Value, name: str) -> int:
        self.script.slots.append(Slot(value.number, name, self._label, stream=self._stream))
        return len(self.script.slots) - 1

    def _retain(self, storage: _Storage) -> _Storage:
        storage.references += 1
        return storage

    def _hold(self, storage: _Storage, key: str, code: int = HOLD) -> None:
        storage.references += 1
        storage.held += 1
        self._steps.append((code, -1 if storage.slot is None else storage.slot, key))

    def _release(self, storage: _Storage) -> None:
        storage.references -= 1
        if storage.references == storage.held:
            self._drop(storage)

    def _drop(self, storage: _Storage) -> None:
        if storage.slot is not None:
            code = DONE if storage.name else TAKE if storage.slot == self._taken else CLOSE
            self._steps.append((code, storage.slot, storage.name))
            storage.slot = None
