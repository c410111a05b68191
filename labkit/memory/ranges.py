"""What an estimate rests on that the workload does not state: each such field gives the peak a range."""

from collections.abc import Iterator

from labkit.memory.estimate import Estimate, estimate
from labkit.summary import Case, Range, Summary
from labkit.workload import Routing, Workload
from labkit.workload.routing import RoutingKind


def ranged(result: Estimate) -> Summary:
    """The summary of an estimate, with a range for each field that was left open."""
    return result.summary.model_copy(update={"ranges": tuple(_ranges(result))})


def _ranges(result: Estimate) -> Iterator[Range]:
    workload = result.workload
    if workload.routing is None and any(layer.mlp == "moe" for layer in workload.model.layers):
        kinds: tuple[RoutingKind, ...] = ("balanced", "allowance", "worst")
        cause = "the router decides how many rows reach this rank's experts"
        yield Range.over("routing", cause, [_routed(workload, kind) for kind in kinds])


def _routed(workload: Workload, kind: RoutingKind) -> Case:
    changed = workload.model_copy(update={"routing": Routing(kind=kind)})
    return Case(value=kind, peak_allocated_bytes=estimate(changed).peak_allocated_bytes)
