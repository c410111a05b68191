"""The order of a pipeline rank's passes, and what variables of the schedule keep beside them.

Source: Megatron Core `pipeline_parallel/schedules.py`. Its variables are followed by name: a tensor lives as long as
one of them refers to it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

from labkit.workload import Workload

type Kind = Literal["input", "input gradient", "output", "output gradient"]
_KINDS: tuple[Kind, ...] = ("input", "input gradient", "output", "output gradient")


class Boundary(NamedTuple):
    """A tensor at an end of a model chunk, in one micro-batch: all of them have the size of the residual stream."""

    kind: Kind
    chunk: int
    microbatch: int

    @property
    def is_retained(self) -> bool:
        """A forward pass leaves it, or the next one has it: it is no gradient on its way."""
        return self.kind in ("input", "output")


class Pass(NamedTuple):
    """One pass of one model chunk, or the end of them all (`grad_sync`).

    `keep` and `free`: from here on, or no longer, only variables of the schedule keep `tensor`. While a pass of the
    chunk keeps it too, or a module's attribute, that is part of the chunk's units.
    """

    phase: Literal["forward", "backward", "keep", "free", "grad_sync"]
    chunk: int = 0
    microbatch: int = 0
    tensor: Boundary | None = None


def passes(workload: Workload, stage: int) -> tuple[Pass, ...]:
    """What happens in one step of pipeline rank `stage`, over `Workload.distinct_microbatches` micro-batches."""
    layout = workload.parallelism
    group = layout.microbatch_group if layout.vpp > 1 else 0
    return _passes(stage, layout.pp, layout.vpp, group, workload.distinct_microbatches)


@lru_cache(maxsize=256)
def _passes(stage: int, stages: int, chunks: int, group: int, microbatches: int) -> tuple[Pass, ...]:
    if chunks == 1:
        return tuple(_alternating(stage, stages, microbatches))
    table = _table(group, chunks, microbatches)
    return tuple(_Interleaved(stage, stages, chunks, group, table).passes())


class _Variables:
    """What the variables of a schedule refer to, and what of that only they keep alive."""

    def __init__(self) -> None:
        self._tensors: dict[str | Boundary, Boundary] = {}
        """By the variable's name; by the tensor itself where a list has it."""
        self._references: Counter[Boundary] = Counter()
        self._kept: set[Boundary] = set()
        self._touched: set[tuple[int, int]] = set()
        """Chunk and micro-batch of tensors that something has happened to since the last look."""
        self._under_way: set[tuple[int, int]] = set()
        """Chunk and micro-batch of forwards whose backward is not over."""
        self._latest: dict[int, int] = {}
        """Micro-batch of each chunk's latest forward, whose input the module keeps (`set_input_tensor`)."""
        self._over: set[tuple[int, int]] = set()
        self._sent: tuple[int, int] | None = None
        """Whose input's gradient `input_tensor_grad` is."""

    def forward(self, chunk: int, microbatch: int) -> Iterator[Pass]:
        """A forward pass."""
        self._under_way.add((chunk, microbatch))
        self._touched |= {(chunk, microbatch), (chunk, self._latest.get(chunk, microbatch))}
        self._latest[chunk] = microbatch
        yield from self.changes()
        yield Pass("forward", chunk, microbatch)

    def backward(self, chunk: int, microbatch: int, *, sends: bool) -> Iterator[Pass]:
        """Its backward pass: its output's gradient is an argument, its input's is then sent unless none was received.

        While it runs the caller of the model keeps the argument.
        """
        received = Boundary("input", chunk, microbatch), Boundary("output gradient", chunk, microbatch)
        for tensor in received:
            self._refer(tensor, None)  # the lists' entries
        gradients = {name: tensor for name, tensor in self._tensors.items() if tensor == received[1]}
        yield from self.assign(dict.fromkeys(gradients))
        yield Pass("backward", chunk, microbatch)
        self._under_way.remove((chunk, microbatch))
        self._over.add((chunk, microbatch))
        self._touched |= {(chunk, microbatch), self._sent or (chunk, microbatch)}
        self._sent = (chunk, microbatch) if sends else None
        yield from self.assign(gradients)

    def assign(self, values: Mapping[str | Boundary, Boundary | None]) -> Iterator[Pass]:
        """Names refer to other tensors, or to none."""
        for name, tensor in values.items():
            self._refer(name, tensor)
        yield from self.changes()

    def _refer(self, name: str | Boundary, tensor: Boundary | None) -> None:
        before = self._tensors.pop(name, None)
        if before is not None:
            self._references[before] -= 1
            self._touched.add(before[1:])
        if tensor is not None:
            self._tensors[name] = tensor
            self._references[tensor] += 1
            self._touched.add(tensor[1:])

    def changes(self) -> Iterator[Pass]:
        """What only variables keep since the last call, and what they do not any more."""
        looked_at = sorted(Boundary(kind, *run) for run in self._touched for kind in _KINDS)
        self._touched.clear()
        alone = {each for each in looked_at if self._is_referred(each) and not self._kept_elsewhere(each)}
        for each in looked_at:
            if each in alone and each not in self._kept:
                yield Pass("keep", each.chunk, each.microbatch, each)
        for each in looked_at:
            if each in self._kept and each not in alone:
                yield Pass("free", each.chunk, each.microbatch, each)
        self._kept.difference_update(looked_at)
        self._kept |= alone

    def _is_referred(self, tensor: Boundary) -> bool:
        if tensor.kind == "input gradient":
            # It goes where its tensor goes.
            return tensor[1:] in self._over and self._references[tensor._replace(kind="input")] > 0
        return self._references[tensor] > 0

    def _kept_elsewhere(self, tensor: Boundary) -> bool:
        run = tensor.chunk, tensor.microbatch
        if tensor.kind == "input":
            return run in self._under_way or self._latest.get(tensor.chunk) == tensor.microbatch
        if tensor.kind == "input gradient":
            return run == self._sent or self._latest[tensor.chunk] == tensor.microbatch
        return False

    def end(self) -> Iterator[Pass]:
        """The schedule reduces gradients, then returns."""
        yield Pass("grad_sync")
        for name in tuple(self._tensors):
            self._refer(name, None)
        yield from self.changes()


def _alternating(stage: int, stages: int, microbatches: int) -> Iterator[Pass]:
    """Warm-up forwards, one forward and one backward in turn, the backwards that are left (1F1B).

    Source: `forward_backward_pipelining_without_interleaving`. Of one that is over `output_tensor` still keeps the
    graph, and that the input, until `forward_step` has returned another.
    """
    variables, receives, sends = _Variables(), stage > 0, stage < stages - 1
    warmup = min(stages - stage - 1, microbatches)

    def tensor(kind: Kind, microbatch: int) -> Boundary | None:
        return Boundary(kind, 0, microbatch) if (receives if kind == "input" else sends) else None

    for forward in range(microbatches):
        yield from variables.assign({"input_tensor": tensor("input", forward)})
        yield from variables.forward(0, forward)
        if forward < warmup:
            continue
        backward = forward - warmup
        yield from variables.assign({"graph": None, "output": tensor("output", forward)})
        yield from variables.assign({"output_tensor_grad": tensor("output gradient", backward)})
        yield from variables.assign({"output": None})
        popped = tensor("input", backward)
        yield from variables.assign({"input_tensor": popped, "graph": popped})
        yield from variables.backward(0, backward, sends=receives)
    for backward in range(microbatches - warmup, microbatches):
        popped = tensor("input", backward)
        yield from variables.assign({"input_tensor": popped, "graph": popped})
        yield from variables.assign({"output_tensor_grad": tensor("output gradient", backward)})
        yield from variables.backward(0, backward, sends=receives)
    yield from variables.end()


class _Interleaved:
    """Model chunks in turn, with `overlap_p2p_comm` (`forward_backward_pipelining_with_interleaving`)."""

    def __init__(self, stage: int, stages: int, chunks: int, group: int, table: list[tuple[int, int]]) -> None:
        self._table = table
        """(micro-batch, model chunk) of each forward, in order."""
        self._warmup = min(2 * (stages - stage - 1) + (chunks - 1) * group, len(table))  # `get_pp_rank_microbatches`
        self._last_chunk = chunks - 1
        self._stages = stages
        self._first, self._last = stage == 0, stage == stages - 1
        ahead = group - stages + 1
        self._forward_buffers = ahead if self._first else 1
        self._backward_buffers = ahead if self._last else 1
        self._received: dict[tuple[Kind, int], int] = {}
        """How many tensors of a kind each chunk has received."""
        self._variables = _Variables()

    def passes(self) -> Iterator[Pass]:
        """All of a step."""
        assign, number = self._variables.assign, len(self._table)
        if not self._first:
            yield from self._receive("input", 0)
        for position in range(self._warmup):
            yield from self._forward(position)
            yield from self._receive_next("input", position, "input_tensor", last=number - 1)
            yield from assign({"output_tensor": None})
        if self._warmup < number and not self._last:
            yield from self._receive(
                "output gradient", self._last_chunk, f"bwd_recv_buffer {self._backward_buffers - 1}"
            )
        for position in range(self._warmup, number):
            yield from assign({"output_tensor": None})
            yield from self._forward(position)
            yield from self._receive_ahead("input", position, "fwd_recv_buffer", self._forward_buffers, last=number - 1)
            yield from self._backward(position - self._warmup)
            ahead = position - self._warmup
            yield from self._receive_ahead("output gradient", ahead, "bwd_recv_buffer", self._backward_buffers)
        yield from assign({"output_tensor": None})
        if self._warmup == number and not self._last:
            yield from self._receive("output gradient", self._last_chunk)
        for position in range(number - self._warmup, number):
            yield from self._backward(position)
            yield from self._receive_next("output gradient", position, "output_tensor_grad", last=number - 1)
        yield from self._variables.end()

    def _forward(self, position: int) -> Iterator[Pass]:
        microbatch, chunk = self._table[position]
        yield from self._variables.forward(chunk, microbatch)
        if not (self._last and chunk == self._last_chunk):
            yield from self._variables.assign({"output_tensor": Boundary("output", chunk, microbatch)})

    def _backward(self, position: int) -> Iterator[Pass]:
        microbatch, chunk = self._table[position]
        chunk = self._last_chunk - chunk
        yield from self._variables.backward(chunk, microbatch, sends=not (self._first and chunk == 0))

    def _receive_ahead(
        self, kind: Kind, position: int, buffer: str, slots: int, *, last: int | None = None
    ) -> Iterator[Pass]:
        """Receive into a ring of buffers, whose next one is emptied."""
        yield from self._receive_next(kind, position, f"{buffer} {position % slots}", last=last)
        if self._next_chunk(kind, position, last) is not None:
            yield from self._variables.assign({f"{buffer} {(position + 1) % slots}": None})

    def _receive_next(self, kind: Kind, position: int, variable: str, *, last: int | None) -> Iterator[Pass]:
        """What follows the pass at `position` is asked for, if anything is sent then; `variable` refers to it."""
        chunk = self._next_chunk(kind, position, last)
        if chunk is None:
            yield from self._variables.assign({variable: None})
        else:
            yield from self._receive(kind, chunk, variable)

    def _receive(self, kind: Kind, chunk: int, *variables: str) -> Iterator[Pass]:
        """A chunk's next tensor: a list (`input_tensors`, `output_tensor_grads`) keeps it until its backward."""
        microbatch = self._received.get((kind, chunk), 0)
        self._received[kind, chunk] = microbatch + 1
        tensor = Boundary(kind, chunk, microbatch)
        yield from self._variables.assign(dict.fromkeys((tensor, *variables), tensor))

    def _next_chunk(self, kind: Kind, position: int, last: int | None) -> int | None:
        """The chunk that the next tensor is for; None: nothing is received (`recv_tensor_from_previous_stage`).

        Chunks are counted from the end that sends, as backward's order is that of forward with them reversed.
        """
        if position == last:
            return None
        forward = kind == "input"
        if self._first if forward else self._last:
            # The stage that leads is ahead of the one that ends by all others.
            aligned = position - (self._stages - 1)
            if aligned < 0 or self._chunk(aligned) == self._last_chunk:
                return None
            chunk = self._chunk(aligned) + 1
        else:
            chunk = self._chunk(position + 1)
        return chunk if forward else self._last_chunk - chunk

    def _chunk(self, position: int) -> int:
        return self._table[position % len(self._table)][1]


def _table(group: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """(micro-batch, model chunk) of each forward, in order (`get_schedule_table`)."""
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]
