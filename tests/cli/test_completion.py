"""Shell completion: what is offered, and that nothing in the name of a file is run."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_group

from labkit.cli import app, completion
from labkit.workload.files import data_directory

ROOT = Path(__file__).parents[2]
HOSTILE = (
    "$(touch pwned).yaml",
    "`touch pwned`.yaml",
    "a';touch pwned;'.yaml",
    'b" ) ; touch pwned ; ( ".yaml',
    "c\\'d e.yaml",
)


def offered(line: str) -> list[str]:
    """The values that complete a line."""
    return [each.partition("\t")[0] for each in completion.answer(get_group(app), f"labkit {line}")]


def shipped(kind: str) -> list[str]:
    return sorted(path.stem for path in (data_directory() / kind).glob("*.yaml"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("est", ["estimate"]),
        ("study s", ["submit", "status"]),
        ("trace moonlight-16b --ra", ["--rank", "--ranges"]),
        ("study run x.yaml --driver ", ["trace", "cuda"]),
        ("estimate ", shipped("workloads")),
        ("estimate moo", ["moonlight-16b"]),
        ("study status ", shipped("studies")),
        ("new workload ", shipped("models")),
        ("new study nem", ["nemotron-3-nano"]),
        ("report rec", ["recompute_study"]),
        ("diagnose x.log --gpu h", ["h100-80gb", "h200-141gb"]),
        ("study run moonlight-16b --only [mla", ["[mla_up_proj]", "[mla_up_proj, mlp]"]),
        ("study run moonlight-16b --only '[layer", ["[layernorm, moe_act]"]),
        ("study run nowhere.yaml --only ", []),
        ("diagnose ", []),
        ("estimate 'unclosed", []),
    ],
)
def test_what_is_offered(line: str, values: list[str]) -> None:
    assert offered(line) == values


def test_files_that_a_command_reads_are_offered_with_their_folders(folder: Path) -> None:
    for name in ("a.yaml", "a.txt", ".hidden.yaml", "sub/b.yml", "sub/.c.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert offered("check a") == []
    assert offered("estimate a") == ["a.yaml"]
    assert offered("study run ")[-2:] == ["a.yaml", "sub/"]
    assert offered("study run sub/") == ["sub/b.yml"]
    assert offered("study run sub/.") == ["sub/.c.yaml"]


def test_candidates_of_ones_own_study_are_offered(folder: Path) -> None:
    text = (data_directory() / "studies/moonlight-16b.yaml").read_text()
    (folder / "mine.yaml").write_text(text + "sweep: {batch.seq_length: [2048, 4096]}\n")
    assert "[moe_act] at seq_length=2048" in offered("study run mine.yaml --only ")


def test_it_imports_no_torch_and_no_tables(folder: Path) -> None:
    code = "import sys; from labkit.__main__ import main\ntry: main()\nfinally: print(sorted(HEAVY & {*sys.modules}))"
    heavy = {"torch", "polars", "altair", "numpy", "yaml", "rich"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), completion.LINE: "labkit estimate moo"}
    command = [sys.executable, "-c", code.replace("HEAVY", repr(heavy))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "moonlight-16b\tships with labkit\n[]\n"


def bash(code: str, folder: Path, line: str) -> list[str]:
    """What bash would insert for a line, as the words it then is."""
    command = folder / "labkit"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m labkit "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    words = line.split(" ")
    listed = " ".join(map(repr, words))
    state = f"COMP_LINE={line!r}; COMP_POINT={len(line)}; COMP_CWORD={len(words) - 1}; COMP_WORDS=({listed})"
    text = (
        f'{code}\n{state}\n_labkit {command}\nfor each in "${{COMPREPLY[@]}}"; do eval "printf \'%s\\n\' $each"; done'
    )
    run = subprocess.run(["bash", "--norc", "-c", text], cwd=folder, capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return run.stdout.splitlines()


def test_bash_inserts_names_of_files_so_that_none_is_run(folder: Path) -> None:
    inner = folder / "in"
    inner.mkdir()
    for name in (*HOSTILE, "line\nbreak.yaml", "bell\x07.yaml"):
        (inner / name).touch()
    script = completion.script("bash")
    assert bash(script, folder, "labkit estimate in/") == sorted(f"in/{name}" for name in HOSTILE)
    assert bash(script, folder, "labkit study run moonlight-16b --only [mo") == ["[moe_act]"]
    assert sorted(path.name for path in folder.iterdir()) == ["in", "labkit"], "nothing was run"


def test_behind_an_open_quote_bash_is_given_no_name_that_would_close_it(folder: Path) -> None:
    for name in (*HOSTILE, "plain name.yaml"):
        (folder / name).touch()
    line = 'labkit estimate "'
    state = f"COMP_LINE={line!r}; COMP_POINT={len(line)}; COMP_CWORD=2; COMP_WORDS=(labkit estimate '\"')"
    bash(completion.script("bash"), folder, "labkit doctor x")  # writes the command
    code = f'{completion.script("bash")}\n{state}\n_labkit ./labkit\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    run = subprocess.run(["bash", "--norc", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert set(run.stdout.splitlines()) == {*shipped("workloads"), "plain name.yaml"}


@pytest.mark.parametrize(
    ("shell", "place"),
    [
        ("bash", ".local/share/bash-completion/completions/labkit"),
        ("zsh", ".zfunc/_labkit"),
        ("fish", ".config/fish/completions/labkit.fish"),
    ],
)
def test_install_writes_one_file_and_says_what_remains(
    labkit: Callable, shell: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    answer = labkit("--install-completion")
    assert (answer.returncode, answer.stdout) == (0, f"{folder / place}\n")
    assert "new shells complete labkit" in answer.stderr
    assert labkit("--show-completion").stdout == (folder / place).read_text()
    assert [path for path in folder.rglob("*") if path.is_file()] == [folder / place]


def test_another_shell_is_one_sentence(labkit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    answer = labkit("--show-completion")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "labkit: the login shell is tcsh; say --shell bash, zsh or fish\n"
    assert labkit("--show-completion", "--shell", "fish").returncode == 0


def test_bash_accepts_its_script() -> None:
    subprocess.run(["bash", "-n"], input=completion.script("bash"), text=True, check=True)


def test_where_there_is_no_answer_the_shell_is_left_to_complete_files(folder: Path) -> None:
    environment = {**os.environ, "_LABKIT_COMPLETE_LINE": "labkit diagnose RE"}
    run = subprocess.run([sys.executable, "-m", "labkit"], env=environment, capture_output=True, check=True)
    assert run.stdout == b""
