"""A small workload, and a driver that fills the contract without torch, for tests of what surrounds drivers."""

from collections.abc import Callable
from typing import Any, NamedTuple

from labkit.drivers.contract import CellKey, Measurement, PhasePeak, RankRecord
from labkit.ledger import Ledger, Moment, Row
from labkit.study.matrix import Candidate
from labkit.study.runner import Cell
from labkit.workload import Workload
from tests.small import MODEL

VERSIONS = (("labkit", "0.1.0"), ("megatron-core", "0.19.2"))

SMALL = {
    "model": MODEL,
    "parallelism": {"world_size": 2, "expert_model_parallel_size": 2},
    "batch": {"seq_length": 128, "global_batch_size": 2},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": []},
}
"""One dense and one MoE layer, EP 2: traced in a few seconds."""


def small(*labels: str) -> Workload:
    """`SMALL` under a list of recompute labels."""
    return Workload.from_mapping(SMALL).with_recompute(
        recompute_granularity="selective", recompute_modules=list(labels)
    )


def cell(*labels: str, control: bool = False, versions: tuple[tuple[str, str], ...] = VERSIONS) -> Cell:
    """The cell of `small(*labels)`."""
    workload = small(*labels)
    changes = () if control else ("recompute",)
    candidate = Candidate(workload.recompute.label, workload, is_control=control, changes=changes)
    return Cell(candidate, CellKey(workload_hash=workload.content_hash, driver="trace", versions=versions))


class Measured(NamedTuple):
    """What a driver hands back."""

    measurement: Measurement
    ledger: Ledger


def row(name: str, nbytes: int, born: int, dies: int | None, **fields: Any) -> Row:
    """A ledger row with blocks as large as its tensor unless `fields` says otherwise."""
    row = Row(
        rank=0,
        phase="forward",
        layer=0,
        kind="attention",
        module="decoder.layers.0.self_attention",
        tensor=name,
        shape=(nbytes // 2,),
        dtype="bf16",
        count=1,
        bytes=nbytes,
        block_bytes=nbytes,
        lifetime="retained",
        certainty="traced",
        recompute=None,
        born=born,
        dies=dies,
    )
    return row._replace(**fields)


def ledger(saved: int = 0, rows: int = 0) -> Ledger:
    """Two steps: 10 MB of parameters, 4 MB of optimizer state from the first step on, 6 MB less `saved` retained."""
    mb = 10**6
    body = [
        row("weight", 10 * mb, 0, None, kind="parameters", lifetime="state", phase="setup"),
        row("exp_avg", 4 * mb, 18, None, kind="optimizer", lifetime="state", phase="optimizer"),
    ]
    for start in (10, 20):
        body += [
            row("q", 6 * mb - saved, start + 1, start + 6, block_bytes=6 * mb - saved + 512),
            row("gradient", mb, start + 4, start + 5, kind="moe", lifetime="transient", phase="backward"),
            row("step", 2 * mb, start + 8, start + 9, kind="optimizer", lifetime="transient", phase="optimizer"),
        ]
    body += [row(f"padding.{n}", 512, 5, 6, phase="setup") for n in range(rows)]
    moments = [Moment(0, 0, "setup")]
    for iteration, start in ((1, 10), (2, 20)):
        phases = (("forward", 0), ("backward", 3), ("grad_sync", 7), ("optimizer", 8))
        moments += [Moment(start + offset, iteration, phase) for phase, offset in phases]
    return Ledger(body, moments)


def measured(workload: Workload, saved: int = 0, rows: int = 0) -> Measured:
    """A passing measurement with `ledger(saved)`."""
    held = ledger(saved, rows)
    phases = tuple(
        PhasePeak(iteration=peak.iteration, phase=peak.phase, peak_allocated_bytes=peak.bytes)
        for peak in held.phase_peaks()
    )
    record = RankRecord(rank=0, phases=phases)
    return Measured(
        Measurement(driver="trace", workload=workload, outcome="ok", ranks=(record,), versions=dict(VERSIONS)), held
    )


def instant(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
    """A driver that answers at once; every label saves 1 MB."""
    if on_phase is not None:
        on_phase(1, "forward")
    return measured(workload, saved=10**6 * len(workload.recompute.modules))
