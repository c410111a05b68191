"""A whole store as one frame: a row for each result, whatever study, machine or version it came from."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from labkit.drivers.contract import Measurement
from labkit.errors import InputError, WorkError
from labkit.files import write_atomically
from labkit.study.store import DamagedCellError, Header, Store
from labkit.workload import Workload

_PAIRS = pl.List(pl.Struct({"name": pl.String, "value": pl.String}))
_PHASES = pl.List(
    pl.Struct(
        {
            "iteration": pl.Int64,
            "phase": pl.String,
            "peak_allocated_bytes": pl.Int64,
            "peak_reserved_bytes": pl.Int64,
        }
    )
)
_RANKS = pl.List(
    pl.Struct(
        {
            "rank": pl.Int64,
            "stages": pl.List(pl.Int64),
            "parameters": pl.Int64,
            "parameter_bytes": pl.Int64,
            "between_steps_bytes": pl.Int64,
            "retained_bytes": pl.Int64,
            "phases": _PHASES,
        }
    )
)
SCHEMA: dict[str, Any] = {
    "cell": pl.String,
    "driver": pl.String,
    "repetition": pl.Int64,
    "model": pl.String,
    "workload_hash": pl.String,
    "world_size": pl.Int64,
    "tp": pl.Int64,
    "sp": pl.Boolean,
    "cp": pl.Int64,
    "pp": pl.Int64,
    "vpp": pl.Int64,
    "ep": pl.Int64,
    "etp": pl.Int64,
    "dp": pl.Int64,
    "seq_length": pl.Int64,
    "micro_batch_size": pl.Int64,
    "global_batch_size": pl.Int64,
    "recompute": pl.String,
    "recompute_granularity": pl.String,
    "recompute_modules": pl.List(pl.String),
    "recompute_method": pl.String,
    "recompute_num_layers": pl.Int64,
    "runtime": pl.String,
    "precision": pl.String,
    "gpu": pl.String,
    "outcome": pl.String,
    "failure_phase": pl.String,
    "failure_message": pl.String,
    "failure_rank": pl.Int64,
    "requested_bytes": pl.Int64,
    "allocated_bytes": pl.Int64,
    "reserved_bytes": pl.Int64,
    "free_bytes": pl.Int64,
    "peak_allocated_bytes": pl.Int64,
    "peak_reserved_bytes": pl.Int64,
    "peak_rank": pl.Int64,
    "peak_phase": pl.String,
    "steady_iterations": pl.Int64,
    "step_time_ms": pl.Float64,
    "step_times_ms": pl.List(pl.Float64),
    "tflops_per_gpu": pl.Float64,
    "losses": pl.List(pl.Float64),
    "gradient_norms": pl.List(pl.Float64),
    "created_at": pl.String,
    "wall_seconds": pl.Float64,
    "source": pl.String,
    "versions": _PAIRS,
    "environment": _PAIRS,
    "ranks": _RANKS,
    "workload": pl.String,
}
"""`cell`: the stem of the result's file. `sp`: sequence parallel. `recompute`: the choice in words. `failure_...` and
the four after it: of a result that did not pass. `peak_...`: of the fullest rank; null where it did not pass.
`ranks`: each rank with each phase's peaks (`frame.select("cell", "ranks").explode("ranks").unnest("ranks")`).
`workload`: all of it, as JSON. What modules do in a step, and a trace's ledger, are in the files alone."""


def results(store: Store, damaged: Callable[[DamagedCellError], None] | None = None) -> pl.DataFrame:
    """Every result of a store, columns `SCHEMA`, in the order of their files' names.

    Args:
        store: A folder of result files.
        damaged: Told of each file that is none, and is left out.
    """
    rows = [_row(path, header) for path, header in store.headers(damaged)]
    return pl.DataFrame(rows, schema=SCHEMA)


def write(store: Store, output: Path, damaged: Callable[[DamagedCellError], None] | None = None) -> pl.DataFrame:
    """Write `results` to a parquet file, whole or not at all; returns them.

    Raises:
        InputError: there is no such store, or the file's name does not end in `.parquet`.
        WorkError: the file cannot be written.
    """
    if output.suffix != ".parquet":
        raise InputError(f"{output}: a frame's name ends in .parquet")
    if not store.directory.is_dir():
        raise InputError(f"{store.directory}: no such folder of results; labkit study run makes one")
    frame = results(store, damaged)
    packed = io.BytesIO()
    frame.write_parquet(packed, compression="zstd")
    try:
        write_atomically(output, packed.getvalue())
    except OSError as error:
        raise WorkError(f"{output}: cannot be written ({error.strerror or error})") from None
    return frame


def _row(path: Path, header: Header) -> dict[str, Any]:
    measurement = header.measurement
    return {
        "cell": path.stem,
        "driver": header.key.driver,
        "repetition": header.key.repetition,
        **_asked(measurement.workload),
        **_answered(measurement),
        "workload": measurement.workload.model_dump_json(),
    }


def _asked(workload: Workload) -> dict[str, Any]:
    layout, batch, recompute, training = workload.parallelism, workload.batch, workload.recompute, workload.training
    return {
        "model": workload.model.name,
        "workload_hash": workload.content_hash,
        "world_size": layout.world_size,
        **{name: getattr(layout, name) for name in ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")},
        "sp": layout.sequence_parallel,
        "seq_length": batch.seq_length,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size,
        "recompute": recompute.label,
        **recompute.model_dump(mode="json"),
        "runtime": training.runtime,
        "precision": training.precision,
        "gpu": training.gpu,
    }


def _answered(measurement: Measurement) -> dict[str, Any]:
    failure, worst = measurement.failure, measurement.worst_rank
    failed = {} if failure is None else failure.model_dump()
    same = measurement.model_dump(
        mode="json",
        include={
            "outcome",
            "steady_iterations",
            "step_time_ms",
            "step_times_ms",
            "tflops_per_gpu",
            "losses",
            "gradient_norms",
            "created_at",
            "wall_seconds",
            "source",
        },
    )
    return {
        **same,
        **{f"failure_{name}": failed.pop(name, None) for name in ("phase", "message", "rank")},
        **failed,
        "peak_allocated_bytes": measurement.peak_allocated_bytes,
        "peak_reserved_bytes": None if worst is None else worst.peak_reserved_bytes,
        "peak_rank": None if worst is None else worst.rank,
        "peak_phase": None if worst is None else worst.peak.phase,
        "versions": _pairs(measurement.versions),
        "environment": _pairs(measurement.environment),
        "ranks": [rank.model_dump(mode="json", exclude={"work"}) for rank in measurement.ranks],
    }


def _pairs(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in values.items()]
