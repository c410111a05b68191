"""Files that are there whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write `text` (UTF-8) to `path`, making its folder: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: the folder or the file cannot be written; nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
