"""What is alive between steps: parameters, gradient buffers, and the optimizer's part (`labkit.memory.optimizer`).

Sources: Megatron Core `distributed/param_and_grad_buffer.py`, `optimizer/param_layout.py`,
`optimizer/distrib_optimizer.py`.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from labkit.ledger import rounded
from labkit.memory.book import Book
from labkit.memory.library import built_with
from labkit.memory.optimizer import ShardedOptimizer
from labkit.memory.tape import DTYPE_BYTES, Value
from labkit.memory.weights import About, Act, Integers, Tensors, Weights
from labkit.workload import Workload

_PARAMETER_ALIGNMENT = 64
"""Elements; `pad_param_start`."""
_BUILT_WIDE = "position_embeddings.weight"
"""A `torch.nn.Embedding` is built in fp32 on the host and moved; `Float16Module` makes the weight of it."""
_BUCKET_ALIGNMENT = 128
"""Elements; `bucket_end_divisor`, with the data-parallel size."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous DDP buffer: gradients, and parameters too if they are gathered, of one reduction group."""

    name: str
    """Path of the attribute of `DistributedDataParallel` that holds it."""
    numel: int
    """With padding."""
    parameters: Integers
    """Numbers of its parameters, in the order Megatron registers them."""
    stepped: Integers
    """Numbers of those that the optimizer of this rank steps, in the order of its shards."""
    shards: Integers
    """Elements of each that it steps."""


def buffers(weights: Weights, chunk: range, workload: Workload, *, bucketed: bool = True) -> list[Buffer]:
    """The DDP buffers of a model chunk on data-parallel rank 0, dense parameters apart from expert ones.

    In Megatron's order. `chunk`: numbers of its parameters. `bucketed`: it is the first of the first pipeline stage,
    others reduce in one piece.
    """
    layout, ddp = workload.parallelism, workload.training.data_parallel
    numbers = np.arange(chunk.start, chunk.stop)
    numbers = numbers[weights.trainable[numbers]]
    ranks = layout.dp * layout.cp
    bucket_size = None
    if bucketed and ddp.overlap_grad_reduce:
        # `megatron.training.training.resolve_ddp_bucket_size`
        bucket_size = max(40_000_000, 1_000_000 * ranks)
    found = []
    for expert in sorted((False, True), key=lambda each: each != weights.expert[numbers[:1]].any()):
        members = numbers[weights.expert[numbers] == expert]
        if not len(members):
            continue
        if ddp.use_distributed_optimizer:
            found.append(_sharded(_NAMES[expert], weights, members, layout.edp if expert else ranks, bucket_size))
        else:
            # No padding (`_compute_default_per_buffer_param_layout`), whole parameters.
            numel = weights.numel[members]
            found.append(Buffer(_NAMES[expert], int(numel.sum()), members, members, numel))
    return found


_NAMES = {False: "buffers.0", True: "expert_parallel_buffers.0"}


def _sharded(name: str, weights: Weights, members: Integers, ranks: int, bucket_size: int | None) -> Buffer:
    """Lay parameters out in reverse order, padded, in buckets of about `bucket_size` elements.

    Source: `DistributedOptimizer._compute_per_buffer_param_layout`; rank 0 owns the first part of each bucket.
    """
    unit = lcm(ranks, _BUCKET_ALIGNMENT)
    laid_out = members[::-1]
    numel = weights.numel[laid_out]
    # As if there were one bucket. Others begin at a multiple of `unit`, and so of the parameters' alignment.
    aligned = _aligned(numel, _PARAMETER_ALIGNMENT)
    begins = np.cumsum(aligned) - aligned
    firsts = _first_of_buckets(begins, numel, bucket_size, np.flatnonzero(weights.shared_embedding[laid_out]))
    lasts = np.append(firsts[1:], len(numel)) - 1
    lengths = _aligned(begins[lasts] + numel[lasts] - begins[firsts], unit)
    counts = lasts - firsts + 1
    begins = begins - np.repeat(begins[firsts], counts)
    owned = np.minimum(begins + numel, np.repeat(lengths // ranks, counts)) - begins
    return Buffer(name, int(lengths.sum()), members, laid_out[owned > 0], owned[owned > 0])


def _first_of_buckets(begins: Integers, numel: Integers, bucket_size: int | None, alone: Integers) -> Integers:
    """Positions of the first parameter of each bucket: one ends with the parameter that fills it.

    Parameters at the positions `alone` have a bucket to themselves.
    """
    cuts = np.unique([*alone, *(alone + 1), len(numel)])
    cuts = cuts[cuts > 0]
    if bucket_size is None:
        return np.concatenate([np.zeros(1, dtype=np.int64), cuts[:-1]])
    # Arrays of their own: numpy's are slow one element at a time.
    starts, ends = array("q", begins.tobytes()), array("q", (begins + numel).tobytes())
    firsts, first = [], 0
    for cut in cuts.tolist():
        while first < cut:
            firsts.append(first)
            first = min(bisect_left(ends, starts[first] + bucket_size, lo=first) + 1, cut)
    return np.array(firsts, dtype=np.int64)


def _aligned(numel: Integers, unit: int) -> Integers:
    return -(-numel // unit) * unit


class State:
    """Opens and closes the entries of one rank's static state."""

    def __init__(self, weights: Weights, chunks: Sequence[range], workload: Workload, stage: int = 0) -> None:
        """Of pipeline rank `stage`, whose model chunks have these parameters, by number."""
        training = workload.training
        self._weights = weights
        self._buffers = [
            buffer
            for index, chunk in enumerate(chunks)
            for buffer in buffers(weights, chunk, workload, bucketed=stage == index == 0)
            if training.steps_optimizer
        ]
        self._megatron = training.runtime == "megatron"
        self._workspace_bytes = training.workspaces
        self.workspaces: set[str] = set()
        """Keys of the library workspaces taken while the model was built (`labkit.memory.library`)."""
        self._gathers = training.data_parallel.use_distributed_optimizer
        self._dtype = training.precision
        self._gradient_dtype = "fp32" if training.data_parallel.grad_reduce_in_fp32 else self._dtype
        none = [np.arange(0)]
        stepped = np.concatenate([*none, *(buffer.stepped for buffer in self._buffers)])
        shards = np.concatenate([*none, *(buffer.shards for buffer in self._buffers)])
        self._optimizer = ShardedOptimizer(weights, stepped, shards, workload, self._gradient_dtype)

    def set_up(self, book: Book) -> None:
        """Build the model, move what is gathered into DDP's buffers, make the main parameters."""
        weights, built = self._weights, 0
        builds, converted = Act("open", "parameter", self._dtype), list[int]()
        wide = Act("open", "fp32 parameter", "fp32")
        for number, parameter in enumerate(weights if self._megatron else ()):
            if parameter.name.endswith(_BUILT_WIDE):
                book.each(self._parameters(np.arange(built, number)), [builds])
                converted.append(number)
                built = number + 1
            elif found := built_with(parameter, self._workspace_bytes):
                # Later ones find it there.
                book.each(self._parameters(np.arange(built, number + 1)), [builds])
                built = number + 1
                for key, workspace in found:
                    self.workspaces.add(key)
                    self._open_workspace(book, workspace)
                break
        book.each(self._parameters(np.arange(built, len(weights.numel))), [builds])
        book.each(self._parameters(np.array(converted, np.int64)), [wide, builds, wide._replace(verb="close")])
        for buffer in self._buffers:
            if self._gathers:
                self._open_buffer(book, buffer, "param_data", self._dtype, "parameters")
            self._open_buffer(book, buffer, "grad_data", self._gradient_dtype, "gradients")
            if self._gathers:
                book.each(self._parameters(buffer.parameters), [builds._replace(verb="close")], last_first=True)
        self._optimizer.set_up(book)

    def _parameters(self, numbers: Integers) -> Tensors:
        return Tensors(self._weights.numel[numbers], numbers, self._about)

    def _about(self, number: int, numel: int, act: Act) -> About:  # noqa: ARG002
        parameter = self._weights.parameters[number]
        module, _, name = parameter.name.rpartition(".")
        moves = self._gathers and bool(self._buffers) and parameter.trainable
        goes = moves or act.dtype != self._dtype
        return About(name, parameter.shape, module, "parameters", parameter.layer, "transient" if goes else "state")

    def _open_workspace(self, book: Book, workspace: Value) -> None:
        book.open(
            workspace.name,
            workspace.shape,
            workspace.dtype,
            workspace.bytes,
            module="",
            kind="library",
            lifetime="workspace",
        )

    def _open_buffer(self, book: Book, buffer: Buffer, name: str, dtype: str, kind: str) -> None:
        nbytes = rounded(buffer.numel * DTYPE_BYTES[dtype])
        # `megatron.training.get_model` wraps the model on a stream of its own.
        book.open(name, (buffer.numel,), dtype, nbytes, module=buffer.name, kind=kind, lifetime="state", stream=1)

    def zero_gradients(self, book: Book) -> None:
        """Start of a step."""
        self._optimizer.zero_gradients(book)

    def sync_gradients(self, book: Book) -> None:
        """After backward, gradients of replicated parameters are concatenated and summed over tensor-parallel ranks.

        Source: `finalize_model_grads._allreduce_non_tensor_model_parallel_grads`.
        """
        weights = self._weights
        numel = int(weights.numel[weights.replicated & weights.trainable].sum())
        if numel:
            nbytes = rounded(numel * DTYPE_BYTES[self._gradient_dtype])
            book.close(
                book.open(
                    "replicated gradients", (numel,), self._gradient_dtype, nbytes, module="grad_sync", kind="gradients"
                )
            )

    def step(self, book: Book) -> None:
        """The optimizer's step."""
        self._optimizer.step(book)
