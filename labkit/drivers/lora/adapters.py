"""LoRA adapters beside Megatron's frozen linears.

An adapter of rank r adds `x A B * alpha / r` to what its linear makes of x. Linears that Megatron fuses (query, key and
value; gate and up) have one for each part. Adapters of a column-parallel linear read its whole input, under sequence
parallelism gathered once and kept; those of a row-parallel linear read its share, and under
sequence parallelism their outputs are summed like the linear's own. Grouped experts have theirs in one tensor each.

A factor that tensor-parallel ranks have alike gets a part of its gradient on each. Under sequence parallelism Megatron
sums the parts after backward (`param.sequence_parallel`, `finalize_model_grads`); without it x A is summed, or its
gradient.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings
from torch import Tensor
from torch.nn import functional

from labkit.workload import Lora

ALPHA = 32
_GROUPED_UNIT = 8
"""`torch._grouped_mm` wants rows of 16 bytes: so many bf16 elements of a rank."""


class Adapter(torch.nn.Module):
    """x (..., width) to x A B, scaled: (..., out width).

    Args:
        like: The linear's weight, for dtype and device.
        splits_input: A is the rank's part over the inputs, B whole; else A is whole, B the part over the outputs.
        config: Megatron's, of the layout.
    """

    def __init__(
        self, width: int, out_width: int, lora: Lora, like: Tensor, config: Any, *, splits_input: bool
    ) -> None:
        super().__init__()
        self.A = torch.nn.Parameter(like.new_empty(lora.rank, width))
        self.B = torch.nn.Parameter(like.new_zeros(out_width, lora.rank))
        self._scale, self._compiled = ALPHA / lora.rank, lora.compile_layers
        several = config.tensor_model_parallel_size > 1
        sums = mappings.reduce_from_tensor_model_parallel_region, mappings.copy_to_tensor_model_parallel_region
        self._over_ranks = sums[not splits_input] if several and not config.sequence_parallel else None
        _initialise(self.A, split=splits_input and several)
        split, whole = (self.A, self.B) if splits_input else (self.B, self.A)
        split.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks parameters
        whole.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """The adapter's share of the output."""
        down = functional.linear(x, self.A)
        if self._over_ranks is not None:
            down = self._over_ranks(down)
        product = functional.linear(down, self.B)
        # A compiled layer needs no second tensor either.
        return product.mul_(self._scale) if self._compiled else product * self._scale


def _initialise(factor: Tensor, *, split: bool) -> None:
    """As `torch.nn.Linear`: alike on all ranks, or where ranks have parts, each with its own numbers."""
    bound = math.sqrt(1 / factor.shape[-1])
    if split:
        with get_cuda_rng_tracker().fork():
            torch.nn.init.uniform_(factor, -bound, bound)
    else:
        torch.nn.init.uniform_(factor, -bound, bound)


class AdaptedColumn(torch.nn.Module):
    """A column-parallel linear, with a norm before it or without, and an adapter for each part of its output.

    Args:
        parts: Columns of each part that has an adapter. Columns behind them have none.
        groups: Parts alternate so often in the output: queries, keys and values of each group of heads.
    """

    def __init__(self, linear: Any, parts: Sequence[int], groups: int, lora: Lora) -> None:
        super().__init__()
        self.linear, self._groups = linear, groups
        self._sequence_parallel = linear.config.sequence_parallel
        columns, width = linear.weight.shape
        self._bare = columns - sum(parts)
        self.adapters = torch.nn.ModuleList(
            Adapter(width, part, lora, linear.weight, linear.config, splits_input=False) for part in parts
        )
        if hasattr(linear, "return_layernorm_output"):
            linear.return_layernorm_output = linear.return_layernorm_output_gathered = True
        self._compiled_sum = torch.compile(self._sum) if lora.compile_layers else None

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(output, no bias), as Megatron's linears."""
        output, _ = self.linear(x)
        if isinstance(output, tuple):
            output, x = output  # behind its norm, and of all ranks
        elif self._sequence_parallel:
            x = mappings.gather_from_sequence_parallel_region(x)
        if self._compiled_sum is not None:
            return self._compiled_sum(output, [adapter(x) for adapter in self.adapters]), None
        return output + self._side_by_side([adapter(x) for adapter in self.adapters]), None

    def _sum(self, output: Tensor, added: list[Tensor]) -> Tensor:
        return output + self._side_by_side(added)

    def _side_by_side(self, added: list[Tensor]) -> Tensor:
        """What the adapters add to all columns of the output."""
        if len(added) == 1:
            return added[0]
        parts = [each.unflatten(-1, (self._groups, -1)) for each in added]
        if self._bare:
            parts.append(added[0].new_zeros(*added[0].shape[:-1], 1, self._bare))
        return torch.cat(parts, -1).flatten(-2)


class AdaptedRow(torch.nn.Module):
    """A row-parallel linear and its adapter."""

    def __init__(self, linear: Any, lora: Lora) -> None:
        super().__init__()
        self.linear = linear
        self._sequence_parallel = linear.config.sequence_parallel
        out_width, width = linear.weight.shape
        self.adapter = Adapter(width, out_width, lora, linear.weight, linear.config, splits_input=True)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(output, no bias), as Megatron's linears."""
        output, _ = self.linear(x)
        added = self.adapter(x)
        if self._sequence_parallel:
            added = mappings.reduce_scatter_to_sequence_parallel_region(added)
        return output + added, None


class AdaptedGroup(torch.nn.Module):
    """A grouped linear and an adapter for each of its experts."""

    def __init__(self, linear: Any, lora: Lora) -> None:
        super().__init__()
        self.linear = linear
        experts, (out_width, width) = linear.num_gemms, linear.weight0.shape
        self.A = torch.nn.Parameter(linear.weight0.new_empty(experts, lora.rank, width))
        self.B = torch.nn.Parameter(linear.weight0.new_zeros(experts, out_width, lora.rank))
        self._scale, self._padding = ALPHA / lora.rank, -lora.rank % _GROUPED_UNIT
        _initialise(self.A, split=True)
        for factor in (self.A, self.B):
            factor.allreduce = linear.weight0.allreduce  # type: ignore[attr-defined]  # whose group reduces it

    def forward(self, x: Tensor, rows_of_experts: list[int]) -> tuple[Tensor, None]:
        """(output, no bias), as Megatron's linears."""
        output, _ = self.linear(x, rows_of_experts)
        ends = torch.tensor(rows_of_experts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(x.device)
        a = functional.pad(self.A, (0, 0, 0, self._padding))
        b = functional.pad(self.B * self._scale, (0, self._padding))
        down = torch._grouped_mm(x, a.transpose(1, 2), offs=ends)
        return output + torch._grouped_mm(down, b.transpose(1, 2), offs=ends), None
