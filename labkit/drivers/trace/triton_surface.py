"""Triton on a machine without a GPU: kernels launch nothing, and the driver answers for the GPU.

Transformer Engine's cross entropy and permutation, flash-linear-attention and Mamba's scan are Triton: their Python
allocates what the kernels write, so it runs as it is. Some of it asks the driver for the device's shared memory to
choose a tile, and allocates by tiles (`fla.utils.hardware.check_shared_mem`).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import triton.runtime
from triton.runtime.jit import KernelInterface

from labkit.drivers.trace import gdn_flops
from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.work import launched
from labkit.workload.gpu import Gpu


def _launcher(kernel: Any) -> Any:
    """Starts a kernel that only writes tensors it is given."""

    def launch(*args: Any, **kwargs: Any) -> None:
        launched(gdn_flops.of(_name(kernel), kwargs), args, [*kwargs.values()])

    return launch


def _name(kernel: Any) -> str:
    """Of the function behind autotuners and heuristics."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    name: str = kernel.__name__
    return name


def _driver(gpu: Gpu) -> SimpleNamespace:
    major, minor = gpu.compute_capability
    target = SimpleNamespace(backend="cuda", arch=10 * major + minor, warp_size=32)
    properties = {"multiprocessor_count": gpu.multiprocessors, "max_shared_mem": gpu.shared_memory_bytes}
    return SimpleNamespace(
        get_current_target=lambda: target,
        utils=SimpleNamespace(get_device_properties=lambda index: properties),
    )


def replacements(gpu: Gpu) -> Iterator[Replacement]:
    """A launcher that launches nothing, and `gpu`'s driver."""
    yield Replacement(
        KernelInterface,
        "__getitem__",
        lambda kernel, grid: _launcher(kernel),
        "nothing: kernels write tensors that Python allocated; tuning a kernel at its first launch takes 256 MiB for "
        "as long as it lasts (`triton.testing.do_bench`), which is not modelled",
    )
    yield Replacement(triton.runtime.driver, "_active", _driver(gpu), NOTHING)
