"""The trace driver: what a rank holds, measured without a GPU. Imports no torch; the work is a worker process's."""

import atexit
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Self

from labkit.drivers.contract import Measurement, RankRecord
from labkit.drivers.trace.server import TraceServer
from labkit.ledger import Ledger
from labkit.ranges import left_open
from labkit.summary import RankSummary, Result, Summary, Written
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
        fragmentation = measurement.environment.get("fragmentation", "")
        super().__init__(workload, rank, lambda: Written(ledger, peak_reserved_bytes, fragmentation))
        self.measurement = measurement
        """The contract's record of the same run; of every rank that was traced with this one."""

    def among(self, ranks: Sequence[RankRecord], seconds: float) -> Self:
        """The same trace as the fullest of several, which took so long in all."""
        update = {"ranks": tuple(ranks), "wall_seconds": round(seconds, 3)}
        measurement = self.measurement.model_copy(update=update)
        return type(self)(
            self.workload,
            self.ledger,
            rank=self.rank,
            peak_reserved_bytes=self.peak_reserved_bytes,
            measurement=measurement,
        )

    @cached_property
    def summary(self) -> Summary:
        """The result on one page, with every rank that was traced."""
        assumed = tuple(f"{each.field} {each.choices[0].value}" for each in left_open(self.workload))
        ranks, versions = tuple(map(_summarised, self.measurement.ranks)), self.measurement.versions
        summary, mended = super().summary, self.measurement.environment.get("mended")
        short = self.measurement.out_of_memory
        # Where fragmentation alone is to blame, the verdict says it.
        beyond = short and "runs out of memory" not in summary.verdict and f"{short.message}; the trace goes on"
        warnings = (*summary.warnings, *filter(None, (mended, beyond)))
        update = {"ranks": ranks, "versions": versions, "assumed": assumed, "warnings": warnings}
        return summary.model_copy(update=update)

    @cached_property
    def ranged(self) -> Summary:
        """The summary with the peak's range over what the workload does not state: as many more traces."""
        from labkit.drivers.trace.ranges import ranged

        return ranged(self, _shared.server())

    @property
    def work(self) -> tuple[WorkRow, ...]:
        """What the steady step does, module by module."""
        return next(record.work for record in self.measurement.ranks if record.rank == self.rank)

    @property
    def works(self) -> tuple[tuple[WorkRow, ...], ...]:
        """The same of every rank that was traced."""
        return tuple(record.work for record in self.measurement.ranks)


def _summarised(record: RankRecord) -> RankSummary:
    return RankSummary(
        rank=record.rank,
        stages=record.stages,
        parameters=record.parameters,
        parameter_bytes=record.parameter_bytes,
        between_steps_bytes=record.between_steps_bytes,
        first_step_peak_bytes=record.first_step_peak_bytes,
        steady_peak_bytes=record.steady_peak_bytes,
        peak_allocated_bytes=record.peak.peak_allocated_bytes,
        peak_reserved_bytes=record.peak_reserved_bytes,
        peak_iteration=record.peak.iteration,
        peak_phase=record.peak.phase,
    )


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


def trace(workload: Workload, rank: int | None = None) -> Trace:
    """Trace `workload` in children of a worker process that this process keeps for the next call.

    Args:
        workload: what is run.
        rank: which rank; None: one of every pipeline stage that can differ, and the trace is the fullest's
            (`trace.measurement.ranks` has the figures of all).

    Raises:
        InputError: there is no such rank.
        Unfinished: the trace failed, took too much, or cannot trace that; one sentence says in which phase and why.
    """
    server = _shared.server()
    return server.run_stages(workload) if rank is None else server.run(workload, rank=rank)
