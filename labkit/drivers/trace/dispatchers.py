"""Token dispatchers ask the device how many rows go where; a trace answers from the workload's routing."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np
import torch

from labkit.drivers.trace.cuda_surface import on_device
from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.routing import Splits, splits
from labkit.drivers.trace.work import exchanged, launched
from labkit.workload import Workload

_PINNED = "nothing on the device: counts are copied to pinned host memory"


_DISPATCH_OPTIONS = (
    "num_sms_dispatch_api",
    "num_sms_combine_api",
    "num_blocks_permute",
    "num_blocks_unpermute",
    "fused",
    "num_permuted_tokens",
    "pad_multiple",
    "num_sms_preprocessing_api",
)
"""What `HybridEPDispatch.forward` takes behind the local experts, in order."""


class Dispatchers:
    """The answers for one workload, and what they replace in Megatron Core."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._answers: list[Splits] = []
        """Plans of the dispatchers that run now."""
        self._behind_decoder = False
        """Whether what is built now are layers of multi-token prediction."""

    @property
    def operators(self) -> Mapping[Any, Callable[..., Any]]:
        """PyTorch operators whose result has as many rows as the router decides."""
        return {torch.ops.aten.masked_select.default: self._masked_select}

    def replacements(self) -> Iterator[Replacement]:
        """Methods that read from the device; imports Megatron Core."""
        from megatron.core.transformer import multi_token_prediction
        from megatron.core.transformer.moe import fused_a2a, moe_layer, token_dispatcher

        set_layer_number = moe_layer.BaseMoELayer.set_layer_number

        def tell_dispatcher(layer: Any, layer_number: int) -> None:
            set_layer_number(layer, layer_number)
            layer.token_dispatcher.labkit_layer = None if self._behind_decoder else layer_number - 1

        yield Replacement(moe_layer.BaseMoELayer, "set_layer_number", tell_dispatcher, NOTHING)
        prediction = multi_token_prediction.MultiTokenPredictionLayer
        build_prediction = prediction.__init__

        def build_behind_decoder(layer: Any, *args: Any, **kwargs: Any) -> None:
            self._behind_decoder = True
            build_prediction(layer, *args, **kwargs)
            self._behind_decoder = False

        yield Replacement(prediction, "__init__", build_behind_decoder, NOTHING)
        alltoall = token_dispatcher.MoEAlltoAllTokenDispatcher

        def copy_to_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
            return self._copy_to_host(dispatcher, point, tokens_per_expert)

        yield Replacement(alltoall, "_maybe_dtoh_and_synchronize", copy_to_host, _PINNED)
        for owner, name in (
            (token_dispatcher.MoEAllGatherTokenDispatcher, "dispatch_postprocess"),
            (token_dispatcher.MoEFlexTokenDispatcher, "token_dispatch"),
        ):
            yield Replacement(owner, name, self._answering(getattr(owner, name)), NOTHING)
        yield Replacement(torch.Tensor, "cpu", self._to_host(torch.Tensor.cpu), _PINNED)
        yield from self._hybrid_ep(fused_a2a, token_dispatcher)

    def _hybrid_ep(self, fused_a2a: Any, token_dispatcher: Any) -> Iterator[Replacement]:
        """What `fused_a2a` defines where DeepEP is installed."""
        made = type("HybridEPBuffer", (_HybridEPBuffer,), {"tokens_per_expert": lambda: self._tokens_per_expert})
        what = "rows, probabilities and the handle's tensors; its symmetric buffers are not PyTorch's"
        yield Replacement(fused_a2a, "HybridEPBuffer", made, what)
        yield Replacement(fused_a2a, "_hybrid_ep_buffer", None, NOTHING)

        def dispatch(x: Any, routing_map: Any, probs: Any, group: Any, num_local_experts: int, **options: Any) -> Any:
            given = [options.get(name) for name in _DISPATCH_OPTIONS]
            return fused_a2a.HybridEPDispatch.apply(x, routing_map, probs, group, num_local_experts, *given)

        def combine(x: Any, handle: Any, num_permuted_tokens: Any, pad_multiple: Any, fused: bool = False) -> Any:
            return fused_a2a.HybridEPCombine.apply(x, handle, num_permuted_tokens, pad_multiple, fused)

        yield Replacement(token_dispatcher, "hybrid_ep_dispatch", dispatch, NOTHING)
        yield Replacement(token_dispatcher, "hybrid_ep_combine", combine, NOTHING)

    def _plan(self, dispatcher: Any, tokens: int) -> Splits:
        return splits(self._workload, dispatcher.labkit_layer, tokens, dispatcher.ep_rank)

    def _copy_to_host(self, dispatcher: Any, point: str, tokens_per_expert: Any) -> Any:
        """The all-to-all dispatcher's one copy to the host."""
        if dispatcher.drop_and_pad or point != dispatcher.cuda_dtoh_point:
            return tokens_per_expert
        plan = self._plan(dispatcher, dispatcher.routing_map.shape[0])
        dispatcher.num_out_tokens = plan.num_out_tokens
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            dispatcher.input_splits, dispatcher.output_splits = plan.input_splits, plan.output_splits
            dispatcher.output_splits_tp = plan.output_splits_tp
        if dispatcher.num_local_experts > 1 and not dispatcher.config.moe_permute_fusion:
            by_sender = np.tile(plan.from_each_sender, (plan.senders, 1))
            dispatcher.num_global_tokens_per_local_expert = torch.from_numpy(by_sender)
        return torch.from_numpy(plan.tokens_per_expert)

    def _answering(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of a dispatcher, with its plan at hand for what it asks the device."""

        @wraps(method)
        def run(dispatcher: Any, *args: Any, **kwargs: Any) -> Any:
            tokens = dispatcher.hidden_shape[:-1].numel()
            with self._at_hand(self._plan(dispatcher, tokens)):
                return method(dispatcher, *args, **kwargs)

        return run

    @contextmanager
    def _at_hand(self, plan: Splits) -> Iterator[None]:
        self._answers.append(plan)
        try:
            yield
        finally:
            self._answers.pop()

    @property
    def _tokens_per_expert(self) -> torch.Tensor:
        return torch.from_numpy(self._answers[-1].tokens_per_expert)

    def _to_host(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._tokens_per_expert if self._answers and on_device(tensor) else original(tensor, *args, **kwargs)

        return cpu

    def _masked_select(self, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`masked_select_out_cuda`: finds the places of the mask first, a column of int64 for each dimension."""
        rows = int(self._tokens_per_expert.sum())
        places = torch.empty(rows, mask.dim(), dtype=torch.int64, device="meta")
        selected = tensor.new_empty(rows)
        del places
        return selected


class _HybridEPBuffer:
    """DeepEP's `HybridEPBuffer`: what it hands out comes from PyTorch's allocator, its own buffers do not.

    The handle is for as many tokens as the buffer was made for. The package cannot be installed here. The handle's
    tensors are those seen on an H200, and their shapes are inferred from what the package's Python half says of them,
    for ranks of one node.
    """

    tokens_per_expert: Callable[[], torch.Tensor]

    def __init__(self, *, group: Any, num_local_experts: int, max_num_of_tokens_per_rank: int, **sizes: Any) -> None:
        self._ranks, self._local, self._most = group.size(), num_local_experts, max_num_of_tokens_per_rank

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        handle: Any = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None, torch.Tensor, Any]:
        """(rows in experts' order, their fp32 probabilities, no scales, rows of each expert on the host, handle)."""
        if handle is None:
            handle = self._handle(hidden.shape[0], type(self).tokens_per_expert())
        *_, counts, _ = handle
        rows = hidden.new_empty(int(counts.sum()), hidden.shape[1])
        chosen = None if probs is None else hidden.new_empty(rows.shape[0], dtype=torch.float32)
        self._exchange(hidden, rows)
        return rows, chosen, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: torch.Tensor, handle: Any, probs: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(tokens, their fp32 probabilities over all experts where those of the rows are given)."""
        *_, tokens = handle
        combined = hidden.new_empty(tokens, hidden.shape[1])
        self._exchange(combined, hidden)
        if probs is None:
            return combined, None
        return combined, hidden.new_empty(tokens, self._ranks * self._local, dtype=torch.float32)

    def _exchange(self, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Each token travels once to every rank that has an expert for it: to all others, with many experts a token."""
        launched(0, tokens, rows)
        exchanged("all_to_all", self._ranks, tokens.nbytes * (self._ranks - 1))

    def _handle(self, tokens: int, counts: torch.Tensor) -> tuple[Any, ...]:
        most = max(tokens, self._most)
        dispatched = most * self._ranks
        return (
            torch.empty(most, self._ranks, dtype=torch.int32, device="cuda"),  # sparse_to_dense_map
            torch.empty(most, 1, dtype=torch.bool, device="cuda"),  # rdma_to_attn_map
            torch.empty(dispatched, self._local, dtype=torch.bool, device="cuda"),  # local_expert_routing_map
            torch.empty(dispatched, self._local, dtype=torch.int32, device="cuda"),  # dense_to_expert_map
            counts,
            tokens,
        )
