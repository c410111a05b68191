"""Which reader a file is for, told by its content, never by its name."""

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from labkit.diagnose import logs, snapshots
from labkit.diagnose.reading import HEAD, Reading, Source
from labkit.errors import InputError

if TYPE_CHECKING:
    import io


class Kind(NamedTuple):
    """A kind of input."""

    accepts: Callable[[bytes], bool]
    """Whether a file that begins with these bytes is one."""
    read: Callable[[Source], Reading]
    """Raises `InputError` where it is damaged or none."""


KINDS: tuple[Kind, ...] = (Kind(snapshots.accepts, snapshots.read), Kind(logs.accepts, logs.read))
"""The first that accepts a file reads it."""

_TOLD = {
    b"\x1f\x8b": "; it is compressed: gunzip it first",
    b"\x28\xb5\x2f\xfd": "; it is compressed: unzstd it first",
    b"\xfd7zXZ": "; it is compressed: unxz it first",
    b"PK": "; it is an archive: unpack it first",
    b"\xff\xfe": "; it may be UTF-16: iconv -f UTF-16 -t UTF-8 makes text of it",
    b"\xfe\xff": "; it may be UTF-16: iconv -f UTF-16 -t UTF-8 makes text of it",
}
"""What a file that is neither begins with, and what would work."""


def read(path: Path | None) -> Reading:
    """What a file says; None is standard input.

    Raises:
        InputError: it cannot be read, or is nothing that labkit knows.
    """
    with _opened(path) as source:
        if not source.head:
            raise InputError(f"{source.name}: it is empty")
        for kind in KINDS:
            if kind.accepts(source.head):
                return kind.read(source)
        told = next((what for start, what in _TOLD.items() if source.head.startswith(start)), "")
        raise InputError(f"{source.name}: it is neither text in UTF-8 nor a memory snapshot{told}")


@contextmanager
def _opened(path: Path | None) -> Iterator[Source]:
    if path is None:
        given = cast("io.BufferedReader", sys.stdin.buffer)
        yield Source("standard input", given.peek(HEAD), given, None)
        return
    try:
        # Without O_NONBLOCK a pipe that nobody writes to would be waited for here.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError) as error:  # ValueError: no file's name has a null character
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        kind = "a folder; give its files" if path.is_dir() else "no regular file"
        raise InputError(f"{path}: is {kind}")
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(HEAD)
        file.seek(0)
        yield Source(str(path), head, file, path)
