"""The table of causes: what evidence leads to which, in which order, and what is said beside a workload."""

from pathlib import Path

import pytest

from labkit.diagnose import Diagnosis, diagnose
from labkit.diagnose.beside import Beside
from labkit.errors import InputError
from labkit.workload import Workload
from tests.small import selective

ROOT = Path(__file__).parents[2]
GB = 10**9
MOONLIGHT = Workload.load(ROOT / "data/workloads/moonlight-16b.yaml")


def message(**figures: str) -> str:
    """An out-of-memory message of today's PyTorch."""
    said = {
        "asked": "2.00 GiB", "free": "500.00 MiB", "process": "77.60 GiB", "allocated": "75.00 GiB", "kept": "300.00 "
        "MiB",
        "others": "", "pools": "", "allowed": "",
    } | figures  # fmt: skip
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {said['asked']}. GPU 0 has a total capacity "
        "of 79.10 "
        f"GiB of which {said['free']} is free. {said['others']}Including non-PyTorch memory, this process has "
        f"{said['process']} memory in use. {said['allowed']}Of the allocated memory {said['allocated']} is allocated "
        "by "
        f"PyTorch, {said['pools']}and {said['kept']} is reserved by PyTorch but unallocated."
    )


def traceback(*places: str) -> str:
    """Frames `file:function`, the outermost first."""
    frames = (each.partition(":") for each in places)
    return "\n".join(
        ["Traceback (most recent call last):", *(f'  File "/m/megatron/{a}", line 1, in {b}' for a, _, b in frames)]
    )


FORWARD = traceback("core/pipeline_parallel/schedules.py:forward_step", "core/transformer/mlp.py:forward")
EXPERTS = traceback("core/pipeline_parallel/schedules.py:forward_step", "core/transformer/moe/experts.py:forward")
OPTIMIZER = traceback("training/training.py:train_step", "core/optimizer/distrib_optimizer.py:step")
EVALUATION = traceback("training/training.py:evaluate", "core/transformer/mlp.py:forward")
SAVING = traceback("training/checkpointing.py:save_checkpoint", "core/optimizer/distrib_optimizer.py:save")
SETUP = traceback("training/training.py:setup_model_and_optimizer", "core/models/gpt/gpt_model.py:__init__")
STEP = (
    "iteration        {}/      20 | consumed samples: 4 | elapsed time per iteration (ms): 466.3 | lm loss: 9.1E+00 |"
)
MEMORY = "[Rank {}] (after {} iterations) memory (MB) | allocated: {:.2f} | max allocated: {:.2f} | reserved: 76000.00"
LEAK = "\n".join(MEMORY.format(0, step, 40000 + 256 * step, 60000) for step in range(2, 14))

CASES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "full": (f"{FORWARD}\n{message()}", [("capacity", "cause")]),
    "an optimizer's step": (f"{OPTIMIZER}\n{message()}", [("optimizer capacity", "cause")]),
    "a model that does not fit": (f"{SETUP}\n{message()}", [("optimizer capacity", "cause")]),
    "in pieces": (
        message(asked="10.62 GiB", allocated="46.00 GiB", kept="30.50 GiB"),
        [("fragmentation", "cause"), ("capacity", "contributes")],
    ),
    "in pieces of 1.13": (
        "CUDA out of memory. Tried to allocate 10.62 GiB (GPU 0; 139.81 GiB total capacity; 95.40 GiB already "
        "allocated; 9.10 "
        "GiB free; 125.90 GiB reserved in total by PyTorch)",
        [("fragmentation", "cause"), ("outside PyTorch", "contributes"), ("capacity", "contributes")],
    ),
    "pieces that would not have been enough": (
        message(asked="20.00 GiB", allocated="68.00 GiB", kept="7.00 GiB"),
        [("capacity", "cause"), ("fragmentation", "contributes")],
    ),
    "graphs hold much": (
        message(pools="with 30.00 GiB allocated in private pools (e.g., CUDA Graphs), "),
        [("private pools", "cause"), ("capacity", "contributes")],
    ),
    "graphs hold little": (
        message(pools="with 1.00 GiB allocated in private pools (e.g., CUDA Graphs), "),
        [("capacity", "cause"), ("private pools", "contributes")],
    ),
    "before 1.4, what was cached is unallocated": (
        "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.90 GiB total capacity; 14.81 GiB "
        "already allocated; 9.88 MiB free; 351.21 MiB cached)",
        [("capacity", "cause")],
    ),
    "another process": (
        message(others="Process 7 has 30.00 GiB memory in use. ", process="47.00 GiB", allocated="45.00 GiB"),
        [("outside PyTorch", "cause"), ("capacity", "contributes")],
    ),
    "NCCL and contexts": (
        message(process="78.00 GiB", allocated="66.00 GiB"),
        [("outside PyTorch", "cause"), ("capacity", "contributes")],
    ),
    "a limited process": (
        message(allowed="75.50 GiB allowed; "),
        [("capacity", "cause"), ("outside PyTorch", "contributes")],
    ),
    "a limit, and a GPU with room": (
        message(free="38.10 GiB", process="39.60 GiB", allocated="38.50 GiB", allowed="39.55 GiB allowed; "),
        [("outside PyTorch", "cause"), ("capacity", "contributes")],
    ),
    "a GPU with room, and no limit": (
        message(asked="12.50 MiB", free="9.28 GiB", process="69.80 GiB", allocated="68.50 GiB"),
        [("outside PyTorch", "cause"), ("capacity", "contributes")],
    ),
    "evaluation": (f"{EVALUATION}\n{message()}", [("capacity", "cause")]),
    "a checkpoint": (f"{SAVING}\n{message()}", [("capacity", "cause")]),
    "a library": (
        "n1:1:2 [3] NCCL WARN Cuda failure 2 'out of memory'\nRuntimeError: NCCL error: unhandled cuda error",
        [("outside PyTorch", "cause"), ("not memory", "note")],
    ),
    "experts, after a step": (
        f"{STEP.format(1)}\n{EXPERTS}\n{message()}",
        [("capacity", "cause"), ("expert imbalance", "contributes")],
    ),
    "ranks of unequal load before one fails in experts": (
        f"{STEP.format(1)}\n{MEMORY.format(0, 2, 1, 60000)}\n{MEMORY.format(1, 2, 1, 70000)}\n{EXPERTS}\n{message()}",
        [("capacity", "cause"), ("expert imbalance", "contributes")],
    ),
    "a leak": (f"{LEAK}\n{message()}", [("growth", "cause"), ("capacity", "contributes")]),
    "a leak that has not ended it": (f"{STEP.format(4)}\n{LEAK}", [("growth", "note"), ("no failure", "note")]),
    "experts, in the first step": (f"{EXPERTS}\n{message()}", [("capacity", "cause")]),
    "ranks of unequal load": (
        f"[rank0]: {EXPERTS.replace(chr(10), chr(10) + '[rank0]: ')}\n[rank0]: {message()}\n"
        f"[rank1]: {message(allocated='60.00 GiB', process='62.60 GiB')}",
        [("capacity", "cause"), ("expert imbalance", "contributes")],
    ),
    "the others only waited": (
        f"[rank0]: {message()}\n[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
        [("capacity", "cause"), ("not memory", "note")],
    ),
    "the host's memory": ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.", [("host memory", "cause")]),
    "killed": ("  exitcode  : -9 (pid: 1)\nSignal 9 (SIGKILL) received by PID 1", [("host memory", "cause")]),
    "a hang": ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", [("not memory", "cause")]),
    "not a number": ("RuntimeError: Rank 3: found NaN in local grad norm", [("not memory", "cause")]),
    "an illegal access": (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        [("not memory", "cause")],
    ),
    "nothing failed": (f"{STEP.format(4)}\n{STEP.format(5)}", [("no failure", "note")]),
}


def diagnosed(folder: Path, text: str, workload: Workload | None = None) -> Diagnosis:
    """A log, and a workload file beside it."""
    log = folder / "run.log"
    log.write_text(text, encoding="utf-8")
    if workload is None:
        return diagnose([log])
    file = folder / "w.yaml"
    file.write_text(workload.model_dump_json(exclude_unset=True), encoding="utf-8")
    return diagnose([log, file])


@pytest.mark.parametrize("name", CASES)
def test_evidence_leads_to_its_causes(tmp_path: Path, name: str) -> None:
    text, expected = CASES[name]
    found = diagnosed(tmp_path, text)
    assert [(each.cause, each.weight) for each in found.findings] == expected
    for finding in found.findings:
        assert finding.evidence or finding.cause == "no failure"
        assert (finding.confirm and finding.remedies) or finding.weight == "note"


def test_an_evidence_line_is_where_it_says(tmp_path: Path) -> None:
    text = f"{FORWARD}\n{message()}\n"
    (finding,) = diagnosed(tmp_path, text).findings
    (evidence,) = finding.evidence
    assert evidence.source == str(tmp_path / "run.log")
    assert "Tried to allocate 2.00 GiB" in text.splitlines()[(evidence.line or 0) - 1]
    assert "in forward, at megatron/core/transformer/mlp.py:1 forward" in finding.happened


DENSE = {
    "name": "dense", "num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 8,
    "vocab_size": 1000,
}  # fmt: skip


def dense(*labels: str) -> Workload:
    """A workload of some GiB that takes milliseconds to price."""
    return Workload.from_mapping(
        {
            "model": DENSE,
            "parallelism": {"world_size": 1},
            "batch": {"seq_length": 8192, "global_batch_size": 1},
            "recompute": {"recompute_granularity": "selective", "recompute_modules": list(labels)},
            "training": {},
        }
    )


def test_beside_a_workload_idle_labels_are_named_and_the_advice_is_for_what_the_gpu_has(tmp_path: Path) -> None:
    small = message(asked="1.00 GiB", allocated="4.00 GiB", process="5.00 GiB", allowed="4.50 GiB allowed; ")
    found = diagnosed(tmp_path, small, dense("core_attn"))
    causes = {each.cause: each for each in found.findings}
    assert "core_attn saves next to nothing" in causes["fused attention"].happened
    assert "By estimate the peak is" in causes["fused attention"].happened
    labels = [
        each for each in diagnosed(tmp_path, small, dense("layernorm")).findings if each.cause == "inactive label"
    ]
    assert [each.happened.partition(":")[0] for each in labels] == ["layernorm saves nothing"]
    advice = causes["capacity"].remedies
    assert advice[0].startswith("Try ")
    short = "As it is, [core_attn], it does not fit what this GPU has for PyTorch (4.50 GiB)"
    assert any(each.startswith(short) for each in causes["capacity"].confirm)
    (compared,) = found.details
    assert isinstance(compared, Beside)
    assert [(each.moment, each.logged_bytes) for each in compared.stages] == [("failure", 5 * 2**30)]


def test_a_failure_above_the_estimate_says_how_much_too_low_it_is(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, message(), dense())
    (compared,) = found.details
    assert isinstance(compared, Beside)
    (failure,) = compared.stages
    short = (failure.logged_bytes - failure.estimated_bytes) / 2**30
    assert short > 1
    assert failure.verdict == f"too low by {short:.2f} GiB at least"
    capacity = found.findings[0]
    assert any(f"the estimate is too low by {short:.2f} GiB" in each for each in capacity.confirm)
    assert not any("fits what this GPU has for PyTorch (" in each for each in capacity.remedies)


def test_a_workload_that_cannot_be_the_logs_is_not_compared(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, "\n".join(MEMORY.format(rank, 2, 1, 2) for rank in range(8)), dense())
    assert not found.details
    assert any("is of 1 rank, and the log has rank 7" in each for each in found.notes)


def test_what_nemo_says_is_the_largest_of_its_steps(tmp_path: Path) -> None:
    line = (
        "Training epoch 0, iteration {}/29 | lr: 1e-07 | global_step: {} | peak_memory_usage: {} | memory_allocated: "
        "4.2e+10 | reduced_train_loss: 12.5 | train_step_timing in s: 9.25"
    )
    text = "\n".join(line.format(step, step, peak) for step, peak in ((0, 74563878912), (1, 78563878912)))
    (finding,) = diagnosed(tmp_path, text).findings
    assert "The most that was reserved is 73.17 GiB." in finding.happened
    assert "Between steps 39.12 GiB was allocated; no peak is said." in finding.happened
    assert 2 in [each.line for each in finding.evidence]


def test_a_label_whose_saving_the_peak_does_not_show_has_moved_the_bottleneck(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, STEP.format(1), MOONLIGHT.with_recompute(**selective("moe")))
    moved = next(each for each in found.findings if each.cause == "moved bottleneck")
    assert "Recomputing [moe] leaves" in moved.happened
    assert "optimizer of iteration 1 holds it now" in moved.happened


def test_the_estimate_stands_beside_what_was_logged(tmp_path: Path) -> None:
    memory = "[Rank 0] (after {} iterations) memory (MB) | allocated: 1.00 | max allocated: {:.2f} | reserved: 40000.00"
    text = "\n".join(memory.format(iteration, peak * GB / 2**20) for iteration, peak in ((1, 35.9), (2, 36.618)))
    found = diagnosed(tmp_path, text, MOONLIGHT)
    (compared,) = found.details
    assert isinstance(compared, Beside)
    steady, first = compared.stages
    assert (steady.moment, first.moment) == ("all steps", "first step")
    assert abs(steady.difference) < 0.01
    assert steady.estimated_bytes > first.estimated_bytes


def test_what_a_message_says_beyond_its_phase(tmp_path: Path) -> None:
    (after, *_) = diagnosed(tmp_path, f"{STEP.format(1)}\n{FORWARD}\n{message(asked='200.00 GiB')}").findings
    assert "The first step had room" in after.happened
    assert "more than the whole GPU has" in after.happened
    (two, *_) = diagnosed(tmp_path, f"[rank0]: {message()}\n[rank1]: {message()}").findings
    assert two.happened.endswith("1 other rank ran out as well.")


OLD = (
    "CUDA out of memory. Tried to allocate 5.00 GiB (GPU 0; 79.15 GiB total capacity; 72.00 GiB already allocated; "
    "1.20 GiB free; 76.00 GiB reserved in total by PyTorch)"
)


@pytest.mark.parametrize(
    ("text", "cause", "happened", "remedy"),
    [
        (CASES["a leak"][0], "growth", "256 MiB more with each step", "detach"),
        (CASES["ranks of unequal load before one fails in experts"][0], "expert imbalance", "iterations rank 1", ""),
        (OLD, "fragmentation", "with the 1.20 GiB that the GPU still had, 5.20 GiB was unused", "max_split_size_mb"),
        (message(asked="12.50 MiB", free="9.28 GiB"), "outside PyTorch", "9.28 GiB of the GPU was free", ""),
        (f"{EVALUATION}\n{message()}", "capacity", "it runs without gradients", "micro-batch of evaluation"),
        (f"{SAVING}\n{message()}", "capacity", "while a checkpoint was saved", "--ckpt-format torch_dist"),
    ],
)  # fmt: skip
def test_what_happened_and_what_to_try_fit_the_message(
    tmp_path: Path, text: str, cause: str, happened: str, remedy: str
) -> None:
    found = next(each for each in diagnosed(tmp_path, text).findings if each.cause == cause)
    assert happened in found.happened
    assert remedy in " ".join(found.remedies)


def test_two_files_that_say_what_was_run_are_one_too_many(tmp_path: Path) -> None:
    workload = ROOT / "data/workloads/moonlight-16b.yaml"
    script = tmp_path / "run.sh"
    script.write_text("torchrun pretrain_gpt.py --num-layers 2 # CUDA out of memory with 4\n", encoding="utf-8")
    with pytest.raises(InputError, match="both say what was run"):
        diagnose([workload, script])


def test_a_log_that_prints_its_arguments_needs_no_workload() -> None:
    found = diagnose([Path(__file__).with_name("examples") / "moonlight.log"])
    fused = next(each for each in found.findings if each.cause == "fused attention")
    assert "recompute_modules" in fused.evidence[0].text
    (compared,) = found.details
    assert isinstance(compared, Beside)
    assert compared.workload.recompute.label == "[core_attn, moe_act]"
    assert [(each.stage, each.moment, each.rank) for each in compared.stages] == [
        (0, "all steps", 1),
        (0, "first step", 1),
    ]
