"""Reading and writing whole files: what is read is a regular file of bounded size, what is written is there whole.

And claims: a file that its holder keeps locked (`flock`) while it makes something. The claim of a killed process lapses
with the process.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PACKAGE = Path(__file__).resolve().parent
_YOUNG_SECONDS = 60.0
"""A temporary folder younger than this may not be locked yet."""


def shipped_directory(name: str) -> Path:
    """What ships with labkit, `data` or `notebooks`: beside the package in a checkout, inside it once installed."""
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def shipped(kind: str) -> dict[str, Path]:
    """What of a kind ships with labkit, by name in order: `notebooks`, or a folder of `data` (`models`...)."""
    if kind == "notebooks":
        found = shipped_directory(kind).glob("*.py")
    else:
        found = (shipped_directory("data") / kind).glob("*.yaml")
    return {path.stem: path for path in sorted(found)}


def read_regular(path: Path, maximum_bytes: int) -> bytes:
    """The content of a regular file; a pipe, a device or a folder is never waited for or read.

    Raises:
        OSError: it cannot be opened, is no regular file, or is larger than `maximum_bytes`.
    """
    # Without O_NONBLOCK a pipe that nobody writes to would be waited for here.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "no regular file", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(maximum_bytes + 1)
    finally:
        os.close(descriptor)
    if len(content) > maximum_bytes:
        raise OSError(0, f"larger than {maximum_bytes / 2**20:g} MiB", str(path))
    return content


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8), making its folder: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the folder or the file cannot be written, or what stands there is no regular file (as root, the file
            would take a device's place); nothing is left behind.
    """
    if path.exists() and not path.is_file():
        raise OSError(0, "no regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not the process's number: machines that share a folder may have the same.
    temporary = path.with_name(f".{path.name[:80]}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Whether this process and thread alone has the claim while the block runs; its folder is made, and it goes after.

    Raises:
        OSError: the folder cannot be written, or its file system has no locks.
    """
    file = _open_claimed(path)
    if file is None:
        yield False
        return
    with file:
        try:
            yield True
        finally:
            if _is_same_file(file, path):
                path.unlink(missing_ok=True)


def claimed_new(path: Path) -> IO[bytes]:
    """A new file to write to, locked so that nobody takes it for abandoned.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        file = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        if _lock(file, fcntl.LOCK_EX) and _is_same_file(file, path):
            return file
        file.close()  # somebody came between our open and our lock, and has removed it


def is_claimed(path: Path) -> bool:
    """Whether some process holds a claim now."""
    try:
        with _opened(path, os.O_RDONLY) as file:
            return not _lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


def remove_unclaimed(path: Path) -> None:
    """Remove a file that a killed process has left behind; one that somebody holds stays."""
    # Opened for writing: NFS grants an exclusive lock on no other file.
    with suppress(OSError), _opened(path, os.O_RDWR) as file:
        if _lock(file, fcntl.LOCK_EX) and _is_same_file(file, path):
            path.unlink()


def _open_claimed(path: Path) -> IO[bytes] | None:
    """`path` opened and locked; None if someone else holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = _opened(path, os.O_RDWR | os.O_CREAT)
        if not _lock(file, fcntl.LOCK_EX):
            file.close()
            return None
        if _is_same_file(file, path):
            return file
        file.close()  # its holder finished between our open and our lock: this is no longer the claim


def _opened(path: Path, flags: int) -> IO[bytes]:
    """A claim's own file: no pipe is waited for, and no link followed to what somebody else owns."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return os.fdopen(descriptor, "r+b" if flags & os.O_EXCL else "rb")


def _lock(file: IO[bytes], kind: int) -> bool:
    """Whether the lock could be had; where none can, the file is closed."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        file.close()
        raise
    return True


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def temporary_folder(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """A folder that is gone afterwards; those that killed processes have left are removed on the way.

    Its owner holds a lock on it, which ends with the process however it ends. It lies `within` a folder, or where the
    system keeps such.
    """
    _remove_abandoned(prefix, within or Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_abandoned(prefix: str, within: Path) -> None:
    """Remove this user's old folders of the prefix that nobody has locked."""
    with suppress(OSError), os.scandir(within) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_abandoned(entry)


def _remove_if_abandoned(entry: "os.DirEntry[str]") -> None:
    found = entry.stat(follow_symlinks=False)
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_SECONDS:
        return
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(entry.path, ignore_errors=True)
    finally:
        os.close(descriptor)
