"""What Megatron Core and Transformer Engine do that only a GPU, or several ranks with data, can do."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from labkit.drivers.trace import compiled_gdn
from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.work import launched
from labkit.workload import Software
from labkit.workload.behaviour import (
    cross_entropy_gradient,
    gathers_ahead_of_every_forward,
    releases_gathered_parameters,
    shards_gradients_in_fp32,
    softmax_gradient_in_place,
    takes_workspace_when_built,
)


def replacements() -> Iterator[Replacement]:
    """What every step needs beyond `torch.cuda` and Transformer Engine's library; imports Megatron Core."""
    importlib.import_module("labkit.drivers.step")
    importlib.import_module("labkit.drivers.build")
    yield from _packed_mamba()
    yield from _random_numbers()
    yield from _compiled_gate()
    yield from _collectives()
    yield from _fully_sharded()
    yield from compiled_gdn.replacements()


def _packed_mamba() -> Iterator[Replacement]:
    """Megatron asks the version of a package with the convolution's kernel, which the trace has a stand-in for."""
    from megatron.core.ssm import mamba_mixer

    yield Replacement(mamba_mixer, "_check_mamba_sequence_packing_support", lambda **options: (True, None), NOTHING)


def _random_numbers() -> Iterator[Replacement]:
    """The CUDA generator's state: every kernel that draws is a stand-in, so any state will do."""
    from megatron.core.tensor_parallel import random

    states = "nothing on the device: generator states are host tensors"
    state = torch.zeros(16, dtype=torch.uint8)
    yield Replacement(random, "_get_cuda_rng_state", lambda *args, **kwargs: state, states)
    yield Replacement(random, "_set_cuda_rng_state", lambda *args, **kwargs: None, states)


def sharing_storage(share: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[Replacement]:
    """`CheckpointWithoutOutput` compiles a C++ function that lets one storage show another's memory."""
    from megatron.core.tensor_parallel import random

    yield Replacement(random, "_get_share_storage", lambda: share, "nothing: both storages show the same memory")


class _OutputGate(torch.autograd.Function):
    """Attention's output times the sigmoid of its gate, as AOTAutograd partitions it: both inputs are kept.

    Eager code would keep the sigmoid in fp32; the min-cut partitioner computes it again in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        launched(0, x, gate, x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        launched(0, gradient, x, gate, x, gate)
        return torch.empty_like(x), torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


def _compiled_gate() -> Iterator[Replacement]:
    """The output gate of attention, a region that `jit_fuser` compiles with its backward."""
    from megatron.core.transformer.attention import Attention

    yield Replacement(
        Attention,
        "_apply_output_gate",
        lambda self, x, gate: _OutputGate.apply(x, gate),
        "the gated output; in backward the gradients of both inputs",
    )


class _Done:
    """The handle of collectives that are over."""

    works = (None,)

    def wait(self) -> None:
        pass


@contextlib.contextmanager
def _coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[_Done]:
    yield _Done()


def _all_gather_object(objects: list[Any], mine: Any, group: Any = None) -> None:
    objects[:] = [mine] * len(objects)


def _collectives() -> Iterator[Replacement]:
    """Collectives the fake process group cannot answer; it answers those on tensors itself."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as sharded_buffers

    # `--high-priority-stream-groups`: options that only NCCL's groups take.
    yield Replacement(parallel_state, "get_nccl_options", lambda *args, **kwargs: None, NOTHING)
    for owner in (param_and_grad_buffer, sharded_buffers, dist):
        # Transformer Engine gathers the data and the scales of quantized tensors at once.
        yield Replacement(owner, "_coalescing_manager", _coalescing_manager, "nothing: collectives run in place")
    objects = "a few KiB while the pickled objects travel"
    yield Replacement(dist, "all_gather_object", _all_gather_object, objects)
    yield Replacement(dist, "broadcast_object_list", lambda *args, **kwargs: None, objects)


def _fully_sharded() -> Iterator[Replacement]:
    """Megatron-FSDP asks all ranks whether their shards make up a tensor."""
    from megatron.core.distributed import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as sharded_buffers

    checked = "a few integers while they are compared"
    yield Replacement(sharded_buffers, "validate_uneven_dtensor", lambda tensor: None, checked)
    yield Replacement(FullyShardedDataParallel, "sync_rng_states_across_tp_group", lambda self: None, NOTHING)


def shared_expert_gates(origin: Origin) -> Iterator[Replacement]:
    """Backward of the gate of overlapped shared experts runs on their stream, and no module's forward says so."""
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    original = SharedExpertMLP.get_output

    def get_output(experts: Any) -> Any:
        if experts.gate_score is not None:
            with torch.cuda.stream(experts.stream):
                origin.claim(experts.gate_score, experts)
        return original(experts)

    yield Replacement(SharedExpertMLP, "get_output", get_output, NOTHING)


def _sharded_as_stated(software: Software) -> Iterator[Replacement]:
    """Megatron-FSDP's habits in the stated version of Megatron Core."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP, TrainingState
    from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import AllGatherPipeline
    from megatron.training import training

    describe, reset, forward = training.get_megatron_ddp_config, AllGatherPipeline.reset, MegatronFSDP.forward

    def in_fp32(arguments: Any) -> Any:
        config = describe(arguments)
        if config.grad_reduce_in_fp32:
            config.megatron_fsdp_main_grads_dtype = config.megatron_fsdp_grad_comm_dtype = torch.float32
        return config

    def releasing_all(pipeline: Any, preserve_non_fsdp_units: bool = True) -> None:
        reset(pipeline, preserve_non_fsdp_units=False)

    def from_idle(model: Any, *inputs: Any, **named: Any) -> Any:
        for module in model.modules():
            module._training_state = TrainingState.IDLE
        return forward(model, *inputs, **named)

    if shards_gradients_in_fp32(software):
        yield Replacement(training, "get_megatron_ddp_config", in_fp32, NOTHING)
    if releases_gathered_parameters(software):
        yield Replacement(AllGatherPipeline, "reset", releasing_all, NOTHING)
    if gathers_ahead_of_every_forward(software):
        yield Replacement(MegatronFSDP, "forward", from_idle, NOTHING)


def _softmax_in_place() -> Iterator[Replacement]:
    """Backward of Transformer Engine's softmax kernels before 2.19."""
    importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.softmax")

    def backward(gradient: torch.Tensor, probabilities: torch.Tensor, _scale: float) -> torch.Tensor:
        launched(0, gradient, probabilities, gradient)
        return gradient

    for kernel in ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax"):
        yield Replacement(torch.ops.te_softmax, f"{kernel}_bwd", backward, "nothing: it overwrites the gradient")


def _without_apex() -> Iterator[Replacement]:
    """What Megatron Core's own layers are made of where it finds no APEX."""
    from megatron.core.models import backends
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    for module in (backends, gpt_layer_specs):
        yield Replacement(module, "LNImpl", WrappedTorchNorm, "PyTorch's norms: output and fp32 statistics of each row")
    yield Replacement(layers, "_grad_accum_fusion_available", False, NOTHING)


def stated_versions(software: Software) -> Iterator[Replacement]:
    """The habits of the stated versions where the installed ones have others (`labkit.workload.behaviour`)."""
    yield from _sharded_as_stated(software)
    if not software.apex:
        yield from _without_apex()
    if not takes_workspace_when_built(software):
        linear = importlib.import_module("transformer_engine.pytorch.module.linear")
        yield Replacement(linear, "get_cublas_workspace", lambda *args: None, "nothing: the first GEMM takes it")
    if softmax_gradient_in_place(software):
        yield from _softmax_in_place()
    gradient = cross_entropy_gradient(software)
    if gradient == cross_entropy_gradient(Software(transformer_engine=version("transformer-engine"))):
        return
    kernels = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    installed_forward = kernels.cross_entropy_forward

    def in_place(logits: torch.Tensor, *arguments: Any) -> Any:
        *others, _overwrite_input = arguments
        return installed_forward(logits, *others, True)

    def fp32_buffer(logits: torch.Tensor, *arguments: Any) -> Any:
        loss, _saved, *others = in_place(logits, *arguments)
        return (loss, torch.empty_like(logits, dtype=torch.float32), *others)

    forward = {"in_place": in_place, "fp32_buffer": fp32_buffer, "input_copy": installed_forward}[gradient]
    yield Replacement(
        kernels,
        "cross_entropy_forward",
        forward,
        "the gradient of the logits where the stated version of Transformer Engine puts it",
    )
