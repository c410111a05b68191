"""A trace as a file: how a worker hands it over. Plain JSON, read back without running anything."""

import json
from pathlib import Path

from labkit.drivers.contract import Measurement
from labkit.drivers.trace.driver import Trace
from labkit.ledger import Ledger, Moment, Row
from labkit.workload import Workload


def dump(trace: Trace, path: Path) -> None:
    """Write everything but the workload, which the reader has."""
    path.write_text(
        json.dumps(
            {
                "rank": trace.rank,
                "peak_reserved_bytes": trace.peak_reserved_bytes,
                "measurement": trace.measurement.model_dump(mode="json"),
                "moments": trace.ledger.moments,
                "rows": trace.ledger.rows,
            }
        ),
        encoding="utf-8",
    )


def load(workload: Workload, path: Path) -> Trace:
    """The trace of `workload` that `dump` wrote."""
    content = json.loads(path.read_text(encoding="utf-8"))
    shape = Row._fields.index("shape")
    rows = (Row._make([*values[:shape], tuple(values[shape]), *values[shape + 1 :]]) for values in content["rows"])
    return Trace(
        workload,
        Ledger(rows, [Moment(*moment) for moment in content["moments"]]),
        rank=content["rank"],
        peak_reserved_bytes=content["peak_reserved_bytes"],
        measurement=Measurement.model_validate(content["measurement"]),
    )
