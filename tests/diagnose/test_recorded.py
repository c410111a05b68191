"""Logs as recorded measurements: read, written, read again, and shown by a study beside the estimate."""

from pathlib import Path

import pytest
import yaml

from labkit.cli import main
from labkit.diagnose import recorded
from labkit.drivers.recorded import read_recorded
from labkit.errors import InputError
from labkit.study import Study
from labkit.workload import Workload
from tests.small import selective, small

STEP = "iteration {:8d}/      20 | consumed samples: 4 | elapsed time per iteration (ms): {:.1f} | lm loss: 9.{}E+00 |"
MEMORY = "[Rank {}] (after {} iterations) memory (MB) | allocated: 1.00 | max allocated: {:.2f} | max reserved: {:.2f}"
OOM = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
    "79.10 "
    "GiB of which 1.00 GiB is free. Of the allocated memory 75.00 GiB is allocated by PyTorch, and 1.00 GiB is "
    "reserved by "
    "PyTorch but unallocated."
)
LOG = "\n".join(
    [STEP.format(step, 400 + step, step) + "\n" + MEMORY.format(0, step, 40 + step, 60) for step in (1, 2)]
    + [MEMORY.format(1, 2, 43, 61), *(STEP.format(step, 400 + step, step) for step in (3, 4, 5))]
)


def write(folder: Path, log: str, workload: Workload) -> tuple[Path, Path]:
    """A log and a workload file."""
    (folder / "run.log").write_text(log, encoding="utf-8")
    (folder / "w.yaml").write_text(workload.model_dump_json(exclude_unset=True), encoding="utf-8")
    return folder / "run.log", folder / "w.yaml"


def test_a_log_becomes_a_measurement_that_can_be_read_again(tmp_path: Path) -> None:
    log, workload = write(tmp_path, LOG, small())
    made, notes = recorded.read_logs([log], workload)
    assert not notes
    assert (made.outcome, made.peak_allocated_bytes) == ("ok", 43 * 2**20)
    assert [(each.rank, each.steady_peak_bytes, each.peak_reserved_bytes) for each in made.ranks] == [
        (0, 42 * 2**20, 60 * 2**20),
        (1, 43 * 2**20, 61 * 2**20),
    ]
    assert made.ranks[0].first_step_peak_bytes == 41 * 2**20
    assert (made.step_time_ms, made.steady_iterations, made.losses[0]) == (404, 3, 9.1)
    file = tmp_path / "made.yaml"
    file.write_text(recorded.as_yaml(made), encoding="utf-8")
    assert read_recorded(file) == made


def test_a_log_out_of_memory_is_recorded_as_such(tmp_path: Path) -> None:
    log, workload = write(tmp_path, f"{STEP.format(1, 400, 1)}\n{MEMORY.format(0, 1, 41, 60)}\n{OOM}\n", small())
    made, _ = recorded.read_logs([log], workload)
    assert made.outcome == "oom"
    assert made.failure is not None
    assert (made.failure.rank, made.failure.requested_bytes) == (1, 2 * 2**30)
    assert made.peak_allocated_bytes is None  # how far it came is no peak


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (STEP.format(3, 400, 1), "it says no memory"),
        (f"{STEP.format(1, 400, 1)}\n{MEMORY.format(0, 1, 41, 60)}", "memory of the first step alone"),
    ],
)
def test_a_log_without_a_steady_peak_is_refused_in_a_sentence(tmp_path: Path, log: str, said: str) -> None:
    path, workload = write(tmp_path, log, small())
    with pytest.raises(InputError, match=said):
        recorded.read_logs([path], workload)
    with pytest.raises(InputError, match="does not say what was run"):
        recorded.read_logs([path])


def test_a_memory_snapshot_is_no_log(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "pytorch_allocator" / "snapshot_default.pickle"
    with pytest.raises(InputError, match="does not say which steps were done"):
        recorded.read_logs([path], write(tmp_path, "", small())[1])


def test_a_study_shows_recorded_figures_beside_its_estimates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, workload = write(tmp_path, LOG, small(recompute=selective("moe_act")))
    made, ran = str(tmp_path / "made.yaml"), str(tmp_path / "ran.yaml")
    with pytest.raises(SystemExit) as ended:
        main(["import", "log", str(log), "--workload", str(workload), "-o", made, "--write-workload", ran])
    assert ended.value.code == 0, capsys.readouterr().err
    study = {
        "name": "mine", "title": "mine", "base": "ran.yaml", "control": {"recompute": selective()},
        "candidates": [{"recompute": selective("moe_act")}], "recorded": ["made.yaml"],
    }  # fmt: skip
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(study), encoding="utf-8")
    results = Study.load(file).results()
    rows = {(row["candidate"], row["source"]): row for row in results.cells.iter_rows(named=True)}
    assert ("[]", "recorded") not in rows
    shown = rows["[moe_act]", "recorded"]
    assert (shown["peak_allocated_bytes"], shown["peak_reserved_bytes"]) == (43 * 2**20, 61 * 2**20)
    assert (shown["step_time_ms"], shown["outcome"]) == (404, "ok")
    assert rows["[moe_act]", "estimated"]["peak_allocated_bytes"] > 0
    assert results.decision.filter(candidate="[moe_act]")["recorded_bytes"][0] == 43 * 2**20
    assert [each.certainty for each in results.observations] == ["measured"]
    file.write_text(yaml.safe_dump({**study, "candidates": [{"recompute": selective("layernorm")}]}), encoding="utf-8")
    with pytest.raises(InputError, match=r"recorded made\.yaml: it is of no candidate"):
        Study.load(file)
    file.write_text(yaml.safe_dump({**study, "recorded": ["made.yaml", "made.yaml"]}), encoding="utf-8")
    with pytest.raises(InputError, match="are both of"):
        Study.load(file)
