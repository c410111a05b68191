"""Regions that `torch.compile` would fuse: what lives and dies inside them never reaches the allocator.

Megatron Core compiles small functions (`megatron.core.jit.jit_fuser`: SwiGLU and its backward, bias and residual
additions). Inductor keeps their intermediates in registers; eager code, which a trace runs, would allocate them all.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Region = Callable[[], AbstractContextManager[None]]

_regions: list[Region] = [nullcontext]
"""What surrounds a call of a compiled function now; functions compiled at import look here when they are called."""


@contextmanager
def watched_by(region: Region) -> Iterator[None]:
    """Run every compiled function inside `region()` while active."""
    _regions.append(region)
    try:
        yield
    finally:
        _regions.remove(region)


def compile_nothing(function: Any = None, **options: Any) -> Any:
    """`torch.compile`, as a decorator with or without options: runs eagerly, inside the current region.

    What runs is the result's `__wrapped__`: replaced where compiled code keeps something else for backward than
    eager code does.
    """
    if function is None:
        return compile_nothing

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _regions[-1]():
            return run.__wrapped__(*args, **kwargs)

    return run
