"""Measured, traced and estimated peaks of a few dense cells on one GPU, side by side: `python scripts/gpu_check.py`.

The machine needs torch, megatron-core, pydantic and PyYAML, and neither Transformer Engine nor APEX: the layers are
Megatron Core's own. Eight cells (two lengths; nothing, core_attn, mlp or everything recomputed) take some four minutes
on an H200. What was measured goes to `data/measured/NAME-OF-GPU.json`, a list of measurements as the contract has them.

`--expect` writes `data/measured/gpu_check_expected.json` on a machine that can trace (no GPU): what the cells are held
against. Without that file the measured peaks are shown alone.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from labkit.drivers.contract import Measurement, Unfinished
from labkit.drivers.cuda.driver import CudaDriver, Plan
from labkit.files import write_atomically
from labkit.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "data" / "measured"
EXPECTED = FOLDER / "gpu_check_expected.json"
LENGTHS = (2048, 4096)
CHOICES: tuple[dict[str, Any], ...] = (
    {"recompute_granularity": "selective", "recompute_modules": []},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
)
PHASES = ("forward", "backward", "grad_sync", "optimizer")
MOST_SECONDS = 420.0


def cells() -> Iterator[Workload]:
    """The workloads, the shorter length's first."""
    base = Workload.load(ROOT / "data" / "workloads" / "gpt-local.yaml").model_dump(mode="json", exclude_unset=True)
    for length in LENGTHS:
        for choice in CHOICES:
            yield Workload.from_mapping({**base, "batch": {**base["batch"], "seq_length": length}, "recompute": choice})


def named(workload: Workload) -> str:
    """`2048 [core_attn]`."""
    return f"{workload.batch.seq_length} {workload.recompute.label}"


def expect() -> None:
    """Trace and estimate every cell; keep the steady peaks of each phase."""
    from labkit.drivers.trace.server import TraceServer
    from labkit.memory.estimate import estimate

    kept: dict[str, Any] = {}
    with TraceServer() as server:
        for workload in cells():
            (record,) = server.run(workload).measurement.ranks
            kept[named(workload)] = {
                "workload": workload.content_hash,
                "traced": _steady(record.phases),
                "traced_between_steps": record.between_steps_bytes,
                "estimated": estimate(workload).summary.peak_allocated_bytes,
            }
    write_atomically(EXPECTED, json.dumps(kept, indent=1) + "\n")


def _steady(phases: Any) -> dict[str, int]:
    """The largest allocated bytes of each phase in steps after the first."""
    steady = [each for each in phases if each.iteration > 1]
    return {
        name: max(each.peak_allocated_bytes for each in steady if each.phase == name)
        for name in PHASES
        if any(each.phase == name for each in steady)
    }


def measure() -> list[Measurement]:
    """Measure every cell, each by a process of its own."""
    made: list[Measurement] = []
    left = MOST_SECONDS
    for workload in cells():
        driver = CudaDriver(replace(Plan(warmup=3, steps=5), seconds=left))
        measurement = driver.run(workload).measurement
        made.append(measurement)
        left -= measurement.wall_seconds or 0.0
        _print(workload, measurement, _expected(workload))
    return made


def _expected(workload: Workload) -> dict[str, Any]:
    """What was traced and estimated of a cell; empty where nothing was, or of another cell."""
    known = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {}
    found: dict[str, Any] = known.get(named(workload), {})
    return found if found.get("workload") == workload.content_hash else {}


def _print(workload: Workload, measurement: Measurement, expected: dict[str, Any]) -> None:
    sys.stdout.write(f"{named(workload)}: ")
    if measurement.failure is not None:
        sys.stdout.write(f"{measurement.outcome} in {measurement.failure.phase}: {measurement.failure.message}\n")
        return
    (record,) = measurement.ranks
    peaks, traced = _steady(record.phases), expected.get("traced", {})
    peak = max(peaks.values())
    sys.stdout.write(f"peak {peak / 1e9:.3f} GB measured")
    if expected:
        held = (("traced", max(traced.values())), ("estimated", expected["estimated"]))
        sys.stdout.write("".join(f", {value / 1e9:.3f} {name} ({value / peak - 1:+.2%})" for name, value in held))
    sys.stdout.write(f"; {measurement.step_time_ms:.1f} ms a step, {measurement.tflops_per_gpu:.0f} TFLOP/s\n")
    pairs = [*((name, value, traced.get(name)) for name, value in peaks.items())]
    pairs.append(("between steps", record.between_steps_bytes or 0, expected.get("traced_between_steps")))
    for name, value, held in pairs:
        beside = "" if held is None else f", traced {held / 1e9:.3f} ({held / value - 1:+.2%})"
        sys.stdout.write(f"    {name}: {value / 1e9:.3f}{beside}\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, or write what is expected; returns the exit code."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--expect", action="store_true", help="trace and estimate the cells instead: no GPU is needed")
    if parser.parse_args().expect:
        expect()
        return 0
    try:
        made = measure()
    except Unfinished as error:
        sys.stderr.write(f"gpu_check: {error}\n")
        return 1
    name = re.sub(r"[^a-z0-9]+", "-", made[0].versions["GPU"].lower())
    path = FOLDER / f"{name}.json"
    write_atomically(path, json.dumps([each.model_dump(mode="json") for each in made], indent=1) + "\n")
    sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0 if all(each.outcome == "ok" for each in made) else 1


if __name__ == "__main__":
    sys.exit(main())
