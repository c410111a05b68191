"""What is read in logs: ranks, steps, memory, arguments, failures; `examples/` are Megatron's and PyTorch's own."""

import io
from pathlib import Path

import pytest

from labkit.diagnose import logs
from labkit.diagnose.facts import Facts, MemorySummary
from labkit.diagnose.reading import HEAD, Source
from labkit.errors import InputError

EXAMPLES = Path(__file__).with_name("examples")
MIB, GIB = 2**20, 2**30
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
    "of which "
    "1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use. Of the allocated "
    "memory 75.00 "
    "GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)
FRAMES = {
    "forward": ["core/pipeline_parallel/schedules.py:forward_step", "core/transformer/moe/experts.py:forward"],
    "backward": ["core/pipeline_parallel/schedules.py:backward_step", "torch/autograd/graph.py:_engine_run_backward"],
    "replay": ["core/pipeline_parallel/schedules.py:backward_step", "core/tensor_parallel/random.py:backward",
               "core/transformer/mlp.py:forward"],
    "grad_sync": ["core/distributed/finalize_model_grads.py:finalize_model_grads"],
    "optimizer": ["core/optimizer/distrib_optimizer.py:step_with_ready_grads", "pytorch/optimizers/fused_adam.py:step"],
    "evaluation": ["training/training.py:evaluate", "core/pipeline_parallel/schedules.py:forward_step"],
    "saving": ["training/checkpointing.py:save_checkpoint", "core/optimizer/distrib_optimizer.py:get_parameter_state"],
    "setup": ["training/training.py:setup_model_and_optimizer", "core/models/gpt/gpt_model.py:__init__"],
}  # fmt: skip


def read(text: str | bytes) -> Facts:
    """The facts of a log."""
    raw = text.encode() if isinstance(text, str) else text
    return logs.read(Source("x.log", raw[:HEAD], io.BytesIO(raw), None)).facts


def test_megatron_says_its_memory_in_mebibytes() -> None:
    facts = read((EXAMPLES / "moonlight.log").read_text(encoding="utf-8"))
    peaks = {(each.rank, each.iteration): each.max_allocated for each in facts.memory}
    assert peaks[0, 2] == pytest.approx(35_941_000_000, abs=0.01 * MIB)
    assert peaks[1, 2] == pytest.approx(35_941_000_000 + MIB, abs=0.01 * MIB)
    (footprint,) = facts.footprints
    assert footprint.weights == pytest.approx(37620.46 * MIB)
    steps = [(each.number, each.of, each.milliseconds, each.tflops, each.loss) for each in facts.iterations]
    assert steps[0] == (1, 20, 466.3, 75.3, 11.8)
    assert len(steps) == 5
    (printed,) = facts.printed
    assert printed.values["num_layers"] == "27"
    assert printed.values["recompute_modules"] == "['moe_act', 'core_attn']"
    assert len(printed.values) > 600
    assert not facts.failures


@pytest.mark.parametrize("name", ["summary.txt", "summary_abbreviated.txt"])
def test_a_memory_summary_is_read_whole_or_abbreviated(name: str) -> None:
    (found,) = read((EXAMPLES / name).read_text(encoding="utf-8")).memory
    assert isinstance(found, MemorySummary)
    assert (found.failures, found.retries, found.device) == (1, 3, 0)
    assert (found.allocated, found.max_allocated) == (55 * GIB, 57 * GIB)
    assert (found.reserved, found.max_reserved) == (77 * GIB, 78 * GIB)
    assert (found.not_releasable, found.requested) == (21 * GIB, 54 * GIB)


def test_small_figures_of_a_summary_are_in_their_unit() -> None:
    (found,) = read((EXAMPLES / "summary_small.txt").read_text(encoding="utf-8")).memory
    assert (found.allocated, found.max_allocated, found.reserved) == (700 * 1024, 3 * MIB, 20 * MIB)


@pytest.mark.parametrize("place", FRAMES)
def test_a_traceback_says_the_phase(place: str) -> None:
    frames = [f"  File \"/opt/megatron/{file}\", line 7, in {name}\n    call()" for file, _, name in
              (each.partition(":") for each in FRAMES[place])]  # fmt: skip
    text = "\n".join(["Traceback (most recent call last):", *frames, OOM])
    (found,) = read(text).out_of_memory
    assert found.phase == ("backward" if place == "replay" else place)
    assert found.replays == (place == "replay")


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("[rank3]: ", 3),
        ("[default3]:", 3),
        ("[default0]:[rank11]: ", 11),
        ("  3: ", 3),
        ("2026-11-30T12:00:00.123Z [rank3]: ", 3),
        ("[2026-11-30 12:00:00,123] ", None),
        ("12: [rank3]: ", 3),
        ("[1,3]<stderr>:", 3),
        ("\x1b[31m[rank3]:\x1b[0m ", 3),
        ("", None),
    ],
)
def test_prefixes_say_the_rank(prefix: str, rank: int | None) -> None:
    (found,) = read(f"{prefix}{OOM}\n").out_of_memory
    assert found.rank == rank
    assert found.requested == 2 * GIB


def test_ranks_that_share_a_line_are_told_apart() -> None:
    memory = "[Rank {0}] (after 2 iterations) memory (MB) | allocated: 1.00 | max allocated: {1}.00 | reserved: 3.00"
    facts = read(
        f"{memory.format(0, 10)}{memory.format(8, 20)}\n\n[rank1]: {OOM}[rank2]: {OOM.replace('2.00', '3.00')}\n"
    )
    assert {each.rank: each.max_allocated for each in facts.memory} == {0: 10 * MIB, 8: 20 * MIB}
    assert {each.rank: each.requested for each in facts.out_of_memory} == {1: 2 * GIB, 2: 3 * GIB}


def test_a_message_may_be_broken_over_lines_or_written_in_json() -> None:
    words = OOM.split()
    broken = "\n".join(" ".join(words[start : start + 9]) for start in range(0, len(words), 9))
    for text in (broken, f'{{"log": "step\\n{OOM}\\nmore"}}\n', OOM.replace(" GiB", "\r\n GiB")):
        found = read(text).out_of_memory[0]
        assert (found.requested, found.allocated, found.process) == (2 * GIB, 75 * GIB, round(77.9 * GIB)), text


def test_a_message_printed_twice_is_one_and_those_of_several_ranks_are_several() -> None:
    text = f"[rank0]: {OOM}\n[rank0]: {OOM}\n[rank1]: {OOM}\n"
    assert [each.rank for each in read(text).out_of_memory] == [0, 1]


def test_the_iteration_under_way_is_the_one_after_the_last_step() -> None:
    step = " [2026-11-30] iteration        4/      20 | consumed samples: 4 | elapsed time per iteration (ms): 466.3 |"
    (found,) = read(f"{step}\n{OOM}\n").out_of_memory
    assert found.iteration == 5


def test_nemo_and_bridge_lines_have_their_own_units() -> None:
    nemo = (
        "Training epoch 0, iteration 1/29 | lr: 1e-07 | global_step: 1 | peak_memory_usage: 6.5e+10 | "
        "memory_allocated: "
        "42000000000 | reduced_train_loss: 12.5 | train_step_timing in s: 9.25"
    )
    figures = "mem-allocated-gigabytes: 25.1 | mem-max-allocated-gigabytes: 36.618"
    bridge = f"[Rank 0] (after 2 iterations) memory (GB) | {figures}"
    facts = read(f"{nemo}\n{bridge}\n")
    (step,) = facts.iterations
    assert (step.number, step.of, step.milliseconds, step.loss) == (2, 30, 9250, 12.5)
    by_rank = {each.rank: each for each in facts.memory}
    assert (by_rank[None].max_reserved, by_rank[None].allocated) == (65_000_000_000, 42_000_000_000)
    assert by_rank[0].max_allocated == 36_618_000_000


FAILURES = {
    "node1:1:2 [3] NCCL WARN Cuda failure 2 'out of memory'": "device memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "device memory",
    "torch.AcceleratorError: CUDA error: out of memory": "device memory",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks were OOM Killed.": "host "
    "memory",
    "[1.0] Out of memory: Killed process 4242 (python) total-vm:99kB, anon-rss:9kB": "host memory",
    "RuntimeError: DataLoader worker (pid 123) is killed by signal: Killed.": "host memory",
    "  exitcode  : -9 (pid: 1234)": "killed",
    "[rank5]:[E1130 ProcessGroupNCCL.cpp:616] Watchdog caught collective operation timeout: Work": "collective timeout",
    "RuntimeError: CUDA error: an illegal memory access was encountered": "device error",
    "AssertionError: Rank 0: found NaN in local forward loss calculation.": "not finite",
    "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-30T12:00:00 DUE TO TIME LIMIT ***": "time limit",
    "OSError: [Errno 28] No space left on device": "disk",
    "ValueError: sequence length must be positive": "error",
    "2026-11-30 12:00:00 [rank1]: ValueError: sequence length must be positive": "error",
    "[2026-11-30 12:00:00,123] KeyError: 'x'": "error",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ": "rank lost",
    "n1:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-a to 9637892 bytes": "host memory",
}


@pytest.mark.parametrize("line", FAILURES)
def test_failures_are_told_apart(line: str) -> None:
    facts = read(f"first\n{line}\n")
    (failure,) = facts.failures
    assert (failure.kind, failure.evidence.line) == (FAILURES[line], 2)
    assert not facts.out_of_memory


def test_an_error_that_the_run_went_on_after_did_not_end_it() -> None:
    step = "iteration        4/      20 | consumed samples: 4 | elapsed time per iteration (ms): 466.3 |"
    text = f"ImportError: no apex, falling back\n{step}\nRuntimeError: the end\n"
    assert [each.evidence.line for each in read(text).failures] == [3]


def test_lines_are_counted_whatever_they_hold() -> None:
    text = (
        b"\n\n"
        + b"x" * 300_000
        + b"\n\xff\xfe latin \xe9\n"
        + b"[rank2]: "
        + OOM.encode()
        + b"\n"
        + b"y" * 2**21
        + b"\n\nMemoryError: no\n"
    )
    facts = read(text)
    assert facts.out_of_memory[0].evidence.line == 5
    assert facts.failures[0].evidence.line == 8


def test_what_a_line_says_cannot_reach_the_terminal() -> None:
    (found,) = read(f"\x1b]0;title\x07[rank1]: {OOM} [bold red]\x1b[2J\x9b31m {'z' * 999}\n").out_of_memory
    assert "\x1b" not in found.evidence.text
    assert "\x9b" not in found.evidence.text
    assert len(found.evidence.text) < 500


def test_text_of_which_nothing_is_known_is_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match="nothing in it is known"):
        read("hello\nworld\n")
