"""Memory that PyTorch's allocator has and cannot give: in pieces, or in private pools."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, size
from labkit.diagnose.causes.common import LARGE, messages
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Before, MemorySummary

_SMALL = 0.01
"""Of what is reserved: so much lies unallocated in any run."""
_EXPANDABLE = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF is the name since PyTorch 2.9)"
_SETTINGS: dict[Before, str] = {
    "": _EXPANDABLE,
    "2.1": "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512 (PyTorch 1.10 to 2.0; from 2.1 on "
    "expandable_segments:True does better)",
    "1.4": "use a newer PyTorch: this one has no setting against it (max_split_size_mb came with 1.10, expandable "
    "segments with 2.1)",
}
"""By version."""
_CONFIRM = "Run it once with {}, changing nothing else: if it passes, it was fragmentation."
_TRIED: dict[Before, str] = {"": "expandable segments", "2.1": "max_split_size_mb:512", "1.4": "a newer PyTorch"}


def fragmentation(case: Case) -> Iterator[Finding]:
    """Allocated fits and reserved does not: what was asked for is there, in pieces."""
    first = case.first
    unallocated = None if first is None else first.unallocated if first.usable is None else first.usable
    if first is None or not unallocated or not first.reserved:
        yield from _fragmented_summary(case)
        return
    share = unallocated / first.reserved
    enough = first.requested is not None and first.requested <= unallocated + first.room
    if share < (_SMALL if enough else LARGE):
        return
    asked = "" if first.requested is None else f"{size(first.requested)} could not be had while "
    whose = "" if first.usable is None else " for this stream"
    happened = (
        f"{asked}PyTorch kept {size(unallocated)} reserved but unallocated{whose} ({share:.1%} of what it has reserved)"
    )
    held = f"; only {size(first.allocated or 0)} was allocated"
    if enough and (first.requested or 0) > unallocated:
        held = f"; with the {size(first.room)} that the GPU still had, {size(unallocated + first.room)} was unused"
    if enough and first.largest is not None:
        verdict = f"{held}: the memory is there, in pieces of at most {size(first.largest)}."
    elif enough:
        verdict = f"{held}: the memory is there, in pieces that are too small or belong to other streams or pools."
    else:
        verdict = f"{held}. In one piece it would not have been enough, but it is memory that nothing used."
    yield Finding(
        cause="fragmentation",
        weight="cause" if enough and share >= LARGE else "contributes",
        happened=happened + verdict,
        evidence=messages(case),
        confirm=(
            *(() if first.expandable else (_CONFIRM.format(_TRIED[first.before]),)),
            "torch.cuda.memory_summary() before the failure: Non-releasable memory is what lies in split blocks; "
            "a memory snapshot shows which tensors keep the segments.",
        ),
        remedies=(
            *(() if first.expandable else (f"{_SETTINGS[first.before]}.",)),
            "--empty-unused-memory-level 1 gives cached blocks back each step, at the cost of time.",
            "Keep shapes alike from step to step (packed rows of equal length, experts' capacity): each new size "
            "leaves pieces of the old ones.",
        ),
    )


def _fragmented_summary(case: Case) -> Iterator[Finding]:
    for report in case.facts.memory:
        if isinstance(report, MemorySummary) and report.reserved and report.allocated is not None:
            unallocated = max(0, report.reserved - report.allocated)
            held = report.not_releasable or 0
            if held < LARGE * report.reserved and not (report.retries and unallocated >= LARGE * report.reserved):
                continue
            retried = (
                f" It has given cached blocks back {report.retries} times to get memory." if report.retries else ""
            )
            yield Finding(
                cause="fragmentation",
                weight="cause" if report.failures else "contributes",
                happened=f"Of {size(report.reserved)} reserved {size(report.allocated)} is allocated; {size(held)} "
                "lies "
                f"unallocated in split blocks that cannot go back to the GPU.{retried}",
                evidence=(report.evidence,),
                confirm=("Run it once with expandable segments, changing nothing else.",),
                remedies=(f"{_EXPANDABLE}.",),
            )
            return


def private_pools(case: Case) -> Iterator[Finding]:
    """CUDA graphs keep what their capture allocated, whether a replay is running or not."""
    first = case.first
    if first is None or not first.private_pools:
        return
    pools, allocated = first.private_pools, first.allocated or first.private_pools
    enough = first.requested is not None and first.room < first.requested <= pools + first.room
    large = pools >= 4 * LARGE * allocated
    yield Finding(
        cause="private pools",
        weight="cause" if enough and large else "contributes",
        happened=f"{size(pools)} of the {size(allocated)} allocated are in private pools of CUDA graphs, which no "
        "eager "
        "operation can use.",
        evidence=messages(case),
        confirm=("Run it once with --cuda-graph-impl none and compare max allocated.",),
        remedies=(
            "Capture less: a narrower --cuda-graph-modules (attention alone, say), or fewer layers and micro-batches.",
            "With full recompute only capture of whole iterations works (--cuda-graph-impl full_iteration).",
            "--cuda-graph-impl none, at the cost of launch time.",
        ),
    )
