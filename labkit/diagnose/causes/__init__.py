"""The table of causes: each looks at the facts of a run and says whether it happened, in docs/diagnose.md's order."""

from collections.abc import Callable, Iterable, Iterator

from labkit.diagnose.case import Case
from labkit.diagnose.causes.allocator import fragmentation, private_pools
from labkit.diagnose.causes.capacity import capacity, footprints
from labkit.diagnose.causes.elsewhere import host, no_failure, not_memory
from labkit.diagnose.causes.experts import imbalance
from labkit.diagnose.causes.growth import growth
from labkit.diagnose.causes.labels import labels, moved
from labkit.diagnose.causes.outside import outside
from labkit.diagnose.diagnosis import Finding

CAUSES: tuple[Callable[[Case], Iterator[Finding]], ...] = (
    fragmentation,
    private_pools,
    growth,
    outside,
    capacity,
    imbalance,
    moved,
    labels,
    host,
    not_memory,
    footprints,
    no_failure,
)


def findings(case: Case, others: Iterable[Finding] = ()) -> list[Finding]:
    """What happened, the cause first; `others` are what readers have concluded themselves."""
    found = [*(finding for cause in CAUSES for finding in cause(case)), *others]
    if any(finding.weight == "cause" and finding.cause not in ("capacity", "optimizer capacity") for finding in found):
        # Where something else would have left room enough, the GPU's size is not what to change.
        found = [
            _noted(finding) if finding.cause in ("capacity", "optimizer capacity") else finding for finding in found
        ]
    order = {"cause": 0, "contributes": 1, "note": 2}
    return sorted(found, key=lambda finding: order[finding.weight])


def _noted(finding: Finding) -> Finding:
    return finding.model_copy(update={"weight": "contributes"})
