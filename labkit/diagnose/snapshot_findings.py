"""What a memory snapshot shows by itself, beside the failure that ended a run."""

from collections.abc import Iterator

from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Evidence
from labkit.diagnose.snapshot_page import DevicePage, Grown, gib

_LARGE = 0.05
"""Of what is reserved: more than any run has by the way."""
_EXPANDABLE = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (PYTORCH_ALLOC_CONF is the name since PyTorch 2.9)."
_LESS_IN_FLIGHT = "Keep fewer collectives in flight: a smaller --ddp-bucket-size, or no --overlap-param-gather."


def findings(source: str, page: DevicePage) -> Iterator[Finding]:
    """Of one device."""
    if not page.failures:
        if not page.entries:
            yield _no_history(source, page)
        yield from _unallocated(source, page)
    yield from _other_streams(source, page)
    yield from _growth(source, page)
    yield from _waiting(source, page)
    yield from _pools(source, page)


def _evidence(source: str, page: DevicePage, text: str) -> tuple[Evidence, ...]:
    return (Evidence.quote(source, None, f"GPU {page.device}, {text}"),)


def _no_history(source: str, page: DevicePage) -> Finding:
    return Finding(
        cause="no failure",
        weight="note",
        happened=f"GPU {page.device}: no history was recorded. When the snapshot was taken "
        f"{gib(page.end.allocated_bytes)} was allocated, with {gib(page.end.reserved_bytes)} reserved.",
        evidence=_evidence(source, page, "no entries in device_traces"),
        confirm=("torch.cuda.memory._record_memory_history() before the model is built records what leads there.",),
    )


def _unallocated(source: str, page: DevicePage) -> Iterator[Finding]:
    """Reserved and not in use where most is reserved."""
    unallocated = page.peak.reserved_bytes - page.peak.allocated_bytes - page.peak.awaiting_bytes
    if unallocated < _LARGE * page.peak.reserved_bytes:
        return
    yield Finding(
        cause="fragmentation",
        weight="note",
        happened=f"At the peak {gib(unallocated)} of {gib(page.peak.reserved_bytes)} reserved was in no tensor's use.",
        evidence=_evidence(source, page, page.peak.sentence),
        confirm=("Run it once with expandable segments, changing nothing else: reserved comes down to allocated.",),
        remedies=() if page.expandable_segments else (_EXPANDABLE,),
    )


def _other_streams(source: str, page: DevicePage) -> Iterator[Finding]:
    """A request failed while another stream's segments had room: only their own stream can use them."""
    for failure in page.failures[-1:]:
        others = failure.unallocated_bytes - failure.usable_bytes - failure.private_bytes
        if failure.requested_bytes <= others and others >= failure.usable_bytes:
            yield Finding(
                cause="fragmentation",
                weight="cause",
                happened=f"{gib(others)} lay free in segments of other streams than the one that asked "
                f"(stream {failure.stream}), which cannot use them.",
                evidence=_evidence(source, page, failure.sentence),
                confirm=("The snapshot's segments by stream: `failures` in --json has what was usable.",),
                remedies=(
                    "Give cached blocks back before the other stream's work (torch.cuda.empty_cache(), "
                    "--empty-unused-memory-level 1).",
                    "Allocate what the side stream works on in the main stream, and record_stream it.",
                ),
            )


def _growth(source: str, page: DevicePage) -> Iterator[Finding]:
    """What steps leave behind adds up."""
    growth = page.growth
    if growth is None:
        return
    more = growth.last.allocated_bytes - growth.first.allocated_bytes
    lines = "; ".join(f"{gib(line.bytes)} {_by(line)}" for line in growth.lines)
    yield Finding(
        cause="growth",
        weight="contributes" if page.failures else "note",
        happened=f"Every step leaves more behind: {gib(more)} more after {growth.steps} steps than after the first of "
        f"them. {lines}.",
        evidence=_evidence(source, page, growth.last.sentence),
        confirm=("Snapshots after two steps, compared (labkit diagnose BEFORE AFTER): the same lines grow.",),
        remedies=(
            "Look who keeps the tensors of these lines: losses or outputs kept with their graph (detach or .item() "
            "them), lists of metrics, hooks, caches by shape.",
        ),
    )


def _by(line: Grown) -> str:
    return f"by {line.site}" + (f", called by {line.caller}" if line.caller else "")


def _waiting(source: str, page: DevicePage) -> Iterator[Finding]:
    """Freed blocks whose other streams have not finished (`record_stream`): nobody can have them."""
    moments = (*(failure.at for failure in page.failures[-1:]), page.peak, page.end)
    worst = max(moments, key=lambda point: point.awaiting_bytes)
    if worst.awaiting_bytes and worst.awaiting_bytes >= _LARGE * worst.reserved_bytes:
        yield Finding(
            cause="fragmentation",
            weight="contributes" if page.failures else "note",
            happened=f"{gib(worst.awaiting_bytes)} had been freed, but could not be had again: another stream had "
            "still to finish with it (free_requested without free_completed).",
            evidence=_evidence(source, page, worst.sentence),
            confirm=("Synchronise the device once a step: if the peak of reserved memory falls, this was it.",),
            remedies=(_LESS_IN_FLIGHT, "TORCH_NCCL_AVOID_RECORD_STREAMS=1 where PyTorch is older than 2.8."),
        )


def _pools(source: str, page: DevicePage) -> Iterator[Finding]:
    reserved = sum(pool.reserved_bytes for pool in page.pools)
    if not reserved or reserved < _LARGE * page.end.reserved_bytes:
        return
    asked = next((failure.requested_bytes for failure in page.failures[-1:]), 0)
    idle = reserved - sum(pool.allocated_bytes for pool in page.pools)
    number = f"{len(page.pools)} private pool{'s' if len(page.pools) > 1 else ''}"
    yield Finding(
        cause="private pools",
        weight="note" if not asked else "cause" if asked <= idle else "contributes",
        happened=f"{gib(reserved)} of {gib(page.end.reserved_bytes)} reserved is in {number} (CUDA graphs', "
        f"or torch.cuda.MemPool's), {gib(idle)} of it free: no other operation can use it.",
        evidence=_evidence(source, page, "segments with a segment_pool_id"),
        confirm=("Run it once with --cuda-graph-impl none and compare max reserved.",),
        remedies=(
            "Capture less: a narrower --cuda-graph-modules, or fewer layers and micro-batches.",
            "--cuda-graph-impl none, at the cost of launch time.",
        ),
    )
