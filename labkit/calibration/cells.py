"""Measured cells of an H200 file (`data/published/README.md`): each a workload and the state its process was in."""

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from labkit.calibration.rows import measured_rows, sequence_lengths
from labkit.workload import Workload
from labkit.workload.files import data_directory, model_mapping
from labkit.workload.workload import content_hash

DEFAULT_CELLS = data_directory() / "published" / "h200_lora_peaks.csv"
"""The cells that OpenPipe ART published."""

CONCENTRATED_SHARE = "0.96875"
"""31/32 of the tokens are sent to the first expert rank's experts."""
CHOSEN_FROM = frozenset(f"h200-{number}" for number in (17, 22, 43, 68, 69, 71, 73, 75))
"""Cells that a choice rests on where no source decides: which recipes fuse the activation (`_kernels`), the state of a
delta net under context parallelism (`labkit/memory/layers/prefix_tree.py`), the tuning allowance
(`labkit/memory/margin.py`). All others are held out: they show that the choices carry over."""
PHASES = {
    "retained": "retained_bytes",
    "forward": "forward_peak_bytes",
    "forward_backward": "forward_backward_peak_bytes",
}
"""What is compared, and the column that measured it: the larger of two repetitions, of which the first may be cold."""
WARM = {"repeat_forward": "repeat_forward_peak_bytes"}
"""The second repetition alone: libraries have their workspaces."""


class Cell(NamedTuple):
    """One measured run."""

    case: str
    group: str
    """dense, hybrid, moe, or moe concentrated."""
    workload: Workload
    measured_bytes: dict[str, int]
    """By phase (`PHASES` and `WARM`), above the baseline before forward; only what was measured."""
    reference_estimate_bytes: int | None
    """The publisher's own estimate, its 10 % margin included."""
    baseline_bytes: int | None
    """Lowest of a rank before a forward."""
    cold: bool
    """The first run of its process: libraries have no workspaces yet."""
    held_bytes: int | None
    """What the process held before the run beyond a fresh one's; None: not measured."""

    @property
    def rows(self) -> int:
        """Rows of the busiest rank."""
        batch, cp = self.workload.batch, self.workload.parallelism.cp
        return batch.sequences.busiest_rank_rows or -(-batch.seq_length // cp)

    @property
    def work_hash(self) -> str:
        """Of all that decides its estimate and its trace: the workload and the state of its process."""
        return content_hash([self.workload.content_hash, self.cold, self.held_bytes])[:16]


def read(path: Path, known: Path | None = None) -> list[Cell]:
    """The measured cells of a file; runs that were refused have no figures and are left out.

    Args:
        path: CSV with the columns of `data/published/h200_lora_peaks.csv`.
        known: Another such file; its cells also tell what a fresh process holds and which cell came first.

    Raises:
        InputError: the file or a row is wrong (`measured_rows`), a model is unknown, or a row makes no workload.
    """
    rows = measured_rows(path)
    more = measured_rows(known) if known else []
    fresh = _fresh_baselines([*rows, *more])
    shortest = _shortest([*rows, *more])
    return [_cell(row, f"{path}, case {row['case'][:80]}", fresh, shortest) for row in rows]


def _layout(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("model", "tp", "cp", "ep", "etp"))


def _fresh_baselines(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, ...], int]:
    """The lowest baseline of each model and layout: that of a process that has run nothing yet."""
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        if row["baseline_min_bytes"]:
            lowest = int(row["baseline_min_bytes"])
            found[_layout(row)] = min(lowest, found.get(_layout(row), lowest))
    return found


def _series(row: Mapping[str, str]) -> tuple[str, ...]:
    """Cells that one process ran after each other: they differ in lengths alone."""
    names = ("compiled", "concentrated_routing", "recompute", "recompute_modules")
    return (*_layout(row), *(row[name] for name in names))


def _shortest(rows: Iterable[Mapping[str, str]]) -> dict[tuple[str, ...], int]:
    found: dict[tuple[str, ...], int] = {}
    for row in rows:
        tokens = int(row["packed_tokens"])
        found[_series(row)] = min(tokens, found.get(_series(row), tokens))
    return found


WORKSPACE_BYTES = 96 * 2**20 + 1024
"""The least that a process holds after its first run: workspaces of Transformer Engine and of two cuBLAS handles."""


def _cell(
    row: Mapping[str, str], source: str, fresh: Mapping[tuple[str, ...], int], shortest: Mapping[tuple[str, ...], int]
) -> Cell:
    workload = _workload(row, source)
    baseline = int(row["baseline_min_bytes"]) if row["baseline_min_bytes"] else None
    held = None if baseline is None else baseline - fresh[_layout(row)]
    return Cell(
        case=row["case"],
        group=_group(workload),
        workload=workload,
        measured_bytes={phase: int(row[name]) for phase, name in (PHASES | WARM).items() if row[name]},
        reference_estimate_bytes=int(row["reference_estimate_bytes"]) if row["reference_estimate_bytes"] else None,
        baseline_bytes=baseline,
        cold=_cold(row, held, shortest),
        held_bytes=held,
    )


def _cold(row: Mapping[str, str], held: int | None, shortest: Mapping[tuple[str, ...], int]) -> bool:
    """Whether the process was fresh: it held nothing yet, and gained the workspaces between its two repetitions.

    Where no baselines were measured, the shortest cell of a series is taken to be its first, as baselines show
    elsewhere.
    """
    if held is None:
        return int(row["packed_tokens"]) == shortest[_series(row)]
    grown = int(row["baseline_max_bytes"]) - int(row["baseline_min_bytes"])
    return held < WORKSPACE_BYTES <= grown


def _group(workload: Workload) -> str:
    if workload.model.mixture_of_experts is not None:
        concentrated = workload.routing is not None and workload.routing.kind == "concentrated"
        return "moe concentrated" if concentrated else "moe"
    return "dense" if workload.model.gated_delta_net is None else "hybrid"


def _workload(row: Mapping[str, str], source: str) -> Workload:
    lengths, rows, cp = sequence_lengths(row["lengths"]), int(row["packed_tokens"]), int(row["cp"])
    ranks, expert_ranks = int(row["tp"]) * cp, int(row["ep"]) * int(row["etp"])
    world_size = math.lcm(ranks, expert_ranks)
    shares = rows < sum(lengths)  # the runtime stores the prefix once where that pays
    model = model_mapping(row["model"].rpartition("/")[2].lower(), source, Path()) | {"num_layers": int(row["layers"])}
    mapping = {
        "model": model,
        "parallelism": {
            "world_size": world_size,
            "tensor_model_parallel_size": int(row["tp"]),
            "context_parallel_size": cp,
            "expert_model_parallel_size": int(row["ep"]),
            "expert_tensor_parallel_size": int(row["etp"]),
            "sequence_parallel": row["sequence_parallel"] == "True",
        },
        "batch": {
            "seq_length": rows,
            "global_batch_size": world_size // ranks,
            "packed": {
                "lengths": lengths,
                "shared_prefix": int(row["shared_prefix"]) if shares else 0,
                "busiest_rank_rows": int(row["retained_tokens"]) if cp > 1 else None,
            },
        },
        "recompute": _recompute(row),
        "training": {
            "gpu": "h200-141gb",
            "runtime": "lora",
            "lora": {"rank": 1, "compile_layers": row["compiled"] == "True", "optimizer_step": False},
            "kernels": _kernels(model),
            "software": {"transformer_engine": "2.14.0"},
        },
    }
    if row["concentrated_routing"] == "True" and int(row["ep"]) > 1:
        mapping["routing"] = {"kind": "concentrated", "share": float(Fraction(CONCENTRATED_SHARE))}
    return Workload.from_mapping(mapping, source)


def _recompute(row: Mapping[str, str]) -> dict[str, object]:
    """`none`, `selective` with a list, or `full`: the runtime's full recompute goes layer by layer."""
    modules = [name for name in row["recompute_modules"].split("+") if name]
    match row["recompute"]:
        case "none":
            return {}
        case "full":
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        case granularity:
            return {"recompute_granularity": granularity, "recompute_modules": modules}


def _kernels(model: Mapping[str, object]) -> dict[str, object]:
    """What the runtime's recipes set for a family of models.

    `bias_activation_fusion` is no column of the file. Empirical, from the eager cells: Qwen3-1.7B (h200-17) and the MoE
    model (h200-22) keep the unfused activation's tensors, the dense hybrids (h200-43, h200-75) do not.
    """
    moe = "mixture_of_experts" in model
    kernels: dict[str, object] = {"bias_activation_fusion": "gated_delta_net" in model and not moe}
    if moe:
        kernels["moe_token_dispatcher_type"] = "flex"
    return kernels
