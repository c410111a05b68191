"""The `lora` runtime: its additions really run, and a trace follows it (its figures: `tests/memory/grid/lora.py`)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.server import TraceServer
from tests.memory.test_lora import tuned


@pytest.mark.long
def test_adapters_and_tree_attention_compute_what_they_say() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.drivers.real_lora"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (
            {
                "parallelism__world_size": 2,
                "parallelism__tensor_model_parallel_size": 1,
                "parallelism__context_parallel_size": 2,
                "parallelism__sequence_parallel": False,
            },
            "context parallelism",
        ),
        ({"training__lora__regather": True}, "regather: true"),
        (
            {
                "training__lora__outputs": "log_probs",
                "training__lora__no_grad": True,
            },
            "outputs: log_probs",
        ),
    ],
)
def test_says_what_it_does_not_follow(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(Unfinished, match=f"lora runtime has no {what}; use labkit estimate") as raised:
        TraceServer().run(tuned(**changes))
    assert raised.value.outcome == "unsupported"


def test_only_adapters_have_gradients_and_optimizer_state(server: TraceServer) -> None:
    between = server.run(tuned(training__lora__optimizer_step=True)).ledger.between_steps()
    stepped = {row.module for row in between.rows if row.kind == "optimizer" and "layers" in row.module}
    assert stepped
    assert all("adapter" in module for module in stepped)
    trained = sum(row.bytes for row in between.rows if row.kind == "gradients")
    assert trained < sum(row.bytes for row in between.rows if row.kind == "parameters") / 50


def test_every_segment_starts_from_states(server: TraceServer) -> None:
    """The prefix from zeros, each sequence from a copy of those in which the prefix ended."""
    lengths = {"lengths": [400, 300, 300], "shared_prefix": 100}
    ledger = server.run(tuned(batch__packed=lengths, batch__seq_length=800)).ledger
    kept = [row for row in ledger.retained().rows if row.shape[1:] == (4, 64, 64) and row.dtype == "fp32"]
    assert sorted(row.shape[0] for row in kept) == [1] * 3 + [3] * 3
