"""The command line as its users meet it: exit codes, one sentence on stderr, `--json` and nothing else on stdout."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import pytest
import yaml

from labkit.cli import main
from labkit.comparison import Comparison
from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.server import Limits
from labkit.study.status import StudyStatus
from labkit.summary import Summary
from labkit.workload import Workload
from labkit.workload.files import data_directory
from tests.study.builder import SMALL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
LABKIT = (sys.executable, "-m", "labkit")
MOONLIGHT = data_directory() / "workloads" / "moonlight-16b.yaml"


class Answer(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


type Command = Callable[..., Answer]


@pytest.fixture
def labkit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs the command in this process, which is quicker; `process` does in a fresh one."""

    def run(*arguments: str | Path, cwd: Path | None = None) -> Answer:
        if cwd is not None:
            monkeypatch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Answer(ended.value.code, *capsys.readouterr())

    return run


def process(*command: str, environment: Mapping[str, str] = ENVIRONMENT, stdout: int = subprocess.PIPE) -> Answer:
    """Runs a command in a fresh process."""
    ended = subprocess.run(
        command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return Answer(ended.returncode, ended.stdout or "", ended.stderr)


def changed(mapping: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """`mapping` with fields of its parts replaced; a part that is no mapping replaces it."""
    new = dict(mapping)
    for part, fields in parts.items():
        new[part] = {**new[part], **fields} if isinstance(fields, dict) and part in new else fields
    return new


STUDY = {
    "name": "small",
    "title": "Small study",
    "base": SMALL,
    "control": {"recompute": {"recompute_modules": []}},
    "candidates": [{"recompute": {"recompute_modules": ["moe_act"]}}],
}
BAD_WORKLOADS = {
    "unknown model": (changed(SMALL, model="moonlite-16b-a3b"), "unknown model 'moonlite-16b-a3b'; did you mean"),
    "unknown label": (
        changed(SMALL, recompute={"recompute_modules": ["moe_akt"]}),
        "'moe_akt' is not allowed; did you mean 'moe_act'",
    ),
    "TP that does not divide": (
        changed(SMALL, parallelism={"world_size": 6, "tensor_model_parallel_size": 3, "sequence_parallel": True}),
        "3 does not divide num_attention_heads (4); use one of 1, 2, 4",
    ),
    "EP that does not divide": (
        changed(SMALL, parallelism={"world_size": 3, "expert_model_parallel_size": 3}),
        "3 does not divide num_moe_experts (8); use one of 1, 2, 4, 8",
    ),
    "world size that does not factor": (
        changed(SMALL, parallelism={"world_size": 3, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        "3 ranks do not factor into tensor x pipeline x context parallel = 2; use a multiple of 2",
    ),
    "unknown key": (
        changed(SMALL, batch={"seq_lenght": 128}),
        "unknown key 'batch.seq_lenght'; did you mean 'seq_length'",
    ),
    "wrong type": (changed(SMALL, batch={"seq_length": "long"}), "batch.seq_length: input should be a valid integer"),
    "missing part": ({"model": SMALL["model"]}, "'parallelism' is missing"),
    "empty file": (None, "empty; expected a mapping"),
    "not a mapping": ([1, 2], "expected a mapping"),
    "model file with a null character": (changed(SMALL, model="x\0.yaml"), "cannot be read (embedded null byte)"),
    "endless name": (changed(SMALL, model="x" * 100_000), f"unknown model '{'x' * 80}'"),
    "endless key": (changed(SMALL, **{"x" * 100_000: 1}), f"unknown key '{'x' * 80}'"),
    "endless version": (changed(SMALL, training={"software": {"megatron_core": "9" * 1000}}), "at most 40 characters"),
    "lists of lists": (
        changed(SMALL, routing={"kind": "measured", "rows_per_expert": [[1] * 4097]}),
        "routing.rows_per_expert.0: ",
    ),
}
BAD_STUDIES = {
    "empty study": (changed(STUDY, candidates=[]), "candidates is empty"),
    "unknown label": (
        changed(STUDY, candidates=[{"recompute": {"recompute_modules": ["moe_akt"]}}]),
        "did you mean 'moe_act'",
    ),
    "unknown key": (changed(STUDY, candidats=[]), "unknown key 'candidats'; did you mean 'candidates'"),
    "a driver twice": (changed(STUDY, drivers=["trace", "trace"]), "drivers names one twice"),
    "unknown base": (changed(STUDY, base="moonlite-16b"), "did you mean 'moonlight-16b'"),
}


def one_sentence(result: Answer, text: str, folder: Path, files: set[str]) -> None:
    """Exit code 2, one line on stderr that holds `text`, nothing on stdout, nothing written."""
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert {path.name for path in folder.rglob("*")} == files


@pytest.mark.parametrize("command", ["estimate", "trace", "compare"])
@pytest.mark.parametrize("mistake", BAD_WORKLOADS)
def test_wrong_workload_is_one_sentence_and_exit_code_2(
    labkit: Command, command: str, mistake: str, tmp_path: Path
) -> None:
    stated, text = BAD_WORKLOADS[mistake]
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(stated) if stated is not None else "")
    one_sentence(labkit(command, "w.yaml", "--json", cwd=tmp_path), text, tmp_path, {"w.yaml"})


@pytest.mark.parametrize("command", [("study", "run"), ("study", "status"), ("report",)], ids=" ".join)
@pytest.mark.parametrize("mistake", BAD_STUDIES)
def test_wrong_study_is_one_sentence_and_exit_code_2(
    labkit: Command, command: tuple[str, ...], mistake: str, tmp_path: Path
) -> None:
    stated, text = BAD_STUDIES[mistake]
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(stated))
    one_sentence(labkit(*command, "s.yaml", cwd=tmp_path), text, tmp_path, {"s.yaml"})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"model: [unclosed\n", "not valid YAML"),
        (b"a: 1\na: 2\n", "key 'a' is given twice"),
        (b"\xff\xfe\x00", "not text in UTF-8"),
        (b"!!python/object/apply:os.system ['true']\n", "not valid YAML"),
        (b"!!bool abc\n", "not valid YAML: a value does not fit its tag"),
        (b"!!map [a]\n", "tagged as a mapping, but it is none"),
        (b"a: !!timestamp foo\n", "not valid YAML: a value does not fit its tag"),
        (b"a: !!float x\n", "not valid YAML: a value does not fit its tag"),
        (b"a: " + b"9" * 5000 + b"\n", "an integer of more than 63 bits (line 1, column 4)"),
        (b"batch: {seq_length: " + b"9" * 3000 + b"}\n", "an integer of more than 63 bits"),
        (b"a: 0x" + b"f" * 16 + b"\n", "an integer of more than 63 bits"),
        (b"batch: {seq_length: 010000}\n", "010000 is octal or base 60 in YAML; write a decimal number"),
        (b"batch: {seq_length: 1:08:16}\n", "1:08:16 is octal or base 60 in YAML"),
        (b"a: [" + b"1," * 2**19 + b"]\n", "larger than 1 MiB"),
    ],
)
def test_malformed_yaml_is_one_sentence(labkit: Command, content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_bytes(content)
    for command in (("estimate",), ("study", "run")):
        one_sentence(labkit(*command, "w.yaml", cwd=tmp_path), text, tmp_path, {"w.yaml"})


@pytest.mark.parametrize(
    ("inner", "outer", "text"),
    [
        ("1", 10_000, "its aliases stand for more than a million values; write it without them"),
        ("x", 200, "routing.rows_per_expert.0.0: input should be a valid integer (got 'x')"),
    ],
)
def test_lists_that_aliases_multiply_end_at_once(
    labkit: Command, inner: str, outer: int, text: str, tmp_path: Path
) -> None:
    """A few kilobytes stand for forty million entries."""
    lists = f"[&a [{f'{inner},' * 4_000}], {'*a,' * outer}]"
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(SMALL) + f"routing: {{kind: measured, rows_per_expert: {lists}}}\n")
    one_sentence(labkit("estimate", "w.yaml", cwd=tmp_path), text, tmp_path, {"w.yaml"})


def test_pipe_without_a_writer_is_not_waited_for(labkit: Command, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.yaml")
    for command in (("estimate",), ("study", "run"), ("report",)):
        one_sentence(labkit(*command, "w.yaml", cwd=tmp_path), "no regular file", tmp_path, {"w.yaml"})


def test_control_characters_do_not_reach_the_terminal(labkit: Command, tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07\x1b[31mred\u202e"
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(changed(SMALL, model={"name": name})))
    shown = labkit("estimate", "w.yaml", cwd=tmp_path)
    assert shown.returncode == 0
    assert "\\x1b[31mred\\u202e" in shown.stdout
    wrong = labkit("estimate", "\x1b[31m.yaml", cwd=tmp_path)
    assert wrong.stderr.startswith("labkit: \\x1b[31m.yaml: cannot be read")
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.stdout + wrong.stderr)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("estimate", "nowhere.yaml"), "nowhere.yaml: cannot be read"),
        (("estimate", "moonlite-16b"), "no such workload in data/workloads; did you mean 'moonlight-16b'?"),
        (("trace", "qwen3-8b"), "qwen3-8b: this is a model; `labkit new workload qwen3-8b` writes a workload of it"),
        (("estimate",), "Missing argument 'WORKLOAD.yaml'"),
        (("estimat", "x"), "No such command 'estimat'"),
        (("study",), "Missing command"),
        (("estimate", "--jsn", "x"), "No such option: --jsn"),
        (("study", "run", "--workers", "0", "x"), "'--workers'"),
        (("study", "run", "--store", "", "x"), "Invalid value for '--store': it is empty"),
        (("study", "run", "--only", "", "x"), "Invalid value for '--only': it is empty"),
        (("report", "--output", "", "x"), "it is empty; give a name"),
        (("estimate", "--profiles", " ", "x"), "Invalid value for '--profiles': it is empty"),
        (("estimate", "--profiles", "nowhere", str(MOONLIGHT)), "nowhere: no folder of profiles"),
        (
            ("profile", "add", str(MOONLIGHT), "--profiles", "p", "--peak-allocated-bytes", "0", "--source", "me"),
            "'--peak-allocated-bytes'",
        ),
        (
            ("profile", "add", str(MOONLIGHT), "--profiles", "p", "--peak-allocated-bytes", "1", "--source", " "),
            "'--source'",
        ),
        (
            ("profile", "add", str(MOONLIGHT), "--profiles", "p", "--peak-allocated-bytes", "1" * 30, "--source", "me"),
            "should be less than or equal to 1099511627776",
        ),
        (
            ("profile", "add", str(MOONLIGHT), "--profiles", "p", "--peak-allocated-bytes", "1", "--source", "\udcff"),
            "Invalid value for '--source': it is not text in UTF-8",
        ),
        (("study", "run", "--only", "moe_akt", str(data_directory() / "studies" / "moonlight-16b.yaml")), "[moe_act]"),
    ],
)
def test_wrong_usage_is_one_sentence(labkit: Command, arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    one_sentence(labkit(*arguments, cwd=tmp_path), text, tmp_path, set())


def test_estimate_prints_one_json_object_that_is_a_summary(labkit: Command) -> None:
    result = labkit("estimate", MOONLIGHT, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    summary = Summary.model_validate_json(result.stdout, strict=False)
    assert summary.certainty == "estimated"
    assert summary.workload.model.name == "moonlight-16b-a3b"
    assert sum(share.bytes for share in summary.breakdown) == summary.peak_allocated_bytes
    assert summary.fits


def test_a_measured_peak_is_kept_and_raises_the_estimate(labkit: Command, tmp_path: Path) -> None:
    profiles = ("--profiles", tmp_path / "profiles")
    peak = ("--peak-allocated-bytes", "60000000000")
    added = labkit("profile", "add", MOONLIGHT, *profiles, *peak, "--source", "somebody, H100")
    assert (added.returncode, added.stderr) == (0, "")
    said, _, file = added.stdout.strip().rpartition(": ")
    assert said == "moonlight-16b-a3b, recompute [], sequence 4096, micro-batch 1: 55.879 GiB measured"
    kept = Path(file)
    raised = Summary.model_validate_json(labkit("estimate", MOONLIGHT, *profiles, "--json").stdout, strict=False)
    assert raised.peak_allocated_bytes == 60_000_000_000
    assert raised.raised == "measured at sequence 4096, micro-batch 1: somebody, H100"
    kept.write_text("{}")
    damaged = labkit("estimate", MOONLIGHT, *profiles, "--json")
    assert damaged.returncode == 0
    assert f"{kept}: left out, a damaged profile" in damaged.stderr
    assert Summary.model_validate_json(damaged.stdout, strict=False).raised is None


def test_what_a_study_measured_is_kept(labkit: Command, tmp_path: Path) -> None:
    store = tmp_path / "results"
    study = data_directory() / "studies" / "moonlight-16b.yaml"
    learned = labkit("profile", "learn", study, "--store", store, "--profiles", tmp_path / "profiles")
    assert learned.returncode == 0
    # Nothing is traced in this store, but six peaks were published.
    files = [line.rpartition(": ")[2] for line in learned.stdout.splitlines()]
    assert len(set(files)) == len(list((tmp_path / "profiles").iterdir())) == 6
    raised = labkit("estimate", MOONLIGHT, "--profiles", tmp_path / "profiles", "--json")
    assert Summary.model_validate_json(raised.stdout, strict=False).peak_allocated_bytes == 36_618_000_000


def test_estimate_prints_a_table_for_people(labkit: Command) -> None:
    result = labkit("estimate", "moonlight-16b")  # the name of what ships with labkit will do
    assert result.returncode == 0
    assert "What holds the peak (estimated, GiB)" in result.stdout
    # Nothing is cut where no terminal says how wide it is.
    assert "the router decides how many rows reach this rank's experts" in result.stdout


def test_estimate_imports_neither_torch_nor_polars_nor_charts() -> None:
    script = (
        "import atexit, sys\nfrom labkit.cli import main\n"
        "heavy = {'torch', 'numpy', 'polars', 'altair', 'pandas', 'megatron', 'transformer_engine', 'IPython'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        f"main(['estimate', {str(MOONLIGHT)!r}, '--json'])"
    )
    result = process(sys.executable, "-c", script)
    assert (result.returncode, result.stderr) == (0, "[]\n")
    assert Summary.model_validate_json(result.stdout, strict=False).workload.model.num_layers == 27


def test_trace_prints_one_json_object_that_is_a_summary(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    result = process(*LABKIT, "trace", str(tmp_path / "small.yaml"), "--json")
    assert result.returncode == 0
    summary = Summary.model_validate_json(result.stdout, strict=False)
    assert summary.certainty == "traced"
    assert sum(share.bytes for share in summary.breakdown) == summary.peak_allocated_bytes
    (rank,) = summary.ranks
    assert (rank.rank, rank.stages, rank.peak_allocated_bytes) == (0, (0,), summary.peak_allocated_bytes)
    assert summary.versions["megatron-core"] == version("megatron-core")


def test_compare_lays_estimate_and_trace_side_by_side(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    result = process(*LABKIT, "compare", str(tmp_path / "small.yaml"), "--json", "--all")
    assert (result.returncode, result.stderr) == (0, "")
    comparison = Comparison.model_validate_json(result.stdout, strict=False)
    assert [section.moment for section in comparison.sections][:2] == ["between steps", "retained"]
    for section in comparison.sections:
        assert sum(line.estimate_bytes for line in section.lines) == section.estimate_bytes
        assert sum(line.trace_bytes for line in section.lines) == section.trace_bytes
        assert section.estimate_bytes == pytest.approx(section.trace_bytes, rel=0.01)
        paired = sum(line.estimate_bytes for line in section.lines if line.match in ("equal", "elsewhere"))
        assert paired > 0.95 * section.estimate_bytes


class FailingServer:
    """A trace server on a machine that cannot hold a trace."""

    def __init__(self, workers: int | None, limits: Limits) -> None:
        assert workers in (None, 1, 2)
        assert limits == Limits(600, 4 * 2**30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def check(self, workload: Workload) -> None:
        pass

    def run_stages(self, workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> NoReturn:
        raise Unfinished("the trace was ended in backward: it took more than 600 s", "timed_out", "backward")


def test_failed_work_is_exit_code_1(labkit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("labkit.drivers.trace.server.TraceServer", FailingServer)
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(SMALL))
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    traced = labkit("trace", "w.yaml", "--json", cwd=tmp_path)
    assert traced == (1, "", "labkit: the trace was ended in backward: it took more than 600 s\n")
    ran = labkit("study", "run", "s.yaml", "--json", cwd=tmp_path)
    assert ran.returncode == 1
    assert "[moe_act] failed: the trace was ended in backward: it took more than 600 s" in ran.stderr
    assert StudyStatus.model_validate_json(ran.stdout, strict=False).count("failed") == 2
    assert labkit("study", "status", "s.yaml", cwd=tmp_path).returncode == 0


def test_bare_command_shows_help(labkit: Command) -> None:
    result = labkit()
    assert result.returncode == 0
    assert {"estimate", "trace", "study", "report"} <= set(result.stdout.split())


def test_status_of_a_study_that_never_ran_writes_nothing(labkit: Command, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(STUDY))
    result = labkit("study", "status", "s.yaml", "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    status = StudyStatus.model_validate_json(result.stdout, strict=False)
    assert [(cell.candidate, cell.state) for cell in status.cells] == [("[]", "missing"), ("[moe_act]", "missing")]
    assert {path.name for path in tmp_path.iterdir()} == {"s.yaml"}
    assert "0 of 2 cells done, 2 missing" in labkit("study", "status", "s.yaml", cwd=tmp_path).stdout


def test_fresh_process_ends_with_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("model: [unclosed\n")
    assert process(*LABKIT, "estimate", str(MOONLIGHT), "--json").returncode == 0
    wrong = process(*LABKIT, "estimate", str(tmp_path / "w.yaml"))
    assert (wrong.returncode, len(wrong.stderr.splitlines())) == (2, 1)


def test_an_interrupt_while_labkit_is_still_imported_is_one_sentence() -> None:
    script = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'labkit.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from labkit.__main__ import main\n"
        "main()"
    )
    assert process(sys.executable, "-c", script) == (130, "", "labkit: interrupted\n")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_trace_that_is_ended_leaves_no_folder(tmp_path: Path, ending: signal.Signals) -> None:
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(SMALL), encoding="utf-8")
    environment = ENVIRONMENT | {"TMPDIR": str(tmp_path)}
    command = (*LABKIT, "trace", str(tmp_path / "w.yaml"))
    ours = signal.signal(ending, signal.SIG_DFL)  # which the process inherits: under nohup it would ignore SIGHUP
    try:
        tracing = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(ending, ours)
    began = time.monotonic()
    while not list(tmp_path.glob("labkit-trace-*")) and time.monotonic() - began < 60:
        time.sleep(0.05)
    tracing.send_signal(ending)
    _, said = tracing.communicate(timeout=60)
    assert (tracing.returncode, said) == (130, "labkit: interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["w.yaml"]


def test_output_that_cannot_be_written_is_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        result = process(*LABKIT, "version", stdout=full.fileno())
    assert (result.returncode, result.stderr) == (1, "labkit: output: No space left on device\n")


def test_letters_that_the_output_cannot_encode_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(changed(SMALL, model={"name": "größe"})), encoding="utf-8")
    ascii_only = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    result = process(*LABKIT, "estimate", str(tmp_path / "w.yaml"), environment=ascii_only)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("gr\\xf6\\xdfe ")


def test_reader_that_leaves_early_is_not_complained_about() -> None:
    command = f"{' '.join(LABKIT)} estimate {MOONLIGHT} --json | head -c 1"
    result = process("/bin/sh", "-c", command)
    assert (result.stdout, result.stderr) == ("{", "")


@pytest.mark.parametrize("debug", ["", "1"])
def test_bug_is_one_sentence_and_a_traceback_on_request(debug: str) -> None:
    script = (
        "import labkit.memory.estimate as e\ndef broken(*_): raise ZeroDivisionError('x')\ne.estimate = broken\n"
        f"from labkit.cli import main\nmain(['estimate', {str(MOONLIGHT)!r}])"
    )
    result = process(sys.executable, "-c", script, environment=ENVIRONMENT | {"LABKIT_DEBUG": debug})
    *above, last = result.stderr.splitlines()
    assert result.returncode == 1
    assert last == "labkit: unexpected ZeroDivisionError: x (LABKIT_DEBUG=1 shows the traceback)"
    assert any("Traceback" in line for line in above) == bool(debug)


def test_package_is_cheap_to_import_and_names_its_public_parts() -> None:
    script = (
        "import sys\nbefore = {*sys.modules}\nimport labkit\nassert {*sys.modules} - before == {'labkit'}\n"
        "assert {'Workload', 'estimate', 'trace', 'Study'} <= set(dir(labkit))\n"
        "labkit.Workload, labkit.estimate, labkit.trace, labkit.Study\nassert 'torch' not in sys.modules\n"
        "try:\n    labkit.estimat\nexcept AttributeError as error:\n    print(error)"
    )
    assert process(sys.executable, "-c", script) == (0, "module 'labkit' has no attribute 'estimat'\n", "")


def test_estimates_the_fullest_pipeline_stage_or_a_stated_one(labkit: Command, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        "model: moonlight-16b-a3b\n"
        "parallelism: {world_size: 16, tensor_model_parallel_size: 2, expert_model_parallel_size: 4,"
        " expert_tensor_parallel_size: 1, pipeline_model_parallel_size: 4, num_layers_in_last_pipeline_stage: 6,"
        " sequence_parallel: true}\n"
        "batch: {seq_length: 4096, global_batch_size: 32}\n"
    )
    fullest = json.loads(labkit("estimate", str(file), "--json").stdout)
    stages = fullest["stages"]
    assert [(stage["rank"], stage["layers"]) for stage in stages] == [(0, 7), (4, 7), (8, 7), (12, 6)]
    assert max(stages, key=lambda stage: stage["peak_tensor_bytes"])["rank"] == fullest["rank"]
    last = json.loads(labkit("estimate", str(file), "--stage", "3", "--json").stdout)
    assert last["rank"] == 12
    assert last["peak_allocated_bytes"] < fullest["peak_allocated_bytes"]
    refused = labkit("estimate", str(file), "--stage", "4")
    assert refused.returncode == 2
    assert "use 0 to 3" in refused.stderr


def test_check_says_everything_that_files_break(labkit: Command, tmp_path: Path) -> None:
    broken = SMALL | {"recompute": {"recompute_granularity": "selective", "recompute_modules": ["gdn_norm_out", "mlp"]}}
    broken |= {"launch": {"arguments": ["--delay-wgrad-compute", "--train-iters -1"]}}
    files = {"fine": SMALL, "broken": broken, "study": STUDY | {"candidates": [{"recompute": broken["recompute"]}]}}
    for name, mapping in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(mapping))
    assert labkit("check", tmp_path / "fine.yaml", MOONLIGHT).returncode == 0
    answer = labkit("check", *(tmp_path / f"{name}.yaml" for name in files), tmp_path / "missing.yaml", "--json")
    assert (answer.returncode, answer.stderr) == (2, "")
    fine, wrong, study, missing = json.loads(answer.stdout)["files"]
    assert (fine["kind"], fine["findings"]) == ("workload", [])
    assert [(found["severity"], found["authority"]) for found in wrong["findings"]][:3] == [
        ("error", "TransformerConfig"),
        ("error", "OptimizerParamScheduler"),
        ("error", "TransformerConfig"),
    ]
    assert all(found["reason"] and found["remedy"] for found in wrong["findings"])
    assert (study["kind"], study["cells"], study["findings"][0]["cells"]) == ("study", 2, ["[gdn_norm_out, mlp]"])
    assert (missing["kind"], "cannot be read" in missing["problem"]) == ("unreadable", True)
    shown = labkit("check", tmp_path / "broken.yaml", tmp_path / "missing.yaml")
    assert "refused by: TransformerConfig (megatron/core/transformer/transformer_config.py)" in shown.stdout
    assert shown.stderr == f"labkit: {missing['problem']}\n"


@pytest.mark.parametrize("command", [("plan", str(MOONLIGHT)), ("import", "megatron-args", "/nonexistent.sh")])
def test_what_stands_in_an_outputs_place_stays(labkit: Command, tmp_path: Path, command: tuple[str, ...]) -> None:
    pipe = tmp_path / "pipe.yaml"
    link = tmp_path / "link.yaml"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "nothing")
    for path, kind in ((pipe, "no regular file"), (link, "a link"), (tmp_path, "a folder")):
        answer = labkit(*command, "-o", path)
        assert (answer.returncode, answer.stdout) == (2, "")
        assert answer.stderr == f"labkit: {path}: is {kind}; give the file another name\n"
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("plan", "w.yaml", "-o"), "./w.yaml"),
        (("plan", "linked.yaml", "-o"), "w.yaml"),
        (("plan", "of_a_file.yaml", "-o"), "model.yaml"),
        (("import", "megatron-args", "w.yaml", "-o"), "hard.yaml"),
        (("import", "huggingface", "w.yaml", "-o"), "w.yaml"),
        (("import", "bridge", "hard.yaml", "--config", "w.yaml", "-o"), "w.yaml"),
        (("import", "log", "log.txt", "w.yaml", "-o"), "w.yaml"),
        (("import", "log", "log.txt", "-o", "m.yaml", "--write-workload"), "log.txt"),
        (("study", "export", "w.yaml", "-o"), "w.yaml"),
        (("report", "w.yaml", "-o"), "w.yaml"),
    ],
)
def test_an_output_is_never_what_is_read(labkit: Command, tmp_path: Path, command: tuple[str, ...], name: str) -> None:
    (tmp_path / "w.yaml").write_bytes(MOONLIGHT.read_bytes())
    (tmp_path / "of_a_file.yaml").write_text("model: model.yaml\n")
    (tmp_path / "model.yaml").write_text("num_layers: 1\n")
    (tmp_path / "log.txt").write_text("a log")
    (tmp_path / "linked.yaml").symlink_to("w.yaml")
    (tmp_path / "hard.yaml").hardlink_to(tmp_path / "w.yaml")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    answer = labkit(*command, name, cwd=tmp_path)
    sentence = f"labkit: {Path(name)}: is what the command reads; give the output another name\n"
    assert answer == (2, "", sentence)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_study_is_no_workload_and_a_gpu_is_guessed(labkit: Command, tmp_path: Path) -> None:
    study = data_directory() / "studies" / "moonlight-16b.yaml"
    one_sentence(labkit("plan", study), "is a study, not a workload", tmp_path, set())
    one_sentence(labkit("plan", MOONLIGHT, "--budget", "h100"), "did you mean 'h100-80gb'?", tmp_path, set())
    one_sentence(labkit("import", "bridge", MOONLIGHT), "is a workload of labkit's already", tmp_path, set())
    one_sentence(labkit("import", "log"), "(labkit import log --help lists what there is)", tmp_path, set())
