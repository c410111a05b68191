"""Memory that no allocator of PyTorch gave out."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, outside_bytes, size
from labkit.diagnose.causes.common import LARGE, PLAN, SHOWN, messages
from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import OutOfMemory
from labkit.workload.gpu import GIB

_OUTSIDE_BYTES = 3 * GIB
"""A CUDA context, cuBLAS and the communicators of a usual layout take one to three GiB of an H100."""


_OTHERS_BYTES = GIB // 4


def outside(case: Case) -> Iterator[Finding]:
    """Memory that no allocator of PyTorch gave out: other processes, communicators, contexts, libraries."""
    first = case.first
    if first is not None:
        yield from _other_processes(case, first)
        yield from _not_pytorch(case, first)
        yield from _room(case, first)
    failures = [each for each in case.facts.failures if each.kind == "device memory"]
    if failures:
        reserved = max((report.max_reserved or report.reserved or 0 for report in case.facts.memory), default=0)
        had = f" PyTorch had reserved {size(reserved)} by then." if reserved else ""
        yield Finding(
            cause="outside PyTorch",
            weight="cause" if first is None else "contributes",
            happened="A library (NCCL, cuBLAS, cuDNN or the driver) asked the GPU for memory itself and got none: what "
            f"PyTorch keeps reserved is not there for it.{had}",
            evidence=tuple(each.evidence for each in failures[:SHOWN]),
            confirm=(
                "nvidia-smi just before the failure: the GPU is full while torch.cuda.memory_reserved is below it.",
                "With NCCL_DEBUG=INFO the log says how much each communicator allocates.",
            ),
            remedies=(
                "Leave room: torch.cuda.set_per_process_memory_fraction(0.95), so that PyTorch gives cached blocks "
                "back "
                "before the libraries run out.",
                "Make communicators and cuBLAS handles early (one collective of each group before the first step).",
                f"Lower the peak of tensors: {PLAN}.",
            ),
        )


def _other_processes(case: Case, first: OutOfMemory) -> Iterator[Finding]:
    held = sum(first.others)
    if held < _OTHERS_BYTES:
        return
    enough = first.requested is not None and first.room < first.requested <= held + first.room
    plural = "process has" if len(first.others) == 1 else "processes have"
    yield Finding(
        cause="outside PyTorch",
        weight="cause" if enough and held >= GIB else "contributes",
        happened=f"{len(first.others)} other {plural} {size(held)} of this GPU's memory.",
        evidence=messages(case),
        confirm=(
            "nvidia-smi on that node: the processes and what each holds; two ranks with one device are among them.",
        ),
        remedies=(
            "End what is left of an earlier run (its ranks, evaluation servers, notebooks).",
            "Check that each rank sets its own device (LOCAL_RANK, CUDA_VISIBLE_DEVICES): a rank that also touches "
            "GPU 0 "
            "leaves a context there.",
        ),
    )


def _not_pytorch(case: Case, first: OutOfMemory) -> Iterator[Finding]:
    held = outside_bytes(first)
    if held is None or first.capacity is None or held < max(_OUTSIDE_BYTES, LARGE / 2 * first.capacity):
        return
    who = "this process" if first.process is not None else "this process or others"
    # With no more than is usual there would have been room, as there is not in pieces of PyTorch's own.
    missing = None if first.requested is None else first.requested - first.room
    main = missing is not None and held - _OUTSIDE_BYTES >= missing > (first.unallocated or 0)
    yield Finding(
        cause="outside PyTorch",
        weight="cause" if main else "contributes",
        happened=f"{size(held)} in use by {who} are not PyTorch's: the CUDA context, NCCL's communicators and buffers, "
        "libraries.",
        evidence=messages(case),
        confirm=(
            "nvidia-smi's figure for the process less torch.cuda.memory_reserved, before and after the first step; "
            "with NCCL_DEBUG=INFO the log says what communicators allocate.",
        ),
        remedies=(
            "Fewer process groups, NCCL_MAX_CTAS or a smaller NCCL_BUFFSIZE; NCCL_CUMEM_ENABLE=0 where buffers are "
            "registered by the user without need.",
            "No user buffers (--nccl-ub, --tp-comm-overlap) where they are not worth their memory.",
        ),
    )


def _room(case: Case, first: OutOfMemory) -> Iterator[Finding]:
    """A limit of the process; or, without one, a device that was not full."""
    if first.allowed is not None and first.capacity is not None and first.allowed < first.capacity:
        room = f" {size(first.free or 0)} of it was free: the limit held, not the GPU." if _holds(first) else ""
        yield Finding(
            cause="outside PyTorch",
            weight="cause" if room else "contributes",
            happened=f"The process may use {size(first.allowed)} of the GPU's {size(first.capacity)} "
            f"(set_per_process_memory_fraction).{room}",
            evidence=messages(case),
            confirm=("Look for set_per_process_memory_fraction in the program and its framework.",),
            remedies=("Raise the fraction, if nothing else needs the rest.",),
        )
    elif first.found_free:
        yield Finding(
            cause="outside PyTorch",
            weight="cause",
            happened=f"{size(first.free or 0)} of the GPU was free when {size(first.requested or 0)} could not be "
            "had: it was not full. Either a limit held that the message does not name, or another process or rank "
            "had that memory a moment before.",
            evidence=messages(case),
            confirm=(
                "nvidia-smi on that node while it starts: other processes on the same device, and what they hold.",
                "Look for set_per_process_memory_fraction, and for a share of the GPU (MIG, vGPU, MPS' "
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT).",
            ),
            remedies=(
                "Give the rank a device of its own, and raise or remove the limit.",
                "If neither is there, run it once with expandable segments changed (on or off): the driver may have "
                "refused the addresses, not the memory.",
            ),
        )


def _holds(first: OutOfMemory) -> bool:
    """Whether the limit refused what the device had."""
    return first.found_free and (first.requested or 0) > first.room
