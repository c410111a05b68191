"""What several causes share."""

from labkit.diagnose.case import Case
from labkit.diagnose.facts import Evidence

LARGE = 0.05
"""Of what is reserved: so much unallocated, in private pools or outside PyTorch is more than any run has by the way."""


SHOWN = 3


PLAN = (
    "labkit plan WORKLOAD.yaml lists every recompute choice with its peak (labkit import megatron-args makes the file)"
)


def messages(case: Case) -> tuple[Evidence, ...]:
    """Where the failure to explain stands."""
    return () if case.first is None else (case.first.evidence,)
