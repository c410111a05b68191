"""Cell files: whole or absent, verified when read, made by one process at a time."""

import errno
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from labkit.drivers.contract import Failure
from labkit.errors import WorkError
from labkit.study.status import examine
from labkit.study.store import DamagedCellError, Store, cell_hash, work
from labkit.workload.workload import content_hash
from tests.study.builder import VERSIONS, cell, measured

CELL = cell()
MEASURED = measured(CELL.candidate.workload, rows=300)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def put(store: Store) -> Path:
    with store.claim(CELL.key) as claim:
        assert claim is not None
        return claim.commit(*MEASURED)


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    """The same zip file with changed members (and right checksums)."""
    changed = members(path)
    change(changed)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in changed.items():
            archive.writestr(name, content)


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_is_stored_comes_back_equal(store: Store) -> None:
    path = put(store)
    stored = store.read(CELL.key)
    assert stored is not None
    assert stored.measurement == MEASURED.measurement
    assert stored.ledger is not None
    assert stored.ledger.rows == MEASURED.ledger.rows
    assert stored.ledger.moments == MEASURED.ledger.moments
    assert [file.name for file in store.directory.iterdir()] == [path.name]


def test_file_is_named_by_workload_driver_and_versions(store: Store) -> None:
    keys = [CELL.key, cell("moe_act").key, cell(versions=(*VERSIONS, ("torch", "2.14.1"))).key]
    keys.append(CELL.key.model_copy(update={"repetition": 2}))
    assert len({cell_hash(key) for key in keys}) == 4
    assert store.path(CELL.key).name == f"{cell_hash(CELL.key)}.zip"


def test_equal_results_make_equal_files(tmp_path: Path) -> None:
    first, second = put(Store(tmp_path / "a")), put(Store(tmp_path / "b"))
    assert first.read_bytes() == second.read_bytes()


def test_failed_measurement_is_stored_without_ledger(store: Store) -> None:
    failed = MEASURED.measurement.model_copy(
        update={"outcome": "failed", "failure": Failure(phase="backward", message="killed")}
    )
    with store.claim(CELL.key) as claim:
        assert claim is not None
        claim.commit(failed, None)
    stored = store.read(CELL.key)
    assert stored is not None
    assert (stored.measurement, stored.ledger) == (failed, None)


def test_missing_cell_reads_as_none(store: Store) -> None:
    assert store.read(CELL.key) is None
    assert not store.directory.exists()


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.faults)])
def test_truncated_at_any_length_is_damage_by_name(store: Store, stride: int) -> None:
    path = put(store)
    whole = path.read_bytes()
    for length in {*range(0, len(whole), stride), 0, 1, len(whole) - 30, len(whole) - 1}:
        path.write_bytes(whole[:length])
        for read in (store.read, store.header):
            with pytest.raises(DamagedCellError, match=path.name) as caught:
                read(CELL.key)
            assert caught.value.path == path


@pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.faults)])
def test_garbage_from_any_byte_on_is_damage(store: Store, stride: int) -> None:
    path = put(store)
    whole = path.read_bytes()
    # To the bytes before the last two, which are the length of a comment.
    for length in range(0, len(whole) - 2, stride):
        path.write_bytes(whole[:length] + bytes(byte ^ 0x5A for byte in whole[length:]))
        for read in (store.read, store.header):
            with pytest.raises(DamagedCellError):
                read(CELL.key)


def test_a_flipped_byte_is_damage_or_changes_nothing(store: Store) -> None:
    path = put(store)
    whole = path.read_bytes()
    generator = random.Random(7)  # noqa: S311 (a reproducible choice of spots)
    spots = {*generator.sample(range(len(whole)), 300), *range(60), *range(len(whole) - 180, len(whole))}
    damaged = 0
    for spot in spots:
        path.write_bytes(whole[:spot] + bytes([whole[spot] ^ (1 << generator.randrange(8))]) + whole[spot + 1 :])
        try:
            stored = store.read(CELL.key)
        except DamagedCellError:
            damaged += 1
            continue
        assert stored is not None
        assert stored.measurement == MEASURED.measurement
        assert stored.ledger is not None
        assert stored.ledger.rows == MEASURED.ledger.rows
    assert damaged > len(spots) // 2


@pytest.mark.parametrize("garbage", [b"", b"\0" * 4096, b"PK\x03\x04" + b"x" * 500, b"not a zip file\n" * 100])
def test_garbage_is_damage(store: Store, garbage: bytes) -> None:
    path = put(store)
    path.write_bytes(garbage)
    with pytest.raises(DamagedCellError, match="not a whole zip file"):
        store.read(CELL.key)


def test_directory_in_a_cell_files_place_is_damage(store: Store) -> None:
    store.path(CELL.key).mkdir(parents=True)
    with pytest.raises(DamagedCellError, match="not a whole zip file"):
        store.read(CELL.key)


def test_device_or_pipe_in_a_cell_files_place_is_damage_and_not_read(store: Store) -> None:
    store.directory.mkdir(parents=True)
    path = store.path(CELL.key)
    path.symlink_to("/dev/zero")
    with pytest.raises(DamagedCellError, match="not a whole zip file: no regular file"):
        store.read(CELL.key)
    assert list(store.headers()) == []
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedCellError, match="no regular file"):
        store.read(CELL.key)
    put(store)
    assert store.read(CELL.key) is not None


def test_pipe_or_link_in_a_claims_place_is_not_waited_for_or_written_through(store: Store, tmp_path: Path) -> None:
    store.directory.mkdir(parents=True)
    part = store.path(CELL.key).with_suffix(".part")
    os.mkfifo(part)
    store.sweep()
    assert not part.exists()
    (tmp_path / "precious").write_text("mine")
    part.symlink_to(tmp_path / "precious")
    store.sweep()
    with pytest.raises(WorkError, match="cannot be written"):
        put(store)
    assert (tmp_path / "precious").read_text() == "mine"


def test_result_of_another_cell_under_this_name_is_damage(store: Store) -> None:
    other = cell("moe_act")
    shutil.copy(put(store), store.path(other.key))
    with pytest.raises(DamagedCellError, match="belongs to another name"):
        store.read(other.key)


def without_ledger(members: dict[str, bytes]) -> None:
    del members["ledger.parquet"]


def without_header(members: dict[str, bytes]) -> None:
    del members["cell.json"]


def foreign_columns(members: dict[str, bytes]) -> None:
    table = io.BytesIO()
    pl.DataFrame({"rank": [0]}).write_parquet(table)
    members["ledger.parquet"] = table.getvalue()


def no_parquet(members: dict[str, bytes]) -> None:
    members["ledger.parquet"] = b"PAR1 but not really PAR1"


def newer_schema(members: dict[str, bytes]) -> None:
    members["cell.json"] = members["cell.json"].replace(b"labkit.cell/1", b"labkit.cell/2")


def other_workload(members: dict[str, bytes]) -> None:
    members["cell.json"] = members["cell.json"].replace(b'"num_layers":2', b'"num_layers":3')


def another_ledger(members: dict[str, bytes]) -> None:
    members["ledger.parquet"] = parquet(measured(CELL.candidate.workload, saved=10**6, rows=300).ledger.frame)


def no_rows(members: dict[str, bytes]) -> None:
    members["ledger.parquet"] = parquet(MEASURED.ledger.frame.clear())


def no_steady_step(members: dict[str, bytes]) -> None:
    header = json.loads(members["cell.json"])
    header["moments"] = [moment for moment in header["moments"] if moment[2] != "backward"]
    members["cell.json"] = json.dumps(header).encode()


def failed_without_a_failure(members: dict[str, bytes]) -> None:
    members["cell.json"] = members["cell.json"].replace(b'"outcome":"ok"', b'"outcome":"failed"')


def passed_with_a_failure(members: dict[str, bytes]) -> None:
    failure = b'"failure":{"phase":"forward","message":"x"}'
    members["cell.json"] = members["cell.json"].replace(b'"failure":null', failure)


def no_ranks(members: dict[str, bytes]) -> None:
    header = json.loads(members["cell.json"])
    header["measurement"]["ranks"] = []
    members["cell.json"] = json.dumps(header).encode()


def another_driver(members: dict[str, bytes]) -> None:
    header = json.loads(members["cell.json"])
    header["measurement"]["driver"] = "published"
    members["cell.json"] = json.dumps(header).encode()


def parquet(frame: pl.DataFrame) -> bytes:
    table = io.BytesIO()
    frame.write_parquet(table)
    return table.getvalue()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_ledger, "its ledger has other peaks than its measurement"),
        (no_rows, "its ledger has no rows"),
        (no_steady_step, "its ledger has no steady step"),
        (failed_without_a_failure, "one that did not says why"),
        (passed_with_a_failure, "a measurement that passed has no failure"),
        (no_ranks, "says what a rank held"),
        (another_driver, "its measurement is by another driver"),
        (without_ledger, "no ledger.parquet"),
        (without_header, "no cell.json"),
        (foreign_columns, "not the ledger's columns"),
        (no_parquet, "ledger.parquet"),
        (newer_schema, "schema_name"),
        (other_workload, "another workload"),
    ],
)
def test_sound_zip_with_wrong_content_is_damage(
    store: Store, change: Callable[[dict[str, bytes]], None], reason: str
) -> None:
    rewritten(put(store), change)
    with pytest.raises(DamagedCellError, match=reason):
        store.read(CELL.key)


def test_only_one_claim_at_a_time(store: Store) -> None:
    with store.claim(CELL.key) as first:
        assert first is not None
        assert store.is_claimed(CELL.key)
        with store.claim(CELL.key) as second:
            assert second is None
        with store.claim(cell("moe_act").key) as other:
            assert other is not None
    assert not store.is_claimed(CELL.key)
    with store.claim(CELL.key) as again:
        assert again is not None


def test_claim_given_up_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.claim(CELL.key):
        raise ZeroDivisionError
    assert list(store.directory.iterdir()) == []


def test_part_file_of_a_killed_writer_is_taken_over(store: Store) -> None:
    store.directory.mkdir(parents=True)
    left = store.path(CELL.key).with_suffix(".part")
    left.write_bytes(b"half a result" * 100_000)
    assert not store.is_claimed(CELL.key)
    assert store.read(CELL.key) is None
    path = put(store)
    assert store.read(CELL.key) is not None
    assert list(store.directory.iterdir()) == [path]


def test_what_killed_writers_left_is_removed_and_what_is_being_made_is_not(store: Store) -> None:
    left = store.path(cell("moe_act").key).with_suffix(".part")
    with store.claim(CELL.key) as claim:
        assert claim is not None
        left.write_bytes(b"half a result")
        store.sweep()
        assert not left.exists()
        assert store.is_claimed(CELL.key)
        claim.commit(*MEASURED)
    assert store.read(CELL.key) is not None


def test_result_replaces_a_damaged_one(store: Store) -> None:
    path = put(store)
    path.write_bytes(b"broken")
    put(store)
    assert store.read(CELL.key) is not None


def test_results_of_other_versions_are_found_newest_first(store: Store) -> None:
    for version, day in (("0.18.0", "01"), ("0.17.0", "02")):
        old = cell(versions=(("labkit", "0.1.0"), ("megatron-core", version)))
        made = MEASURED.measurement.model_copy(
            update={"versions": dict(old.key.versions), "created_at": f"2026-08-{day}"}
        )
        with store.claim(old.key) as claim:
            assert claim is not None
            claim.commit(made, MEASURED.ledger)
    put(store)
    (store.directory / "broken.zip").write_bytes(b"broken")
    found = [dict(header.key.versions)["megatron-core"] for header in store.by_work()[work(CELL.key)]]
    assert found == ["0.17.0", "0.18.0", "0.19.2"]


def test_result_of_before_workloads_had_a_field_is_found_under_todays_workload(store: Store) -> None:
    header = json.loads(members(put(store))["cell.json"])
    del header["measurement"]["workload"]["launch"]  # all of it a default
    header["key"]["workload_hash"] = content_hash(header["measurement"]["workload"])
    old = store.directory / f"{content_hash(header['key'])}.zip"
    rewritten(store.path(CELL.key), lambda members: members.update({"cell.json": json.dumps(header).encode()}))
    store.path(CELL.key).rename(old)
    assert store.read(CELL.key) is None
    (found,) = store.by_work()[work(CELL.key)]
    assert store.path(found.key) == old
    stored = store.read(found.key)
    assert stored is not None
    assert stored.measurement.workload == CELL.candidate.workload
    (status,) = examine([CELL], store)
    assert (status.state, status.detail) == (
        "stale",
        "made by the same versions, before workloads had all of their fields",
    )


def test_where_the_file_system_has_no_locks_it_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(WorkError, match=r"has no file locks \(No locks available\), .* or choose another store"):
        put(store)


def test_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WorkError, match=r"cannot be written.*choose another store"):  # noqa: SIM117
        with Store(tmp_path / "file" / "results").claim(CELL.key):
            pass
