"""A store as one frame, and stores merged by copying their files."""

import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from labkit.drivers.contract import Failure, Measurement
from labkit.errors import InputError, WorkError
from labkit.study import export
from labkit.study.runner import Cell
from labkit.study.status import examine
from labkit.study.store import DamagedCellError, Store
from tests.study.builder import cell, measured

CELLS = [cell(control=True), cell("moe_act"), cell("layernorm", "moe_act")]


def put(store: Store, cell: Cell, **changes: Any) -> Path:
    made = measured(cell.candidate.workload)
    measurement = Measurement.model_validate({**dict(made.measurement), **changes})
    with store.claim(cell.key) as claim:
        assert claim is not None
        return claim.commit(measurement, made.ledger if measurement.outcome == "ok" else None)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "one")


def test_every_result_is_a_row_with_what_was_asked_and_answered(store: Store, tmp_path: Path) -> None:
    passed = put(store, CELLS[0], environment={"routing": "balanced"}, created_at="2026-08-01T00:00:00+00:00")
    failure = Failure(phase="backward", message="CUDA out of memory", rank=1, requested_bytes=2**20, free_bytes=7)
    put(store, CELLS[1], outcome="oom", failure=failure, ranks=())
    (store.directory / "broken.zip").write_bytes(b"broken")
    damaged: list[DamagedCellError] = []
    frame = export.write(store, tmp_path / "frames" / "all.parquet", damaged.append)
    assert [damage.path.name for damage in damaged] == ["broken.zip"]
    assert frame.schema == pl.Schema(export.SCHEMA)
    assert pl.read_parquet(tmp_path / "frames" / "all.parquet").equals(frame)
    ok = frame.row(by_predicate=pl.col("outcome") == "ok", named=True)
    workload = CELLS[0].candidate.workload
    assert (ok["cell"], ok["workload_hash"], ok["recompute"]) == (passed.stem, workload.content_hash, "[]")
    assert (ok["model"], ok["ep"], ok["seq_length"], ok["world_size"]) == (workload.model.name, 2, 128, 2)
    assert (ok["peak_allocated_bytes"], ok["peak_rank"], ok["peak_phase"]) == (21_000_512, 0, "backward")
    assert ok["environment"] == [{"name": "routing", "value": "balanced"}]
    assert type(workload).model_validate_json(ok["workload"], strict=False) == workload
    oom = frame.row(by_predicate=pl.col("outcome") == "oom", named=True)
    assert (oom["failure_phase"], oom["failure_rank"], oom["requested_bytes"], oom["free_bytes"]) == (
        "backward",
        1,
        2**20,
        7,
    )
    assert oom["peak_allocated_bytes"] is None
    ranks = frame.filter(outcome="ok").select("cell", "ranks").explode("ranks").unnest("ranks")
    phases = ranks.explode("phases").unnest("phases")
    assert phases["phase"].to_list() == ["setup", *["forward", "backward", "grad_sync", "optimizer"] * 2]


def test_an_empty_store_is_an_empty_frame(store: Store) -> None:
    assert export.results(store).schema == pl.Schema(export.SCHEMA)


def test_what_cannot_be_read_or_written_is_one_sentence(store: Store, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder of results"):
        export.write(store, tmp_path / "x.parquet")
    put(store, CELLS[0])
    with pytest.raises(InputError, match=r"a frame's name ends in \.parquet"):
        export.write(store, tmp_path / "x.csv")
    with pytest.raises(WorkError, match="cannot be written"):
        export.write(store, store.directory / "broken" / ".." / next(store.directory.iterdir()).name / "x.parquet")


def test_stores_of_two_machines_are_merged_by_copying_files(store: Store, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    put(store, CELLS[0])
    put(store, CELLS[1])
    put(other, CELLS[1], wall_seconds=1.0)
    put(other, CELLS[2])
    for path in other.directory.glob("*.zip"):
        if not (store.directory / path.name).exists():  # as `cp -n` does
            shutil.copy(path, store.directory)
    assert [status.state for status in examine(CELLS, store)] == ["done"] * 3
    frame = export.results(store)
    assert sorted(frame["recompute"]) == ["[]", "[layernorm, moe_act]", "[moe_act]"]
    assert frame["wall_seconds"].null_count() == 3
