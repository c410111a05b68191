"""Workspaces that libraries allocate from PyTorch's allocator at first use and keep for the process.

Transformer Engine takes 32 MiB + 1 KiB for its GEMMs and four of them for grouped GEMMs
(`transformer_engine/pytorch/module/base.py`, `cpp_extensions/gemm.py`, compute capability 9 and up); PyTorch takes
32 MiB for each cuBLAS handle, one in the forward thread and one in autograd's
(`aten/src/ATen/cuda/CublasHandlePool.cpp`, compute capability 9).
"""

from labkit.ledger import rounded
from labkit.memory.schedule import Book
from labkit.memory.tape import Op
from labkit.workload.gpu import MIB

_TE_WORKSPACE = rounded(32 * MIB + 1024)
_CUBLAS_WORKSPACE = 32 * MIB
_TE_GROUPED_STREAMS = 4


class Libraries:
    """Opens each workspace the first time an operation needs it."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seen: set[str] = set()

    def __call__(self, op: Op, backward: bool) -> None:
        """Before `op` runs."""
        if op.library == "te_gemm":
            self._open("te_gemm", "Transformer Engine GEMM workspace", _TE_WORKSPACE)
        elif op.library == "te_grouped_gemm":
            for stream in range(_TE_GROUPED_STREAMS):
                self._open(f"te_grouped_gemm {stream}", "Transformer Engine grouped GEMM workspace", _TE_WORKSPACE)
        elif op.library == "aten_matmul":
            thread = "autograd" if backward else "forward"
            self._open(f"cublas {thread}", f"cuBLAS workspace ({thread} thread)", _CUBLAS_WORKSPACE)

    def _open(self, key: str, name: str, nbytes: int) -> None:
        if key not in self._seen:
            self._seen.add(key)
            self._book.open(name, (nbytes,), "uint8", nbytes, module="", kind="library", lifetime="workspace")
