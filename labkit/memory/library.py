"""Workspaces that libraries allocate from PyTorch's allocator at first use and keep for the process.

Transformer Engine takes one for its GEMMs, the moment a `Linear` has its weight or else at the first GEMM, and four
for grouped GEMMs (`transformer_engine/pytorch/module/linear.py`, `cpp_extensions/gemm.py`); PyTorch takes one for each
cuBLAS handle, one in the forward thread and one in autograd's (`aten/src/ATen/cuda/CublasHandlePool.cpp`). Their sizes
depend on the GPU (`labkit.workload.gpu`).
"""

from functools import cache

from labkit.memory.tape import Library, Parameter, Value
from labkit.workload.training import WorkspaceBytes

_TE_GROUPED_STREAMS = 4


def _workspace(name: str, nbytes: int) -> Value:
    return Value(name, (nbytes,), "uint8", "", None, "library", nbytes, differentiable=False, certainty="exact")


_LINEARS = frozenset(("linear_proj", "out_proj", "linear_fc2"))
"""Modules that are a `Linear`: each layer's first has one of these names, experts' grouped linears apart."""


def built_with(parameter: Parameter, sizes: WorkspaceBytes) -> list[tuple[str, Value]]:
    """What the module of a parameter takes as soon as it is built: (key within the process, workspace)."""
    module, _, name = parameter.name.rpartition(".")
    linear = name == "weight" and module.rpartition(".")[2] in _LINEARS
    built = linear and not parameter.expert and ".experts." not in module
    return workspaces("te_gemm", sizes, backward=False) if built else []


@cache
def workspaces(library: Library, sizes: WorkspaceBytes, *, backward: bool) -> list[tuple[str, Value]]:
    """What an operation of `library` needs in a forward or a backward pass: (key within the process, workspace)."""
    if library == "te_gemm":
        return [("te_gemm", _workspace("Transformer Engine GEMM workspace", sizes.gemm))]
    if library == "te_grouped_gemm":
        return [
            (f"te_grouped_gemm {stream}", _workspace("Transformer Engine grouped GEMM workspace", sizes.gemm))
            for stream in range(_TE_GROUPED_STREAMS)
        ]
    thread = "autograd thread" if backward else "forward thread"
    place = thread if library == "aten_matmul" else f"{thread}, side stream"
    return [(f"cublas {place}", _workspace(f"cuBLAS workspace ({place})", sizes.cublas))]
