"""Every storage a program makes, from birth to death, with who made it.

Tensors on the *meta* device have shapes, strides, dtypes and storages of the right size, and no data: they stand for
tensors on the GPU, while those on the CPU are the host's. `StorageTracker` is a dispatch mode: it sees each tensor an
operator returns, books a meta tensor's storage (once, in the allocator's 512-byte units) and learns from a weak
reference when the storage dies. Its event log is what the allocator simulation replays; its allocations become the
ledger's rows.

    with StorageTracker(Origin()) as tracker:
        hidden = torch.zeros(4096, 2048, device="meta")
        del hidden
    tracker.events  # [(1, 33554432), (-1, 0)]

Known limitation: what an operator or a library takes from the allocator and gives back before it returns is invisible;
what it keeps must be booked by hand (`book`).
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from labkit.allocator import EMPTY_CACHE
from labkit.drivers.trace.cuda_surface import on_device
from labkit.drivers.trace.origin import Maker, Origin
from labkit.drivers.trace.patches import Replacement, installed
from labkit.drivers.trace.shape_functions import ShapeFunctions
from labkit.drivers.trace.work import WorkCounter
from labkit.ledger import Moment, rounded
from labkit.workload.gpu import GPUS


@dataclass(slots=True)
class Allocation:
    """One request to the allocator. Clocks are positions in the event log."""

    serial: int
    bytes: int
    """Rounded to 512."""
    shape: tuple[int, ...]
    dtype: str
    born: int
    dies: int | None
    iteration: int
    phase: str
    maker: Maker


class _Liveness(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage that remembers which entry of the books it stands for."""

    __slots__ = ("key",)

    key: int


class StorageTracker(TorchDispatchMode):
    """Books storages while active. `phase(iteration, name)` turns the page of the clock.

    Args:
        origin: who to ask for the maker of a tensor.
        before: called with each operator before it runs (library workspaces are booked there).
        instead: operators that a function answers, with their arguments.
        work: who counts what the operators do.
    """

    def __init__(
        self,
        origin: Origin,
        before: Callable[[Any], None] = lambda operator: None,
        instead: Mapping[Any, Callable[..., Any]] | None = None,
        work: WorkCounter | None = None,
    ) -> None:
        super().__init__()
        self.origin = origin
        self.before = before
        self.instead = instead or {}
        self.work = work or WorkCounter(origin, GPUS["h100-80gb"], iteration=1)
        self.events: list[tuple[int, int]] = []
        """(serial, bytes) for an allocation, (-serial, 0) for its end, or `EMPTY_CACHE`."""
        self.allocations: list[Allocation] = []
        """Allocation of serial n at n - 1."""
        self.moments: list[Moment] = []
        self._living: dict[int, tuple[_Liveness, Allocation | None]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._shape_functions = ShapeFunctions()
        self._fused = 0
        self._pending: list[tuple[weakref.ref[torch.UntypedStorage], tuple[int, ...], str, Maker]] = []
        """Storages made in the current fused region, with shape, dtype and maker."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """TorchDynamo compiles nothing here: it need neither be imported nor kept off each operator."""
        return False

    def phase(self, iteration: int, name: str) -> None:
        """From here on the clock is in this phase."""
        self.moments.append(Moment(len(self.events), iteration, name))
        self.work.begin(iteration, name)

    def book(self, nbytes: int, shape: tuple[int, ...], dtype: str, maker: Maker) -> Allocation:
        """Log an allocation that no tensor shows; it never ends."""
        iteration, phase = self.moments[-1][1:] if self.moments else (0, "setup")
        serial, born = len(self.allocations) + 1, len(self.events)
        allocation = Allocation(serial, rounded(nbytes), shape, dtype, born, None, iteration, phase, maker)
        self.allocations.append(allocation)
        self.events.append((serial, allocation.bytes))
        return allocation

    @contextmanager
    def fused(self) -> Iterator[None]:
        """A region whose intermediates stay in registers: what outlives it is booked when it ends."""
        self._fused += 1
        if self._fused == 1:
            self.work.enter_region()
        try:
            yield
        finally:
            self._fused -= 1
            if not self._fused:
                kept = 0
                pending, self._pending = self._pending, []
                for reference, shape, dtype, maker in pending:
                    storage = reference()
                    if storage is not None:
                        self._keep(storage, shape, dtype, maker)
                        kept += storage.nbytes()
                self.work.leave_region(kept)

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The living allocation that holds `tensor`; None if it lies on the host or is empty."""
        storage = tensor.untyped_storage()
        entry = self._living.get(storage._cdata)
        return entry[1] if entry is not None and entry[0]() is storage else None

    def _end(self, allocation: Allocation) -> None:
        allocation.dies = len(self.events)
        self.events.append((-allocation.serial, 0))

    def seen(self, tensor: torch.Tensor, function: Any) -> None:
        """Book the storage of a tensor that `function` has made, unless it is booked.

        Tensors made of others (DTensor, Transformer Engine's quantized ones) hold nothing themselves.
        """
        if type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
            return
        storage = tensor.untyped_storage()
        entry = self._living.get(storage._cdata)
        if entry is not None and entry[0]() is storage:
            return
        shape, dtype, maker = tuple(tensor.shape), str(tensor.dtype)[6:], self.origin.of(function)
        if self._fused:
            self._pending.append((weakref.ref(storage), shape, dtype, maker))
        else:
            self._keep(storage, shape, dtype, maker)

    def _keep(self, storage: torch.UntypedStorage, shape: tuple[int, ...], dtype: str, maker: Maker) -> None:
        """Book a storage unless it is booked."""
        key = storage._cdata
        entry = self._living.get(key)
        if entry is not None:
            if entry[0]() is storage:
                return
            self._died(entry[0])  # the address was reused before the death was told
        liveness = _Liveness(storage, self._died)
        liveness.key = key
        nbytes = storage.nbytes()
        if nbytes == 0:
            self._living[key] = (liveness, None)
            return
        self._living[key] = (liveness, self.book(nbytes, shape, dtype, maker))

    def _died(self, liveness: Any) -> None:
        entry = self._living.get(liveness.key)
        if entry is None or entry[0] is not liveness:
            return
        del self._living[liveness.key]
        if entry[1] is not None:
            self._end(entry[1])
        self._kept.pop(liveness.key, None)

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """A storage gave its memory back (0 bytes) or took new memory: the next life is a new allocation."""
        entry = self._living.get(storage._cdata)
        if entry is None or entry[0]() is not storage:
            return
        liveness, allocation = entry
        if allocation is not None:
            self._end(allocation)
        reborn = None
        if nbytes:
            reborn = self.book(nbytes, (nbytes,), "uint8", self.origin.of(torch.UntypedStorage.resize_))
        self._living[storage._cdata] = (liveness, reborn)

    def empty_cache(self) -> None:
        """`torch.cuda.empty_cache`, for the allocator's simulation."""
        self.events.append(EMPTY_CACHE)

    def shown(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor at the same address, which keeps nothing alive."""
        with _disable_current_modes():
            alias = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        liveness = _Liveness(alias.untyped_storage(), self._died)
        liveness.key = alias.untyped_storage()._cdata
        self._living[liveness.key] = (liveness, None)
        return alias

    def share(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """`destination`'s storage shows `source`'s memory from now on: counted once, alive until both are gone."""
        storage, shown = destination.untyped_storage(), source.untyped_storage()
        _resize(storage, shown.nbytes())
        self.resized(storage, 0)
        self._kept[storage._cdata] = shown

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types:
            if any(issubclass(kind, FakeTensor) for kind in types):
                return function(*args, **(kwargs or {}))  # DTensor works out shapes
            if any(kind.__torch_dispatch__ is not _NO_DISPATCH for kind in types):
                # Tensors made of others: their class runs operators on those, which come back here.
                return NotImplemented
        self.before(function)
        kwargs = kwargs or {}
        instead = self.instead.get(function)
        result = instead(*args, **kwargs) if instead else self._shape_functions.run(function, args, kwargs)
        if self.work.counting:
            self.work.operator(function, args, kwargs, result)
        if isinstance(result, torch.Tensor):
            if on_device(result):
                self.seen(result, function)
        elif isinstance(result, (tuple, list)):
            for item in result:
                # operators over lists of tensors may return lists in a tuple
                for tensor in item if isinstance(item, list) else (item,):
                    if isinstance(tensor, torch.Tensor) and on_device(tensor):
                        self.seen(tensor, function)
        return result

    def __enter__(self) -> Self:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = _resize(storage, nbytes)
            self.resized(storage, nbytes)
            return result

        self._restore = installed(
            [Replacement(torch.UntypedStorage, "resize_", resize_, "the new size (and frees the old)")]
        )
        self._restore.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._restore.__exit__(*exception)


_resize = torch.UntypedStorage.resize_
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
