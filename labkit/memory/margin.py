"""The safety margin: rows of their own above an estimate, never a factor inside it.

*Margin*: 2 % of what a step allocates above what is alive before it (2.5 % with experts), and 64 MiB. Justified by
measured cells (`benchmarks/accuracy_h200.py`): from 1000 rows a rank the estimate lies at most 0.5 % below what an H200
held for dense and hybrid models, and four times that is set aside for models and kernels that were not measured;
mixtures of experts lie up to 2.1 % below, since a router's balance is never exact. On smaller cells what libraries
allocate beside the tensors weighs more, up to 60 MiB: a buffer of the L2 cache's size that Inductor flushes while it
tunes a kernel (`torch/_inductor/runtime/benchmarking.py`).

*Kernel tuning*: Triton flushes the cache with 256 MiB while it tunes a kernel (`triton/backends/nvidia/driver.py`,
`get_empty_cache_for_benchmark`). The delta rule's kernels are tuned in the first backward, unless a file of tuned
kernels is found: it may be, so it is an allowance.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from labkit.ledger import Ledger, Lifetime, Row
from labkit.workload import Workload
from labkit.workload.gpu import MIB

RELATIVE, RELATIVE_WITH_EXPERTS = 0.02, 0.025
FIXED_BYTES = 64 * MIB
TUNING_BYTES = 256 * MIB


def margin_bytes(workload: Workload, increment_bytes: int) -> int:
    """The margin over what a step allocates above what is alive before it."""
    return round(increment_bytes * relative_margin(workload)) + FIXED_BYTES


def relative_margin(workload: Workload) -> float:
    """The margin's part that grows with the increment."""
    return RELATIVE if workload.model.mixture_of_experts is None else RELATIVE_WITH_EXPERTS


def tuning_bytes(workload: Workload) -> int:
    """The buffer that tuning kernels in the first backward may take."""
    return TUNING_BYTES if any(layer.mixer == "gdn" for layer in workload.model.kinds) else 0


class _PhasePeak(Protocol):
    """`labkit.ledger.Peak`, or `labkit.memory.outline.PhaseLevel`."""

    @property
    def iteration(self) -> int: ...
    @property
    def phase(self) -> str: ...
    @property
    def bytes(self) -> int: ...


def margin_over(workload: Workload, peaks: Sequence[_PhasePeak], before_bytes: int) -> int:
    """What the margin rows add to the largest of the phases' peaks; `before_bytes` are alive before the first step."""
    highest = max(peak.bytes for peak in peaks)
    tuned = (peak.bytes + tuning_bytes(workload) for peak in peaks if (peak.iteration, peak.phase) == (1, "backward"))
    return max(highest, *tuned) + margin_bytes(workload, highest - before_bytes) - highest


def margin_rows(workload: Workload, ledger: Ledger) -> Iterator[Row]:
    """The margin over the ledger's peak, and the tuning allowance of its first backward."""
    first = ledger.start(1, "forward")
    yield _row("safety margin", margin_bytes(workload, ledger.peak().bytes - before(ledger)), "margin", first, None)
    if tuned := tuning_bytes(workload):
        begins = ledger.start(1, "backward")
        yield _row("kernel tuning buffer", tuned, "allowance", begins, ledger.start(2, "forward"))


def before(ledger: Ledger) -> int:
    """Block bytes alive before the first step."""
    return ledger.at(ledger.start(1, "forward") - 1).total(blocks=True)


def _row(name: str, nbytes: int, lifetime: Lifetime, born: int, dies: int | None) -> Row:
    return Row(
        rank=0,
        phase="forward" if lifetime == "margin" else "backward",
        layer=None,
        kind=lifetime,
        module="",
        tensor=name,
        shape=(nbytes,),
        dtype="uint8",
        count=1,
        bytes=nbytes,
        block_bytes=nbytes,
        lifetime=lifetime,
        certainty="allowance",
        recompute=None,
        born=born,
        dies=dies,
    )
