"""The GPUs labkit knows: what decides memory is their capacity, their compute capability and their multiprocessors."""

from typing import NamedTuple

GIB = 2**30
MIB = 2**20


def gib(nbytes: int) -> str:
    """Bytes as sentences have them."""
    return f"{nbytes / GIB:.2f} GiB"


class Products(NamedTuple):
    """Dense peaks in FLOP/s by what a matrix product runs in (NVIDIA data sheets, SXM; of sparse figures half)."""

    fp64: float
    """Of the tensor cores."""
    fp32: float
    """Of the CUDA cores."""
    tf32: float
    bf16: float
    fp8: float
    """0 where there is none."""

    def of(self, dtype: str, *, tf32: bool) -> float:
        """That of operands of `dtype`; `tf32` says whether those in fp32 may be rounded to TF32."""
        if dtype == "fp32":
            return self.tf32 if tf32 else self.fp32
        return {"fp64": self.fp64, "fp8": self.fp8}.get(dtype, self.bf16)


_HOPPER = Products(fp64=67e12, fp32=67e12, tf32=494.5e12, bf16=989e12, fp8=1979e12)
_AMPERE = Products(fp64=19.5e12, fp32=19.5e12, tf32=156e12, bf16=312e12, fp8=0.0)
_B200 = Products(fp64=37e12, fp32=75e12, tf32=1.125e15, bf16=2.25e15, fp8=4.5e15)
_GB200 = Products(fp64=40e12, fp32=80e12, tf32=1.25e15, bf16=2.5e15, fp8=5.0e15)


class Gpu(NamedTuple):
    """One GPU model."""

    name: str
    total_memory_bytes: int
    """`torch.cuda.get_device_properties().total_memory`, as PyTorch's out-of-memory messages print it."""
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_memory_bytes: int
    """What one block may use (`cudaDevAttrMaxSharedMemoryPerBlockOptin`)."""
    products: Products
    hbm_bytes_per_second: float
    nvlink_bytes_per_second: float
    """One direction."""

    @property
    def gemm_workspace_bytes(self) -> int:
        """Transformer Engine's workspace of one GEMM (`cpp_extensions/gemm.py`, `get_cublas_workspace_size_bytes`)."""
        return 32 * MIB + 1024 if self.compute_capability >= (9, 0) else 4 * MIB


GPUS: dict[str, Gpu] = {
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", int(79.10 * GIB), (9, 0), 132, 227 * 1024, _HOPPER, 3.35e12, 450e9),
    "h200-141gb": Gpu("NVIDIA H200", int(139.81 * GIB), (9, 0), 132, 227 * 1024, _HOPPER, 4.8e12, 450e9),
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", int(39.39 * GIB), (8, 0), 108, 163 * 1024, _AMPERE, 1.555e12, 300e9),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", int(79.15 * GIB), (8, 0), 108, 163 * 1024, _AMPERE, 2.039e12, 300e9),
    "b200-180gb": Gpu("NVIDIA B200", int(178.35 * GIB), (10, 0), 148, 227 * 1024, _B200, 8.0e12, 900e9),
    "gb200-186gb": Gpu("NVIDIA GB200", int(184.31 * GIB), (10, 0), 152, 227 * 1024, _GB200, 8.0e12, 900e9),
}
"""By name. The first is the default."""
