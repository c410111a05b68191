"""Adapters and attention over trees, really run on the CPU: `python -m tests.drivers.real_lora`.

A process of its own: importing Megatron Core changes the one that does it.
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from labkit.drivers.trace.surface import fake_cuda
from labkit.workload import Lora, Workload
from labkit.workload.gpu import GPUS
from tests.memory.grid import changed
from tests.memory.grid import lora as grid

with fake_cuda(GPUS["h200-141gb"]):  # or Transformer Engine is not imported
    from labkit.drivers.lora.adapters import AdaptedColumn, AdaptedRow, Adapter
    from labkit.drivers.lora.tree import Tree, TreeAttention

CONFIG = SimpleNamespace(sequence_parallel=False, tensor_model_parallel_size=1)


class Linear(torch.nn.Linear):
    """As Megatron's: it returns its bias apart, knows the configuration, and may hand on what it reads."""

    config = CONFIG
    return_layernorm_output = return_layernorm_output_gathered = False

    def forward(self, x: Tensor) -> tuple[Tensor | tuple[Tensor, Tensor], None]:  # type: ignore[override]
        output = super().forward(x)
        return ((output, x) if self.return_layernorm_output else output), None


def frozen(width: int, out_width: int) -> Linear:
    linear = Linear(width, out_width, bias=False)
    linear.requires_grad_(requires_grad=False)
    return linear


def weights(adapters: list[Adapter]) -> list[Tensor]:
    """What each adapter adds to its part of the weight, after its B has become something."""
    for adapter in adapters:
        torch.nn.init.normal_(adapter.B)
    return [32 / adapter.A.shape[0] * adapter.B @ adapter.A for adapter in adapters]


def adapted_linears_are_those_with_merged_weights() -> None:
    x, lora = torch.randn(5, 1, 12), Lora(rank=3)
    linear = frozen(12, 8)
    row = AdaptedRow(linear, lora)
    torch.testing.assert_close(row(x)[0], linear(x)[0], msg="an adapter begins as nothing")
    (added,) = weights([row.adapter])
    torch.testing.assert_close(row(x)[0], functional.linear(x, linear.weight + added))
    row(x)[0].sum().backward()
    assert linear.weight.grad is None
    assert row.adapter.A.grad is not None

    # Two groups of (query 4, key 2, value 2), and three columns behind them without an adapter.
    linear = frozen(12, 19)
    column = AdaptedColumn(frozen(12, 16), [8, 4, 4], 2, lora)
    query, key, value = (part.unflatten(0, (2, -1)) for part in weights([*column.adapters]))
    merged = column.linear.weight + torch.cat([query, key, value], 1).flatten(0, 1)
    torch.testing.assert_close(column(x)[0], functional.linear(x, merged))
    bare = AdaptedColumn(linear, [8, 8], 1, lora)
    merged = linear.weight + functional.pad(torch.cat(weights([*bare.adapters])), (0, 0, 0, 3))
    torch.testing.assert_close(bare(x)[0], functional.linear(x, merged))


def attention_over_a_tree_is_that_of_its_sequences(changes: dict[str, object]) -> None:
    workload: Workload = changed(grid.BASE, changes, "tree")
    tree, packed = Tree(workload, torch.device("cpu")), workload.batch.sequences
    query, key, value = (torch.randn(tree.rows, 1, heads, 16) for heads in (4, 2, 2))
    attention = TreeAttention(tree)
    attention._attend = flex_attention  # it computes the same eagerly
    rows = attention(query, key, value).squeeze(1)[tree.outputs]
    for length, found, own in zip(
        packed.lengths, rows.split(packed.lengths), tree.outputs.split(packed.lengths), strict=True
    ):
        assert tree.positions[own].tolist() == list(range(length))
        q, k, v = (part[own].permute(1, 2, 0, 3) for part in (query, key, value))
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(found, expected.permute(2, 0, 1, 3).flatten(1))


def padded_segments_hold_every_token_once() -> None:
    tree = Tree(changed(grid.BASE, grid.PREFIX, "tree"), torch.device("cpu"))
    assert tree.sources[tree.slots].tolist() == list(range(tree.rows))
    assert tree.counts.sum() == tree.rows
    assert [level.host_ends.tolist() for level in tree.levels] == [[0, 192], [0, 384, 960, 1152]]


if __name__ == "__main__":
    torch.manual_seed(1)
    adapted_linears_are_those_with_merged_weights()
    attention_over_a_tree_is_that_of_its_sequences(grid.PREFIX)
    attention_over_a_tree_is_that_of_its_sequences({})
    padded_segments_hold_every_token_once()
