"""What is alive between steps: parameters, gradient buffers, and the optimizer's part (`labkit.memory.optimizer`).

Sources: Megatron Core `distributed/param_and_grad_buffer.py`, `optimizer/param_layout.py`,
`optimizer/distrib_optimizer.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from labkit.ledger import rounded
from labkit.memory.book import Book
from labkit.memory.library import built_with
from labkit.memory.optimizer import Shard, ShardedOptimizer
from labkit.memory.tape import DTYPE_BYTES, Parameter
from labkit.memory.tape import Buffer as Workspace
from labkit.workload import Workload

_PARAMETER_ALIGNMENT = 64
"""Elements; `pad_param_start`."""
_BUCKET_ALIGNMENT = 128
"""Elements; `bucket_end_divisor`, with the data-parallel size."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous DDP buffer: gradients, and parameters too if they are gathered, of one reduction group."""

    name: str
    """Path of the attribute of `DistributedDataParallel` that holds it."""
    numel: int
    """With padding."""
    parameters: tuple[Parameter, ...]
    shards: tuple[Shard, ...]
    """What of them the optimizer of this rank steps."""


def buffers(parameters: Sequence[Parameter], workload: Workload, *, bucketed: bool = True) -> list[Buffer]:
    """The DDP buffers of a model chunk on data-parallel rank 0, dense parameters apart from expert ones.

    In Megatron's order. `bucketed`: the chunk is the first of the first pipeline stage, others reduce in one piece.
    """
    layout = workload.parallelism
    found: dict[bool, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.expert, []).append(parameter)
    if not workload.training.data_parallel.use_distributed_optimizer:
        return [_whole(_NAMES[expert], members) for expert, members in found.items()]
    ranks = layout.dp * layout.cp
    bucket_size = None
    if bucketed and workload.training.data_parallel.overlap_grad_reduce:
        # `megatron.training.training.resolve_ddp_bucket_size`
        bucket_size = max(40_000_000, 1_000_000 * ranks)
    return [
        _sharded(_NAMES[expert], members, layout.edp if expert else ranks, bucket_size)
        for expert, members in found.items()
    ]


_NAMES = {False: "buffers.0", True: "expert_parallel_buffers.0"}


def _whole(name: str, parameters: Sequence[Parameter]) -> Buffer:
    """Without a distributed optimizer: no padding (`_compute_default_per_buffer_param_layout`), whole parameters."""
    shards = tuple(Shard(parameter, parameter.numel) for parameter in parameters)
    return Buffer(name, sum(shard.numel for shard in shards), tuple(parameters), shards)


def _sharded(name: str, parameters: Sequence[Parameter], ranks: int, bucket_size: int | None) -> Buffer:
    """Lay parameters out in reverse order, padded, in buckets of about `bucket_size` elements.

    Source: `DistributedOptimizer._compute_per_buffer_param_layout`; rank 0 owns the first part of each bucket.
    """
    unit = lcm(ranks, _BUCKET_ALIGNMENT)
    start = bucket_start = 0
    shards: list[Shard] = []
    members: list[tuple[Parameter, int]] = []

    def finish(end: int) -> int:
        bucket_end = -(-end // unit) * unit
        owned_end = bucket_start + (bucket_end - bucket_start) // ranks
        for parameter, begin in members:
            owned = min(begin + parameter.numel, owned_end) - begin
            if owned > 0:
                shards.append(Shard(parameter, owned))
        members.clear()
        return bucket_end

    for parameter in reversed(parameters):
        start = -(-start // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
        members.append((parameter, start))
        start += parameter.numel
        if bucket_size is not None and start - bucket_start >= bucket_size:
            start = bucket_start = finish(start)
    if members:
        start = finish(start)
    return Buffer(name, start, tuple(parameters), tuple(shards))


class State:
    """Opens and closes the entries of one rank's static state."""

    def __init__(self, chunks: Sequence[Sequence[Parameter]], workload: Workload, stage: int = 0) -> None:
        """Of pipeline rank `stage`, whose model chunks have these parameters."""
        training = workload.training
        self._parameters = [parameter for chunk in chunks for parameter in chunk]
        self._buffers = [
            buffer
            for index, chunk in enumerate(chunks)
            for buffer in buffers([each for each in chunk if each.trainable], workload, bucketed=stage == index == 0)
            if training.steps_optimizer
        ]
        self._megatron = training.runtime == "megatron"
        self.workspaces: set[str] = set()
        """Keys of the library workspaces taken while the model was built (`labkit.memory.library`)."""
        self._gathers = training.data_parallel.use_distributed_optimizer
        self._dtype = training.precision
        self._gradient_dtype = "fp32" if training.data_parallel.grad_reduce_in_fp32 else self._dtype
        shards = [shard for buffer in self._buffers for shard in buffer.shards]
        self._optimizer = ShardedOptimizer(shards, workload, self._gradient_dtype)

    def set_up(self, book: Book) -> None:
        """Build the model, move what is gathered into DDP's buffers, make the main parameters."""
        moving = {parameter for buffer in self._buffers if self._gathers for parameter in buffer.parameters}
        built = {}
        for parameter in self._parameters:
            built[parameter] = self._open_parameter(book, parameter, parameter in moving)
            for key, workspace in built_with(parameter) if self._megatron else ():
                if key not in self.workspaces:
                    self.workspaces.add(key)
                    self._open_workspace(book, workspace)
        for buffer in self._buffers:
            if self._gathers:
                self._open_buffer(book, buffer, "param_data", self._dtype, "parameters")
            self._open_buffer(book, buffer, "grad_data", self._gradient_dtype, "gradients")
            if self._gathers:
                for parameter in reversed(buffer.parameters):
                    book.close(built[parameter])
        self._optimizer.set_up(book)

    def _open_parameter(self, book: Book, parameter: Parameter, moves: bool) -> int:
        module, _, name = parameter.name.rpartition(".")
        return book.open(
            name,
            parameter.shape,
            self._dtype,
            rounded(parameter.numel * DTYPE_BYTES[self._dtype]),
            module=module,
            kind="parameters",
            layer=parameter.layer,
            lifetime="transient" if moves else "state",
        )

    def _open_workspace(self, book: Book, workspace: Workspace) -> None:
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
        numel = sum(each.numel for each in self._parameters if each.replicated and each.trainable)
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
