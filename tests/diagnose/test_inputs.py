"""Which reader a file is given to, and what cannot be read at all."""

import os
from pathlib import Path

import pytest

from labkit.diagnose import diagnose
from labkit.errors import InputError


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(InputError, match="no regular file"):
            diagnose([path])


@pytest.mark.parametrize("content", [b"", b"\x7fELF\0\0\0"])
def test_what_is_no_text_and_no_snapshot_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.log"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"file\.log"):
        diagnose([path])
