"""How long labkit's everyday acts take here: `make bench`, or `python benchmarks/speed.py`.

As whole processes the estimate (median of several), one Moonlight trace cell, the six-cell study into an empty store
and, with `--tests`, the test suite; inside a process the estimate's outline of a 64-layer model and a sweep of ten
thousand workloads. Beside each stands the project's target for a two-core machine. Nothing is asserted: a slow or busy
machine is not a defect.
"""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

from labkit.console import Terminal
from labkit.drivers.trace.server import Limits, TraceServer
from labkit.memory.estimate import estimate
from labkit.memory.outline import outline
from labkit.memory.sweep import sweep, variations
from labkit.summary import Summary
from labkit.workload import RECOMPUTE_MODULES, Parallelism, Recompute, Workload
from labkit.workload.files import model_mapping

ROOT = Path(__file__).resolve().parent.parent
LABKIT = [sys.executable, "-m", "labkit"]
WORKLOAD = "data/workloads/moonlight-16b.yaml"
STUDY = "data/studies/moonlight-16b.yaml"
SWEPT = 10_000
PACKAGES = ("labkit", "torch", "megatron-core", "transformer-engine", "polars")


@dataclass(frozen=True)
class Timing:
    """Wall seconds of one command, each run in a process of its own."""

    what: str
    target_seconds: float
    seconds: list[float]
    note: str = ""

    @property
    def median_seconds(self) -> float:
        """Median of the runs."""
        return statistics.median(self.seconds)


def timed(command: Sequence[str]) -> float:
    """Wall seconds of a command run from the repository's root.

    Raises:
        SystemExit: the command failed; its last line of stderr is shown.
    """
    start = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise SystemExit(f"{' '.join(command)} ended with exit code {done.returncode}: {''.join(last)}")
    return elapsed


def imports_torch(command: Sequence[str]) -> bool:
    """Whether the Python process behind a command imports torch."""
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return re.search(r"\|\s+torch$", done.stderr, flags=re.MULTILINE) is not None


def time_estimate(runs: int) -> Timing:
    """`labkit estimate`, the shell to the answer."""
    command = [*LABKIT, "estimate", WORKLOAD, "--json"]
    timed(command)  # the first run after an install compiles Python files
    note = "imports torch" if imports_torch(command) else "torch not imported"
    return Timing("labkit estimate", 1, [timed(command) for _ in range(runs)], note)


def time_plans(runs: int) -> list[Timing]:
    """`labkit plan`, the shell to the answer: one layout, and all of them."""
    found = []
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        deep = Path(folder) / "deep.yaml"
        layout = {"world_size": 64, "expert_model_parallel_size": 8}
        deep.write_text(json.dumps(deep_model(61).model_dump(mode="json") | {"parallelism": layout}))
        for name, path in (("Nemotron 3 Nano", "data/workloads/nemotron-3-nano.yaml"), ("61 layers", str(deep))):
            for options in ([], ["--settings"]):
                command = [*LABKIT, "plan", path, "--budget", "80GB", "--json", *options]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                note = f"{json.loads(done.stdout)['considered']} choices"
                what = " ".join(["labkit plan", *options])
                found.append(Timing(f"{what}, {name}", 3, [timed(command) for _ in range(runs)], note))
    return found


def time_trace() -> Timing:
    """`labkit trace`, one cell."""
    return Timing("labkit trace, one Moonlight cell", 15, [timed([*LABKIT, "trace", WORKLOAD, "--json"])])


def hybrid_model(layers: int) -> Workload:
    """Qwen's gated delta nets with attention in every fourth layer, on eight ranks, trained whole."""
    model = {**model_mapping("qwen3.8-27b", "benchmarks/speed.py", ROOT), "num_layers": layers}
    layout = {"world_size": 8, "tensor_model_parallel_size": 4, "sequence_parallel": True}
    batch = {"seq_length": 4096, "global_batch_size": 8}
    training = {"gpu": "h200-141gb", "data_parallel": {"use_distributed_optimizer": True}}
    return Workload.from_mapping({"model": model, "parallelism": layout, "batch": batch, "training": training})


def time_warm_traces() -> list[Timing]:
    """Traces of one rank by a process that holds the libraries ready, each within the usual limit of memory."""
    cases = [("one Moonlight cell", 12, Workload.load(ROOT / WORKLOAD))]
    cases += [(f"{layers} hybrid layers", 20, hybrid_model(layers)) for layers in (64, 32)]
    with TraceServer(workers=1) as server:
        server.run(cases[0][2])
        seconds = [clocked(server.run, case) for *_, case in cases]
    note = f"within {Limits().memory_bytes / 2**30:g} GiB of host memory"
    return [
        Timing(f"trace by a warm worker, {what}", target, [taken], note)
        for (what, target, _), taken in zip(cases, seconds, strict=True)
    ]


def time_study() -> Timing:
    """`labkit study run` with nothing kept from before."""
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as store:
        seconds = timed([*LABKIT, "study", "run", STUDY, "--store", store])
    return Timing("labkit study run, six cells, empty store", 75, [seconds])


def deep_model(layers: int) -> Workload:
    """Moonlight with more layers; its shared experts do not overlap, so that every label may be tried."""
    data = Workload.load(ROOT / WORKLOAD).model_dump()
    data["model"] |= {"num_layers": layers}
    data["model"]["mixture_of_experts"] |= {"moe_layer_freq": [0] + [1] * (layers - 1)}
    data["training"]["kernels"] |= {"moe_shared_expert_overlap": False}
    data["batch"] |= {"global_batch_size": 128}
    return Workload.from_mapping(data)


def time_outlines(layers: int) -> list[Timing]:
    """One estimate after the other in one process: the first of a layout, then others of the same."""
    base = deep_model(layers)
    lengths = [base.batch.model_copy(update={"seq_length": length}) for length in range(1024, 9216, 256)]
    others = [base.model_copy(update={"batch": batch}) for batch in lengths]
    choices = [base.model_copy(update={"recompute": choice}) for choice in recompute_choices()]
    layouts = [base.model_copy(update={"parallelism": layout}) for layout in parallel_layouts()]
    what = f"one estimate of {layers} layers"
    return [
        Timing(f"{what}, new layout", 2e-3, [clocked(outline, case) for case in layouts], "state priced anew"),
        Timing(f"{what}, new length", 2e-3, [clocked(outline, case) for case in others]),
        Timing(f"{what}, new recompute choice", 2e-3, [clocked(outline, case) for case in choices]),
        Timing(f"{what}, with rows and allocator blocks", 1, [clocked(summary, base) for _ in range(3)]),
    ]


def summary(case: Workload) -> Summary:
    """The whole estimate: rows, allocator blocks, summary."""
    return estimate(case).summary


def recompute_choices() -> list[Recompute]:
    """Label lists of up to three, and whole layers."""
    labels = [label for label in RECOMPUTE_MODULES if label != "gdn_norm_out"]
    lists = [chosen for size in range(4) for chosen in combinations(labels, size)]
    selective = [{"recompute_granularity": "selective", "recompute_modules": chosen} for chosen in lists]
    full = [
        {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": number}
        for method, number in (("uniform", 1), ("uniform", 2), ("block", 1), ("block", 8), ("block", 32), ("block", 64))
    ]
    return [Recompute.model_validate(choice) for choice in (*selective, *full)]


def parallel_layouts() -> list[Parallelism]:
    """Tensor and expert parallelism on 64 ranks."""
    return [
        Parallelism(
            world_size=64,
            tensor_model_parallel_size=tp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=1,
            sequence_parallel=tp > 1,
        )
        for tp in (1, 2, 4, 8)
        for ep in (1, 2, 4, 8, 16)
    ]


def time_sweep() -> Timing:
    """Layouts x labels x lengths of a 64-layer model, as one frame."""
    base = deep_model(64)
    batches = [base.batch.model_copy(update={"seq_length": length}) for length in range(1024, 13312, 1024)]
    cases = list(variations(base, parallelism=parallel_layouts(), recompute=recompute_choices(), batch=batches))[:SWEPT]
    seconds = clocked(sweep, cases)
    return Timing(f"sweep of {len(cases)} workloads of 64 layers", 3, [seconds], "one core")


def clocked[T](act: Callable[[T], object], argument: T) -> float:
    """Wall seconds of a call."""
    start = time.perf_counter()
    act(argument)
    return time.perf_counter() - start


def time_tests() -> Timing:
    """`make test`."""
    return Timing("make test", 360, [timed(["make", "test"])])


def machine() -> dict[str, str]:
    """What the timings depend on."""
    return {
        "cores": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def show(timings: Sequence[Timing], facts: dict[str, str], console: Console) -> None:
    """The timings as a table for people."""
    table = Table(title="Wall seconds", title_justify="left")
    table.add_column("what")
    for heading in ("measured", "spread", "target"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for timing in timings:
        spread = f"{min(timing.seconds):.2g} - {max(timing.seconds):.2g}" if len(timing.seconds) > 1 else ""
        within = timing.median_seconds < timing.target_seconds
        remark = ", ".join(filter(None, ["within" if within else "over target", timing.note]))
        table.add_row(timing.what, f"{timing.median_seconds:.3g}", spread, f"< {timing.target_seconds:g}", remark)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


def main() -> None:
    """Times what was asked for and prints it."""
    parser = argparse.ArgumentParser(description="Time labkit's everyday acts.")
    parser.add_argument("--quick", action="store_true", help="all but the study")
    parser.add_argument("--tests", action="store_true", help="`make test` too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()

    facts = machine()  # before the work, so that the load is other people's
    timings = [
        time_estimate(runs=7),
        *time_plans(runs=3),
        *time_outlines(64),
        time_sweep(),
        time_trace(),
        *time_warm_traces(),
    ]
    if not options.quick:
        timings.append(time_study())
    if options.tests:
        timings.append(time_tests())

    if options.json:
        timed_acts = [asdict(timing) | {"median_seconds": timing.median_seconds} for timing in timings]
        print(json.dumps({"machine": facts, "timings": timed_acts}, indent=2))
    else:
        show(timings, facts, Terminal())


if __name__ == "__main__":
    main()
