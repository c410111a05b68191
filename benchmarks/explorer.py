"""How long a change in the explorer takes in the kernel: `python -m benchmarks.explorer`.

For each model some 36 changes of length, recompute, layout and training, each new to the process: seconds from what the
front end sends to what it is sent, in CPU time, which a busy machine does not stretch, and wall time. The target is
150 ms. Beside them the size of an update, and the ledger that follows in the background. Nothing is asserted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.speed import ROOT, machine
from labkit.console import Terminal
from labkit.explore import Explorer
from labkit.explore.state import GIVEN, LABELS, LAYERS, MODE
from labkit.explore.view import settled
from labkit.starters.workload import starting_workload
from labkit.workload import Parallelism, Workload

TARGET_MS = 150


class Timed(NamedTuple):
    """The changes of one start, in milliseconds."""

    what: str
    cpu_ms: list[float]
    wall_ms: list[float]
    largest_update_bytes: int
    settled_ms: float
    """CPU time of the ledger."""


def starts() -> Iterator[tuple[str, Workload]]:
    """What is changed."""
    yield "Moonlight 16B", Workload.load(ROOT / "data/workloads/moonlight-16b.yaml")
    yield "Nemotron 3 Nano", Workload.load(ROOT / "data/workloads/nemotron-3-nano.yaml")
    yield "Llama 70B, PP 4", _pipelined("llama-3.1-70b", world_size=64, tensor=8, pipeline=4)
    yield "DeepSeek-V3, 61 layers", starting_workload("deepseek-v3")
    deep = {"expert_model_parallel_size": 64, "expert_tensor_parallel_size": 1}
    deep |= {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 1}
    yield "DeepSeek-V3, PP 16", _pipelined("deepseek-v3", world_size=1024, tensor=1, pipeline=16, **deep)


def _pipelined(model: str, *, world_size: int, tensor: int, pipeline: int, **others: Any) -> Workload:
    layout = Parallelism(
        world_size=world_size,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_model_parallel_size=pipeline,
        **others,
    )
    start = starting_workload(model)
    batch = start.batch.model_copy(update={"global_batch_size": world_size * 8})
    return start.model_copy(update={"parallelism": layout, "batch": batch}).checked()


def changes() -> Iterator[dict[str, Any]]:
    """What is picked, one after the other."""
    yield from ({"batch.seq_length": 1024 * number} for number in range(1, 17))
    labels = (["core_attn"], ["moe_act"], ["layernorm"], ["mlp"], ["moe"], ["moe_act", "layernorm"])
    yield from ({MODE: "selective", LABELS: each} for each in labels)
    yield from ({MODE: "full uniform", LAYERS: layers} for layers in (1, 2, 4))
    yield from ({MODE: "full block", LAYERS: layers} for layers in (1, 8))
    tensor, sequence = "parallelism.tensor_model_parallel_size", "parallelism.sequence_parallel"
    yield from ({tensor: ranks, sequence: ranks > 1} for ranks in (1, 2, 4, 8))
    yield from ({"batch.micro_batch_size": size} for size in (2, 4))
    yield {"training.gpu": "h200-141gb"}
    yield {"training.optimizer.use_precision_aware_optimizer": True, "training.optimizer.exp_avg_dtype": "bf16"}
    yield {"training.data_parallel.grad_reduce_in_fp32": True}


def timed(what: str, start: Workload) -> Timed:
    """Every change of a start that can run."""
    explorer = Explorer(start)
    found = Timed(what, [], [], 0, 0.0)
    for seq, fields in enumerate(changes(), start=1):
        cpu, wall = time.thread_time(), time.perf_counter()
        explorer.choice = {"seq": seq, "start": GIVEN, "fields": fields}
        found.cpu_ms.append(1e3 * (time.thread_time() - cpu))
        found.wall_ms.append(1e3 * (time.perf_counter() - wall))
        size = len(json.dumps(explorer.answer)) + len(json.dumps(explorer.picture))
        found = found._replace(largest_update_bytes=max(found.largest_update_bytes, size))
    explorer.close()
    cpu = time.thread_time()
    settled(start)
    return found._replace(settled_ms=1e3 * (time.thread_time() - cpu))


def main() -> None:
    """Times every start and prints it."""
    parser = argparse.ArgumentParser(description="Time changes in the explorer.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    facts = machine()  # before the work, so that the load is other people's
    found = [timed(*start) for start in starts()]
    if options.json:
        print(json.dumps({"machine": facts, "timings": [each._asdict() for each in found]}, indent=2))
        return
    table = Table(title=f"A change in the explorer, ms (target {TARGET_MS})", title_justify="left")
    for heading in ("what", "changes", "median", "worst", "median, wall", "worst, wall", "update, KB", "ledger after"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for each in found:
        shown = (statistics.median(each.cpu_ms), max(each.cpu_ms), statistics.median(each.wall_ms), max(each.wall_ms))
        update, after = f"{each.largest_update_bytes / 1000:.1f}", f"{each.settled_ms:.0f}"
        table.add_row(each.what, str(len(each.cpu_ms)), *(f"{value:.0f}" for value in shown), update, after)
    console = Terminal()
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
