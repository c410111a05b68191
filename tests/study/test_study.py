"""A study from its file to its decision: with the real trace, small, killed, resumed, damaged."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.drivers.trace.server import Limits
from labkit.errors import InputError
from labkit.study import Study
from labkit.study.status import StudyStatus
from tests.study.builder import SMALL, instant

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
STUDY = {
    "name": "small",
    "title": "Small <study>",
    "base": SMALL,
    "control": {"recompute": {"recompute_modules": []}},
    "candidates": [{"recompute": {"recompute_modules": ["moe_act"]}}, {"recompute": {"recompute_modules": ["moe"]}}],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "studies" / "small.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(STUDY))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "labkit", "study", *map(str, arguments)]


def labkit(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )


def test_results_lie_beside_the_folder_of_studies_or_beside_the_file(path: Path, tmp_path: Path) -> None:
    assert Study.load(path).store.directory == tmp_path / "results" / "small"
    alone = tmp_path / "alone.yaml"
    alone.write_text(path.read_text())
    assert Study.load(alone).store.directory == tmp_path / "results" / "small"
    assert Study.load(path, store=tmp_path / "elsewhere").store.directory == tmp_path / "elsewhere"


def test_loading_and_asking_write_nothing(path: Path, tmp_path: Path) -> None:
    study = Study.load(path)
    assert study.status().count("missing") == 3
    assert study.results().decided.sentences[0].startswith("The control [] has no traced result")
    assert [file.name for file in tmp_path.rglob("*")] == ["studies", "small.yaml"]


def test_only_the_chosen_run_and_unknown_labels_are_refused(path: Path) -> None:
    study = Study.load(path)
    status = study.run(only=["moe_act"], driver=instant)
    assert [(cell.candidate, cell.state) for cell in status.cells] == [("[moe_act]", "done")]
    assert study.status().count("missing") == 2
    with pytest.raises(InputError, match="no candidate 'moe_akt'"):
        study.run(only=["moe_akt"], driver=instant)
    with pytest.raises(InputError, match="workers: 0 cannot run anything"):
        study.run(workers=0, driver=instant)


def test_it_shows_itself_with_its_text_escaped(path: Path) -> None:
    study = Study.load(path)
    study.run(only=["[]"], driver=instant)
    html = study._repr_html_()
    assert "<strong>Small &lt;study&gt;</strong>: 1 of 3 cells done, 2 missing" in html
    assert html.count("<tr>") == 4
    assert repr(study) == "Study('small', 1 of 3 cells done, 2 missing)"


def test_real_study_killed_damaged_resumed_and_decided(path: Path) -> None:
    """The whole life of a study with the real trace driver, as a user's shell sees it."""
    study = Study.load(path)
    process = subprocess.Popen(command("run", path, "--workers", "1"), env=ENVIRONMENT, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while study.status().count("done") == 0 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 1 <= study.status().count("done") < 3

    damaged = next(study.store.directory.glob("*.zip"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[: len(whole) // 2])
    assert "1 damaged" in labkit("status", path).stdout

    resumed = labkit("run", path, "--json")
    assert resumed.returncode == 0
    assert f"{damaged}: damaged cell file" in resumed.stderr
    assert StudyStatus.model_validate_json(resumed.stdout, strict=False).count("done") == 3
    assert {file.suffix for file in study.store.directory.iterdir()} == {".zip"}

    results = study.results()
    assert results.cells.filter(source="traced")["outcome"].to_list() == ["ok"] * 3
    assert results.decided.sentences
    for result in results.candidates:
        (run,) = result.runs
        assert run.traced is not None
        assert run.measurement is not None
        assert run.traced.peak_allocated_bytes == run.measurement.peak_allocated_bytes


def test_a_real_pipelined_cell_is_ended_at_a_limit_and_then_holds_every_stage(tmp_path: Path) -> None:
    layout: dict[str, Any] = {"world_size": 4, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    path = tmp_path / "pipelined.yaml"
    base: dict[str, Any] = {**SMALL, "parallelism": layout}
    path.write_text(yaml.safe_dump({**STUDY, "base": base}))
    study = Study.load(path)
    (cell,) = study.run(["[]"], limits=Limits(memory_bytes=2**28)).cells
    assert cell.state == "failed"
    assert "was ended in setup: its process needed more than 0.25 GiB of host memory" in cell.detail
    ended = study.results().cells.filter(source="traced", candidate="[]")
    assert ended["outcome"].to_list() == ["out_of_host_memory"]

    assert [cell.state for cell in study.run(["[]"]).cells] == ["done"]
    results = study.results()
    assert results.ranks["rank"].to_list() == [0, 2]
    assert results.ranks["stages"].to_list() == ["0", "1"]
    traced = results.candidates[0].traced
    assert traced is not None
    peaks = dict(zip(results.ranks["rank"], results.ranks["peak_allocated_bytes"], strict=True))
    assert peaks[traced.rank] == max(peaks.values()) == traced.peak_allocated_bytes
    assert {row.rank for row in traced.ledger.rows} == {traced.rank}


def test_interrupted_command_ends_at_once_with_130(path: Path) -> None:
    process = subprocess.Popen(
        command("run", path), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    directory = Study.load(path).store.directory
    deadline = time.monotonic() + 60
    while not list(directory.glob("*.part")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr == "labkit: interrupted\n"
    assert time.monotonic() - began < 20
    assert list(directory.glob("*.part")) == []
