"""Recompute labels that save nothing, or whose saving the peak does not show."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, size
from labkit.diagnose.causes.common import PLAN
from labkit.diagnose.diagnosis import Finding
from labkit.ledger import MATERIAL, WITHOUT_ACTIVATIONS


def labels(case: Case) -> Iterator[Finding]:
    """Labels that save nothing, `core_attn` under a kernel that keeps no scores among them."""
    if case.stated is None:
        return
    for finding in case.stated.workload.findings:
        if finding.severity != "warning" or not finding.field.startswith("recompute."):
            continue
        fused = "core_attn" in finding.reason
        costs = _costs(case, finding.reason.split()[0].rstrip(":"))
        yield Finding(
            cause="fused attention" if fused else "inactive label",
            weight="note",
            happened=f"{finding.reason}. {costs}",
            evidence=(case.stated.evidence,),
            confirm=("labkit compare or labkit estimate with and without it.",),
            remedies=(f"{finding.remedy}: it costs time, and saves no memory worth it.",),
        )


def _costs(case: Case, label: str) -> str:
    """What a label does to the peak: it may pin what it runs again from, which is more than it lets go."""
    now, without = case.estimate, case.without_label(label)
    if now is None or without is None:
        return "It may even cost memory: what it runs again from is kept."
    more = now.peak_allocated_bytes - without.peak_allocated_bytes
    kept = now.retained_bytes - without.retained_bytes
    if not more and not kept:
        return "By estimate the peak is the same without it."
    return (
        f"By estimate the peak is {_signed(-more)} without it, and what forward leaves for backward {_signed(-kept)}."
    )


def _signed(nbytes: int) -> str:
    return "the same" if not nbytes else f"{size(abs(nbytes))} {'higher' if nbytes > 0 else 'lower'}"


def moved(case: Case) -> Iterator[Finding]:
    """Labels did their work, and something else holds the peak now."""
    stated, now, before = case.stated, case.estimate, case.without_recompute
    if stated is None or now is None or before is None or stated.workload.recompute.recompute_granularity is None:
        return
    if now.workload.content_hash == before.workload.content_hash:
        return
    lower = before.retained_bytes - now.retained_bytes
    fell = before.peak_allocated_bytes - now.peak_allocated_bytes
    if lower < MATERIAL * before.peak_allocated_bytes or lower - fell < lower / 4:
        return
    phases = before.summary.peak_phase, now.summary.peak_phase
    if phases[0] == phases[1] and now.summary.peak_iteration == before.summary.peak_iteration and fell > lower / 2:
        return
    label = stated.workload.recompute.label
    holds = phases[1].replace("_", " ")
    state = phases[1] in WITHOUT_ACTIVATIONS
    yield Finding(
        cause="moved bottleneck",
        weight="note",
        happened=f"Recomputing {label} leaves {size(lower)} less for backward, but the peak falls by only "
        f"{size(max(fell, 0))}: {holds} of iteration {now.summary.peak_iteration} holds it now (by estimate).",
        evidence=(stated.evidence,),
        confirm=(
            "labkit estimate shows each phase's peak; max allocated after iteration 1 and 2 in the log should agree.",
        ),
        remedies=(
            (
                "More labels will not lower it: no activations are left there. Smaller optimizer state or more GPUs "
                "do.",
                "A cheaper choice may now do as well: " + PLAN + ".",
            )
            if state
            else (f"Look at what holds the peak now: {PLAN}.",)
        ),
    )
