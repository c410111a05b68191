"""A small model really trained on the CPU by two processes keeps exactly the bytes that its trace says."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace import cublas
from labkit.drivers.trace.server import TraceServer
from labkit.ledger import Ledger, Row, rounded
from tests.small import full, selective

pytestmark = [pytest.mark.slow, pytest.mark.long]

SEQUENCE, MICRO_BATCH, HIDDEN = 32, 3, 64
RANKS = 2
PHASES = ("forward", "backward", "grad_sync", "optimizer")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def workload(tensor_parallel: int, recompute: dict[str, Any]) -> Workload:
    """Megatron Core's own layers (`local`) without fusions: the same operators run on the CPU as on a GPU."""
    unfused = (
        *("bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"),
        *("cross_entropy_loss_fusion", "masked_softmax_fusion", "persist_layer_norm"),
    )
    return Workload.from_mapping(
        {
            "model": {
                "name": "tiny",
                "num_layers": 2,
                "hidden_size": HIDDEN,
                "ffn_hidden_size": 160,
                "num_attention_heads": 4,
                "vocab_size": 128,
                "make_vocab_size_divisible_by": 64,
                "normalization": "LayerNorm",
                "activation_func": "gelu",
                "gated_linear_unit": False,
                "add_bias_linear": True,
                "position_embedding_type": "learned_absolute",
            },
            "parallelism": {"world_size": RANKS, "tensor_model_parallel_size": tensor_parallel},
            "batch": {
                "seq_length": SEQUENCE,
                "micro_batch_size": MICRO_BATCH,
                "global_batch_size": MICRO_BATCH * RANKS // tensor_parallel,
            },
            "recompute": recompute,
            "training": {
                "kernels": {"transformer_impl": "local"} | dict.fromkeys(unfused, False),
                "software": {"apex": False},
                "data_parallel": {
                    "overlap_grad_reduce": False,
                    "overlap_param_gather": False,
                    "average_in_collective": False,  # gloo cannot
                },
            },
            "launch": {"arguments": ["--distributed-backend gloo"]},
        }
    )


CELLS = {
    "tensor-parallel": (workload(2, selective()), 5),
    "data-parallel full recompute": (workload(1, full("uniform", 1)), 1),
}
"""Each with the norms whose statistics are kept as backward begins."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each cell a folder with what each rank found."""
    folder = tmp_path_factory.mktemp("trained")
    for name, (cell, _) in CELLS.items():
        (folder / name).mkdir()
        text = json.dumps(cell.model_dump(mode="json", exclude_unset=True))
        (folder / name / "workload.json").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tests.drivers.real_cpu", str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("name", CELLS)
def test_a_real_step_keeps_what_its_trace_says(server: TraceServer, trained: Path, name: str) -> None:
    cell, norms_kept = CELLS[name]
    for rank in range(RANKS):
        real = json.loads((trained / name / f"{rank}.json").read_text(encoding="utf-8"))
        losses = real["losses"]
        assert all(0.5 * math.log(128) < loss < 1.5 * math.log(128) for loss in losses), "it really trains"
        ledger = server.run(cell, rank=rank).ledger
        moments = [(moment.iteration, moment.phase) for moment in ledger.moments if moment.iteration]
        assert moments == [(iteration, phase) for iteration, phase, _ in real["alive"]]
        assert moments == [(iteration, phase) for iteration in (1, 2) for phase in PHASES]
        for iteration, phase, alive in real["alive"]:
            found = Counter((dtype, rounded(nbytes)) for dtype, nbytes in alive)
            kept = norms_kept if phase == "backward" else 0
            assert found == _on_cpu(_at(ledger, iteration, phase), kept), (rank, iteration, phase)


def _at(ledger: Ledger, iteration: int, phase: str) -> list[Row]:
    """What the trace says is alive when a phase begins, but for what PyTorch's cuBLAS takes below any tensor."""
    rows = ledger.at(ledger.start(iteration, phase) - 1).rows
    return [row for row in rows if not row.tensor.startswith(cublas.PRODUCER)]


def _on_cpu(rows: list[Row], norms_kept: int) -> Counter[tuple[str, int]]:
    """The trace's rows as a CPU has them: (dtype, bytes)."""
    alive = Counter((DTYPES.get(row.dtype, row.dtype), row.bytes) for row in rows)
    # CUDA's layer norms keep mean and inverse deviation of each row in fp32; the CPU's in the dtype of
    # input and weight (`LayerNormKernelImpl`: `param_scalar_type`).
    tokens = SEQUENCE * MICRO_BATCH
    alive["float32", rounded(4 * tokens)] -= 2 * norms_kept
    alive["bfloat16", rounded(2 * tokens)] += 2 * norms_kept
    # Transformer Engine's Adam has a flag for overflows (`_dummy_overflow_buf`), PyTorch's, which a CPU takes, none.
    alive["int32", rounded(4)] -= 1
    return +alive
