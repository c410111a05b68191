"""What a workload leaves open gives a trace a range, as it gives an estimate one."""

from typing import Any

from labkit import Workload
from labkit.drivers.trace.ranges import ranged
from labkit.drivers.trace.server import TraceServer
from labkit.workload.unstated import open_fields
from tests.memory.test_ranges import STATED
from tests.small import small

GRADIENTS, BACKEND = "training.data_parallel.grad_reduce_in_fp32", "training.kernels.attention_backend"


def workload(**training: Any) -> Workload:
    """The small one with everything stated but for what `training` replaces."""
    return small(training={**STATED["training"], **training}, routing=STATED["routing"])


def test_an_open_field_is_traced_with_each_of_its_values(server: TraceServer) -> None:
    kernels = {name: value for name, value in STATED["training"]["kernels"].items() if name != "attention_backend"}
    open_case = workload(data_parallel={}, kernels=kernels)
    assert [each.field for each in open_fields(open_case)] == [GRADIENTS, BACKEND]
    trace = server.run_stages(open_case)
    assert trace.summary.assumed == (f"{GRADIENTS} false", f"{BACKEND} fused")
    found = ranged(trace, server)
    assert found.assumed == ()
    gradients = next(each for each in found.ranges if each.field == GRADIENTS)
    stated = server.run(workload(data_parallel={"grad_reduce_in_fp32": True}, kernels=kernels))
    peaks = [case.peak_allocated_bytes for case in gradients.cases]
    assert peaks == [trace.peak_allocated_bytes, stated.peak_allocated_bytes]
    assert found.peak_range is not None
    assert found.peak_range.low_bytes <= min(peaks)
    assert found.peak_range.high_bytes >= max(peaks) > min(peaks)


def test_a_trace_of_what_is_stated_has_no_range(server: TraceServer) -> None:
    trace = server.run(workload())
    assert trace.summary.assumed == ()
    assert ranged(trace, server) == trace.summary
