"""Small workloads of every kind, on which the estimate is held against a trace of the real Megatron code.

Each module is a family: a `BASE` mapping and `CHANGES` to it by name. Written so that each differs from its base in
one thing; `benchmarks/estimate_vs_trace.py` lays all of them side by side.
"""

from collections.abc import Mapping
from typing import Any

from labkit.workload import Workload
from tests.memory.grid import (
    attention,
    devices,
    ends,
    gdn,
    hybrid,
    inputs,
    local,
    lora,
    mamba,
    mlp,
    moe,
    moonlight,
    packed,
    pipeline,
    positions,
    precision,
    prediction,
    state,
)

FAMILIES = {
    "attention": attention,
    "devices": devices,
    "ends": ends,
    "gdn": gdn,
    "hybrid": hybrid,
    "inputs": inputs,
    "local": local,
    "lora": lora,
    "mamba": mamba,
    "mlp": mlp,
    "moe": moe,
    "moonlight": moonlight,
    "packed": packed,
    "pipeline": pipeline,
    "positions": positions,
    "precision": precision,
    "prediction": prediction,
    "state": state,
}
NAMES = [f"{family}: {name}" for family, module in FAMILIES.items() for name in module.CHANGES]


def workload(name: str) -> Workload:
    """The workload called `family: name`."""
    family, _, case = name.partition(": ")
    module = FAMILIES[family]
    return changed(module.BASE, module.CHANGES[case], name)


def changed(base: Mapping[str, Any], changes: Mapping[str, Any], name: str) -> Workload:
    """`base` with dotted fields changed; `labels` is a selective list, `full` a method and its number of layers."""
    data = {section: dict(fields) for section, fields in base.items() if fields is not None}
    fields = dict(changes)
    labels, full = fields.pop("labels", []), fields.pop("full", None)
    for path, value in fields.items():
        *parents, last = path.split(".")
        target: dict[str, Any] = data
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        target[last] = value
    if full is None:
        data["recompute"] = {"recompute_granularity": "selective", "recompute_modules": labels}
    else:
        method, layers = full
        data["recompute"] = {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": layers,
        }
    return Workload.from_mapping(data, source=name)
