"""Gated delta net's compiled functions with what Inductor's graphs keep for backward.

Run eagerly, `GatedDeltaNet._apply_gated_norm` keeps two fp32 tensors of the values' size and `_compute_g_and_beta` two
of a number a head. `torch.compile` partitions the graph of forward and backward by the least memory between them
(`torch._functorch.partitioners.min_cut_rematerialization_partition`): pointwise chains are computed again from their
inputs inside the backward kernel, and their intermediates never leave registers. Tracing these functions through
`aot_function` with that partitioner and Inductor's decompositions gives: norm output and gate; A_log, dt_bias and
alpha; the sigmoid's output. Transformer Engine's norm breaks the graph of `_apply_gated_norm` and runs as it is.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.patches import Replacement
from labkit.drivers.trace.work import launched


class _GatedOutput(torch.autograd.Function):
    """`(y * act_fn(gate.float())).to(y.dtype)`: one kernel each way, of which only the results are memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate)
        launched(0, y, gate, y)
        return torch.empty_like(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y, gate = ctx.saved_tensors
        launched(0, gradient, y, gate, y, gate)
        return torch.empty_like(y), torch.empty_like(gate)


class _Decay(torch.autograd.Function):
    """`-A_log.exp() * softplus(alpha.float() + dt_bias)` in fp32, a number a token and value head."""

    @staticmethod
    def forward(ctx: Any, a_log: Tensor, dt_bias: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(a_log, dt_bias, alpha)
        decay = torch.empty_like(alpha, dtype=torch.float32)
        launched(0, alpha, decay)
        return decay

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        launched(0, gradient, ctx.saved_tensors, ctx.saved_tensors)
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def _apply_gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    y = self.out_norm(x.reshape(-1, x.shape[-1]))
    result: Tensor = _GatedOutput.apply(y, gate.reshape(-1, gate.shape[-1]))
    return result


def _compute_g_and_beta(
    self: Any, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    return _Decay.apply(A_log_local_cp, dt_bias_local_cp, alpha), beta.sigmoid()


def replacements() -> Iterator[Replacement]:
    """The two functions of `_GDNBase` whose compiled graphs keep less than eager code."""
    from megatron.core.ssm.gated_delta_net.common import _GDNBase

    yield Replacement(
        _GDNBase, "_apply_gated_norm", _apply_gated_norm, "norm output and 1/rms, gated output; their gradients"
    )
    yield Replacement(
        _GDNBase, "_compute_g_and_beta", _compute_g_and_beta, "g in fp32 and beta; gradients of alpha and beta"
    )
