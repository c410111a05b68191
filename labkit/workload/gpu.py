"""The GPUs labkit knows: what decides memory is their capacity, their compute capability and their multiprocessors."""

from typing import NamedTuple

GIB = 2**30
MIB = 2**20


class Gpu(NamedTuple):
    """One GPU model."""

    name: str
    total_memory_bytes: int
    """`torch.cuda.get_device_properties().total_memory`, as PyTorch's out-of-memory messages print it."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_bytes: int
    """What one block may use (`cudaDevAttrMaxSharedMemoryPerBlockOptin`)."""
    bf16_flops: float
    """Dense bf16 peak in FLOP/s (NVIDIA data sheet, SXM)."""
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float
    """One direction."""

    @property
    def gemm_workspace_bytes(self) -> int:
        """Transformer Engine's workspace of one GEMM (`cpp_extensions/gemm.py`, `get_cublas_workspace_size_bytes`)."""
        return 32 * MIB + 1024 if self.compute_capability >= (9, 0) else 4 * MIB


GPUS: dict[str, Gpu] = {
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", int(79.10 * GIB), (9, 0), 132, 227 * 1024, 989e12, 3.35e12, 450e9),
    "h200-141gb": Gpu("NVIDIA H200", int(139.81 * GIB), (9, 0), 132, 227 * 1024, 989e12, 4.8e12, 450e9),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", int(39.39 * GIB), (8, 0), 108, 163 * 1024, 312e12, 1.555e12, 300e9),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", int(79.15 * GIB), (8, 0), 108, 163 * 1024, 312e12, 2.039e12, 300e9),
    "b200-180gb": Gpu("NVIDIA B200", int(178.35 * GIB), (10, 0), 148, 227 * 1024, 2.25e15, 8.0e12, 900e9),
    "gb200-186gb": Gpu("NVIDIA GB200", int(184.31 * GIB), (10, 0), 152, 227 * 1024, 2.5e15, 8.0e12, 900e9),
}
"""By name. The first is the default."""
