"""Workspaces that libraries allocate from PyTorch's allocator at first use and keep for the process.

Transformer Engine takes 32 MiB + 1 KiB for its GEMMs, the moment a `Linear` has its weight or else at the first GEMM,
and four of them for grouped GEMMs (`transformer_engine/pytorch/module/linear.py`, `cpp_extensions/gemm.py`, compute
capability 9 and up); PyTorch takes 32 MiB for each cuBLAS handle, one in the forward thread and one in autograd's
(`aten/src/ATen/cuda/CublasHandlePool.cpp`, compute capability 9).
"""

from functools import cache

from labkit.memory.tape import Library, Parameter, Value
from labkit.workload.gpu import MIB

_TE_GROUPED_STREAMS = 4


def _workspace(name: str, nbytes: int) -> Value:
    return Value(name, (nbytes,), "uint8", "", None, "library", nbytes, differentiable=False, certainty="exact")


_TE_GEMM = [("te_gemm", _workspace("Transformer Engine GEMM workspace", 32 * MIB + 1024))]
_TE_GROUPED = [
    (f"te_grouped_gemm {stream}", _workspace("Transformer Engine grouped GEMM workspace", 32 * MIB + 1024))
    for stream in range(_TE_GROUPED_STREAMS)
]


_LINEARS = frozenset(("linear_proj", "out_proj", "linear_fc2"))
"""Modules that are a `Linear`: each layer's first has one of these names, experts' grouped linears apart."""


def built_with(parameter: Parameter) -> list[tuple[str, Value]]:
    """What the module of a parameter takes as soon as it is built: (key within the process, workspace)."""
    module, _, name = parameter.name.rpartition(".")
    linear = name == "weight" and module.rpartition(".")[2] in _LINEARS
    return _TE_GEMM if linear and not parameter.expert and ".experts." not in module else []


@cache
def workspaces(library: Library, *, backward: bool) -> list[tuple[str, Value]]:
    """What an operation of `library` needs in a forward or a backward pass: (key within the process, workspace)."""
    if library == "te_gemm":
        return _TE_GEMM
    if library == "te_grouped_gemm":
        return _TE_GROUPED
    thread = "autograd thread" if backward else "forward thread"
    place = thread if library == "aten_matmul" else f"{thread}, side stream"
    return [(f"cublas {place}", _workspace(f"cuBLAS workspace ({place})", 32 * MIB))]
