"""What Megatron Core and Transformer Engine do that only a GPU, or several ranks with data, can do."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from labkit.drivers.trace.patches import NOTHING, Replacement, everywhere
from labkit.drivers.trace.routing import balanced
from labkit.workload import Workload
from labkit.workload.behaviour import cross_entropy_gradient

_HOST_ONLY = "nothing on the device: generator states are host tensors"


def replacements(workload: Workload) -> Iterator[Replacement]:
    """Every replacement a step of `workload` needs beyond `torch.cuda` and Transformer Engine's library."""
    yield from _random_numbers()
    yield from _gradient_fusion()
    yield from _collectives()
    if workload.model.mixture_of_experts is not None:
        yield from _expert_routing()
    yield from _cross_entropy(workload)


class _NoGenerators:
    """Megatron's generator states, for kernels that draw nothing."""

    def fork(self, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: dict[str, Any]) -> None:
        pass

    def is_initialized(self) -> bool:
        return False

    def is_inference_rng_tracker(self) -> bool:
        return False


def _random_numbers() -> Iterator[Replacement]:
    from megatron.core.tensor_parallel import random

    generators = _NoGenerators()
    answers: dict[str, Callable[..., Any]] = {
        "get_cuda_rng_tracker": lambda *args, **kwargs: generators,
        "model_parallel_cuda_manual_seed": lambda *args, **kwargs: None,
        "_fork_rng": contextlib.nullcontext,
        "_get_all_rng_states": lambda: (None, None, {}),
        "_set_all_rng_states": lambda *states: None,
    }
    megatron = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    for name, answer in answers.items():
        yield from everywhere(megatron, getattr(random, name), answer, _HOST_ONLY)


def sharing_storage(share: Callable[[torch.Tensor, torch.Tensor], None]) -> Iterator[Replacement]:
    """`CheckpointWithoutOutput` compiles a C++ function that lets one storage show another's memory."""
    from megatron.core.tensor_parallel import random

    yield Replacement(random, "_get_share_storage", lambda: share, "nothing: both storages show the same memory")


def _gradient_fusion() -> Iterator[Replacement]:
    """APEX's kernel that adds a weight gradient straight into the gradient buffer."""
    from megatron.core.tensor_parallel import layers

    kernels = ModuleType("fused_weight_gradient_mlp_cuda")
    for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
        setattr(kernels, name, lambda *args: None)
    yield Replacement(layers, "fused_weight_gradient_mlp_cuda", kernels, "nothing: it writes main_grad")
    yield Replacement(layers, "_grad_accum_fusion_available", True, NOTHING)


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
    from megatron.core.distributed import param_and_grad_buffer

    yield Replacement(
        param_and_grad_buffer, "_coalescing_manager", _coalescing_manager, "nothing: collectives run in place"
    )
    objects = "a few KiB while the pickled objects travel"
    yield Replacement(dist, "all_gather_object", _all_gather_object, objects)
    yield Replacement(dist, "broadcast_object_list", lambda *args, **kwargs: None, objects)


def _expert_routing() -> Iterator[Replacement]:
    """The all-to-all dispatcher's one device-to-host copy, answered from a balanced plan."""
    import numpy as np
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def copy_to_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point != self.cuda_dtoh_point:
            return tokens_per_expert
        experts, local = self.num_experts, self.num_local_experts
        tokens = self.routing_map.shape[0]
        splits = balanced(tokens, self.config.moe_router_topk, experts, self.ep_size, self.ep_group.rank())
        if self.ep_size > 1:
            self.input_splits, self.output_splits = splits.input_splits, splits.output_splits
        if local > 1 and not self.config.moe_permute_fusion:
            self.num_global_tokens_per_local_expert = splits.received
            order = np.arange(experts)
            self.sort_input_by_local_experts = order.reshape(-1, local).T.ravel()
            self.restore_output_by_local_experts = order.reshape(local, -1).T.ravel()
        return splits.tokens_per_expert

    yield Replacement(
        MoEAlltoAllTokenDispatcher,
        "_maybe_dtoh_and_synchronize",
        copy_to_host,
        "nothing on the device: counts are copied to pinned host memory",
    )


def _cross_entropy(workload: Workload) -> Iterator[Replacement]:
    """The stated Transformer Engine version's way with the gradient of the logits, if the installed one differs."""
    gradient = cross_entropy_gradient(workload.training.software)
    if gradient == "input_copy":
        return
    kernels = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    installed_forward = kernels.cross_entropy_forward

    def in_place(logits: torch.Tensor, *arguments: Any) -> Any:
        *others, _overwrite_input = arguments
        return installed_forward(logits, *others, True)

    def fp32_buffer(logits: torch.Tensor, *arguments: Any) -> Any:
        loss, _saved, *others = in_place(logits, *arguments)
        return (loss, torch.empty_like(logits, dtype=torch.float32), *others)

    yield Replacement(
        kernels,
        "cross_entropy_forward",
        in_place if gradient == "in_place" else fp32_buffer,
        "the gradient's buffer, as the stated version of Transformer Engine does (labkit.workload.behaviour)",
    )
