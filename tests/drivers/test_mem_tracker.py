"""PyTorch's own memory tracker beside labkit's, in the child of one trace: they agree to the byte."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace import cublas
from labkit.ledger import Row
from tests.small import full, selective, small

pytestmark = pytest.mark.slow

CELLS: dict[str, Workload] = {
    "dense": small(
        model__mixture_of_experts=None,
        parallelism={"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "moe": small(),
    "full": small(recompute=full("uniform", 1)),
    # Storages are emptied and filled again (`resize_`).
    "discarded": small(recompute=selective("moe_act", "layernorm")),
}
ACTIVATIONS = ("Activation", "Temp")
"""MemTracker's names for what forward and backward make; only an optimizer's step and `.grad` have others."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of each cell a file of what both trackers said."""
    folder = tmp_path_factory.mktemp("seen")
    for name, cell in CELLS.items():
        text = json.dumps(cell.model_dump(mode="json", exclude_unset=True))
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "tests.drivers.mem_tracker_child", str(folder)], check=True, timeout=300)
    return folder


@pytest.mark.parametrize("cell", CELLS)
def test_torchs_memory_tracker_agrees_in_every_phase(cell: str, seen: Path) -> None:
    compared = json.loads((seen / f"{cell}.seen.json").read_text(encoding="utf-8"))
    assert [(each["iteration"], each["phase"]) for each in compared["moments"]] == [
        (0, "setup"),
        *((iteration, phase) for iteration in (1, 2) for phase in ("forward", "backward", "grad_sync", "optimizer")),
    ]
    for each in compared["moments"]:
        rows = [Row(*row) for row in each["rows"]]
        # Their dispatch mode cannot see what PyTorch's cuBLAS takes from the allocator below any tensor.
        tensors = [row for row in rows if not row.tensor.startswith(cublas.PRODUCER)]
        assert each["theirs"].get("Total", 0) == sum(row.bytes for row in tensors)
        if each["iteration"] == 2:
            _compare_categories(each["theirs"], tensors)
    assert compared["our_peak"] - compared["their_peak"] == compared["cublas"] > 0


def _compare_categories(theirs: dict[str, int], rows: list[Row]) -> None:
    """In the steady step, where everything has been named."""

    def held(keep: Any) -> int:
        return sum(row.bytes for row in rows if keep(row))

    parameters = held(lambda row: row.tensor == "param_data")
    # What autograd is given as a parameter's gradient counts for MemTracker: Transformer Engine's dummies too, whose
    # real gradients its kernels have added to the buffers.
    gradients = held(lambda row: row.tensor in ("grad_data", "get_dummy_wgrad"))
    moments = held(lambda row: row.tensor in ("exp_avg", "exp_avg_sq"))
    assert theirs["Parameter"] == parameters > 0
    assert theirs["Optstate"] == moments > 0
    assert theirs["Gradient"] == gradients > 0
    assert (
        sum(theirs[name] for name in ACTIVATIONS) == sum(row.bytes for row in rows) - parameters - gradients - moments
    )
