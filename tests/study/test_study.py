"""A study from its file to its decision: with the real trace, small, killed, resumed, damaged."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from labkit.drivers.contract import Failure, Measurement, Outcome, PhasePeak, RankRecord
from labkit.drivers.trace.server import Limits
from labkit.errors import InputError
from labkit.report.tables import study as tables
from labkit.study import Study, export
from labkit.study.drivers import KINDS, Started
from labkit.study.status import StudyStatus
from labkit.workload import Workload
from tests.study.builder import SMALL, instant

pytestmark = pytest.mark.slow

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


class SmallGpus:
    """A driver that fills the contract of a GPU run; each repetition has another step time."""

    def __init__(self, outcomes: dict[str, Outcome] | None = None) -> None:
        self.outcomes = outcomes or {}
        self.runs: Counter[str] = Counter()

    @contextmanager
    def start(self, workers: int, limits: Limits | None) -> Iterator[Started]:
        assert workers == 1  # one cell has all GPUs
        yield Started(self, lambda workload: None)

    def __call__(self, workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> "GpuRun":
        label = workload.recompute.label
        self.runs[label] += 1
        outcome = self.outcomes.get(f"{label} #{self.runs[label]}", "ok")
        ranks = tuple(
            RankRecord(
                rank=rank,
                phases=tuple(
                    PhasePeak(
                        iteration=2, phase=phase, peak_allocated_bytes=10**9 + rank, peak_reserved_bytes=2 * 10**9
                    )
                    for phase in ("forward", "backward", "optimizer")
                ),
            )
            for rank in range(workload.parallelism.world_size)
        )
        return GpuRun(
            Measurement(
                driver="cuda",
                workload=workload,
                outcome=outcome,
                failure=None if outcome == "ok" else Failure(phase="backward", message="CUDA out of memory", rank=1),
                ranks=ranks,
                steady_iterations=2,
                step_time_ms=100.0 + self.runs[label],
                step_times_ms=(99.0 + self.runs[label], 101.0 + self.runs[label]),
                tflops_per_gpu=400.0,
                losses=(7.0, 6.9),
                gradient_norms=(1.0, 0.9),
                versions=dict.fromkeys(
                    ("labkit", "cuda driver", "torch", "megatron-core", "CUDA", "NVIDIA driver"), "1"
                ),
                environment=dict.fromkeys(("device", "allocator", "routing"), "x"),
            )
        )


class GpuRun(NamedTuple):
    measurement: Measurement
    ledger: None = None


@contextmanager
def start_instant(workers: int, limits: Limits | None) -> Iterator[Started]:
    yield Started(instant, lambda workload: None)


def test_drivers_stand_side_by_side_with_repeated_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = SmallGpus({"[moe] #2": "oom"})
    here: dict[str, str] | None = {"cuda driver": "1"}
    monkeypatch.setitem(KINDS, "trace", KINDS["trace"]._replace(start=start_instant))
    monkeypatch.setitem(KINDS, "cuda", KINDS["cuda"]._replace(start=gpus.start, versions=lambda: here))
    path = tmp_path / "both.yaml"
    path.write_text(yaml.safe_dump({**STUDY, "drivers": ["trace", "cuda"], "repetitions": 2}))
    study = Study.load(path)
    with pytest.raises(InputError, match=r"add it to the study file"):
        Study.load(write(tmp_path / "traced.yaml", STUDY)).run(drivers=["cuda"])
    assert study.run(drivers=["trace"]).count("done") == 3
    status = study.run()
    assert [(cell.name, cell.driver, cell.state) for cell in status.cells] == [
        ("[] (control)", "trace", "done"),
        ("[moe_act]", "trace", "done"),
        ("[moe]", "trace", "done"),
        ("[] (control)", "cuda", "done"),
        ("[moe_act]", "cuda", "done"),
        ("[moe]", "cuda", "done"),
        ("[] (control) #2", "cuda", "done"),
        ("[moe_act] #2", "cuda", "done"),
        ("[moe] #2", "cuda", "failed"),
    ]
    results = study.results()
    measured = {row["candidate"]: row for row in results.cells.filter(source="measured").iter_rows(named=True)}
    control, died = measured["[]"], measured["[moe]"]
    assert (control["outcome"], control["repetitions"], control["peak_allocated_bytes"]) == ("ok", 2, 10**9 + 1)
    assert (control["step_time_ms"], control["step_time_low_ms"], control["step_time_high_ms"]) == (101.5, 100, 103)
    assert (died["outcome"], died["peak_allocated_bytes"]) == ("oom", None)
    assert died["failure"] == "1 of 2 repetitions: CUDA out of memory (in backward)"
    assert set(results.decision["evidence"]) == {"measured"}
    assert results.ranks.filter(source="measured")["rank"].to_list() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert "measured" in tables.decision(results.decision).as_raw_html()
    assert len(export.results(study.store)) == 9

    here = None  # the same store on a machine without GPUs
    assert study.status().count("done") == 8
    assert study.run().count("failed") == 1
    assert study.elsewhere(study.status()) == ("cuda",)
    with pytest.raises(InputError, match="cuda cannot run on this machine; labkit doctor says what is missing"):
        study.run(drivers=["cuda"])
    assert gpus.runs.total() == 6


def write(path: Path, study: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(study))
    return path


def test_a_sweep_is_run_setting_by_setting_and_decided_in_each(tmp_path: Path) -> None:
    sweep = {"batch.seq_length": [128, 256], "parallelism.expert_model_parallel_size": [2, 3]}
    study = Study.load(write(tmp_path / "swept.yaml", {**STUDY, "sweep": sweep}))
    first, second = "seq_length=128, expert_model_parallel_size=2", "seq_length=256, expert_model_parallel_size=2"
    status = study.run([second], driver=instant)
    assert [cell.candidate for cell in status.cells] == [
        f"{label} at {second}" for label in ("[]", "[moe_act]", "[moe]")
    ]
    assert study.status().sentence == "3 of 6 cells done, 3 missing, 2 refused"
    results = study.results()
    assert results.decision["rank"].to_list() == [None, None, None, None, 1, None]
    said = results.decided.sentences
    assert said[0] == f"{first}: The control [] has no traced result: nothing can be compared yet."
    assert any(sentence.startswith(f"{second}: Try [moe_act] first: ") for sentence in said)
    assert results.decision["candidate"].to_list() == [candidate.label for candidate in study.matrix.candidates]
    assert said[-1].startswith("control at seq_length=256, expert_model_parallel_size=3 is refused: parallelism.expert")
    assert len(said) == 4
    saved = results.cells.filter(source="traced", setting=second)["saved_bytes"].to_list()
    assert saved == [0, 10**6, 10**6]
