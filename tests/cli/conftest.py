"""What the tests of commands share: a command run in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from labkit.cli import main


class Answer(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def labkit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Answer]:
    """Runs a command in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, *capsys.readouterr())

    return run
