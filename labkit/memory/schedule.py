"""Plays a tape forward and backward, with recompute, and writes down when each tensor is alive.

The rules are autograd's: a tensor lives while the forward pass, a Python variable or a saved reference needs it; an
operation's backward makes the gradients of its inputs, then lets go of its output's gradient and of what it saved;
gradients that meet are added in place where one of them is free to take the sum (`InputBuffer::accumulate`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from labkit.ledger import Certainty, Lifetime, Moment, Row
from labkit.memory.recompute import Region
from labkit.memory.tape import Op, Shape, Tape, Value


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
        self.moments: list[Moment] = []
        self.phase = ""
        self._clock = 0

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
    ) -> int:
        """Write down a new tensor; returns its number."""
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
        self.events.append((number, nbytes))
        return number

    def close(self, number: int) -> None:
        """The tensor is free from now on."""
        self._clock += 1
        self.entries[number - 1].dies = self._clock
        self.events.append((-number, 0))

    def rows(self, rank: int, block_bytes: dict[int, int]) -> Iterator[Row]:
        """The ledger rows, with the size of the block each entry got.

        What a forward pass leaves for its backward is `retained`.
        """
        starts = [moment.clock for moment in self.moments if moment.phase == "backward"]
        for number, entry in enumerate(self.entries, start=1):
            if entry.phase == "forward" and entry.lifetime == "transient":
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
                block_bytes[number],
                entry.lifetime,
                entry.certainty,
                entry.recompute,
                entry.born,
                entry.dies,
            )


class _Storage:
    """Memory with a reference count; `number` is its open entry, None while it is discarded."""

    __slots__ = ("number", "references", "value")

    def __init__(self, number: int, value: Value | None) -> None:
        self.number: int | None = number
        self.references = 1
        self.value = value


type Library = Callable[[Op, bool], None]
"""Called before an operation runs, with whether it is its backward: opens the workspaces it needs."""


class Player:
    """Runs forward and backward passes of one tape into a `Book`."""

    def __init__(
        self, tape: Tape, found: list[Region], book: Book, library: Library, *, fused_weight_gradients: bool
    ) -> None:
        self._tape = tape
        self._book = book
        self._library = library
        self._fused_weight_gradients = fused_weight_gradients
        self._starting: dict[int, list[Region]] = {}
        """Regions by their first operation, outer before inner."""
        self._ending: dict[int, list[Region]] = {}
        """Checkpoints by their last operation, outer before inner."""
        self._consumed: dict[int, list[Region]] = {}
        """Discards by their consumer's last operation."""
        for region in found:
            self._starting.setdefault(region.first, []).append(region)
            table = self._ending if region.verb == "checkpoint" else self._consumed
            table.setdefault(region.until, []).append(region)
        self._order = tape.backward_order()
        self._ends: dict[int, list[Value]] = {}
        for op in tape.ops:
            for value in op.outputs:
                if value.base is None:
                    self._ends.setdefault(value.last_use, []).append(value)
        self._storages: dict[Value, _Storage] = {}
        self._saved: dict[int, list[_Storage]] = {}
        self._inputs: dict[Region, list[_Storage]] = {}
        self._discarded: dict[Region, list[_Storage]] = {}
        self._restored: dict[int, list[_Storage]] = {}
        """What restored regions hold, by their first operation."""
        self._gradients: dict[Value, _Storage] = {}
        self._attributes: dict[tuple[int, str], _Storage] = {}
        self._graphs: dict[int, list[_Storage]] = {}
        """What a persisting operation's attribute keeps alive through its autograd graph."""
        self._caches: dict[str, dict[int, list[_Storage]]] = {}
        self._dummy_gradients: set[Shape] = set()
        self._label: str | None = None
        self._replayed_from = 0
        """First operation of the region being replayed; 0 outside replays."""

    def forward(self) -> None:
        """One micro-batch's forward pass."""
        self._run(0, len(self._tape.ops) - 1, frozenset(), keep=True)

    def backward(self) -> None:
        """The backward pass of the last forward."""
        loss = self._tape.ops[-1].outputs[0]
        self._gradients[loss] = self._new(loss, "gradient")
        self._reverse(0, len(self._tape.ops) - 1, frozenset())

    # -- forward -------------------------------------------------------------------------------------------------

    def _run(self, first: int, last: int, inside: frozenset[Region], *, keep: bool) -> None:
        """Run operations; `keep` what they save, except in regions entered here (not those already `inside`)."""
        index = first
        while index <= last:
            region = self._entered(index, inside)
            if region is None:
                self._forward_op(index, keep)
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
        return next((region for region in self._starting.get(index, ()) if region not in inside), None)

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
        self._library(op, False)
        if op.caches:
            self._cache(index, op)
            return
        for value in op.outputs:
            if value.base is None:
                self._make(value)
        temporaries = [
            self._book.open(
                buffer.name, buffer.shape, buffer.dtype, buffer.bytes, module=op.module, kind=op.kind, layer=op.layer
            )
            for buffer in op.temporaries
        ]
        if keep:
            self._saved[index] = [self._retain(self._storages[value.storage]) for value in op.saves]
        for storage in self._graphs.pop(index, ()):
            self._release(storage)
        for value in op.persists:
            key = (index, value.name)
            before = self._attributes.get(key)
            self._attributes[key] = self._retain(self._storages[value])
            if before is not None:
                self._release(before)
        for number in temporaries:
            self._book.close(number)
        for value in self._ends.get(index, ()):
            # In a replay, what was made before the region belongs to the pass outside it.
            if value.made >= self._replayed_from:
                self._release(self._storages[value])

    def _make(self, value: Value) -> None:
        """Give an output its memory: its discarded storage again if it has one, else a new one."""
        storage = self._storages.get(value)
        if storage is not None and storage.number is None and storage.references > 0:
            storage.number = self._open(value, value.name)
            storage.references += 1
        else:
            self._storages[value] = self._new(value, value.name)

    def _cache(self, index: int, op: Op) -> None:
        cache = self._caches.setdefault(op.name, {})
        if index in cache:
            return
        cache[index] = [self._new(value, value.name) for value in op.outputs]
        for storage in cache[index]:
            entry = self._book.entries[(storage.number or 0) - 1]
            entry.lifetime, entry.kind = "workspace", "library"
        if len(cache) > op.caches:
            for storage in cache.pop(next(iter(cache))):
                self._release(storage)

    def _discard_after(self, index: int, keep: bool) -> None:
        """Drop the outputs of discard regions whose consumer has just run."""
        for region in self._consumed.get(index, ()) if keep else ():
            if region in self._inputs and region not in self._discarded:
                self._discarded[region] = [self._storages[value] for value in self._region_outputs(region)]
                for storage in self._discarded[region]:
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
            for region in self._consumed.get(index, ()):
                if region in self._discarded and region not in inside:
                    self._restore(region, inside)
            ending = (region for region in self._ending.get(index, ()) if region not in inside)
            checkpoint = next((region for region in ending if region in self._inputs), None)
            if checkpoint is None:
                self._backward_op(index)
                for storage in self._restored.pop(index, ()):
                    self._release(storage)
                position -= 1
                continue
            within = inside | {checkpoint}
            held = self._replay(checkpoint, within)
            self._reverse(checkpoint.first, checkpoint.last, within)
            self._keep_graph(checkpoint)
            for storage in (*held, *self._inputs.pop(checkpoint)):
                self._release(storage)
            position = checkpoint.first - 1

    def _keep_graph(self, region: Region) -> None:
        """Keep what a module attribute made in a replay holds on to until the module's next forward replaces it.

        Its autograd graph is the replay's, which holds the region's detached inputs and their gradients (MoE
        dispatchers: `self.probs`).
        """
        ops = self._tape.ops
        for index in range(region.first, region.last + 1):
            if any(value.differentiable for value in ops[index].persists):
                gradients = [
                    self._gradients[value] for value in self._region_values(region) if value in self._gradients
                ]
                kept = [*self._inputs[region], *gradients]
                self._graphs[index] = [self._retain(storage) for storage in kept]
                return

    def _replay(self, region: Region, within: frozenset[Region]) -> list[_Storage]:
        """Run a checkpointed region again, keeping what it saves; its outputs are held until its backward is done."""
        self._run_again(region, within)
        return [self._storages[value] for value in self._region_outputs(region)]

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
        saved = self._saved.pop(index, [])
        flowing = [self._gradients.pop(value) for value in op.outputs if value in self._gradients]
        if flowing or (op.outputs and not op.inputs and not op.caches):
            self._library(op, True)
            temporaries = [
                self._book.open(
                    buffer.name,
                    buffer.shape,
                    buffer.dtype,
                    buffer.bytes,
                    module=op.module,
                    kind=op.kind,
                    layer=op.layer,
                    recompute=self._label,
                )
                for buffer in op.backward_temporaries
            ]
            if op.weight is not None:
                temporaries += self._weight_gradient(op)
            for value in op.inputs:
                if value.differentiable:
                    self._accumulate(value, self._gradient(op, value, flowing))
            for number in temporaries:
                self._book.close(number)
        for storage in (*flowing, *saved):
            self._release(storage)

    def _gradient(self, op: Op, value: Value, flowing: list[_Storage]) -> _Storage:
        if op.aliases:
            return self._retain(flowing[0])
        if op.gradient_in is not None:
            return self._retain(self._storages[op.gradient_in.storage])
        return self._new(value, f"{value.name} gradient")

    def _accumulate(self, value: Value, gradient: _Storage) -> None:
        before = self._gradients.get(value)
        if before is None:
            self._gradients[value] = gradient
        elif before.references == 1:
            self._release(gradient)
        elif gradient.references == 1:
            self._gradients[value] = gradient
            self._release(before)
        else:
            self._gradients[value] = self._new(value, f"{value.name} gradient")
            self._release(before)
            self._release(gradient)

    def _weight_gradient(self, op: Op) -> list[int]:
        """Open what a weight's gradient takes.

        Fused into the gradient buffer it leaves autograd a cached dummy of the weight's shape
        (`transformer_engine/pytorch/module/base.py`, `get_dummy_wgrad`); else it is a tensor until it is added.
        """
        shape = op.weight or ()
        dtype = self._tape.dtype
        nbytes = self._tape.buffer("", shape).bytes
        if not self._fused_weight_gradients:
            return [
                self._book.open("weight gradient", shape, dtype, nbytes, module=op.module, kind=op.kind, layer=op.layer)
                for _ in range(op.weights)
            ]
        if shape not in self._dummy_gradients:
            self._dummy_gradients.add(shape)
            self._book.open(
                "dummy weight gradient", shape, dtype, nbytes, module=op.module, kind="library", lifetime="workspace"
            )
        return []

    # -- storages ------------------------------------------------------------------------------------------------

    def _new(self, value: Value, name: str) -> _Storage:
        return _Storage(self._open(value, name), value)

    def _open(self, value: Value, name: str) -> int:
        return self._book.open(
            name,
            value.shape,
            value.dtype,
            value.bytes,
            module=value.module,
            kind=value.kind,
            layer=value.layer,
            certainty="allowance" if value.routed else "exact",
            recompute=self._label,
        )

    def _retain(self, storage: _Storage) -> _Storage:
        storage.references += 1
        return storage

    def _release(self, storage: _Storage) -> None:
        storage.references -= 1
        if storage.references == 0:
            self._drop(storage)

    def _drop(self, storage: _Storage) -> None:
        if storage.number is not None:
            self._book.close(storage.number)
            storage.number = None
