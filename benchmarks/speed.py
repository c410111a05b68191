"""How long labkit's everyday acts take here, as whole processes: `make bench`, or `python benchmarks/speed.py`.

Times the estimate (median of several), one Moonlight trace cell, the six-cell study into an empty store and, with
`--tests`, the test suite; beside each stands the project's target for a two-core machine. Nothing is asserted: a slow
or busy machine is not a defect.
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LABKIT = [sys.executable, "-m", "labkit"]
WORKLOAD = "data/workloads/moonlight-16b.yaml"
STUDY = "data/studies/moonlight-16b.yaml"
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


def time_trace() -> Timing:
    """`labkit trace`, one cell."""
    return Timing("labkit trace, one Moonlight cell", 15, [timed([*LABKIT, "trace", WORKLOAD, "--json"])])


def time_study() -> Timing:
    """`labkit study run` with nothing kept from before."""
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as store:
        seconds = timed([*LABKIT, "study", "run", STUDY, "--store", store])
    return Timing("labkit study run, six cells, empty store", 75, [seconds])


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
    table = Table(title="Whole processes, wall seconds", title_justify="left")
    table.add_column("what")
    for heading in ("measured", "spread", "target"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for timing in timings:
        spread = f"{min(timing.seconds):.2f} - {max(timing.seconds):.2f}" if len(timing.seconds) > 1 else ""
        within = timing.median_seconds < timing.target_seconds
        remark = ", ".join(filter(None, ["within" if within else "over target", timing.note]))
        table.add_row(timing.what, f"{timing.median_seconds:.2f}", spread, f"< {timing.target_seconds:g}", remark)
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


def main() -> None:
    """Times what was asked for and prints it."""
    parser = argparse.ArgumentParser(description="Time labkit's everyday acts as whole processes.")
    parser.add_argument("--quick", action="store_true", help="the estimate and one trace cell only")
    parser.add_argument("--tests", action="store_true", help="`make test` too")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()

    facts = machine()  # before the work, so that the load is other people's
    timings = [time_estimate(runs=7), time_trace()]
    if not options.quick:
        timings.append(time_study())
    if options.tests:
        timings.append(time_tests())

    if options.json:
        timed_acts = [asdict(timing) | {"median_seconds": timing.median_seconds} for timing in timings]
        print(json.dumps({"machine": facts, "timings": timed_acts}, indent=2))
    else:
        show(timings, facts, Console())


if __name__ == "__main__":
    main()
