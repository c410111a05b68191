"""Jobs of Megatron-LM's tests: a file's rows are checked, and traced ones come out as NVIDIA measured them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from benchmarks.accuracy_megatron_ci import show, summary
from labkit.calibration.jobs import DEFAULT_JOBS, Job, Row, read_rows, traced
from labkit.console import Terminal
from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError
from labkit.importers.megatron import MegatronReader

pytestmark = pytest.mark.slow

FIRST = json.loads(DEFAULT_JOBS.read_text(encoding="utf-8").partition("\n")[0])
ROWS = {row.case: row for row in read_rows(DEFAULT_JOBS)}


@pytest.fixture(scope="module")
def reader() -> Iterator[MegatronReader]:
    with MegatronReader() as running:
        yield running


@pytest.mark.parametrize(
    ("case", "most"),
    [
        pytest.param("gpt/gpt3_7b_tp4_pp1_memory_speed/dev_dgx_h100", 0.0005, marks=pytest.mark.long),
        ("gpt/gpt3_mcore_tp1_pp4/dev_dgx_h100", 0.001),  # Megatron Core's own layers
        ("gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor/dev_dgx_h100", 0.0005),  # Megatron-FSDP
        ("moe/gpt3_mcore_te_tp1_pp1_te_4experts_groupedGEMM_op_fuser/dev_dgx_h100", 0.002),
        (
            "moe/gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances"
            "/dev_dgx_h100",
            0.002,
        ),
    ],
)
def test_peak_is_the_measured_one(case: str, most: float, reader: MegatronReader, server: TraceServer) -> None:
    job = traced(ROWS[case], reader, server)
    assert job.status == "traced", job.reason
    assert job.error is not None
    assert abs(job.error) <= most, job


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("t5/t5_mcore_tp4_pp1/dev_dgx_h100", "pretrain_t5.py trains a model that labkit does not have"),
        ("gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume/dev_dgx_gb200", "unknown argument --export-kd-cfg"),
    ],
)
def test_another_program_is_refused_with_its_reason(
    case: str, reason: str, reader: MegatronReader, server: TraceServer
) -> None:
    job = traced(ROWS[case], reader, server)
    assert (job.status, job.traced_bytes) == ("unsupported", None)
    assert reason in str(job.reason)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: no job of Megatron-LM's tests"),
        ("[]", "line 2: no job of Megatron-LM's tests"),
        (json.dumps({"case": "x"}), "line 2: no job of Megatron-LM's tests .'family' is missing"),
        ("[" * 100_000, "line 2: no job of Megatron-LM's tests"),
        (
            json.dumps(FIRST | {"peak_allocated_bytes": 10**400}),
            "line 2: no job of Megatron-LM's tests .peak_allocated_bytes: input should be less than",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(f"{json.dumps(FIRST)}\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match=said):
        list(read_rows(path))


def test_a_mark_at_the_beginning_and_other_line_ends_within_a_text_mean_nothing(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(json.dumps(FIRST | {"case": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8-sig")
    assert [row.case for row in read_rows(path)] == ["a\u2028b"]


def test_a_pipe_or_a_device_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(InputError, match="no regular file"):
            list(read_rows(path))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cases", "empty.jsonl"], "error: empty.jsonl: there is no job in it"),
        (["--only", "nothing"], "error: no job has that name and group"),
        (["--limit", "-1"], "error: argument --limit: should be a whole number from 1 on, not '-1'"),
        (["--cases", "\x1b[31m"], "error: \\x1b[31m: cannot be read (No such file or directory)"),
    ],
)
def test_errors_of_the_command_are_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "empty.jsonl").touch()
    ended = subprocess.run(
        [sys.executable, root / "benchmarks/accuracy_megatron_ci.py", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"{said}\n")


def test_control_characters_of_a_name_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("\x1b[31m", "gpt", "H100", "\x07", "current", "failed", 1000, reason="\x1b[2J")
    show([job], Terminal(width=160, markup=False))
    assert not {"\x1b", "\x07"} & {*capsys.readouterr().out}


def test_a_machine_has_eight_gpus_unless_layout_and_batch_need_others() -> None:
    row = next(iter(ROWS.values()))

    def world(**sizes: int) -> int | None:
        return Row(**{**dict(row), "n_gpus": None, "megatron_args": sizes}).world_size

    assert world(**{"global-batch-size": 32, "micro-batch-size": 4, "tensor-model-parallel-size": 2}) == 8
    assert world(**{"global-batch-size": 32, "tensor-model-parallel-size": 16}) is None
    assert world(**{"global-batch-size": 2, "micro-batch-size": 2}) is None


def test_summary_counts_and_measures() -> None:
    def job(traced_bytes: int | None, gpu: str = "H100") -> Job:
        status: Literal["traced", "failed"] = "failed" if traced_bytes is None else "traced"
        return Job("case", "moe", gpu, "2026-08-01", "current", status, 1000, traced_bytes)

    both, a100, h100 = summary([job(1010), job(980), job(None), job(1001, "A100")])
    assert (both["jobs"], both["number"], both["traced"]) == ("moe, mixtral, hybrid", 4, 3)
    assert both["peak_median_absolute_error"] == pytest.approx(0.01)
    assert (a100["traced"], h100["number"]) == (1, 3)
    assert h100["peak_median_error"] == pytest.approx(-0.005)
