"""A trace's peak with each value of what its workload leaves open: each is traced."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import PhaseCallback, TraceServer
from labkit.ranges import ranged as with_ranges
from labkit.summary import Summary
from labkit.workload.unstated import with_fields


def ranged(trace: Trace, server: TraceServer, on_phase: PhaseCallback | None = None) -> Summary:
    """The summary of a trace, with a range for each field that was left open, and one for all of them together.

    As many ranks as `server` has workers are traced at once; a value whose trace comes to no result is left out.
    """
    alone = len(trace.measurement.ranks) == 1

    def peak(fields: Mapping[str, Any]) -> int | None:
        changed = with_fields(trace.workload, fields)
        if changed is None:
            return None
        words = ", ".join(f"{path.rpartition('.')[2]} {value}" for path, value in fields.items())

        def tell(iteration: int, phase: str) -> None:
            if on_phase is not None:
                on_phase(iteration, f"{phase} with {words}")

        try:
            other = server.run(changed, tell, rank=trace.rank) if alone else server.run_stages(changed, tell)
        except Unfinished:
            return None
        return other.peak_allocated_bytes

    def peaks(changes: Sequence[Mapping[str, Any]]) -> list[int | None]:
        with ThreadPoolExecutor(max(1, len(changes))) as pool:
            return list(pool.map(peak, changes))

    summary = trace.summary.model_copy(update={"assumed": ()})
    return with_ranges(summary, peaks)
