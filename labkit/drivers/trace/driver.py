"""The trace driver: what a rank holds, measured without a GPU. Imports no torch; the work is a worker process's."""

import atexit
import threading

from labkit.drivers.contract import Measurement
from labkit.drivers.trace.server import TraceServer
from labkit.ledger import Ledger
from labkit.summary import Result, Written
from labkit.work import WorkRow
from labkit.workload import Workload


class Trace(Result):
    """What a rank of a workload held in real Megatron Core and Transformer Engine steps over tensors without data.

    The ledger has one row per allocation, on the clock of allocations and frees, from setup to the last step.
    """

    certainty = "traced"

    def __init__(
        self,
        workload: Workload,
        ledger: Ledger,
        *,
        rank: int,
        peak_reserved_bytes: int | None,
        measurement: Measurement,
    ) -> None:
        super().__init__(workload, rank, lambda: Written(ledger, peak_reserved_bytes))
        self.measurement = measurement
        """The contract's record of the same run."""

    @property
    def work(self) -> tuple[WorkRow, ...]:
        """What the steady step does, module by module."""
        return self.measurement.ranks[0].work


class _Shared:
    """The server that `trace` keeps for the life of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: TraceServer | None = None

    def server(self) -> TraceServer:
        """A server that takes requests; started when there is none or the last one died."""
        with self._lock:
            if self._server is None or not self._server.alive:
                self._server = TraceServer()
                self._server.start()
                atexit.register(self._server.close)
            return self._server


_shared = _Shared()


def trace(workload: Workload) -> Trace:
    """Trace `workload` on rank 0, in a child of a worker process that this process keeps for the next call.

    Raises:
        WorkError: the trace failed; one sentence says in which phase and why.
    """
    return _shared.server().run(workload)
