"""Where results lie: one file per cell, named by what was run, by what, in which versions.

A cell file `<sha256>.zip` holds `cell.json` (its key, its measurement and the ledger's moments) and, where a trace
passed, `ledger.parquet` (every row). It appears whole or not at all: it is written under a name of its own
(`<sha256>.<token>.tmp`), flushed, and renamed. An empty `<sha256>.part` is the claim on the cell: whoever holds its
`flock` is making it. The claim of a killed process lapses with the process, and the next run takes over or removes what
it left behind.

Several machines may share a store where `flock` reaches all of them: NFSv4, or Lustre mounted with `flock`. Where the
file system has no `flock` the store says so and nothing is run; where it only locks each machine for itself, two
machines may make a cell twice, and the last whole file stays.

A file that passed is never written again; one that records a failure is replaced by the next run. Stores are merged by
copying files.
"""

import contextlib
import errno
import io
import json
import os
import secrets
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from labkit.drivers.contract import CellKey, Measurement
from labkit.errors import LabkitError, WorkError
from labkit.files import claimed, claimed_new, is_claimed, read_regular, remove_unclaimed
from labkit.ledger import Ledger, Moment
from labkit.workload.base import Many, Part
from labkit.workload.workload import content_hash

_MAXIMUM_MEMBER_BYTES = 256 * 2**20
_MAXIMUM_BYTES = 2 * _MAXIMUM_MEMBER_BYTES
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of the zip's members: equal results make equal files


class DamagedCellError(LabkitError):
    """A cell file that cannot be trusted; its text names the file and the reason."""

    def __init__(self, path: Path, reason: str, how: str = "running the study") -> None:
        super().__init__(f"{path}: damaged cell file ({reason}); {how} makes it again")
        self.path = path
        self.reason = reason


class Header(Part):
    """The `cell.json` of a cell file."""

    schema_name: Literal["labkit.cell/1"] = "labkit.cell/1"
    key: CellKey
    measurement: Measurement
    moments: Many[tuple[int, int, str]] = ()
    """`labkit.ledger.Moment` of the ledger beside it; empty where there is none."""


class ContractError(LabkitError):
    """A driver's answer that is no result of the cell it was asked for; its text says what is missing or wrong."""


class Stored(NamedTuple):
    """A cell file's content, verified."""

    key: CellKey
    measurement: Measurement
    ledger: Ledger | None
    """None where the cell did not pass, or its driver has none."""


class Work(NamedTuple):
    """What a cell is of, whatever the versions; fields that came after a result count with their defaults."""

    workload_hash: str
    driver: str
    repetition: int


def work(key: CellKey) -> Work:
    """What the cell of `key` is of."""
    return Work(key.workload_hash, key.driver, key.repetition)


def cell_hash(key: CellKey) -> str:
    """SHA-256 (hex) of a key: the stem of its cell's file."""
    return content_hash(key.model_dump(mode="json"))


class Store:
    """A folder of cell files, safe for several processes and threads at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: CellKey) -> Path:
        """The file a cell's result is (or would be) in."""
        return self.directory / f"{cell_hash(key)}.zip"

    def state(self, key: CellKey) -> tuple[int, int, int] | None:
        """What tells a cell's file from one that takes its place later; None if there is none."""
        try:
            found = self.path(key).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self, key: CellKey) -> Stored | None:
        """The verified result of a cell; None if there is none.

        Raises:
            DamagedCellError: there is one, but it is not readable, whole, of the known schema, and this cell's.
        """
        path = self.path(key)
        return _read(path) if path.exists() else None

    def header(self, key: CellKey) -> Header | None:
        """The same without the ledger's rows, in a millisecond: bytes are verified, and that they are this cell's.

        Raises:
            DamagedCellError: as `read`, but for a whole ledger that belongs to another measurement.
        """
        path = self.path(key)
        return _identified(path)[0] if path.exists() else None

    def headers(self, damaged: Callable[[DamagedCellError], None] | None = None) -> Iterator[tuple[Path, Header]]:
        """Every result in the store, in the order of names; `damaged` is told of each file that is none."""
        for path in sorted(self.directory.glob("*.zip")):
            try:
                header, _ = _identified(path)
            except DamagedCellError as error:
                if damaged is not None:
                    damaged(error)
            else:
                yield path, header

    def by_work(self) -> dict[Work, list[Header]]:
        """Every result under what was run, whatever the versions, newest first; damaged files are left out."""
        found: dict[Work, list[Header]] = {}
        for _, header in self.headers():
            of = work(header.key)._replace(workload_hash=header.measurement.workload.content_hash)
            found.setdefault(of, []).append(header)
        for headers in found.values():
            headers.sort(key=lambda header: header.measurement.created_at, reverse=True)
        return found

    def sweep(self) -> None:
        """Remove what killed processes left behind, of whatever cell."""
        for path in (*self.directory.glob("*.part"), *self.directory.glob("*.tmp")):
            remove_unclaimed(path)

    def is_claimed(self, key: CellKey) -> bool:
        """Some process is making this cell now."""
        return is_claimed(self.path(key).with_suffix(".part"))

    @contextlib.contextmanager
    def claim(self, key: CellKey) -> Iterator["Claim | None"]:
        """The sole right to make a cell while the block runs; None if another process or thread has it.

        Raises:
            WorkError: the store cannot be written.
        """
        path = self.path(key)
        with contextlib.ExitStack() as stack:
            try:
                mine = stack.enter_context(claimed(path.with_suffix(".part")))
            except OSError as error:
                raise _unwritable(path, error) from None
            yield Claim(path, key) if mine else None


class Claim:
    """The right to make one cell."""

    def __init__(self, path: Path, key: CellKey) -> None:
        self._path = path
        self._key = key

    def commit(self, measurement: Measurement, ledger: Ledger | None) -> Path:
        """Make the result visible, whole; `ledger` is None where the cell did not pass or its driver has none.

        Raises:
            ContractError: it is no whole result of this cell; nothing has become visible.
            WorkError: it cannot be written (a full disk, say); nothing has become visible.
        """
        content = _packed(Stored(self._key, measurement, ledger))
        # A name of its own, so that where locks fail to exclude another writer, neither's file is a mixture.
        temporary = self._path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            with claimed_new(temporary) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(self._path)
                finally:
                    temporary.unlink(missing_ok=True)
            _sync_directory(self._path.parent)
        except OSError as error:
            raise _unwritable(self._path, error) from None
        return self._path


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> WorkError:
    if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
        return WorkError(
            f"{path.parent}: its file system has no file locks ({error.strerror}), without which two runs would make "
            "the same cells; mount it with them (Lustre: -o flock), or choose another store"
        )
    return WorkError(f"{path}: cannot be written ({error.strerror or error}); choose another store")


def _packed(stored: Stored) -> bytes:
    """The bytes of a cell file.

    Raises:
        ContractError: a reader would refuse them.
    """
    key, measurement, ledger = stored
    moments = () if ledger is None else tuple((*moment,) for moment in ledger.moments)
    try:
        # Of its plain values: a measurement may have been made without being checked.
        whole = Measurement.model_validate_json(measurement.model_dump_json(warnings=False), strict=False)
        header = Header(key=key, measurement=whole, moments=moments)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "measurement"
        raise ContractError(f"the driver's record is not whole: {where}: {problem['msg']}") from None
    except PydanticSerializationError as error:
        raise ContractError(f"the driver's record is not plain data: {error}") from None
    wrong = _mistaken(header, whole.workload.content_hash) or _mismatched(header, ledger)
    if wrong is not None:
        raise ContractError(f"the driver's record is not this cell's: {wrong}")
    members = {"cell.json": header.model_dump_json().encode()}
    if ledger is not None:
        table = io.BytesIO()
        ledger.frame.write_parquet(table, compression="zstd")
        members["ledger.parquet"] = table.getvalue()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
    return packed.getvalue()


def _identified(path: Path) -> tuple[Header, bytes | None]:
    """A cell file's header and ledger, if they are what its name says."""
    header, table, workload_hash = _unpacked(path)
    if cell_hash(header.key) != path.stem:
        raise DamagedCellError(path, "its content belongs to another name")
    wrong = _mistaken(header, workload_hash)
    if wrong is None and table is None and _has_ledger(header.measurement):
        wrong = "no ledger.parquet"
    if wrong is not None:
        raise DamagedCellError(path, wrong)
    return header, table


def _read(path: Path) -> Stored:
    header, table = _identified(path)
    ledger = None
    if table is not None and _has_ledger(header.measurement):
        ledger = _ledger(path, table, header)
    wrong = _mismatched(header, ledger)
    if wrong is not None:
        raise DamagedCellError(path, wrong, "`labkit study run --force`")
    return Stored(header.key, header.measurement, ledger)


def _has_ledger(measurement: Measurement) -> bool:
    """Whether its ledger belongs to the result: a trace's, which is where its peaks come from."""
    return measurement.driver == "trace" and measurement.outcome == "ok"


def _mistaken(header: Header, workload_hash: str) -> str | None:
    """Why a measurement is not the one its key names; None if it is. The hash is of its workload as it is stored."""
    key, measurement = header.key, header.measurement
    if workload_hash != key.workload_hash:
        return "its measurement is of another workload"
    if measurement.driver != key.driver:
        return "its measurement is by another driver"
    return None


def _mismatched(header: Header, ledger: Ledger | None) -> str | None:
    """Why a ledger is not the one that the measurement was taken from; None if it is, or needs none."""
    measurement = header.measurement
    if not _has_ledger(measurement):
        return None
    if ledger is None or not len(ledger):
        return "its ledger has no rows"
    steady = ledger.steady_iteration()
    phases = {(moment.iteration, moment.phase) for moment in ledger.moments}
    if not {(steady, "forward"), (steady, "backward")} <= phases:
        return "its ledger has no steady step"
    worst = measurement.worst_rank
    stated = {(peak.iteration, peak.phase): peak.peak_allocated_bytes for peak in worst.phases} if worst else {}
    if stated != {(peak.iteration, peak.phase): peak.bytes for peak in ledger.phase_peaks()}:
        return "its ledger has other peaks than its measurement"
    return None


def _unpacked(path: Path) -> tuple[Header, bytes | None, str]:
    """A cell file's header, its ledger, and the hash of its workload; reading a member checks its CRC-32.

    The hash is of what is stored: an older labkit's workload lacks the fields that have come since.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(read_regular(path, _MAXIMUM_BYTES))) as archive:
            if any(member.file_size > _MAXIMUM_MEMBER_BYTES for member in archive.infolist()):
                raise DamagedCellError(path, "a member is larger than any result")
            names = archive.namelist()
            if "cell.json" not in names:
                raise DamagedCellError(path, "no cell.json")
            stated = archive.read("cell.json")
            header = Header.model_validate_json(stated, strict=False)  # not strict: JSON has lists for tuples
            workload_hash = content_hash(json.loads(stated)["measurement"]["workload"])
            return header, archive.read("ledger.parquet") if "ledger.parquet" in names else None, workload_hash
    except ValidationError as error:
        problem = error.errors()[0]
        raise DamagedCellError(path, f"cell.json: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    # zipfile answers damage with any of these, depending on the byte that is wrong.
    except (OSError, EOFError, RuntimeError, ValueError, struct.error, zipfile.BadZipFile, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DamagedCellError(path, f"not a whole zip file: {reason}") from None


def _ledger(path: Path, table: bytes, header: Header) -> Ledger:
    import polars as pl

    try:
        frame = pl.read_parquet(io.BytesIO(table))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise DamagedCellError(path, f"ledger.parquet: {str(error).splitlines()[0]}") from None
    if frame.schema != Ledger((), ()).frame.schema:
        raise DamagedCellError(path, "ledger.parquet: not the ledger's columns")
    return Ledger.from_frame(frame, [Moment(*moment) for moment in header.moments])
