"""What the steady step does, counted as the trace runs it: FLOPs, memory traffic, messages and launches.

Three kinds of caller tell of work: the dispatch mode shows each PyTorch operator and collective, the stand-ins of
compiled libraries state their own (`launched`, `exchanged`), and Triton kernels are counted where they would start.
FLOPs are those of `torch.utils.flop_counter`: products, convolutions and attention. Traffic is counted at the ends of
a launch: each input and output once, so what a compiled region keeps in registers costs nothing. Views and
allocations are no work.

A checkpoint runs forward again inside backward with gradients enabled, where the nodes of backward have them off. That
is how a replay is known: `torch.enable_grad` was entered in the running graph task, and no backward of the replay's
own graph, which is another task, has begun.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.flop_counter import flop_registry

from labkit.drivers.trace.cuda_surface import on_device
from labkit.drivers.trace.origin import OUTSIDE, Origin
from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.work import Exchange, WorkRow
from labkit.workload.gpu import Gpu

_ALLOCATIONS = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided resize_ set_ lift_fresh _unsafe_view record_stream "
    "_local_scalar_dense is_pinned".split()
)
"""Operators beside views that start nothing on the device."""
_OVERWRITE = frozenset("copy_ zero_ fill_ normal_ uniform_ bernoulli_ random_ exponential_".split())
"""Do not read what they write."""
_LOOK_UP = frozenset("embedding index index_select gather take".split())
"""Read of their source what they return, and no more."""
_SCATTER = frozenset("scatter_ scatter_add_ scatter_reduce_ index_put_ _index_put_impl_ index_add_ index_copy_".split())
"""Touch of what they change as much as they are given."""

_OPERANDS = {torch.float64: "fp64", torch.float32: "fp32", torch.uint8: "fp8"}
"""What is not 16 bits wide, by PyTorch's name; FP8 is in bytes."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")

type _Place = tuple[str, str, bool]
"""Module, phase, replayed."""


class _Sums:
    """What a place has done so far."""

    __slots__ = ("checkpoints", "exchanges", "flops", "hbm_bytes", "launches", "seconds")

    def __init__(self) -> None:
        self.checkpoints = self.launches = self.flops = self.hbm_bytes = 0
        self.seconds = 0.0
        self.exchanges: Counter[tuple[str, int, str]] = Counter()


class WorkCounter:
    """Counts the work of one iteration.

    Args:
        origin: who to ask for the module that runs.
        gpu: whose speeds give seconds.
        iteration: the one that counts.
    """

    def __init__(self, origin: Origin, gpu: Gpu, iteration: int) -> None:
        self.counting = False
        self._origin = origin
        self.iteration = iteration
        """The one that counts."""
        self._products, self._per_byte = gpu.products, 1 / gpu.hbm_bytes_per_second
        self._per_message_byte = 1 / gpu.nvlink_bytes_per_second
        self._phase = ""
        self._borrowed: str | None = None
        """Phase of work that the clock of phases does not show."""
        self._sums: dict[_Place, _Sums] = {}
        self._replaying: list[int] = []
        """Graph tasks in which gradients were enabled."""
        self._region: _Region | None = None
        self._operators: dict[Any, Callable[..., None] | None] = {}

    def begin(self, iteration: int, phase: str) -> None:
        """From here on the clock is in this phase."""
        self.counting, self._phase = iteration == self.iteration, phase

    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """PyTorch ran `function`."""
        try:
            count = self._operators[function]
        except KeyError:
            count = self._operators[function] = self._counting(function)
        if count is not None:
            count(args, kwargs, result)

    def launch(self, hbm_bytes: int, launches: int = 1, flops: int = 0, flops_per_second: float = inf) -> None:
        """Work done here and now."""
        sums = self._here()
        sums.launches += launches
        sums.flops += flops
        sums.hbm_bytes += hbm_bytes
        sums.seconds += max(flops / flops_per_second, hbm_bytes * self._per_byte)

    def product(self, flops: int, touched: Any, *, tf32: bool, launches: int = 1) -> None:
        """A matrix product of the first of the device's tensors in `touched`, which has all that it reads or writes."""
        operand = next(device_tensors(touched), None)
        if operand is not None:
            peak = self._products.of(_OPERANDS.get(operand.dtype, ""), tf32=tf32)
            self.launch(traffic(touched), launches, flops, peak)

    def exchange(self, kind: str, ranks: int, nbytes: int) -> None:
        """A message of which this rank puts `nbytes` on the wire."""
        if ranks == 1:
            return
        sums = self._here()
        sums.launches += 1
        sums.seconds += nbytes * self._per_message_byte
        sums.exchanges[kind, ranks, "calls"] += 1
        sums.exchanges[kind, ranks, "bytes"] += nbytes

    def enter_region(self) -> None:
        """A compiled function begins: one launch, of which only the ends are traffic."""
        self._region = _Region() if self.counting else None

    def leave_region(self, kept_bytes: int) -> None:
        """It ends, and leaves `kept_bytes` of new tensors."""
        region, self._region = self._region, None
        if region is not None and (kept_bytes or region.read):
            self.launch(region.traffic + kept_bytes)

    @contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        """What runs in this block belongs to `phase` and to no module, wherever the schedule put it."""
        before, self._borrowed = self._borrowed, phase
        try:
            yield
        finally:
            self._borrowed = before

    def replacements(self) -> Iterator[Replacement]:
        """What tells of replays, and of collectives that run in the midst of a micro-batch; imports Megatron Core."""
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        enter, leave = torch.enable_grad.__enter__, torch.enable_grad.__exit__

        def entered(context: Any) -> Any:
            within = self._replays()
            self._replaying.append(torch._C._current_graph_task_id())
            if self.counting and self._replays() and not within:
                self._here().checkpoints += 1
            return enter(context)

        def left(context: Any, *exception: Any) -> Any:
            self._replaying.pop()
            return leave(context, *exception)

        yield Replacement(torch.enable_grad, "__enter__", entered, NOTHING)
        yield Replacement(torch.enable_grad, "__exit__", left, NOTHING)
        for name, phase in (("start_grad_sync", "grad_sync"), ("start_param_sync", "optimizer")):
            method = self._within(phase, getattr(_ParamAndGradBucketGroup, name))
            yield Replacement(_ParamAndGradBucketGroup, name, method, NOTHING)

    def rows(self, passes: float = 1.0) -> tuple[WorkRow, ...]:
        """What was counted, layers of a kind in one row; each pass of a micro-batch counts as `passes` of them."""
        folded: dict[_Place, _Sums] = {}
        for (module, phase, replayed), sums in self._sums.items():
            times = passes if phase in ("forward", "backward") else 1.0
            into = folded.setdefault((_NUMBER.sub(".*", module), phase, replayed), _Sums())
            into.checkpoints += round(sums.checkpoints * times)
            into.launches += round(sums.launches * times)
            into.flops += round(sums.flops * times)
            into.hbm_bytes += round(sums.hbm_bytes * times)
            into.seconds += sums.seconds * times
            for key, count in sums.exchanges.items():
                into.exchanges[key] += round(count * times)
        return tuple(_row(place, sums) for place, sums in folded.items())

    def _within(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._during(phase):
                return method(*args, **kwargs)

        return run

    def _here(self) -> _Sums:
        if self._borrowed is not None:
            place = (OUTSIDE, self._borrowed, False)
        else:
            place = (self._origin.running(), self._phase, self._replays())
        sums = self._sums.get(place)
        if sums is None:
            sums = self._sums[place] = _Sums()
        return sums

    def _replays(self) -> bool:
        if not self._replaying:
            return False
        task = torch._C._current_graph_task_id()
        return task != -1 and task == self._replaying[-1]

    def _counting(self, function: Any) -> Callable[..., None] | None:
        """What counts a call of `function`; None if it does nothing on the device."""
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            return partial(self._collective, name)
        if namespace != "aten" or function.is_view or name in _ALLOCATIONS:
            return None
        formula = flop_registry.get(function.overloadpacket)
        if formula is not None:
            return partial(self._product, formula, "convolution" in name)
        return partial(self._kernel, name, not function._schema.returns)

    def _product(self, formula: Callable[..., int], convolves: bool, args: Any, kwargs: Any, result: Any) -> None:
        if traffic(args) + traffic(result):
            # cuBLAS rounds fp32 to TF32 where PyTorch is told so (by default it is not), cuDNN by default.
            tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32
            self.product(formula(*args, **kwargs, out_val=result), [args, result], tf32=tf32)

    def _kernel(self, name: str, in_place: bool, args: Any, kwargs: Any, result: Any) -> None:
        if self._region is not None:
            self._region.operator(args, result)
            return
        if name in _OVERWRITE:
            touched = traffic(args)
        elif name in _LOOK_UP:
            touched = traffic(args[1:]) + 2 * traffic(result)
        elif name in _SCATTER:
            touched = 3 * traffic(args[1:])
        else:
            touched = traffic(args) + (traffic(args[0]) if in_place else traffic(result))
        if touched:
            self.launch(touched)

    def _collective(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is None:
            return
        position = next(index for index, argument in enumerate(args) if isinstance(argument, torch.ScriptObject))
        group = ProcessGroup.unbox(args[position])
        ranks = group.size()
        match kind:
            case "all_to_all":
                nbytes = _sent_to_others(args[1], args[4] if len(args) > 4 else [], group.rank(), ranks)
            case "reduce_scatter":
                nbytes = traffic(args[1]) * (ranks - 1) // ranks
            case "all_gather":
                nbytes = traffic(args[0]) * (ranks - 1) // ranks
            case "all_reduce":
                nbytes = 2 * traffic(args[0]) * (ranks - 1) // ranks
            case _:
                nbytes = traffic(args[0])
        self.exchange(kind, ranks, nbytes)


_KINDS = {
    "allreduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "send": "send",
    "recv": "receive",
    "broadcast": "broadcast",
    "gather_": "gather",
    "scatter_": "scatter",
    "reduce_": "reduce",
}
"""By what the names of c10d's operators contain, the longer first."""


def _sent_to_others(sent: Any, splits: Sequence[int], rank: int, ranks: int) -> int:
    """Bytes that leave the rank; `splits` has the rows for each receiver, empty where they are equal."""
    whole = traffic(sent)
    if not splits or not sum(splits):
        return whole * (ranks - 1) // ranks
    return whole * (sum(splits) - splits[rank]) // sum(splits)


class _Views:
    """Parts of one storage that are read or written: what several of them cover counts once."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], int] = {}
        """Of (first byte, byte after the last), the bytes in between that belong to a view."""

    def add(self, tensor: Tensor) -> None:
        """Another view."""
        width = tensor.element_size()
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * width
        extent = start, start + (int(steps) + 1) * width
        self._parts[extent] = max(self._parts.get(extent, 0), _bytes(tensor))

    @property
    def bytes(self) -> int:
        """Of all views: no more than they span, and no more than they have."""
        spanned, reached = 0, 0
        for start, stop in sorted(self._parts):
            spanned += max(stop - max(start, reached), 0)
            reached = max(reached, stop)
        return min(spanned, sum(self._parts.values()))


class _Region:
    """What a compiled function reads and writes from outside, by storage."""

    def __init__(self) -> None:
        self.read: dict[int, _Views] = {}
        self._written: dict[int, _Views] = {}
        self._made: set[int] = set()

    def operator(self, args: Any, result: Any) -> None:
        for tensor in device_tensors(args):
            key = tensor.untyped_storage()._cdata
            if key not in self._made and tensor.numel():
                self.read.setdefault(key, _Views()).add(tensor)
        for tensor in device_tensors(result):
            key = tensor.untyped_storage()._cdata
            if key not in self.read:
                self._made.add(key)
            elif tensor.numel():
                self._written.setdefault(key, _Views()).add(tensor)

    @property
    def traffic(self) -> int:
        return sum(views.bytes for views in (*self.read.values(), *self._written.values()))


def _row(place: _Place, sums: _Sums) -> WorkRow:
    module, phase, replayed = place
    exchanges = tuple(
        Exchange(kind=kind, ranks=ranks, calls=calls, bytes=sums.exchanges[kind, ranks, "bytes"])
        for (kind, ranks, what), calls in sums.exchanges.items()
        if what == "calls"
    )
    return WorkRow(
        module=module,
        phase=phase,
        replayed=replayed,
        checkpoints=sums.checkpoints,
        launches=sums.launches,
        flops=sums.flops,
        hbm_bytes=sums.hbm_bytes,
        communicated_bytes=sum(exchange.bytes for exchange in exchanges),
        seconds=float(f"{sums.seconds:.6g}"),
        exchanges=exchanges,
    )


def device_tensors(value: Any) -> Iterator[Tensor]:
    """The device's tensors in nested lists."""
    if isinstance(value, Tensor):
        if on_device(value):
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from device_tensors(item)


def _bytes(tensor: Tensor) -> int:
    """Of its elements, but no more than there is memory behind them: expanded dimensions are read once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def traffic(value: Any) -> int:
    """Bytes of the device's tensors in nested lists."""
    if isinstance(value, Tensor):
        return _bytes(value) if on_device(value) else 0
    if isinstance(value, (tuple, list)):
        return sum(map(traffic, value))
    return 0


_active: list[WorkCounter] = []
"""Who counts what stand-ins tell."""


@contextmanager
def counted_by(counter: WorkCounter) -> Iterator[None]:
    """`launched` and `exchanged` tell `counter` while active."""
    _active.append(counter)
    try:
        yield
    finally:
        _active.remove(counter)


def launched(flops: int, *touched: Any, launches: int = 1, tf32: bool = True) -> None:
    """A stand-in says what the real thing does: its FLOPs, and the tensors (or lists of them) it reads or writes.

    The first is an operand of its products. Transformer Engine multiplies operands in fp32 in TF32
    (`common/gemm/cublaslt_gemm.cu`: CUBLAS_COMPUTE_32F_FAST_TF32), as Triton does where a kernel says nothing else.
    """
    for counter in _active:
        if not counter.counting:
            continue
        if flops:
            counter.product(flops, touched, tf32=tf32, launches=launches)
        else:
            counter.launch(traffic(touched), launches)


def exchanged(kind: str, ranks: int, nbytes: int) -> None:
    """A stand-in says what the real thing puts on the wire."""
    for counter in _active:
        if counter.counting:
            counter.exchange(kind, ranks, nbytes)
