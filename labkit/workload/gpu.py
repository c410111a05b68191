"""The GPUs labkit knows: what decides memory is their capacity and their compute capability."""

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


GPUS: dict[str, Gpu] = {
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", int(79.10 * GIB), (9, 0), 132, 227 * 1024, 989e12, 3.35e12, 450e9),
    "h200-141gb": Gpu("NVIDIA H200", int(139.81 * GIB), (9, 0), 132, 227 * 1024, 989e12, 4.8e12, 450e9),
}
