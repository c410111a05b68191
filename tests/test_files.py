"""Temporary folders: gone afterwards, and gone at the next start where a process could not take its own along."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from labkit.files import temporary_folder, write_atomically

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def aged(path: Path) -> Path:
    """As it looks a while later."""
    then = time.time() - 1000
    os.utime(path, (then, then))
    return path


def test_it_is_there_and_then_gone(folder: Path) -> None:
    with temporary_folder("labkit-x-") as made:
        assert made.parent == folder
        (made / "file").write_text("text")
    assert list(folder.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(folder: Path) -> None:
    script = (
        "import os, signal, sys, tempfile\nfrom labkit.files import temporary_folder\n"
        f"tempfile.tempdir = {str(folder)!r}\n"
        "with temporary_folder('labkit-x-') as made:\n    (made / 'file').touch()\n    os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    (left,) = folder.iterdir()
    with temporary_folder("labkit-x-"):
        assert left.exists()  # it may be one that was just made
    aged(left)
    with temporary_folder("labkit-x-"):
        assert not left.exists()


def test_what_is_in_use_or_not_labkits_stays(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (folder / "labkit-x-link").symlink_to(elsewhere)
    other = aged(Path(tempfile.mkdtemp(prefix="labkit-y-", dir=folder)))
    with temporary_folder("labkit-x-") as used:
        aged(used)
        with temporary_folder("labkit-x-"):
            assert used.exists()
    assert other.exists()
    assert elsewhere.exists()


def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe, link, plain = tmp_path / "pipe", tmp_path / "link", tmp_path / "plain"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path):
        with pytest.raises(OSError, match="no regular file"):
            write_atomically(path, "text")
    assert pipe.is_fifo()
    assert link.is_symlink()
    write_atomically(plain, "text")
    write_atomically(plain, "another")
    assert plain.read_text() == "another"
