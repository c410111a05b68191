"""One context manager for everything a trace replaces: `fake_cuda`."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import _lru_cache_wrapper

from labkit.drivers.trace import (
    apex_shapes,
    cuda_operators,
    cuda_surface,
    flash_shapes,
    light_imports,
    mamba_shapes,
    megatron_patches,
    te_shapes,
    triton_surface,
)
from labkit.drivers.trace.patches import Replacement, installed
from labkit.workload.gpu import Gpu


def fake_cuda(gpu: Gpu) -> AbstractContextManager[list[Replacement]]:
    """This process believes it has one `gpu`, Transformer Engine's library and Megatron's CUDA extensions.

    Yields the list of what was replaced; every attribute is restored at the end. Not restored are the modules that
    were first imported inside: Megatron Core and Transformer Engine keep the stand-in for the compiled half, and the
    eager functions `torch.compile` would have compiled. Hence the worker process (`labkit.drivers.trace.server`).

    Raises:
        WorkError: Transformer Engine's real compiled half is already loaded.
    """
    return installed(_replacements(gpu))


def _replacements(gpu: Gpu) -> Iterator[Replacement]:
    yield from light_imports.replacements()
    yield from apex_shapes.replacements()
    yield from cuda_surface.replacements(gpu)
    yield from triton_surface.replacements(gpu)
    yield from light_imports.flash_linear_attention()
    te_shapes.import_transformer_engine()
    _forget_device()
    yield from mamba_shapes.replacements()
    yield from flash_shapes.replacements(gpu)
    yield from megatron_patches.replacements()
    yield from cuda_operators.replacements()


def _forget_device() -> None:
    """Clear what libraries imported under another GPU have cached of it: its capability, its shared memory.

    Not what flash-linear-attention decided while it was imported, which is how kernels are tuned.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformer_engine.", "fla.")):
            for value in vars(module).values():
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()
