"""From a study file to its report, through jupytext, papermill, a kernel and the renderer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from labkit.errors import InputError
from labkit.report.document import study_report
from labkit.report.files import check_output

pytestmark = pytest.mark.slow

STUDY = """
name: tiny
title: Tiny <study>
base: moonlight-16b
control: {recompute: {recompute_modules: []}}
candidates:
  - recompute: {recompute_modules: [moe_act]}
"""


def test_a_study_that_was_not_run_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(STUDY)
    output = Path("new") / "folder" / "tiny.html"
    output.with_suffix(".failed.ipynb").parent.mkdir(parents=True)
    output.with_suffix(".failed.ipynb").write_text("of an earlier run")
    assert study_report(Path("tiny.yaml"), output) == output
    assert sorted(path.name for path in output.parent.iterdir()) == ["tiny.executed.ipynb", "tiny.html"]
    page = output.read_text()
    assert "<title>Tiny &lt;study&gt;</title>" in page
    assert "0 of 2 cells done, 2 missing" in page
    assert "by what the workload does not state: " in page
    assert "routing is not stated, and the router decides how many rows" in page
    assert str(tmp_path) not in page
    notebook = nbformat.read(output.with_suffix(".executed.ipynb"), as_version=4)
    (injected,) = [cell for cell in notebook.cells if "injected-parameters" in cell.metadata.get("tags", ())]
    assert 'study = "tiny.yaml"' in injected.source
    assert str(tmp_path) not in json.dumps(notebook)


def test_a_study_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        study_report(tmp_path / "nowhere.yaml", tmp_path / "out" / "x.html")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(STUDY)
    with pytest.raises(InputError, match="is a folder; give the report a file name"):
        study_report(tmp_path / "tiny.yaml", tmp_path)


def test_a_failing_notebook_keeps_the_report_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: [")
    output = tmp_path / "bad.html"
    output.write_text("of an earlier run")
    with pytest.raises(InputError, match=r"recompute_study.py: .*bad.yaml: not valid YAML"):
        study_report(tmp_path / "bad.yaml", output)
    assert output.read_text() == "of an earlier run"
    assert (tmp_path / "bad.failed.ipynb").exists()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_a_run_ends_its_kernel(tmp_path: Path, ending: signal.Signals) -> None:
    started = tmp_path / "pid"
    (tmp_path / "sleeper.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(600)\n"
    )
    code = (
        "from pathlib import Path\nfrom labkit.report.execute import execute\n"
        f"execute(Path({str(tmp_path / 'sleeper.py')!r}), {{}}, Path({str(tmp_path / 'failed.ipynb')!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    runner = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    wait_until(lambda: started.exists() and started.read_text() != "", 60)
    kernel = int(started.read_text())
    runner.send_signal(ending)
    assert runner.wait(30) != 0
    wait_until(lambda: not Path(f"/proc/{kernel}").exists(), 30)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["/dev/null", "study.yaml", "pipe.html", "taken/report.html"])
def test_nothing_but_a_report_is_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "study.yaml").write_text("the user's")
    (tmp_path / "taken").write_text("a file")
    os.mkfifo(tmp_path / "pipe.html")
    before = os.lstat("/dev/null")
    with pytest.raises(InputError):
        check_output(tmp_path / name)
    assert (tmp_path / "study.yaml").read_text() == "the user's"
    assert os.path.samestat(os.lstat("/dev/null"), before)
