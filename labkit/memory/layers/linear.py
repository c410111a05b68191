"""Norms and linears of Transformer Engine: what they save, gather and reduce.

Sources: `transformer_engine/pytorch/module/{linear,layernorm_linear}.py`, `ops/basic/rmsnorm.py`.
A linear saves its input as it got it (the local shard under sequence parallelism) and gathers it again in backward.
A fused norm-linear behaves as the norm followed by the linear.
"""

from collections.abc import Sequence

from labkit.memory.layers.adapters import adapted, adapted_row
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def global_buffer(tape: Tape, shape: tuple[int, int]) -> Value:
    """Rows gathered in `mpu.get_global_memory_buffer()`: one allocation for the process, as large as the largest."""
    gathered = tape.value("gathered_input", shape, grad=False)
    gathered.module = "global_memory_buffer"
    tape.op("gather_into_global_buffer", [], [gathered], caches=1)
    return gathered


def rms_norm(tape: Tape, x: Value, rows: int, width: int) -> Value:
    """RMSNorm of `x` (rows, width): saves its input and the reciprocal standard deviation."""
    rstd = tape.value("rstd", (rows,), "fp32", grad=False)
    out = tape.value("norm_output", (rows, width))
    weight_gradient = tape.buffer("weight_gradient", (width,))
    tape.op("rmsnorm", [x], [out, rstd], saves=[x, rstd], backward_temporaries=[weight_gradient])
    return out


def column_parallel(
    tape: Tape,
    sizes: Sizes,
    x: Value,
    width: int,
    out_width: int,
    *,
    gathered: bool = False,
    adapters: Sequence[int] = (),
) -> Value:
    """`x` (shard rows, width) times a weight split over its outputs: (tokens, out_width), out_width per rank.

    With `gathered` the input already has all tokens, and so has its gradient. `adapters` are the widths of the parts
    that have an adapter each in the `lora` runtime.
    """
    if sizes.lora is not None:
        whole = gather_input(tape, sizes, x, width) if sizes.sp > 1 and not gathered else x
        return adapted(tape, sizes, whole, x, _frozen_gemm(tape, sizes, whole, out_width), adapters)
    out = tape.value("output", (sizes.tokens, out_width))
    gathers = sizes.sp > 1 and not gathered
    full = tape.buffer("gathered_input", (sizes.tokens, width))
    full_gradient = tape.buffer("input_gradient", (sizes.tokens, width))
    tape.op(
        "column_parallel_gemm",
        [x],
        [out],
        saves=[x],
        temporaries=[full] if gathers else [],
        backward_temporaries=[full, full_gradient] if gathers else [],
        weight=(out_width, width),
        library="te_gemm",
        flops=2 * sizes.tokens * width * out_width,
        communicated_bytes=sizes.from_tensor_ranks(full.bytes) if gathers else 0,
    )
    return out


def row_parallel(tape: Tape, sizes: Sizes, x: Value, width: int) -> Value:
    """`x` (tokens, width per rank) times a weight split over its inputs, reduced to (shard rows, hidden)."""
    out = tape.value("output", (sizes.shard, sizes.hidden))
    partial = tape.buffer("partial_output", (sizes.tokens, sizes.hidden))
    gathered = tape.buffer("gathered_gradient", (sizes.tokens, sizes.hidden))
    scatters = sizes.sp > 1
    tape.op(
        "row_parallel_gemm",
        [x],
        [out],
        saves=[x] if sizes.trains else [],
        temporaries=[partial] if scatters else [],
        backward_temporaries=[gathered] if scatters else [],
        weight=(sizes.hidden, width) if sizes.trains else None,
        library="te_gemm",
        flops=2 * sizes.tokens * width * sizes.hidden,
        # An all-reduce moves twice what a reduce-scatter does.
        communicated_bytes=sizes.from_tensor_ranks(partial.bytes) * (1 if scatters else 2),
    )
    return adapted_row(tape, sizes, x, out)


def gather_input(tape: Tape, sizes: Sizes, x: Value, width: int) -> Value:
    """All tokens of a norm's output that a fused linear returns beside its own (`return_layernorm_output_gathered`).

    The linear keeps the shard, frozen or not.
    """
    full = tape.value("gathered_input", (sizes.tokens, width))
    tape.op("gather", [x], [full], saves=[x], communicated_bytes=sizes.from_tensor_ranks(full.bytes))
    return full


def _frozen_gemm(tape: Tape, sizes: Sizes, x: Value, out_width: int) -> Value:
    """`x` (tokens, width) times a frozen weight: nothing is saved, backward makes the input's gradient alone."""
    out = tape.value("output", (sizes.tokens, out_width))
    tape.op("column_parallel_gemm", [x], [out], library="te_gemm", flops=2 * sizes.tokens * x.shape[1] * out_width)
    return out


def replicated(tape: Tape, sizes: Sizes, x: Value, width: int, out_width: int) -> Value:
    """`x` (shard rows, width) times a whole weight on every rank (`parallel_mode="duplicated"`)."""
    out = tape.value("output", (sizes.shard, out_width))
    tape.op(
        "gemm",
        [x],
        [out],
        saves=[x],
        weight=(out_width, width),
        library="te_gemm",
        flops=2 * sizes.shard * width * out_width,
    )
    return out


def add(tape: Tape, sizes: Sizes, branch: Value, residual: Value) -> Value:
    """Residual addition (`bias_dropout_add` without dropout): saves nothing, passes its gradient on."""
    out = tape.value("residual", (sizes.shard, sizes.hidden))
    tape.op("bias_dropout_add", [branch, residual], [out], aliases=True)
    return out


def swiglu(tape: Tape, rows: int, x: Value, width: int) -> Value:
    """SwiGLU of `x` (rows, 2 width): a compiled kernel that saves its input (`fused_bias_swiglu.SwiGLUFunction`)."""
    out = tape.value("activation", (rows, width))
    tape.op("swiglu", [x], [out], saves=[x])
    return out
