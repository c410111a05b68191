"""Where results lie: one file per cell, named by what was run, by what, in which versions.

A cell file `<sha256>.zip` holds `cell.json` (its key, its measurement and the ledger's moments) and, of a trace that
passed, `ledger.parquet` (every row). It appears whole or not at all: it is written as `<sha256>.part`, flushed, and
renamed. The `.part` file is also the claim on the cell: whoever holds its `flock` is making it. The claim of a killed
process lapses with the process, and the next run takes over or removes what it left behind.

A file that passed is never written again; one that records a failure is replaced by the next run.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple

from pydantic import ValidationError

from labkit.drivers.contract import CellKey, Measurement
from labkit.errors import LabkitError, WorkError
from labkit.files import read_regular
from labkit.ledger import Ledger, Moment
from labkit.workload.base import Many, Part

_MAXIMUM_MEMBER_BYTES = 256 * 2**20
_MAXIMUM_BYTES = 2 * _MAXIMUM_MEMBER_BYTES
_EPOCH = (1980, 1, 1, 0, 0, 0)  # of the zip's members: equal results make equal files


class DamagedCellError(LabkitError):
    """A cell file that cannot be trusted; its text names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: damaged cell file ({reason}); running the study makes it again")
        self.path = path
        self.reason = reason


class Header(Part):
    """The `cell.json` of a cell file."""

    schema_name: Literal["labkit.cell/1"] = "labkit.cell/1"
    key: CellKey
    measurement: Measurement
    moments: Many[tuple[int, int, str]] = ()
    """`labkit.ledger.Moment` of the ledger beside it; empty where there is none."""


class Stored(NamedTuple):
    """A cell file's content, verified."""

    key: CellKey
    measurement: Measurement
    ledger: Ledger | None
    """None where the cell did not pass, or where GPUs measured it."""


def cell_hash(key: CellKey) -> str:
    """SHA-256 (hex) of a key: the stem of its cell's file."""
    canonical = json.dumps(key.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class Store:
    """A folder of cell files, safe for several processes and threads at once."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: CellKey) -> Path:
        """The file a cell's result is (or would be) in."""
        return self.directory / f"{cell_hash(key)}.zip"

    def read(self, key: CellKey) -> Stored | None:
        """The verified result of a cell; None if there is none.

        Raises:
            DamagedCellError: there is one, but it is not readable, whole, of the known schema, and this cell's.
        """
        path = self.path(key)
        return _read(path) if path.exists() else None

    def others(self, key: CellKey) -> list[Measurement]:
        """What other versions measured of the same work with the same driver, newest first; damaged files left out."""
        found = []
        for path in self.directory.glob("*.zip"):
            try:
                header, _ = _unpacked(path)
            except DamagedCellError:
                continue
            if header.key != key and header.key.model_copy(update={"versions": key.versions}) == key:
                found.append(header.measurement)
        return sorted(found, key=lambda measurement: measurement.created_at, reverse=True)

    def sweep(self) -> None:
        """Remove what killed processes left behind, of whatever cell."""
        for path in self.directory.glob("*.part"):
            with contextlib.suppress(OSError), _opened(path, os.O_RDONLY) as part:
                if _lock(part, fcntl.LOCK_EX) and _is_same_file(part, path):
                    path.unlink()

    def is_claimed(self, key: CellKey) -> bool:
        """Some process is making this cell now."""
        try:
            with _opened(self.path(key).with_suffix(".part"), os.O_RDONLY) as part:
                return not _lock(part, fcntl.LOCK_SH)
        except OSError:
            return False

    @contextlib.contextmanager
    def claim(self, key: CellKey) -> Iterator["Claim | None"]:
        """The sole right to make a cell while the block runs; None if another process or thread has it.

        Raises:
            WorkError: the store cannot be written.
        """
        path = self.path(key).with_suffix(".part")
        try:
            part = _open_locked(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        if part is None:
            yield None
            return
        with part:
            try:
                yield Claim(part, path, key)
            finally:
                if _is_same_file(part, path):
                    path.unlink(missing_ok=True)


class Claim:
    """The right to make one cell."""

    def __init__(self, part: IO[bytes], path: Path, key: CellKey) -> None:
        self._part = part
        self._path = path
        self._key = key

    def commit(self, measurement: Measurement, ledger: Ledger | None) -> Path:
        """Make the result visible, whole; `ledger` is None where there is none.

        Raises:
            WorkError: it cannot be written (a full disk, say); nothing has become visible.
        """
        content = _packed(Stored(self._key, measurement, ledger))
        final = self._path.with_suffix(".zip")
        try:
            self._part.seek(0)
            self._part.truncate()
            self._part.write(content)
            self._part.flush()
            os.fsync(self._part.fileno())
            self._path.replace(final)
            _sync_directory(final.parent)
        except OSError as error:
            raise _unwritable(final, error) from None
        return final


def _open_locked(path: Path) -> IO[bytes] | None:
    """`path` opened and locked; None if someone else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        part = _opened(path, os.O_RDWR | os.O_CREAT)
        if not _lock(part, fcntl.LOCK_EX):
            part.close()
            return None
        if _is_same_file(part, path):
            return part
        part.close()  # its holder finished between our open and our lock: this is no longer the claim


def _opened(path: Path, flags: int) -> IO[bytes]:
    """A claim's own file: no pipe is waited for, and no link followed to what somebody else owns."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b")


def _lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> WorkError:
    return WorkError(f"{path}: cannot be written ({error.strerror or error}); choose another store")


def _packed(stored: Stored) -> bytes:
    key, measurement, ledger = stored
    moments = () if ledger is None else tuple((*moment,) for moment in ledger.moments)
    header = Header(key=key, measurement=measurement, moments=moments)
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


def _read(path: Path) -> Stored:
    header, table = _unpacked(path)
    if cell_hash(header.key) != path.stem:
        raise DamagedCellError(path, "its content belongs to another name")
    if header.measurement.workload.content_hash != header.key.workload_hash:
        raise DamagedCellError(path, "its measurement is of another workload")
    if header.measurement.driver != header.key.driver:
        raise DamagedCellError(path, "its measurement is by another driver")
    if header.measurement.outcome != "ok" or header.measurement.driver != "trace":
        return Stored(header.key, header.measurement, None)
    if table is None:
        raise DamagedCellError(path, "no ledger.parquet")
    ledger = _ledger(path, table, header)
    _check(path, ledger, header.measurement)
    return Stored(header.key, header.measurement, ledger)


def _check(path: Path, ledger: Ledger, measurement: Measurement) -> None:
    """Refuse a ledger that is not the one the measurement was taken from."""
    if not len(ledger):
        raise DamagedCellError(path, "its ledger has no rows")
    steady = ledger.steady_iteration()
    phases = {(moment.iteration, moment.phase) for moment in ledger.moments}
    if not {(steady, "forward"), (steady, "backward")} <= phases:
        raise DamagedCellError(path, "its ledger has no steady step")
    worst = measurement.worst_rank
    stated = {(peak.iteration, peak.phase): peak.peak_allocated_bytes for peak in worst.phases} if worst else {}
    if stated != {(peak.iteration, peak.phase): peak.bytes for peak in ledger.phase_peaks()}:
        raise DamagedCellError(path, "its ledger has other peaks than its measurement")


def _unpacked(path: Path) -> tuple[Header, bytes | None]:
    """A cell file's header and ledger; reading a member checks its CRC-32."""
    try:
        with zipfile.ZipFile(io.BytesIO(read_regular(path, _MAXIMUM_BYTES))) as archive:
            if any(member.file_size > _MAXIMUM_MEMBER_BYTES for member in archive.infolist()):
                raise DamagedCellError(path, "a member is larger than any result")
            names = archive.namelist()
            if "cell.json" not in names:
                raise DamagedCellError(path, "no cell.json")
            # Not strict: JSON has lists for tuples. That nothing was read as something else, the key's hash proves.
            header = Header.model_validate_json(archive.read("cell.json"), strict=False)
            return header, archive.read("ledger.parquet") if "ledger.parquet" in names else None
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
