"""Traces of measured cells and jobs, kept as text: `make cells` and `make jobs` write, reports read (`data/traced`).

A trace takes seconds to a minute, and hundreds of them are no part of a report. A kept figure answers for the work it
was made of: its row carries the hash of that work, and where today's is another, the figure is stale.
"""

import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from labkit.drivers.trace.versions import trace_versions
from labkit.errors import InputError
from labkit.files import read_regular, write_atomically
from labkit.workload.files import data_directory

KEPT_CELLS = data_directory() / "traced" / "h200_lora_cells.csv"
KEPT_JOBS = data_directory() / "traced" / "megatron_ci_jobs.csv"

_VERSIONS = ("labkit", "torch", "megatron-core", "transformer-engine", "fla-core")
_MADE = {"date": pl.String, "trace driver": pl.String, **dict.fromkeys(_VERSIONS, pl.String)}
CELLS = {
    "case": pl.String,
    "work_hash": pl.String,
    "phase": pl.String,
    "traced_bytes": pl.Int64,
    "reason": pl.String,
    **_MADE,
}
"""A traced phase of a cell: bytes above the baseline, as `labkit.calibration.accuracy.increments` reads them; or one
row with the reason why the cell was not traced. `work_hash`: of the cell (`Cell.work_hash`). Then how it was made."""
JOBS = {
    "case": pl.String,
    "work_hash": pl.String,
    "workload_hash": pl.String,
    "status": pl.String,
    "traced_bytes": pl.Int64,
    "traced_first_step_bytes": pl.Int64,
    "traced_between_steps_bytes": pl.Int64,
    "estimated_bytes": pl.Int64,
    "estimated_first_step_bytes": pl.Int64,
    "estimated_between_steps_bytes": pl.Int64,
    "margin_bytes": pl.Int64,
    "reason": pl.String,
    **_MADE,
}
"""A CI job (`labkit.calibration.jobs.Job`): bytes of PyTorch's allocator, or why there are none. `work_hash`: of the
job as it was published (`Row.work_hash`); `workload_hash`: of what its import made of it."""

_MAXIMUM_BYTES = 64 * 2**20


def read_kept(path: Path, schema: Mapping[str, Any]) -> pl.DataFrame:
    """A file of kept figures, with the columns of `CELLS` or `JOBS`.

    Raises:
        InputError: it cannot be read, or is no such file.
    """
    try:
        content = read_regular(path, _MAXIMUM_BYTES)
        frame = pl.read_csv(io.BytesIO(content), schema_overrides=dict(schema))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: no file of kept figures ({str(error).splitlines()[0][:200]})") from None
    if dict(frame.schema) != dict(schema):
        raise InputError(f"{path}: its columns should be {', '.join(schema)}")
    return frame


def keep(path: Path, schema: Mapping[str, Any], rows: Iterable[dict[str, object]]) -> None:
    """Write rows beside those that the file has of other cases; what is said of how they were made is added here.

    Args:
        path: the file; a new one is made.
        schema: `CELLS` or `JOBS`.
        rows: all of one or more cases; names that are no columns are left out, columns without a value stay empty.

    Raises:
        InputError: the file that is there is none of kept figures.
        OSError: it cannot be written.
    """
    made = {"date": f"{datetime.now(UTC):%Y-%m-%d}", **trace_versions()}
    new = pl.DataFrame([{name: (row | made).get(name) for name in schema} for row in rows], schema=dict(schema))
    old = read_kept(path, schema) if path.exists() else new.clear()
    whole = pl.concat([old.filter(~pl.col("case").is_in(new["case"].implode())), new])
    write_atomically(path, whole.sort("case", maintain_order=True).write_csv())
