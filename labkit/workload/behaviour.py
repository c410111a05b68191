"""What differs between versions of Megatron Core, Transformer Engine and PyTorch in the bytes they keep.

Each entry says where it was read. The estimator and the trace driver both ask here, so that a workload
stated for one version is never priced with another's habits.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from labkit.workload.training import Software

CrossEntropyGradient = Literal["in_place", "fp32_buffer", "input_copy"]

KNOWN = {"transformer_engine": ((2, 13), (2, 20)), "megatron_core": ((0, 19), (0, 19)), "torch": ((2, 9), (2, 14))}
"""First and last minor version whose habits are known here. Before 2.13 Transformer Engine's FusedAdam copied bf16
moments to fp32 in the step (no `fuse_unscale` in `optimizers/fused_adam.py`)."""
MEGATRON_FSDP_SINCE = (0, 17)
"""Version of Megatron Core from which Megatron-FSDP's habits are known, with 0.19's layers around it."""


def version_tuple(version: str) -> tuple[int, ...]:
    """`"2.20.2"` -> `(2, 20, 2)`; a part that is no number of up to nine digits ends it."""
    numbers: list[int] = []
    for part in version.split("."):
        if not (part.isascii() and part.isdigit() and len(part) <= 9):
            break
        numbers.append(int(part))
    return tuple(numbers)


def cross_entropy_gradient(software: "Software") -> CrossEntropyGradient:
    """Where Transformer Engine's fused cross entropy puts the gradient of the logits.

    Read in `transformer_engine/pytorch/triton/cross_entropy.py` of each wheel: up to 2.17 the kernel overwrites
    the logits; 2.18 allocates an fp32 tensor of their shape in forward; from 2.19 forward copies the logits into a
    buffer of their own dtype (`saved_input`), which backward overwrites.
    """
    version = version_tuple(software.transformer_engine)
    if version < (2, 18):
        return "in_place"
    return "fp32_buffer" if version < (2, 19) else "input_copy"


def shards_gradients_in_fp32(software: "Software") -> bool:
    """Whether Megatron-FSDP keeps gradients in fp32 because gradients are reduced in fp32.

    `mcore_fsdp_adapter.py` of the wheels: 0.18.2 takes fp32 where `grad_reduce_in_fp32` is set; 0.19.0 asks
    `--megatron-fsdp-main-grads-dtype` and `--megatron-fsdp-grad-comm-dtype` alone.
    """
    return version_tuple(software.megatron_core) < (0, 19)


def releases_gathered_parameters(software: "Software") -> bool:
    """Whether Megatron-FSDP frees all gathered parameters when it synchronizes, those outside of its units too.

    `AllGatherPipeline.reset` of the wheels: 0.17.1 frees every bucket; 0.18.0 preserves those of embeddings and last
    norm. What came between calls itself `0.18.0rc0`.
    """
    return version_tuple(software.megatron_core) < (0, 18, 0)


def gathers_ahead_of_every_forward(software: "Software") -> bool:
    """Whether Megatron-FSDP's embedding and last norm gather the layers ahead in every forward.

    `MegatronFSDP._root_pre_backward` of the wheels: 0.17.1 marks its units alone as being in backward; 0.18.0 marks
    all modules, and those outside of units stay so, whose next forward then gathers nothing ahead.
    """
    return version_tuple(software.megatron_core) < (0, 18)


def takes_workspace_when_built(software: "Software") -> bool:
    """Whether a Transformer Engine `Linear` takes the workspace of its GEMMs as soon as it has its weight.

    2.20 does (`module/linear.py`, `_prealloc_cublas_workspace`). The cells of `data/published/h200_lora_peaks.csv`, of
    2.11 to 2.14, take it in the first forward. With which version that changed is not known.
    """
    return version_tuple(software.transformer_engine) >= (2, 15)


def softmax_gradient_in_place(software: "Software") -> bool:
    """Whether Transformer Engine's softmax kernels write their gradient over the incoming one.

    Read in `csrc/extensions/softmax.cpp` of the sources of 2.17.1, 2.18.0, 2.19.0 and 2.20.2: up to 2.18 ("Produce
    gradients in place"); from 2.19 into a tensor of its own, as `torch.library.custom_op` asks.
    """
    return version_tuple(software.transformer_engine) < (2, 19)


def has_single_grouped_parameters(software: "Software") -> bool:
    """Whether a rank's experts may have one parameter together (`TransformerConfig.__post_init__`)."""
    return version_tuple(software.transformer_engine) >= (2, 14)


def discards_gated_norms(software: "Software") -> bool:
    """Whether `gdn_norm_out` is a label: `TransformerConfig.__post_init__` of the wheels, 0.18.2 and 0.19.0."""
    return version_tuple(software.megatron_core) >= (0, 19)


def spreads_delta_nets_over_contexts(software: "Software") -> bool:
    """Whether gated delta net goes with context parallelism: the same of 0.17.1 and 0.18.2."""
    return version_tuple(software.megatron_core) >= (0, 18)


def overlaps_shared_experts_with_flex(software: "Software") -> bool:
    """Whether shared experts overlap with the flex dispatcher: the same of 0.17.1 and 0.18.2."""
    return version_tuple(software.megatron_core) >= (0, 18)


def large_cublas_workspace(software: "Software", compute_capability: tuple[int, int]) -> bool:
    """Whether PyTorch's workspace of a cuBLAS handle is 32 MiB where the environment does not say.

    `aten/src/ATen/cuda/CublasHandlePool.cpp`, `parseChosenWorkspaceSize`, read in the libraries of the wheels: 2.11.0
    asks for compute capability 9.0, 2.12.0 and 2.13.0 for 9, 10 or 12, 2.14.1 for 9 to 12.
    """
    if version_tuple(software.torch) < (2, 12):
        return compute_capability == (9, 0)
    return compute_capability >= (9, 0)
