"""Lines that say that something failed, other than PyTorch's allocator."""

import re
from typing import NamedTuple

from labkit.diagnose.facts import FailureKind


class _Sign(NamedTuple):
    kind: FailureKind
    pattern: re.Pattern[str]


def _sign(kind: FailureKind, *patterns: str) -> _Sign:
    return _Sign(kind, re.compile("|".join(patterns)))


SIGNS = (
    _sign(
        "device memory",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate",
        r"CUDNN_STATUS_ALLOC_FAILED",
        r"CUDA(?: driver)? error: out of memory",
        r"CUDA Error: out of memory",
        r"cudaErrorMemoryAllocation",
        r"CUDA_ERROR_OUT_OF_MEMORY",
        r"Cuda failure (?:2 )?'out of memory'",
        r"Failed to CUDA calloc",
        r"\[CUDA\]: out of memory",
        r"CUDA ran out of memory outside PyTorch's allocator",
        r"cudaMalloc(?:Async)? failed.{0,40}out of memory",
    ),
    _sign(
        "host memory",
        r"oom[-_]kill",
        r"[Oo]ut of memory: Killed process",
        r"Memory cgroup out of memory",
        r"OOMKilled",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"Cannot allocate memory",
        r"std::bad_alloc",
        r"^(?:\w{1,40}\.)?MemoryError\b",
        r"(?<!CUDA )(?<!GPU )\bOut Of Memory\b",
        r"OUT_OF_MEMORY",
        r"DataLoader worker \(pid.{1,300}?(?:is killed by signal: (?:Killed|Bus)|exited unexpectedly)",
        r"insufficient shared memory",
        r"failed to extend /dev/shm",
        r"shm.{0,200}No space left",
    ),
    _sign(
        "collective timeout",
        r"Watchdog caught collective operation timeout",
        r"collective operation timeout",
        r"Timed out waiting \d{1,12}\s?ms for (?:recv|send) operation",
        r"DistStoreError: Timed out",
        r"wait timeout after \d{1,12}\s?ms",
        r"NCCL communicator was aborted",
    ),
    _sign(
        "device error",
        r"an illegal memory access was encountered",
        r"device-side assert triggered",
        r"uncorrectable (?:NVLink|ECC) error",
        r"unspecified launch failure",
        r"misaligned address",
        r"CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|INVALID_VALUE)",
        r"CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)",
        r"NVRM: Xid",
        r"no kernel image is available",
        r"driver version is insufficient",
        r"(?:CUDA|HIP) error: (?!out of memory)[a-z]",
    ),
    _sign(
        "collective error",
        r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError|ncclInvalidUsage",
        r"NCCL error",
        r"Connection (?:reset|closed) by (?:remote )?peer",
        r"recvValue failed",
    ),
    _sign(
        "not finite", r"found (?:NaN|Inf|nan|inf)\b", r"[Ll]oss is (?:NaN|nan)\b", r"Unexpected result (?:nan|inf)\b"
    ),
    _sign("time limit", r"DUE TO TIME LIMIT", r"DUE TO PREEMPTION", r"CANCELLED AT "),
    _sign("disk", r"No space left on device", r"Disk quota exceeded"),
    _sign(
        "killed",
        r"Signal 9 \(SIGKILL\)",
        r"exitcode {0,4}: -9\b",
        r"^(?:\S{1,80} line \d{1,9}: {1,4}\d{1,9} )?Killed\b",
        r"task \d{1,7}: Killed",
        r"exit code 137\b",
        r"signal: Killed",
    ),
    _sign(
        "crash",
        r"Segmentation fault",
        r"Signal (?:11|7|6|4) \(SIG[A-Z]{2,5}\)",
        r"Bus error",
        r"exitcode {0,4}: -(?:11|7|6|4)\b",
    ),
    _sign("rank lost", r"ChildFailedError", r"Exited with exit code [1-9]"),
    _sign("error", r"^(?:[A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt|Exit)|AssertionError)(?::|$)"),
)
"""The first that a line shows holds."""

KEYS = tuple(
    (
        "CUBLAS_STATUS|CUDNN_STATUS|out of memory|Out of memory|Out Of Memory|OUT_OF_MEMORY|OutOfMemory|Error|error|"
        "Exception|KeyboardInterrupt|SystemExit|oom-kill|oom_kill|OOMKilled|allocate memory|enough memory|bad_alloc|"
        "illed|DataLoader worker|shared memory|imeout|imed out|aborted|illegal memory|assert triggered|launch failure|"
        "misaligned|Xid|no kernel image|is insufficient|nccl|NCCL|Connection |recvValue|found NaN|found Inf|found nan|"
        "found inf|oss is |Unexpected result|DUE TO|CANCELLED AT|No space left|quota exceeded|failed to extend|"
        "Exited with|SIG|exitcode|exit code 137|Segmentation|calloc|cudaMalloc"
    ).split("|")
)
"""One of these is in each line that any of the signs is in."""


def sign(text: str) -> tuple[FailureKind, int] | None:
    """What a line says failed, and where in it; None if nothing."""
    begun = text.lstrip()
    for each in SIGNS:
        if found := each.pattern.search(begun):
            return each.kind, len(text) - len(begun) + found.start()
    return None
