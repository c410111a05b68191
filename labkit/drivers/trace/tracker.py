"""Every storage a program makes, from birth to death, with who made it.

`StorageTracker` is a dispatch mode: it sees each tensor an operator returns, books the tensor's storage (once, in
the allocator's 512-byte units) and learns from a weak reference when the storage dies. Its event log is what the
allocator simulation replays; its allocations become the ledger's rows.

    with FakeTensorMode(), StorageTracker() as tracker:
        hidden = torch.zeros(4096, 2048)
        del hidden
    tracker.events  # [(1, 33554432), (-1, 0)]

Known limitations: only fake tensors count, all of them as device memory except those the `host` block made; a
buffer that a library takes below the dispatcher is invisible and must be `book`ed by hand.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.patches import Replacement, installed
from labkit.ledger import Moment, rounded


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
    module: str
    """Path of the module whose forward or backward made it, below the model."""
    producer: str
    """The operator, or the function that called it if the operator only allocates."""


class _Liveness(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage that remembers which entry of the books it stands for."""

    __slots__ = ("key",)

    key: int


class StorageTracker(TorchDispatchMode):
    """Books storages while active. `phase(iteration, name)` turns the page of the clock."""

    def __init__(self, origin: Origin, before: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.origin = origin
        self.before = before
        """Called with each operator before it runs (library workspaces are booked there)."""
        self.events: list[tuple[int, int]] = []
        """(serial, bytes) for an allocation, (-serial, 0) for its end."""
        self.allocations: list[Allocation] = []
        """Allocation of serial n at n - 1."""
        self.moments: list[Moment] = []
        self._living: dict[int, tuple[_Liveness, Allocation | None]] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._on_host = False

    def phase(self, iteration: int, name: str) -> None:
        """From here on the clock is in this phase."""
        if not self.moments or self.moments[-1][1:] != (iteration, name):
            self.moments.append(Moment(len(self.events), iteration, name))

    @contextmanager
    def host(self) -> Iterator[None]:
        """Storages born inside lie in the host's memory and do not count."""
        before, self._on_host = self._on_host, True
        try:
            yield
        finally:
            self._on_host = before

    def book(self, nbytes: int, shape: tuple[int, ...], dtype: str, module: str, producer: str) -> Allocation:
        """Log an allocation that no tensor shows; it never ends unless `_end` is called."""
        iteration, phase = self.moments[-1][1:] if self.moments else (0, "setup")
        serial, born = len(self.allocations) + 1, len(self.events)
        allocation = Allocation(
            serial, rounded(nbytes), shape, dtype, born, None, iteration, phase, module, producer
        )
        self.allocations.append(allocation)
        self.events.append((serial, allocation.bytes))
        return allocation

    def allocation_of(self, tensor: torch.Tensor) -> Allocation | None:
        """The living allocation that holds `tensor`; None if it is not on the device or empty."""
        storage = tensor.untyped_storage()
        entry = self._living.get(storage._cdata)
        return entry[1] if entry is not None and entry[0]() is storage else None

    def on_host(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the host's memory (an empty tensor lies nowhere)."""
        storage = tensor.untyped_storage()
        entry = self._living.get(storage._cdata)
        return entry is not None and entry[0]() is storage and entry[1] is None and storage.nbytes() > 0

    def _end(self, allocation: Allocation) -> None:
        allocation.dies = len(self.events)
        self.events.append((-allocation.serial, 0))

    def _see(self, tensor: torch.Tensor, function: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._living.get(key)
        if entry is not None:
            if entry[0]() is storage:
                return
            self._died(entry[0])  # the address was reused before the death was told
        liveness = _Liveness(storage, self._died)
        liveness.key = key
        nbytes = storage.nbytes()
        if self._on_host or nbytes == 0:
            self._living[key] = (liveness, None)
            return
        module, producer = self.origin.of(function)
        allocation = self.book(nbytes, tuple(tensor.shape), str(tensor.dtype)[6:], module, producer)
        self._living[key] = (liveness, allocation)

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
        if nbytes and not self._on_host:
            module, producer = self.origin.of(torch.UntypedStorage.resize_)
            reborn = self.book(nbytes, (nbytes,), "uint8", module, producer)
        self._living[storage._cdata] = (liveness, reborn)

    def share(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """`destination`'s storage shows `source`'s memory from now on: counted once, alive until both are gone."""
        storage, shown = destination.untyped_storage(), source.untyped_storage()
        _resize(storage, shown.nbytes())
        self.resized(storage, 0)
        self._kept[storage._cdata] = shown

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.before is not None:
            self.before(function)
        result = function(*args, **(kwargs or {}))
        if isinstance(result, FakeTensor):
            self._see(result, function)
        elif isinstance(result, (tuple, list)):
            for item in result:
                if isinstance(item, FakeTensor):
                    self._see(item, function)
                elif isinstance(item, list):  # foreach operators return lists in tuples
                    for inner in item:
                        self._see(inner, function)
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
