"""Megatron Core's model under the `lora` runtime: base frozen, adapters on its linears, mixers that know the tree."""

from functools import partial
from typing import Any

import torch
from megatron.core.ssm.gated_delta_net.common import _GDNBase
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import TEGroupedMLP

from labkit.drivers.lora.adapters import AdaptedColumn, AdaptedGroup, AdaptedRow
from labkit.drivers.lora.tree import Tree, TreeAttention, delta_net_forward
from labkit.workload import Lora


def adapt(model: torch.nn.Module, lora: Lora, tree: Tree) -> None:
    """Make a built model one of the runtime, in place."""
    model.requires_grad_(requires_grad=False)
    for module in [*model.modules()]:
        if isinstance(module, SelfAttention):
            _adapt_attention(module, lora)
            module.core_attention = TreeAttention(tree)
        elif isinstance(module, _GDNBase):
            _adapt_delta_net(module, lora)
            module.forward = partial(_tree_forward, module, tree)
        elif isinstance(module, MLP):
            parts = [module.linear_fc1.weight.shape[0] // 2] * 2
            _adapt(module, "linear_fc1", lora, parts)
            _adapt(module, "linear_fc2", lora)
        elif isinstance(module, TEGroupedMLP):
            _adapt(module, "linear_fc1", lora)
            _adapt(module, "linear_fc2", lora)


def _tree_forward(net: Any, tree: Tree, hidden: torch.Tensor, *rest: Any, **options: Any) -> Any:  # noqa: ARG001
    """What Megatron's layer calls, with a mask and lengths that the tree replaces."""
    return delta_net_forward(net, tree, hidden)


def _adapt_attention(attention: Any, lora: Lora) -> None:
    """Queries with their gates, keys and values of each group of heads.

    Ranks that share a group have parts of it, in adapters of their own.
    """
    config, width = attention.config, attention.hidden_size_per_attention_head
    queries = config.num_attention_heads * (1 + config.attention_output_gate) * width
    keys = config.num_query_groups * width
    ranks, groups = config.tensor_model_parallel_size, config.num_query_groups
    _adapt(attention, "linear_qkv", lora, [each // ranks for each in (queries, keys, keys)], max(1, groups // ranks))
    _adapt(attention, "linear_proj", lora)


def _adapt_delta_net(net: Any, lora: Lora) -> None:
    """Queries, keys and values together, and the gate; what decides decay and beta has none."""
    convolved = 2 * net.qk_dim_local_tp + net.v_dim_local_tp
    _adapt(net, "in_proj", lora, [convolved, net.v_dim_local_tp])
    _adapt(net, "out_proj", lora)


def _adapt(owner: Any, name: str, lora: Lora, parts: list[int] | None = None, groups: int = 1) -> None:
    if not lora.adapts(name):
        return
    linear = getattr(owner, name)
    if parts is not None:
        setattr(owner, name, AdaptedColumn(linear, parts, groups, lora))
    elif isinstance(owner, TEGroupedMLP):
        setattr(owner, name, AdaptedGroup(linear, lora))
    else:
        setattr(owner, name, AdaptedRow(linear, lora))
