"""Confirming an estimate with a trace, in the background: the kernel answers while a worker process runs Megatron."""

import threading
from collections.abc import Callable
from typing import Any

from labkit.drivers.trace.server import TraceServer
from labkit.errors import LabkitError
from labkit.explore.view import PHASES, held_of, stacked
from labkit.memory.estimate import estimate
from labkit.workload import Workload
from labkit.workload.stages import differing_stages

_PHASES_OF_A_RANK = 9
"""Setup, and in each of two steps forward, backward, gradient sync and optimizer; a pipeline's passes begin more."""

type Told = Callable[[dict[str, Any]], None]


class Confirmation:
    """Traces one workload at a time; `told` gets every change of state as plain data, from another thread.

    `state`: tracing, done, failed or cancelled; with `hash` and `name` of the workload, while tracing `phase`,
    `begun` and `expected` phases, then the traced `peak` beside the estimated one, or the sentence of what went wrong.
    """

    def __init__(self, told: Told) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._run: _Run | None = None
        self._server: TraceServer | None = None

    def start(self, workload: Workload) -> None:
        """Trace a workload that can run; nothing if one is being traced."""
        with self._lock:
            if self._run is None:
                self._run = _Run(workload)
                threading.Thread(target=self._trace, args=(self._run,), name="labkit explorer", daemon=True).start()

    def cancel(self) -> None:
        """End what is being traced."""
        with self._lock:
            run, server = self._run, self._server
            if run is None:
                return
            run.cancelled, self._run, self._server = True, None, None
        if server is not None:
            server.close()
        self._told({**run.about, "state": "cancelled"})

    def close(self) -> None:
        """End the worker process too."""
        self.cancel()
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    def _trace(self, run: "_Run") -> None:
        self._tell(run, {"state": "tracing", **run.progress("loading the libraries")})
        try:
            end = self._traced(run)
        except LabkitError as error:
            end = {"state": "failed", "sentence": str(error)}
        with self._lock:
            if self._run is run:
                self._run = None
        self._tell(run, end)

    def _traced(self, run: "_Run") -> dict[str, Any]:
        server = self._ready(run)

        def on_phase(iteration: int, phase: str) -> None:
            run.begun += 1
            name, _, where = phase.partition(" on ")
            step = f" of step {iteration}" if iteration else ""
            self._tell(run, {"state": "tracing", **run.progress(f"{PHASES.get(name, name)}{step}", where)})

        trace = server.run_stages(run.workload, on_phase)
        summary, estimated = trace.summary, estimate(run.workload).summary
        held = held_of(summary)
        return {
            "state": "done",
            "peak": held.nbytes,
            "phase": PHASES.get(held.phase, held.phase),
            "iteration": held.iteration,
            "rank": summary.rank,
            "held": stacked(held.breakdown),
            "reserved": summary.peak_reserved_bytes,
            "estimated": estimated.peak_allocated_bytes,
            "difference": estimated.peak_allocated_bytes / held.nbytes - 1,
            "seconds": trace.measurement.wall_seconds,
            "warnings": list(summary.warnings),
            "versions": ", ".join(f"{name} {version}" for name, version in summary.versions.items()),
        }

    def _ready(self, run: "_Run") -> TraceServer:
        with self._lock:
            if not run.cancelled and (self._server is None or not self._server.alive):
                self._server = TraceServer()
                self._server.start()
            return self._server or TraceServer()

    def _tell(self, run: "_Run", state: dict[str, Any]) -> None:
        if not run.cancelled:
            self._told({**run.about, **state})


class _Run:
    """One trace under way."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.about = {"hash": workload.content_hash, "name": workload.model.name}
        self.begun = 0
        self.cancelled = False
        self._expected = _PHASES_OF_A_RANK * len(differing_stages(workload))

    def progress(self, phase: str, where: str = "") -> dict[str, Any]:
        """How far it is."""
        doing = f"{phase} ({where})" if where else phase
        return {"phase": doing, "begun": min(self.begun, self._expected), "expected": self._expected}
