"""What an error in a rank means: its outcome and its sentence."""

import re

import torch
import torch.distributed as dist

from labkit.drivers.contract import NotFiniteError, Outcome
from labkit.errors import InputError

_LONGEST = 1000
_CUDA_ERROR = re.compile(r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS|cuDNN error|device-side assert", re.IGNORECASE)
_TIMED_OUT = re.compile(r"tim(ed|e) ?out", re.IGNORECASE)
_LOST = re.compile(r"connection (closed|reset|refused)|broken pipe", re.IGNORECASE)
_NOT_FINITE = re.compile(r"found (NaN|Inf)")
"""What `labkit.drivers.step` says of a loss and Megatron of gradients (`_ParamAndGradBucketGroup.check_grads`)."""


class WorldSizeError(Exception):
    """Other than as many ranks as the workload has."""


def outcome_of(error: BaseException) -> Outcome:
    """The kind of end that an error is; of a rank that has lost another, `rank_died`, though it lives."""
    text = str(error)
    match error:
        case torch.OutOfMemoryError():
            return "oom"
        case WorldSizeError():
            return "wrong_world_size"
        case InputError():
            return "unsupported"
        case NotFiniteError():
            return "non_finite"
        case RuntimeError() if _NOT_FINITE.search(text):
            return "non_finite"
        case RuntimeError() if _TIMED_OUT.search(text):
            return "collective_timeout"
        case RuntimeError() if _LOST.search(text):
            return "rank_died"
        case RuntimeError() if _CUDA_ERROR.search(text) and not isinstance(error, dist.DistError):
            return "cuda_error"
        case _:
            return "failed"


def sentence_of(error: BaseException) -> str:
    """What an error says, in one line.

    The first line of CUDA's, which says what happened (how to debug it follows), and the last of any other's.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, NotFiniteError | WorldSizeError | InputError | torch.OutOfMemoryError):
        return lines[0][:_LONGEST]
    return f"{type(error).__name__}: {lines[0 if _CUDA_ERROR.search(lines[0]) else -1]}"[:_LONGEST]
