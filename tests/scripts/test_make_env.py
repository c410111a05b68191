"""`make env` where it must not install: with no usable Python, and when the environment is there already."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without an environment, in a folder with a space in its name."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("Makefile", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def make_env(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # The MAKEFLAGS of a `make test` that runs this are its own affair.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", "env", *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def test_a_python_that_does_not_do_is_said_in_one_sentence_and_nothing_is_made(checkout: Path) -> None:
    result = make_env(checkout, "PYTHON=no-such-python")
    assert result.returncode == 2
    sentence, make_itself = result.stderr.splitlines()
    assert sentence.startswith("PYTHON=no-such-python cannot be used: labkit needs a Python 3.12 or 3.13")
    assert make_itself.startswith("make: ***")
    assert not (checkout / ".venv").exists()


def test_nothing_is_done_when_the_environment_is_newer_than_what_it_is_made_from(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "stamp").touch()
    result = make_env(checkout, "PYTHON=no-such-python")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_half_made_environment_is_not_taken_for_a_whole_one(checkout: Path) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to("/bin/true")
    result = make_env(checkout, "PYTHON=no-such-python")
    assert result.returncode == 2
    assert "cannot be used" in result.stderr
