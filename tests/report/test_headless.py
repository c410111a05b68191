"""A notebook run many times, for real: resumable, each failure kept for reading, no success that is none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from labkit.errors import InputError
from labkit.files import claimed
from labkit.report.headless import Runs, load_parameters, run_all

ROOT = Path(__file__).parents[2]
NOTEBOOK = """# %% tags=["parameters"]
number = 0
how: str = "well"

# %% [markdown]
# ## The work

# %%
import os, sys, time
from pathlib import Path
with open("log", "a") as log:
    log.write(f"{number}\\n")
if how == "raise":
    raise ValueError("no number")
if how == "exit":
    sys.exit(0)
if how == "die":
    os._exit(0)
time.sleep(30 if how == "slow" and not Path("enough").exists() else 0)

# %%
from labkit.report.heading import Heading, finish
finish(Heading(title=str(number)))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "work.py"
    path.write_text(NOTEBOOK)
    return path


def swept(source: Path, asked: list[dict[str, Any]], folder: Path, **options: Any) -> Runs:
    said: list[str] = []
    return run_all(source, asked, folder, say=said.append, **options)


def test_what_failed_is_kept_and_only_that_is_run_again(source: Path, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [{"number": 1}, {"number": 2, "how": "raise"}]
    done, failed = swept(source, asked, tmp_path / "runs", workers=2).runs
    assert (done.state, failed.state) == ("done", "failed")
    # Papermill has put a cell with the parameters in.
    assert failed.reason.startswith("work.py: cell 4 of 5 (The work): ValueError: no number; ")
    assert Path(failed.notebook).name == f"{failed.name}.failed.ipynb"
    assert "no number" in str(nbformat.read(failed.notebook, as_version=4).cells)
    assert nbformat.read(done.notebook, as_version=4).cells[-1].execution_count
    names = sorted(path.name.removeprefix(done.name) for path in (tmp_path / "runs").glob(f"{done.name}*"))
    assert names == [".ipynb", ".json"]

    again = swept(source, asked, tmp_path / "runs").runs
    assert [run.state for run in again] == ["done", "failed"]
    assert again[0] == done
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "2", "2"]

    with claimed(tmp_path / "runs" / f"{done.name}.part"):
        (others,) = swept(source, asked[:1], tmp_path / "runs", force=True).runs
    assert others.state == "running"


@pytest.mark.faults
def test_an_interrupt_ends_the_runs_and_keeps_what_was_done(source: Path, tmp_path: Path) -> None:
    (tmp_path / "runs.yaml").write_text(yaml.safe_dump([{"number": 1}, {"number": 2, "how": "slow"}]))
    command = [sys.executable, "-m", "labkit", "notebook", "work.py", "-f", "runs.yaml", "-o", "runs"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while "2" not in ((tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.endswith("labkit: interrupted\n")
    assert len(list((tmp_path / "runs").glob("*.json"))) == 1
    (tmp_path / "enough").touch()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0
    assert (tmp_path / "log").read_text().split() == ["1", "2", "2"]


def test_what_a_notebook_has_not_is_refused_before_anything_runs(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"work\.py: no parameter 'numbre'; did you mean 'number'"):
        swept(source, [{"number": 1}, {"numbre": 2}], tmp_path / "runs")
    with pytest.raises(InputError, match="no such notebook"):
        swept(tmp_path / "nowhere.py", [{}], tmp_path / "runs")
    source.write_text("# %%\n1\n")
    with pytest.raises(InputError, match="no cell is tagged as its parameters"):
        swept(source, [{}], tmp_path / "runs")
    study = ROOT / "notebooks" / "recompute_study.py"
    with pytest.raises(InputError, match=r"recompute_study parameters: study: there is no such file"):
        swept(study, [{"study": "nowhere.yaml"}], tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "p.yaml").write_text("- 3\n")
    with pytest.raises(InputError, match="should be a mapping of a notebook's parameters, or a list"):
        load_parameters(tmp_path / "p.yaml")
