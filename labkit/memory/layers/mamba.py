"""Mamba 2 (Megatron Core `ssm/mamba_mixer.py`, `mamba_ssm` `ops/triton/ssd_combined.py` 2.3.2), its training path.

Per rank: h heads of width p share g groups of B and C, a state of (p, n) a head. One projection makes z, x, B, C and dt
side by side; x, B and C pass a short causal convolution, and a scan in chunks of 128 tokens carries states from chunk
to chunk. Its output is gated by z inside and normed by groups outside, before the output projection. All of it but the
norm is one autograd function that keeps its packed input and the output before the gate, and makes the rest again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from labkit.memory.layers.exchange import heads_for_tokens, in_order, tokens_for_heads
from labkit.memory.layers.inputs import batch_tensor
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Buffer, Free, Shape, Tape, Value
from labkit.workload import Model, Workload
from labkit.workload.gpu import GPUS, Gpu

CHUNK = 128
"""Tokens of one chunk (`MambaMixer.__init__`, `chunk_size`)."""
CONVOLUTION_WIDTH = 4
"""`MambaMixer.__init__`, `d_conv`."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """Sizes of one rank's scan."""

    batch: int
    chunks: int
    """Of one sequence."""
    heads: int
    width: int
    groups: int
    state: int
    tokens: int
    multiprocessors: int

    @classmethod
    def of(cls, workload: Workload, sizes: Sizes, ranks: int) -> Self:
        """All tokens of `ranks` context-parallel ranks, one's share of their heads; at least one group."""
        model = workload.model
        if model.mamba is None:
            raise ValueError("a Mamba layer needs mamba")
        return cls(
            batch=sizes.batch,
            chunks=-(-sizes.sequence * ranks // CHUNK),
            heads=model.mamba_heads // sizes.tp // ranks,
            width=model.mamba.mamba_head_dim,
            groups=max(model.mamba.mamba_num_groups // sizes.tp // ranks, 1),
            state=model.mamba.mamba_state_dim,
            tokens=sizes.tokens * ranks,
            multiprocessors=GPUS[workload.training.gpu].multiprocessors,
        )

    @property
    def inner(self) -> int:
        """Columns of x, and of z."""
        return self.heads * self.width

    @property
    def convolved(self) -> int:
        """Columns of x, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def packed(self) -> int:
        return self.inner + self.convolved + self.heads

    @property
    def per_head(self) -> tuple[int, ...]:
        """A number for each token of each head, in whole chunks."""
        return self.batch, self.heads, self.chunks, CHUNK

    @property
    def states(self) -> tuple[int, ...]:
        return self.batch, self.chunks, self.heads, self.width, self.state

    @property
    def products(self) -> tuple[int, ...]:
        """C B^T within each chunk and group."""
        return self.batch, self.chunks, self.groups, CHUNK, CHUNK

    @property
    def splits(self) -> int:
        """Parts in which a group's heads add up their gradients: enough programs for every multiprocessor.

        `nsplits` of `_chunk_state_bwd_db`, `_chunk_scan_bwd_dC` and `_chunk_scan_bwd_dcb`.
        """
        of_group = self.heads // self.groups
        each = -(-self.batch * self.chunks * self.heads // self.multiprocessors)
        smaller = (each + of_group - abs(each - of_group)) // 2
        return -(-of_group // smaller)


def mamba(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into the projection to (shard rows, hidden)."""
    local, scan = _Scan.of(workload, sizes, 1), _Scan.of(workload, sizes, sizes.cp)
    _parameters(tape, workload.model, sizes, local)
    interleaved = workload.batch.micro_batch_size > 1
    with tape.module("in_proj"):
        normed = norm(tape, workload.model, hidden, sizes.shard, sizes.hidden)
        # The gradient comes from the reordered copy unless an exchange lies between.
        transposed = interleaved and sizes.cp == 1
        projected = column_parallel(tape, sizes, normed, sizes.hidden, local.packed, transposed_gradient=transposed)
    packed = projected if sizes.cp == 1 else _own_heads(tape, sizes, local, scan, projected)
    if interleaved:
        exchanged, packed = packed, _reordered(tape, packed)
    used = _used_parameters(tape, sizes, scan) + ([batch_tensor(tape, sizes, "seq_idx")] if sizes.packed else [])
    out = _convolution_and_scan(tape, scan, packed, used)
    if interleaved:
        out = _reordered(tape, out)
    if sizes.cp > 1:
        order = _places(tape, [scan.tokens]) if sizes.packed else []
        out = heads_for_tokens(tape, sizes, out, order)
    with tape.module("norm"):
        out = _group_norm(tape, local, out, GPUS[workload.training.gpu])
    with tape.module("out_proj"):
        output = row_parallel(tape, sizes, out, local.inner)
    # A local variable of MambaMixer.forward.
    tape.hold([exchanged if interleaved else packed])
    return output


def _own_heads(tape: Tape, sizes: Sizes, local: _Scan, scan: _Scan, projected: Value) -> Value:
    """`MambaContextParallel.pre_conv_ssm`: z, x, B, C and dt of this rank's heads, of all tokens in order.

    A group of B and C goes to every rank that has heads of it.
    """
    group, repeats = local.groups * local.state, scan.groups * sizes.cp // local.groups
    widths = {"z": local.inner, "x": local.inner, "B": group, "C": group, "dt": local.heads}
    parts = [tape.view(projected, name, (local.tokens, width)) for name, width in widths.items()]
    tape.op("split", [projected], parts)
    received = []
    for part in parts:
        copied = part
        if part.name in ("B", "C") and repeats > 1:
            copied = tape.value(part.name, (local.tokens, group * repeats))
            tape.op("repeat", [part], [copied])
        received.append(tokens_for_heads(tape, sizes, copied, joined=True))
    joined = tape.value("joined", (scan.tokens, scan.packed))
    tape.op("cat", received, [joined], aliases=True)
    order = _places(tape, [sizes.tokens] * sizes.cp) if sizes.packed else []
    ordered = in_order(tape, joined, order)
    # Local variables of the two methods.
    tape.hold([*received, projected])
    return ordered


def _places(tape: Tape, rows: Sequence[int]) -> list[Value]:
    """Which rows of packed sequences ranks have (`thd_get_partitioned_indices`), in tensors of so many."""
    places = [tape.value("index", (count,), "int32", grad=False) for count in rows]
    tape.op("partition", [], places)
    return places


def _parameters(tape: Tape, model: Model, sizes: Sizes, scan: _Scan) -> None:
    """In the order `MambaMixer` registers them, its own before its submodules'; all in the training precision."""
    tape.parameter("conv1d_weight", (scan.convolved, 1, CONVOLUTION_WIDTH))
    tape.parameter("conv1d_bias", (scan.convolved,))
    for name in ("dt_bias", "A_log", "D"):
        tape.parameter(name, (scan.heads,))
    norm_parameters(tape, model, sizes.hidden, "in_proj.layer_norm_", replicated=sizes.sp > 1)
    tape.parameter("in_proj.weight", (scan.packed, sizes.hidden))
    tape.parameter("norm.weight", (scan.inner,))
    tape.parameter("out_proj.weight", (sizes.hidden, scan.inner))


def _reordered(tape: Tape, x: Value) -> Value:
    """A copy with one sequence after the other, or interleaved again."""
    copy = tape.value(x.name, x.shape)
    tape.op("contiguous", [x], [copy], aliases=True)
    return copy


def _used_parameters(tape: Tape, sizes: Sizes, scan: _Scan) -> list[Value]:
    """Parameters as the scan takes them: exp(A_log), its negative and dt_bias in fp32.

    Under context parallelism also the convolution's of this rank's heads, put together.
    """
    shapes: dict[str, tuple[Shape, str]] = dict.fromkeys(("exp_A_log", "A", "dt_bias"), ((scan.heads,), "fp32"))
    if sizes.cp > 1:
        shapes["conv1d_weight"] = (scan.convolved, 1, CONVOLUTION_WIDTH), tape.dtype
        shapes["conv1d_bias"] = (scan.convolved,), tape.dtype
    used = [tape.value(name, shape, dtype, grad=False) for name, (shape, dtype) in shapes.items()]
    tape.op("use_parameters", [], used)
    return used


def _convolution_and_scan(tape: Tape, scan: _Scan, packed: Value, used: Sequence[Value]) -> Value:
    """`MambaSplitConv1dScanCombinedFn` of z, x, B, C and dt (tokens, packed): the gated output (tokens, inner)."""
    mixed = tape.value("convolved", (scan.tokens, scan.convolved), grad=False)
    # The convolution takes rows whose distance is a multiple of 8 (`ensure_stride`).
    dense = [] if scan.packed % 8 == 0 else [tape.buffer("dense", mixed.shape)]
    tape.op("causal_conv1d", [packed], [mixed], temporaries=dense)
    sums = [tape.value(name, scan.per_head, "fp32", grad=False) for name in ("dA_cumsum", "dt")]
    passed = tape.value("states", scan.states, grad=False)
    final = tape.value("final_states", (scan.batch, scan.heads, scan.width, scan.state), "fp32", grad=False)
    tape.op(
        "chunk_states",
        [packed, mixed],
        [*sums, passed, final],
        temporaries=[tape.buffer("chunk_states", scan.states, "fp32")],
    )
    scanned = (scan.tokens, scan.inner)
    gated, before_gate = tape.value("gated", scanned), tape.value("scanned", scanned, grad=False)
    tape.op(
        "chunk_scan",
        [packed, *used],
        [gated, before_gate],
        saves=[packed, before_gate, *used],
        temporaries=[tape.buffer("products", scan.products, "fp32")],
        backward_temporaries=_backward(tape, scan),
        flops=_flops(scan),
    )
    tape.hold([mixed, *sums, passed, final])
    return gated


def _flops(scan: _Scan) -> int:
    """Products of forward: C B^T; that times x, states times C and B^T times x."""
    return 2 * scan.tokens * (CHUNK * scan.groups * scan.state + scan.inner * (CHUNK + 2 * scan.state))


def _backward(tape: Tape, scan: _Scan) -> list[Buffer | Free]:
    """`MambaSplitConv1dScanCombinedFn.backward` and `_mamba_chunk_scan_combined_bwd`, in their order.

    They make the convolution, chunk sums, products and states again, pass the states' gradient from chunk to chunk in
    fp32, and add up what heads of a group and programs of a kernel have in parts.
    """

    def fp32(name: str, *shape: int) -> Buffer:
        return tape.buffer(name, shape, "fp32")

    batch, chunks, *product = scan.products
    return [
        tape.buffer("convolved", (scan.tokens, scan.convolved)),
        GRADIENTS,
        tape.buffer("convolved_gradient", (scan.tokens, scan.convolved)),
        tape.buffer("dt_in", (scan.tokens, scan.heads)),
        fp32("dA_cumsum", *scan.per_head),
        fp32("dt", *scan.per_head),
        fp32("products", *scan.products),
        fp32("chunk_states", *scan.states),
        fp32("states", *scan.states),
        fp32("final_states", scan.batch, scan.heads, scan.width, scan.state),
        Free("chunk_states"),
        tape.buffer("gradient_behind_gate", (scan.tokens, scan.inner)),
        fp32("states_gradient", *scan.states),
        tape.buffer("passed_gradient", scan.states),
        tape.buffer("narrow_states", scan.states),
        fp32("dA_parts", scan.batch, scan.heads, scan.chunks, -(-scan.width * scan.state // 64)),
        Free("states"),
        Free("states_gradient"),
        Free("dA_parts"),
        fp32("ddt", *scan.per_head),
        fp32("ddA_next", *scan.per_head),
        *_summed(tape, "dB", (scan.tokens,), scan.splits, (scan.groups, scan.state)),
        fp32("ddA_previous", *scan.per_head),
        *_summed(tape, "dC", (scan.tokens,), scan.splits, (scan.groups, scan.state)),
        *_summed(tape, "products_gradient", (batch, chunks), scan.splits, tuple(product)),
        fp32("ddA_summed", *scan.per_head),
        *_summed(tape, "ddA", scan.per_head[:3], CHUNK // 32, (CHUNK,)),
    ]


def _summed(
    tape: Tape, name: str, outer: tuple[int, ...], parts: int, inner: tuple[int, ...]
) -> tuple[Buffer, Buffer, Free]:
    """A gradient in `parts`, and their sum."""
    return (
        tape.buffer(f"{name}_parts", (*outer, parts, *inner), "fp32"),
        tape.buffer(name, (*outer, *inner), "fp32"),
        Free(f"{name}_parts"),
    )


def _group_norm(tape: Tape, scan: _Scan, x: Value, gpu: Gpu) -> Value:
    """`mamba_ssm` `layernorm_gated.RMSNorm` without a gate: one norm a token and group, a Triton kernel.

    The weight's gradient comes in parts, one a program of its backward (`_layer_norm_bwd`).
    """
    rstd = tape.value("rstd", (scan.tokens * scan.groups,), "fp32", grad=False)
    out = tape.value("normed", x.shape)
    block = 1 << (scan.inner // scan.groups - 1).bit_length()
    warps = min(max(min(block, 65536 // 2) // 256, 1), 8)
    programs = -(-gpu.multiprocessors * -(-4 // warps) // scan.groups)
    parts = tape.buffer("weight_gradient_parts", (programs, scan.inner), "fp32")
    tape.op("group_norm", [x], [out, rstd], saves=[x, rstd], backward_temporaries=[parts])
    return out
