"""What differs between versions of Megatron Core and Transformer Engine in the bytes they keep.

Each entry says where it was read. The estimator and the trace driver both ask here, so that a workload
stated for one version is never priced with another's habits.
"""

from typing import Literal

from labkit.workload.training import Software

CrossEntropyGradient = Literal["in_place", "fp32_buffer", "input_copy"]

KNOWN = {"transformer_engine": ((2, 13), (2, 20)), "megatron_core": ((0, 19), (0, 19))}
"""First and last minor version whose habits are known here. Before 2.13 Transformer Engine's FusedAdam copied bf16
moments to fp32 in the step (no `fuse_unscale` in `optimizers/fused_adam.py`)."""


def version_tuple(version: str) -> tuple[int, ...]:
    """`"2.20.2"` -> `(2, 20, 2)`; a part that is no number of up to nine digits ends it."""
    numbers: list[int] = []
    for part in version.split("."):
        if not (part.isascii() and part.isdigit() and len(part) <= 9):
            break
        numbers.append(int(part))
    return tuple(numbers)


def cross_entropy_gradient(software: Software) -> CrossEntropyGradient:
    """Where Transformer Engine's fused cross entropy puts the gradient of the logits.

    Read in `transformer_engine/pytorch/triton/cross_entropy.py` of each wheel: up to 2.17 the kernel overwrites
    the logits; 2.18 allocates an fp32 tensor of their shape in forward; from 2.19 forward copies the logits into a
    buffer of their own dtype (`saved_input`), which backward overwrites.
    """
    version = version_tuple(software.transformer_engine)
    if version < (2, 18):
        return "in_place"
    return "fp32_buffer" if version < (2, 19) else "input_copy"
