"""The `mamba_ssm` package, which needs a CUDA build, as functions that allocate what its Triton code does.

Megatron Core's `MambaMixer` takes from it the gated norm (`ops/triton/layernorm_gated.RMSNorm`) and the chunked scan
of training, convolution included (`ops/triton/ssd_combined.mamba_split_conv1d_scan_combined`, with `ssd_chunk_state`,
`ssd_state_passing`, `ssd_bmm` and `ssd_chunk_scan`; 2.3.2). Each function here allocates the same tensors in the same
order and lets them go at the same moments, for the calls the mixer makes: one D a head, no sequence index, gate inside
the scan, norm after it. Buffers of a number a head (the gradients of A, D and dt_bias) are single rounded blocks.
"""

import math
from collections.abc import Iterator
from sys import modules
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.work import launched

_TAPS = 4
"""Width of the convolution (`MambaMixer.d_conv`)."""
_FUSED_BYTES = 65536
"""`_layer_norm_fwd`: of one row of a group, at most."""


class RMSNorm(torch.nn.Module):
    """`layernorm_gated.RMSNorm` without a gate: norms each group of `group_size` columns."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.group_size = group_size or hidden_size
        torch.nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normed copy of `x` (..., hidden)."""
        result: Tensor = _GroupNorm.apply(x, self.weight, self.group_size)
        return result


class _GroupNorm(torch.autograd.Function):
    """`layernorm_gated.LayerNormFn`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group_size: int) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        rstd = torch.empty(rows.shape[0] * (rows.shape[1] // group_size), dtype=torch.float32, device=x.device)
        launched(0, rows, y)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.shape, ctx.group_size = x.shape, group_size
        return y.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, _ = ctx.saved_tensors
        columns, group = rows.shape[1], ctx.group_size
        dx = torch.empty_like(rows)
        launched(0, rows, rows, dx)
        # A program of few warps leaves room for others on its multiprocessor.
        block = min(_FUSED_BYTES // rows.element_size(), 1 << (group - 1).bit_length())
        warps = min(max(block // 256, 1), 8)
        programs = math.ceil(_multiprocessors() * math.ceil(4 / warps) / (columns // group))
        parts = torch.empty(programs, columns, dtype=torch.float32, device=rows.device)
        return dx.reshape(ctx.shape), parts.sum(0).to(weight.dtype), None


def _multiprocessors() -> int:
    count: int = torch.cuda.get_device_properties(0).multi_processor_count
    return count


def _dense(x: Tensor) -> Tensor:
    """`ssd_combined.ensure_stride`: the convolution's kernel takes rows whose distance is a multiple of 8."""
    return x if x.stride(1) % 8 == 0 else x.contiguous()


def _convolved(x: Tensor) -> Tensor:
    """`causal_conv1d_fwd_function` over channels: its input as it is, or a dense copy while it runs."""
    output = torch.empty_like(_dense(x))
    launched(2 * _TAPS * x.numel(), x, output)
    return output


class _Chunks:
    """Makes the scan's tensors, which are counted in chunks: `dt` is (batch, sequence, heads)."""

    def __init__(self, dt: Tensor, head_width: int, groups: int, state: int, chunk: int) -> None:
        self.batch, self.sequence, self.heads = dt.shape
        self.chunks = math.ceil(self.sequence / chunk)
        self.chunk, self.width, self.groups, self.state = chunk, head_width, groups, state
        self.device = dt.device
        heads_of_group = self.heads // groups
        each = max(min(math.ceil(self.batch * self.chunks * self.heads / _multiprocessors()), heads_of_group), 1)
        self.splits = math.ceil(heads_of_group / each)
        """Parts in which a group's heads add up their gradients of B and C (`nsplits`)."""

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def per_head(self, *more: int) -> Tensor:
        """A number for each token of each head, in chunks."""
        return self.tensor(self.batch, self.heads, self.chunks, *more, self.chunk)

    def states(self, dtype: torch.dtype) -> Tensor:
        """The state before or after each chunk."""
        return self.tensor(self.batch, self.chunks, self.heads, self.width, self.state, dtype=dtype)

    def final_states(self) -> Tensor:
        return self.tensor(self.batch, self.heads, self.width * self.state)

    def products(self, *split: int) -> Tensor:
        """C B^T within each chunk and group (`_bmm_chunk_fwd`)."""
        return self.tensor(self.batch, self.chunks, *split, self.groups, self.chunk, self.chunk)

    def per_head_parts(self, rows: int) -> Tensor:
        """What programs of `rows` tokens each leave of a number a head."""
        return self.tensor(math.ceil(self.chunk / rows), self.batch, self.chunks, self.heads, 1)

    def state_products(self) -> int:
        """FLOPs of one product of every token and head with a state: width x state."""
        return 2 * self.batch * self.sequence * self.heads * self.width * self.state

    def chunk_products(self) -> int:
        """FLOPs of one product of every token and head with a chunk's: chunk x width."""
        return 2 * self.batch * self.sequence * self.heads * self.chunk * self.width

    def group_products(self) -> int:
        """FLOPs of C B^T, or of its like for a gradient: chunk x state, each token and group."""
        return 2 * self.batch * self.sequence * self.groups * self.chunk * self.state

    def group_gradient(self) -> Tensor:
        """The gradient of B or C in fp32, added up over the splits."""
        return self.tensor(self.batch, self.sequence, self.splits, self.groups, self.state).sum(2)


class _SplitConvolutionScan(torch.autograd.Function):
    """`ssd_combined.MambaSplitConv1dScanCombinedFn`: saves its packed input and the scan's output before the gate.

    Of packed sequences also the number of each token's.
    """

    @staticmethod
    def forward(
        ctx: Any,
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        chunk_size: int,
        headdim: int,
        ngroups: int,
        seq_idx: Tensor | None,
    ) -> Tensor:
        inner = D.shape[0] * headdim
        convolved = conv1d_weight.shape[0]
        _, mixed, dt = torch.split(zxbcdt, [inner, convolved, D.shape[0]], dim=-1)
        mixed = _convolved(mixed)
        chunks = _Chunks(dt, headdim, ngroups, (convolved - inner) // ngroups // 2, chunk_size)
        dA_cumsum, dt_out = chunks.per_head(), chunks.per_head()
        states = chunks.states(torch.float32)
        passed, final = chunks.states(zxbcdt.dtype), chunks.final_states()
        launched(0, dt, dA_cumsum, dt_out)  # _chunk_cumsum_fwd
        launched(chunks.state_products(), mixed, dt_out, dA_cumsum, states)  # _chunk_state_fwd
        launched(0, states, dA_cumsum, passed, final)  # _state_passing_fwd
        del states
        products = chunks.products()
        launched(chunks.group_products(), mixed, products)  # _bmm_chunk_fwd
        shape = (chunks.batch, chunks.sequence, inner)
        out, out_x = (chunks.tensor(*shape, dtype=zxbcdt.dtype) for _ in range(2))
        # _chunk_scan_fwd reads the gate as well.
        flops = chunks.state_products() + chunks.chunk_products()
        launched(flops, products, mixed, dt_out, dA_cumsum, passed, out, out, out_x)
        del products
        ctx.save_for_backward(zxbcdt, conv1d_weight, conv1d_bias, out_x, A, D, dt_bias, seq_idx)
        ctx.sizes = (headdim, ngroups, chunks.state, chunk_size)
        # Everything a chunk has is alive until here.
        del mixed, dA_cumsum, dt_out, passed, final
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        zxbcdt, conv1d_weight, conv1d_bias, _, A, D, dt_bias, _ = ctx.saved_tensors
        inner, convolved = dout.shape[-1], conv1d_weight.shape[0]
        _, packed, dt = torch.split(zxbcdt, [inner, convolved, D.shape[0]], dim=-1)
        mixed = _convolved(packed)
        dzxbcdt, dmixed = torch.empty_like(zxbcdt), torch.empty_like(packed)
        dA, dD, ddt_bias = _scan_backward(_Chunks(dt, *ctx.sizes), dt, dout, A, D, dt_bias)
        # Convolution (`causal_conv1d_bwd_function`): its input's gradient goes into dzxbcdt.
        dense = [_dense(packed), _dense(dmixed), _dense(dzxbcdt[..., inner : inner + convolved])]
        dweight = torch.zeros_like(conv1d_weight, dtype=torch.float32)
        dbias = torch.zeros_like(conv1d_bias, dtype=torch.float32)
        dweight, dbias = dweight.type_as(conv1d_weight), dbias.type_as(conv1d_bias)
        launched(2 * 2 * _TAPS * packed.numel(), packed, dmixed, packed)
        del dense, mixed
        return dzxbcdt, dweight, dbias, ddt_bias, dA, dD, None, None, None, None


def _scan_backward(
    chunks: _Chunks, dt: Tensor, dout: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`_mamba_chunk_scan_combined_bwd`: makes chunk sums, products and states again; gradients of A, D and dt_bias."""
    dt_in = dt.clone()
    dA_cumsum, dt_out = chunks.per_head(), chunks.per_head()
    products = chunks.products()
    states = chunks.states(torch.float32)
    launched(0, dt_in, dA_cumsum, dt_out)
    launched(chunks.group_products(), products)
    launched(chunks.state_products(), dt_out, dA_cumsum, states)
    launched(0, states, states)
    states, final = chunks.states(torch.float32), chunks.final_states()
    # _chunk_scan_bwd_dz: the gradient behind the gate, and that of D.
    parts = chunks.per_head_parts(32)
    dout_x = torch.empty_like(dout)
    dD = parts.sum(dim=(0, 1, 2)).to(D.dtype)[:, 0]
    launched(0, [dout] * 5, parts)
    del parts
    # _chunk_scan_bwd_dstates, _state_passing_bwd: the latter hands on both in the compute dtype.
    dstates = chunks.states(torch.float32)
    narrow_dstates, narrow_states = (chunks.states(dout.dtype) for _ in range(2))
    passing = chunks.tensor(chunks.batch, chunks.heads, chunks.chunks, math.ceil(chunks.width * chunks.state / 64))
    launched(chunks.state_products(), dout_x, dA_cumsum, dstates)
    launched(0, dstates, states, narrow_dstates, narrow_states, passing)
    dA_chunk = passing.sum(dim=-1)
    del states, dstates, passing
    # _chunk_scan_chunk_state_bwd_dx
    dD_again = chunks.per_head_parts(32)
    ddt = chunks.per_head()
    launched(chunks.state_products() + chunks.chunk_products(), products, narrow_dstates, [dout_x] * 3, ddt)
    dD_again = dD_again.sum(dim=(0, 1, 2)).sum(dim=-1).to(D.dtype)
    ddA_next = chunks.per_head()
    launched(2 * chunks.state_products(), [dout_x] * 2, narrow_states, narrow_dstates)  # dB and dC
    dB = chunks.group_gradient()
    ddA_previous = chunks.per_head()
    dC = chunks.group_gradient()
    launched(chunks.chunk_products(), [dout_x] * 2, products)  # _chunk_scan_bwd_dcb
    dproducts = chunks.products(chunks.splits).sum(2)
    launched(2 * chunks.group_products(), [dproducts] * 2, dB, dC)  # _bmm_chunk_bwd, for B and for C
    summed = ddA_previous.flip([-1]).cumsum(dim=-1).flip([-1])
    ddA = chunks.per_head(math.ceil(chunks.chunk / 32)).sum(dim=3)
    ddA += ddA_next + summed
    ddt_bias, dA = torch.empty_like(dt_bias, dtype=torch.float32), torch.empty_like(A, dtype=torch.float32)
    del dt_in, dA_cumsum, dt_out, products, final, dout_x, narrow_dstates, narrow_states, dA_chunk, dD_again
    del ddt, ddA_next, dB, ddA_previous, dC, dproducts, summed, ddA
    return dA, dD, ddt_bias


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    headdim: int | None = None,
    ngroups: int = 1,
    seq_idx: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Convolution and gated scan of (batch, sequence, z + x + B + C + dt) to (batch, sequence, z)."""
    result: Tensor = _SplitConvolutionScan.apply(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, headdim, ngroups, seq_idx
    )
    return result


def mamba_chunk_scan_combined(*args: Any, **kwargs: Any) -> Any:
    """The scan alone, of inference and of training without the memory-efficient path."""
    raise NotImplementedError("the trace has no shapes for mamba_ssm's mamba_chunk_scan_combined")


def replacements() -> Iterator[Replacement]:
    """The modules of `mamba_ssm` that Megatron Core imports."""
    contents: dict[str, dict[str, Any]] = {
        "mamba_ssm": {"__path__": []},
        "mamba_ssm.ops": {"__path__": []},
        "mamba_ssm.ops.triton": {"__path__": []},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
            "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        yield Replacement(modules, name, module, NOTHING)
