"""What is alive between steps: parameters, gradient buffers, optimizer state.

Sources: Megatron Core `distributed/param_and_grad_buffer.py`, `optimizer/param_layout.py`,
`optimizer/distrib_optimizer.py`; Transformer Engine `optimizers/fused_adam.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from labkit.ledger import Lifetime, rounded
from labkit.memory.book import Book
from labkit.memory.tape import DTYPE_BYTES, Parameter
from labkit.workload import Workload

_PARAMETER_ALIGNMENT = 64
"""Elements; `pad_param_start`."""
_BUCKET_ALIGNMENT = 128
"""Elements; `bucket_end_divisor`, with the data-parallel size."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The stretch of a parameter whose optimizer state this rank holds."""

    parameter: Parameter
    numel: int


@dataclass(frozen=True, slots=True)
class Buffer:
    """One contiguous DDP buffer: parameters and gradients of one reduction group."""

    name: str
    """Path of the attribute of `DistributedDataParallel` that holds it."""
    numel: int
    """With padding."""
    shards: tuple[Shard, ...]


def buffers(parameters: Sequence[Parameter], workload: Workload, *, bucketed: bool = True) -> list[Buffer]:
    """The DDP buffers of a model chunk on data-parallel rank 0, dense parameters apart from expert ones.

    In Megatron's order. `bucketed`: the chunk is the first of the first pipeline stage, others reduce in one piece.
    """
    layout = workload.parallelism
    found: dict[bool, list[Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.expert, []).append(parameter)
    bucket_size = None
    if bucketed and workload.training.data_parallel.overlap_grad_reduce:
        # DistributedDataParallel.__init__
        bucket_size = max(40_000_000, 1_000_000 * layout.dp)
    return [
        _buffer(
            "expert_parallel_buffers.0" if expert else "buffers.0",
            members,
            layout.edp if expert else layout.dp * layout.cp,
            bucket_size,
        )
        for expert, members in found.items()
    ]


def _buffer(name: str, parameters: list[Parameter], ranks: int, bucket_size: int | None) -> Buffer:
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
    return Buffer(name, start, tuple(shards))


class State:
    """Opens and closes the entries of one rank's static state."""

    def __init__(self, chunks: Sequence[Sequence[Parameter]], workload: Workload, stage: int = 0) -> None:
        """Of pipeline rank `stage`, whose model chunks have these parameters."""
        self._parameters = [parameter for chunk in chunks for parameter in chunk]
        self._buffers: list[Buffer] = []
        for index, chunk in enumerate(chunks if workload.training.steps_optimizer else ()):
            trained = [parameter for parameter in chunk if parameter.trainable]
            self._buffers += buffers(trained, workload, bucketed=stage == index == 0)
        self._dtype = workload.training.precision
        self._optimizer = workload.training.optimizer
        self._gradient_dtype = "fp32" if workload.training.data_parallel.grad_reduce_in_fp32 else self._dtype
        self._gradient_copies: list[int] = []
        self._moments_exist = False

    def set_up(self, book: Book) -> None:
        """Build the model, move what trains into DDP's buffers, make the main parameters."""
        built = []
        for parameter in self._parameters:
            moves = bool(self._buffers) and parameter.trainable
            number = book.open(
                parameter.name.rsplit(".", 1)[1],
                parameter.shape,
                self._dtype,
                rounded(parameter.numel * DTYPE_BYTES[self._dtype]),
                module=parameter.name.rsplit(".", 1)[0],
                kind="parameters",
                layer=parameter.layer,
                lifetime="transient" if moves else "state",
            )
            built += [number] * moves
        for buffer in self._buffers:
            self._open_buffer(book, buffer, "param_data", self._dtype, "parameters")
            self._open_buffer(book, buffer, "grad_data", self._gradient_dtype, "gradients")
        for number in built:
            book.close(number)
        if not self._optimizer.main_params_in_te:
            for shard in self._shards:
                # `shard_model_param.clone().float()`
                clone = self._open_shard(book, shard, "parameter copy", self._dtype, "transient")
                self._open_shard(book, shard, "main_param", self._optimizer.main_params_dtype, "state")
                book.close(clone)

    def _open_buffer(self, book: Book, buffer: Buffer, name: str, dtype: str, kind: str) -> None:
        nbytes = rounded(buffer.numel * DTYPE_BYTES[dtype])
        book.open(name, (buffer.numel,), dtype, nbytes, module=buffer.name, kind=kind, lifetime="state")

    @property
    def _shards(self) -> list[Shard]:
        return [shard for buffer in self._buffers for shard in buffer.shards]

    def _open_shard(self, book: Book, shard: Shard, name: str, dtype: str, lifetime: Lifetime) -> int:
        return book.open(
            name,
            (shard.numel,),
            dtype,
            rounded(shard.numel * DTYPE_BYTES[dtype]),
            module=shard.parameter.name,
            kind="optimizer",
            layer=shard.parameter.layer,
            lifetime=lifetime,
        )

    def zero_gradients(self, book: Book) -> None:
        """Start of a step: the last step's gradient copies go (`optimizer.zero_grad`)."""
        for number in self._gradient_copies:
            book.close(number)
        self._gradient_copies.clear()

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
        """Optimizer step: fp32 gradient copies where Megatron holds the main parameters; moments on the first step.

        Sources: `DistributedOptimizer._copy_model_grads_to_main_grads`, `FusedAdam.step`.
        """
        if not self._optimizer.main_params_in_te and self._gradient_dtype != "fp32":
            self._gradient_copies = [
                self._open_shard(book, shard, "fp32 gradient", "fp32", "transient") for shard in self._shards
            ]
        for group in self._groups:
            copies = []
            for shard in group:
                if not self._moments_exist:
                    self._make_moments(book, shard)
                copies += [
                    self._open_shard(book, shard, f"fp32 {name}", "fp32", "transient") for name in self._unfused_moments
                ]
            for number in copies:
                book.close(number)
        if not self._moments_exist:
            self._moments_exist = True
            self._make_scales(book)

    @property
    def _groups(self) -> list[list[Shard]]:
        """Shards in the order FusedAdam steps them: dense before experts, matrices (weight decay) before vectors."""
        return [
            [shard for shard in buffer.shards if (len(shard.parameter.shape) > 1) == matrices]
            for buffer in self._buffers
            for matrices in (True, False)
        ]

    @property
    def _moments(self) -> list[tuple[str, str]]:
        return [("exp_avg", self._optimizer.exp_avg_dtype), ("exp_avg_sq", self._optimizer.exp_avg_sq_dtype)]

    @property
    def _unfused_moments(self) -> list[str]:
        """Moments that the step copies to fp32, group by group: of bf16, unless both are (`FusedAdam.fuse_unscale`)."""
        narrow = [name for name, dtype in self._moments if dtype == "bf16"]
        return narrow if len(narrow) == 1 else []

    @property
    def _states(self) -> list[tuple[str, str]]:
        """Names and dtypes of what FusedAdam keeps of a shard."""
        optimizer = self._optimizer
        if not optimizer.main_params_in_te:
            return self._moments
        # With remainders it keeps 16 bits beside each bf16 parameter, else the whole fp32 one.
        return [*self._moments, ("master_param", "bf16" if optimizer.store_param_remainders else "fp32")]

    def _make_moments(self, book: Book, shard: Shard) -> None:
        """`FusedAdam.initialize_state`."""
        for name, dtype in self._states:
            self._open_shard(book, shard, name, dtype, "state")
        if ("master_param", "fp32") in self._states:
            # `master = param.clone().detach().float()` on its way into the state.
            clone = self._open_shard(book, shard, "parameter copy", self._dtype, "transient")
            master = self._open_shard(book, shard, "fp32 parameter copy", "fp32", "transient")
            book.close(clone)
            book.close(master)

    def _make_scales(self, book: Book) -> None:
        """One fp32 scalar for each state that is not fp32."""
        count = sum(dtype != "fp32" for _, dtype in self._states) * len(self._shards)
        if count:
            nbytes = rounded(4) * count
            book.open(
                "state scales",
                (1,),
                "fp32",
                nbytes,
                module="optimizer",
                kind="optimizer",
                lifetime="state",
                count=count,
            )
