"""scripts/find_python.sh, run by a real shell among pythons that answer as they do on real machines."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python.sh"
SHELL = shutil.which("sh") or "/bin/sh"
PYENV_SHIM = 'echo "pyenv: ${0##*/}: command not found" >&2\nexit 127'
WITHOUT_VENV = "echo \"ModuleNotFoundError: No module named 'ensurepip'\" >&2\nexit 1"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder whose path has a space in it, with an empty `bin`."""
    home = tmp_path / "a home"
    (home / "bin").mkdir(parents=True)
    return home


Program = Callable[[str, str], Path]


@pytest.fixture
def program(home: Path) -> Program:
    """Puts an executable shell script under the home folder."""

    def put(path: str, body: str) -> Path:
        file = home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!{SHELL}\n{body}\n")
        file.chmod(0o755)
        return file

    return put


def python(version: str) -> str:
    """What a Python of this version does with the probe: it prints its version and where it is."""
    return f'echo "{version} $0"'


def find(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(home / "bin"), "HOME": str(home), **environment}
    return subprocess.run(
        [SHELL, str(SCRIPT)], env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_prefers_3_12_to_what_comes_first_on_path(home: Path, program: Program) -> None:
    program("bin/python3", python("3.13"))
    expected = program("bin/python3.12", python("3.12"))
    assert find(home).stdout == f"{expected}\n"


def test_takes_3_13_when_there_is_no_3_12(home: Path, program: Program) -> None:
    program("bin/python3", python("3.11"))
    expected = program("bin/python3.13", python("3.13"))
    assert find(home).stdout == f"{expected}\n"


def test_looks_past_a_pyenv_shim_that_fails_into_pyenv_itself(home: Path, program: Program) -> None:
    program("bin/python3.12", PYENV_SHIM)
    program("bin/python3", python("3.11"))
    program("bin/pyenv", f'echo "{home}/pyenv root"')
    expected = program("pyenv root/versions/3.12.7/bin/python", python("3.12"))
    assert find(home).stdout == f"{expected}\n"


def test_looks_past_a_python_that_cannot_make_an_environment(home: Path, program: Program) -> None:
    program("bin/python3.12", WITHOUT_VENV)
    expected = program(".pyenv/versions/3.12.1/bin/python", python("3.12"))
    assert find(home).stdout == f"{expected}\n"


def test_asks_uv(home: Path, program: Program) -> None:
    expected = program("uv pythons/python3.12", python("3.12"))
    program("bin/uv", f'[ "$*" = "python find --no-project --no-python-downloads 3.12" ] && echo "{expected}"')
    assert find(home).stdout == f"{expected}\n"


def test_looks_into_every_conda_environment(home: Path, program: Program) -> None:
    program("bin/conda", f'echo "{home}/conda"')
    program("conda/bin/python", python("3.14"))
    expected = program("conda/envs/train/bin/python", python("3.12"))
    assert find(home).stdout == f"{expected}\n"


def test_a_named_python_is_the_only_candidate(home: Path, program: Program) -> None:
    program("bin/python3.12", python("3.12"))
    named = program("own/python", python("3.13"))
    assert find(home, PYTHON=str(named)).stdout == f"{named}\n"


@pytest.mark.parametrize(
    ("body", "said"), [(python("3.11"), "this one is 3.11"), (PYENV_SHIM, "does not run"), ("exit 0", "does not run")]
)
def test_a_named_python_that_does_not_do_is_an_error(home: Path, program: Program, body: str, said: str) -> None:
    program("bin/python3.12", python("3.12"))
    named = program("own/python", body)
    result = find(home, PYTHON=str(named))
    assert result.returncode == 1
    assert result.stdout == ""
    assert f"PYTHON={named} cannot be used" in result.stderr
    assert said in result.stderr


def test_says_in_one_sentence_what_is_missing_and_how_to_get_it(home: Path, program: Program) -> None:
    program("bin/python3.12", PYENV_SHIM)
    program("bin/python3", python("3.11"))
    result = find(home)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("No Python 3.12 or 3.13 with venv was found")
    assert "3.11" in line
    assert "make env PYTHON=/path/to/python3.12" in line


def test_the_python_that_runs_these_tests_is_a_right_one(home: Path) -> None:
    result = find(home, PYTHON=sys.executable)
    assert (result.returncode, result.stderr) == (0, "")
    assert Path(result.stdout.strip()).samefile(sys.executable)
