"""Token dispatchers ask the device how many rows go where; a trace answers from the workload's routing."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.routing import Splits, splits
from labkit.workload import Workload

_PINNED = "nothing on the device: counts are copied to pinned host memory"


def replacements(workload: Workload) -> Iterator[Replacement]:
    """The answers for one workload; imports Megatron Core."""
    from megatron.core.transformer.moe import moe_layer
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    set_layer_number = moe_layer.BaseMoELayer.set_layer_number

    def tell_dispatcher(self: Any, layer_number: int) -> None:
        set_layer_number(self, layer_number)
        behind = getattr(self.router, "is_mtp_layer", False)
        self.token_dispatcher.labkit_layer = None if behind else layer_number - 1

    yield Replacement(moe_layer.BaseMoELayer, "set_layer_number", tell_dispatcher, NOTHING)

    def plan(dispatcher: Any, tokens: int) -> Splits:
        return splits(workload, dispatcher.labkit_layer, tokens, dispatcher.ep_rank)

    def copy_to_host(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert
        answer = plan(self, self.routing_map.shape[0])
        self.num_out_tokens = answer.num_out_tokens
        if self.ep_size > 1 or self.tp_size > 1:
            self.input_splits, self.output_splits = answer.input_splits, answer.output_splits
            self.output_splits_tp = answer.output_splits_tp
        if self.num_local_experts > 1 and not self.config.moe_permute_fusion:
            by_sender = np.tile(answer.from_each_sender, (answer.senders, 1))
            self.num_global_tokens_per_local_expert = torch.from_numpy(by_sender)
        return torch.from_numpy(answer.tokens_per_expert)

    yield Replacement(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", copy_to_host, _PINNED)
