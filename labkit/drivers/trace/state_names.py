"""Which tensor of the optimizer belongs to which parameter, for the names of the ledger's rows."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)


def optimizer_tensors(
    optimizer: MegatronOptimizer, paths: Mapping[torch.Tensor, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(path of the parameter and of what is kept of it, tensor) for each shard of the optimizer on this rank.

    Source: `FusedAdam.initialize_state`.

    Args:
        optimizer: After its first step.
        paths: At least the parameters of the model, and their paths.
    """
    parts = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    for part in parts:
        if part.is_stub_optimizer:
            continue
        for groups in _groups(part):
            for parameters, shards, mains in zip(*groups, strict=True):
                for parameter, shard, main in zip(parameters, shards, mains, strict=True):
                    path = paths[parameter]
                    if main is not None and main is not shard:
                        yield f"{path}.main_param", main
                    for name, tensor in part.optimizer.state.get(shard if main is None else main, {}).items():
                        if isinstance(tensor, torch.Tensor):
                            yield f"{path}.{name}", tensor


type _Groups = list[list[Any]]


def _groups(part: MegatronOptimizer) -> Iterator[tuple[_Groups, _Groups, _Groups]]:
    """Groups of parameters of one kind, of the shards of them that this rank steps, and of their main parameters.

    Sources: `DistributedOptimizer._build_model_and_main_param_groups`, `Float16OptimizerWithFloat16Params.__init__`.
    """
    if isinstance(part, DistributedOptimizer):
        # Where Transformer Engine holds the main parameters there are none here, and the bf16 shards key the state.
        yield part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups
        yield part.model_fp32_groups, part.shard_fp32_groups, part.shard_fp32_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        yield part.float16_groups, part.float16_groups, part.fp32_from_float16_groups
        yield part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, part.fp32_from_fp32_groups
    elif isinstance(part, FP32Optimizer):
        groups = [group["params"] for group in part.optimizer.param_groups]
        yield groups, groups, groups
