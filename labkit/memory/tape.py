"""A layer as data: the operations it runs, what each one saves for backward, and what it holds while it runs.

Layer functions (`labkit.memory.layers`) record operations on a `Tape` in the order Megatron Core runs them. The
tape knows nothing of recompute or of time: `labkit.memory.recompute` chooses regions of it, and
`labkit.memory.player` plays it forward and backward to find what is alive when.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from labkit.ledger import Certainty, rounded
from labkit.workload.training import FLOAT_BYTES

DTYPE_BYTES = {**FLOAT_BYTES, "fp64": 8, "int64": 8, "int32": 4, "int16": 2, "uint8": 1, "bool": 1}

type Shape = tuple[int, ...]
Library = Literal["te_gemm", "te_grouped_gemm", "aten_matmul", "aten_matmul_on_side_stream"]
"""Whose workspace an operation needs: Transformer Engine's GEMM or grouped GEMM, PyTorch's cuBLAS handle
(a workspace for each stream)."""


@dataclass(slots=True, eq=False)
class Value:
    """A tensor of the forward pass."""

    name: str
    shape: Shape
    dtype: str
    module: str
    layer: int | None
    kind: str
    bytes: int
    """Of the tensor, and so of its gradient; rounded to the allocator's unit."""
    differentiable: bool
    certainty: Certainty
    """Whether its size is exact, or rests on where the router sends tokens (`Tape.routed`)."""
    base: "Value | None" = None
    """The tensor whose storage it is a view of; None where it has its own."""
    made: int = -1
    """Index of the operation it is an output of."""
    last_use: int = -1
    """Index of the last forward operation that needs its storage (set by uses and holds)."""
    number: int = -1
    """Its position among the tape's tensors; -1 if it is on no tape (a library's workspace)."""

    @property
    def is_weight(self) -> bool:
        """See `Tape.weight`."""
        return self.base is self

    @property
    def storage(self) -> "Value":
        """The value that owns its storage: itself unless it is a view."""
        return self if self.base is None else self.base

    @property
    def is_part(self) -> bool:
        """It is a view of less than its storage."""
        # In a sweep bytes are arrays: views are parts at every length or at none.
        smaller: Any = self.bytes != self.storage.bytes
        return smaller if isinstance(smaller, bool) else bool(smaller.all())


NOTHING = Value("", (), "uint8", "", None, "", 0, differentiable=False, certainty="exact")
"""A tensor of no bytes."""


class Buffer(NamedTuple):
    """A tensor an operation holds only while it runs."""

    name: str
    shape: Shape
    dtype: str

    @property
    def bytes(self) -> int:
        """Rounded to the allocator's unit."""
        return rounded(prod(self.shape) * DTYPE_BYTES[self.dtype])


SIDE_STREAM = 2
"""The stream of what runs beside the main one, whose blocks are its own (1 is that of gradient buffers)."""


class Free(NamedTuple):
    """In a list of temporaries: from here on the one of this name is free."""

    name: str


GRADIENTS = Free("")
"""In a list of backward's temporaries: here the gradients of inputs and weights are made; left out, after all."""


@dataclass(slots=True, eq=False)
class Op:
    """One operation, forward and backward."""

    name: str
    module: str
    """With markers (see `Tape.path`)."""
    module_path: str
    layer: int | None
    kind: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    saves: tuple[Value, ...]
    """Inputs and outputs kept until its backward is done."""
    temporaries: tuple[Value | Free, ...]
    backward_temporaries: tuple[Value | Free, ...]
    aliases: bool
    """Backward hands its output's gradient on as the inputs' gradient: no new tensor."""
    norms_first: bool
    """A linear with the norm before it: one function, whose backward ends with the norm's."""
    views_gradient: bool
    """Backward returns views of new tensors: no other gradient is added into them."""
    gradient_in: Value | None
    """Saved value whose storage backward overwrites with the gradient of the first input."""
    weight: Shape | None
    """Shape of the weight whose gradient its backward makes."""
    weights: int
    """Number of such weights: local experts of a grouped GEMM."""
    weight_gradient: Value | None
    """The gradient of one."""
    library: Library | None
    flops: int
    communicated_bytes: int
    persists: tuple[Value, ...]
    """Values kept as module attributes until the module's next forward replaces them."""
    node_keeps: tuple[Value, ...]
    """What its autograd node has as Python attributes: kept as long as what `persists`, which leads to the node, or
    what does of a later operation in the same graph."""
    caches: int
    """Its outputs go to a cache of this many entries shared by all layers; 0: no cache."""
    once: Value | None
    """What the process allocates when such an operation first runs, and keeps; known by its name."""
    keeps: tuple[Value, ...]
    """Tensors that the caller of the model keeps until backward is done."""
    keeps_gradient: bool
    """The caller keeps the gradient it hands to the backward pass until that returns."""
    stream: int
    """Whose blocks it takes, forward and backward."""

    @property
    def reduces_gradient(self) -> bool:
        """Its backward makes the first input's gradient out of a temporary of all tokens."""
        return GRADIENTS in self.backward_temporaries


class Parameter(NamedTuple):
    """A weight of this rank, or several equal ones in a row that differ in the number at the end of their names."""

    name: str
    shape: Shape
    layer: int | None
    expert: bool
    """Reduced over the expert data-parallel group (`param.allreduce` is False)."""
    replicated: bool
    """Computed on a sequence shard but not sharded itself: its gradient is summed over the tensor-parallel group
    after backward (`param.sequence_parallel`, `finalize_model_grads`)."""
    trainable: bool = True
    """It has a gradient; frozen parameters are weights alone."""
    shared_embedding: bool = False
    """Another pipeline stage has it too (`param.shared_embedding`)."""
    copies: int | None = None
    """How many; None: one, without a number."""

    @property
    def numel(self) -> int:
        """Number of elements of one."""
        return prod(self.shape)

    def one(self, number: int, first: int) -> "Parameter":
        """One of them, in a unit whose layer 0 is decoder layer `first`."""
        name, layer = self.name, self.layer
        if layer is not None and first:
            layer += first
            name = name.replace(f"layers.{self.layer}.", f"layers.{layer}.", 1)
        if self.copies is not None:
            name = f"{name}{number}"
        about = self.shape, layer, self.expert, self.replicated, self.trainable, self.shared_embedding
        return Parameter(name, *about)  # quicker than `_replace`: estimates make tens of thousands


@dataclass(slots=True)
class Tape:
    """Records one unit of a rank's model. Also the naming context: current module path, layer and kind."""

    dtype: str
    routed: Certainty = "exact"
    """How sure we are of the rows that the router decides on."""
    frozen: bool = False
    """Only parameters declared trainable have gradients."""
    ops: list[Op] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    tensors: list[Value] = field(default_factory=list)
    """All that its operations make, temporaries too."""
    entry: Value | None = None
    """The residual stream the unit reads; None: it begins with the batch."""
    exit: Value | None = None
    """The residual stream it writes; None: it ends in the loss."""
    leaves: Value | None = None
    """A weight whose gradient outlives the unit's backward: the rank's first unit uses the weight too."""
    takes: Value | None = None
    """That weight in the first unit, which adds its own part and is done with it."""
    batch: dict[str, Value] = field(default_factory=dict)
    """Tensors of the batch that it reads, or uses where the chunk has read them, by name: variables of the forward step
    keep them until the chunk's forward returns, what saves them longer."""
    backward_at: dict[int, float] = field(default_factory=dict)
    """Operations whose backward does not run in reverse order of forward, and the forward index it runs as."""
    sums: dict[Any, Any] = field(default_factory=dict)
    """What `labkit.memory.meter` and `labkit.memory.replay` have summed up of it, kept as long as the tape."""
    path: str = ""
    """Dotted path of the current module, markers included.

    A name that starts with `@` marks a stretch of a module's own code that recompute can name (its up-projection,
    its activation); it is no Megatron module and not part of a value's `module`.
    """
    module_path: str = ""
    """Dotted path of the current Megatron module."""
    stream: int = 0
    """The current stream."""
    _layer: int | None = None
    _kind: str = ""
    _form: list[tuple[object, ...]] = field(default_factory=list)
    _weight_shapes: dict[Shape, int] = field(default_factory=dict)
    """The first operation with a weight of this shape."""

    def module(self, name: str, kind: str | None = None, layer: int | None = None) -> "_Within":
        """Everything recorded inside belongs to the submodule `name` (and, if given, to a kind and a layer)."""
        within = _Within(self, self.path, self.module_path, self._kind, self._layer)
        if name:
            self.path = f"{self.path}.{name}" if self.path else name
            if not name.startswith("@"):
                self.module_path = f"{self.module_path}.{name}" if self.module_path else name
        self._kind = kind or self._kind
        self._layer = self._layer if layer is None else layer
        return within

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Everything recorded inside runs on the side stream."""
        self.stream = SIDE_STREAM
        yield
        self.stream = 0

    def leave(self, path: str, module_path: str, kind: str, layer: int | None) -> None:
        """Go back to a context."""
        self.path, self.module_path, self._kind, self._layer = path, module_path, kind, layer

    def parameter(
        self,
        name: str,
        shape: Shape,
        *,
        expert: bool = False,
        replicated: bool = False,
        trainable: bool | None = None,
        copies: int | None = None,
        shared_embedding: bool = False,
    ) -> None:
        """Declare weights, in the order Megatron registers them; `copies` numbers equal ones from 0.

        Left open, they are trainable unless the tape's are frozen.
        """
        trains = not self.frozen if trainable is None else trainable
        path = f"{self.module_path}.{name}"
        self.parameters.append(
            Parameter(path, shape, self._layer, expert, replicated, trains, shared_embedding, copies)
        )

    def value(
        self, name: str, shape: Shape, dtype: str | None = None, *, grad: bool = True, routed: bool = False
    ) -> Value:
        """A tensor of the current module; it exists from the operation it is an output of."""
        kind = dtype or self.dtype
        nbytes = rounded(prod(shape) * DTYPE_BYTES[kind])
        certainty = self.routed if routed else "exact"
        value = Value(name, shape, kind, self.module_path, self._layer, self._kind, nbytes, grad, certainty)
        value.number = len(self.tensors)
        self.tensors.append(value)
        self._form.append((name, grad))
        return value

    def weight(self, name: str, shape: Shape) -> Value:
        """A weight as an operation's input: its memory is the rank's state, its gradient the pass's."""
        value = self.value(name, shape)
        value.base = value
        self._form.append((value.number,))
        return value

    def like(self, other: Value, name: str, shape: Shape) -> Value:
        """A tensor of another's dtype, whose rows depend on routing where the other's do."""
        return self.value(name, shape, other.dtype, routed=other.certainty != "exact")

    def view(self, base: Value, name: str, shape: Shape) -> Value:
        """A part of `base` that shares its storage but has a gradient of its own."""
        view = self.value(name, shape, base.dtype, grad=base.differentiable)
        view.base = base.storage
        self._form.append((view.number, view.base.number))
        return view

    def buffer(self, name: str, shape: Shape, dtype: str | None = None) -> Buffer:
        """A tensor for `temporaries`."""
        return Buffer(name, shape, dtype or self.dtype)

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        *,
        saves: Sequence[Value] = (),
        temporaries: Sequence[Buffer | Free] = (),
        backward_temporaries: Sequence[Buffer | Free] = (),
        aliases: bool = False,
        norms_first: bool = False,
        views_gradient: bool = False,
        gradient_in: Value | None = None,
        weight: Shape | None = None,
        weights: int = 1,
        library: Library | None = None,
        flops: int = 0,
        communicated_bytes: int = 0,
        persists: Sequence[Value] = (),
        node_keeps: Sequence[Value] = (),
        caches: int = 0,
        once: Buffer | None = None,
        keeps: Sequence[Value] = (),
        keeps_gradient: bool = False,
    ) -> None:
        """Record an operation of the current module."""
        index = len(self.ops)
        for value in outputs:
            value.made = index
        for value in (*inputs, *outputs):
            (value.base or value).last_use = index
        op = Op(
            name,
            self.path,
            self.module_path,
            self._layer,
            self._kind,
            tuple(inputs),
            tuple(outputs),
            tuple(saves),
            self._scratches(temporaries),
            self._scratches(backward_temporaries),
            aliases,
            norms_first,
            views_gradient,
            gradient_in,
            weight,
            weights,
            None if weight is None else self._scratch(self.buffer("weight gradient", weight)),
            library,
            flops,
            communicated_bytes,
            tuple(persists),
            tuple(node_keeps),
            caches,
            None if once is None else self._once(once),
            tuple(keeps),
            keeps_gradient,
            self.stream,
        )
        self.ops.append(op)
        self._form.append(
            (
                name,
                self.path,
                self._layer,
                self._kind,
                aliases,
                norms_first,
                views_gradient,
                library,
                caches,
                once is None,
                keeps_gradient,
                self.stream,
                None if weight is None else self._weight_shapes.setdefault(weight, index),
                None if gradient_in is None else gradient_in.number,
                _steps(op.temporaries),
                _steps(op.backward_temporaries),
                (len(inputs), len(outputs), len(saves), len(persists), len(node_keeps)),
                tuple([each.number for each in (*inputs, *outputs, *saves, *persists, *node_keeps, *keeps)]),
            )
        )

    def _scratches(self, listed: Sequence[Buffer | Free]) -> tuple[Value | Free, ...]:
        return () if not listed else tuple([each if isinstance(each, Free) else self._scratch(each) for each in listed])

    def _scratch(self, buffer: Buffer) -> Value:
        return self.value(buffer.name, buffer.shape, buffer.dtype, grad=False)

    def _once(self, buffer: Buffer) -> Value:
        value = self._scratch(buffer)
        value.module, value.layer = buffer.name, None  # the process's, not the module's
        return value

    @property
    def form(self) -> tuple[object, ...]:
        """All of it but sizes, dtypes, certainties and numbers of weights: tapes of one form play alike.

        Where weight gradients are tensors of their own, only those with as many weights do.
        """
        return (
            *self._form,
            *(None if end is None else end.number for end in (self.entry, self.exit, self.leaves, self.takes)),
            *self.backward_at.items(),
            *((name, value.number) for name, value in self.batch.items()),
        )

    def backward_order(self) -> list[int]:
        """Operations in the order whose reverse is that of their backward."""
        return sorted(range(len(self.ops)), key=lambda index: self.backward_at.get(index, index))

    def hold(self, values: Iterable[Value]) -> None:
        """Python variables keep `values` alive until the last operation recorded so far has run."""
        for value in values:
            value.storage.last_use = len(self.ops) - 1
            self._form.append((value.number, len(self.ops)))


class _Within:
    """Leaves a module again (see `Tape.module`)."""

    __slots__ = ("_before", "_tape")

    def __init__(self, tape: Tape, *before: *tuple[str, str, str, int | None]) -> None:
        self._tape = tape
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._tape.leave(*self._before)


def _steps(temporaries: Iterable[Value | Free]) -> tuple[int | str, ...]:
    """Numbers of what is made and names of what is freed."""
    return tuple([each.name if isinstance(each, Free) else each.number for each in temporaries])
