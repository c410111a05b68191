"""Norms and linears of Transformer Engine: what they save, gather and reduce; Megatron Core's own are in `local.py`.

Sources: `transformer_engine/pytorch/module/{linear,layernorm_linear}.py`, `ops/basic/{rmsnorm,layer_norm}.py`.
A linear saves its input as it got it (the local shard under sequence parallelism) and gathers it again in backward,
whose gradient is a view in the input's shape (`dgrad.view(inp_shape)`).
A fused norm-linear behaves as the norm followed by the linear.
"""

from collections.abc import Sequence

from labkit.memory.layers.adapters import adapted, adapted_row, adapts
from labkit.memory.layers.local import local_column_parallel, local_norm, local_row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Free, Shape, Tape, Value
from labkit.workload import Model, Workload


def norm(tape: Tape, model: Model, x: Value, rows: int, width: int) -> Value:
    """The model's `normalization` of `x` (rows, width) by Transformer Engine (`TENorm`, or in the linear after it)."""
    return rms_norm(tape, x, rows, width) if model.normalization == "RMSNorm" else layer_norm(tape, x, rows, width)


def unfused_norm(tape: Tape, workload: Workload, x: Value, rows: int, width: int) -> Value:
    """A norm that is a module of its own, as the layers' implementation has it."""
    if workload.training.kernels.local:
        return local_norm(tape, workload, x, rows, width)
    return norm(tape, workload.model, x, rows, width)


def norm_parameters(tape: Tape, model: Model, width: int, prefix: str = "", *, replicated: bool) -> None:
    """The norm's weight, and its bias where it has one."""
    for name in ("weight",) if model.normalization == "RMSNorm" else ("weight", "bias"):
        tape.parameter(f"{prefix}{name}", (width,), replicated=replicated)


def layer_norm(tape: Tape, x: Value, rows: int, width: int) -> Value:
    """LayerNorm of `x` (rows, width): saves its input, the mean and the reciprocal standard deviation."""
    mean = tape.value("mean", (rows,), "fp32", grad=False)
    rstd = tape.value("rstd", (rows,), "fp32", grad=False)
    out = tape.value("norm_output", (rows, width))
    gradients = [tape.buffer(f"{name}_gradient", (width,)) for name in ("weight", "bias")]
    tape.op(
        "layernorm",
        [x],
        [out, mean, rstd],
        saves=[x, mean, rstd],
        backward_temporaries=gradients,
        views_gradient=True,
    )
    return out


def global_buffer(tape: Tape, workload: Workload, sizes: Sizes, *, experts: bool = True) -> None:
    """Rows are gathered in `mpu.get_global_memory_buffer()`: one allocation for the process, as large as the largest.

    The head gathers its input under sequence parallelism where the rank has one, the allgather dispatcher its tokens
    where the rank has `experts`, Megatron Core's own attention takes a tensor of its scores.
    """
    shape: Shape = (sizes.tokens, sizes.hidden)
    moe, senders = workload.model.mixture_of_experts, sizes.ep * sizes.etp
    if (
        experts
        and moe is not None
        and workload.training.kernels.moe_token_dispatcher_type == "allgather"
        and senders > 1
    ):
        width = moe.moe_latent_size or sizes.hidden
        # Both grow with the tokens: compared for one token.
        if not sizes.head or sizes.sp == 1 or width * senders > sizes.hidden * sizes.sp:
            shape = (sizes.shard * senders, width)
    if sizes.choices.wide_scores:
        heads = workload.model.num_attention_heads // sizes.tp
        shape = (sizes.batch * heads, sizes.sequence, sizes.sequence)
    tape.op("gather_into_global_buffer", [], [], once=tape.buffer("global_memory_buffer", shape))


def rms_norm(tape: Tape, x: Value, rows: int, width: int) -> Value:
    """RMSNorm of `x` (rows, width): saves its input and the reciprocal standard deviation."""
    rstd = tape.value("rstd", (rows,), "fp32", grad=False)
    out = tape.value("norm_output", (rows, width))
    weight_gradient = tape.buffer("weight_gradient", (width,))
    tape.op("rmsnorm", [x], [out, rstd], saves=[x, rstd], backward_temporaries=[weight_gradient], views_gradient=True)
    return out


def column_parallel(
    tape: Tape,
    sizes: Sizes,
    x: Value,
    width: int,
    out_width: int,
    *,
    gathered: bool = False,
    transposed_gradient: bool = False,
    biased: bool = False,
    adapters: Sequence[int] = (),
) -> Value:
    """`x` (shard rows, width) times a weight split over its outputs: (tokens, out_width), out_width per rank.

    With `gathered` the input already has all tokens, and so has its gradient. A `transposed_gradient` of the output is
    copied first (`grad_output_preprocess`). `biased` where it adds a bias, which Transformer Engine's product does in
    one. `adapters` are the widths of the parts that have an adapter each in the `lora` runtime.
    """
    if sizes.local:
        return local_column_parallel(tape, sizes, x, width, out_width, gathered=gathered, biased=biased)
    gathers = sizes.sp > 1 and not gathered
    if sizes.lora is not None and not adapts(tape, sizes):
        return _frozen_gemm(tape, sizes, x, out_width, gathers=gathers)
    if sizes.lora is not None:
        whole = gather_input(tape, sizes, x, width) if gathers else x
        return adapted(tape, sizes, whole, x, _frozen_gemm(tape, sizes, whole, out_width), adapters)
    out = tape.value("output", (sizes.tokens, out_width))
    full = tape.buffer("gathered_input", (sizes.tokens, width))
    full_gradient = tape.buffer("input_gradient", (sizes.tokens, width))
    copy = [tape.buffer("contiguous_gradient", out.shape)] if transposed_gradient else []
    tape.op(
        "column_parallel_gemm",
        [x],
        [out],
        saves=[x],
        temporaries=[full] if gathers else [],
        backward_temporaries=[*copy, full, full_gradient, GRADIENTS, Free("gathered_input")] if gathers else copy,
        norms_first=bool(tape.ops) and tape.ops[-1].module == tape.path and x.made == len(tape.ops) - 1,
        views_gradient=True,
        weight=(out_width, width),
        library="te_gemm",
        flops=2 * sizes.tokens * width * out_width,
        communicated_bytes=sizes.from_tensor_ranks(full.bytes) if gathers else 0,
    )
    return out


def row_parallel(tape: Tape, sizes: Sizes, x: Value, width: int) -> Value:
    """`x` (tokens, width per rank) times a weight split over its inputs, reduced to (shard rows, hidden)."""
    if sizes.local:
        return local_row_parallel(tape, sizes, x, width)
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
        backward_temporaries=[gathered, GRADIENTS, Free("gathered_gradient")] if scatters else [],
        views_gradient=True,
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


def _frozen_gemm(tape: Tape, sizes: Sizes, x: Value, out_width: int, *, gathers: bool = False) -> Value:
    """`x` (rows, width) times a frozen weight: nothing is saved, backward makes the input's gradient alone."""
    width = x.shape[1]
    out = tape.value("output", (sizes.tokens, out_width))
    full, full_gradient = (tape.buffer(name, (sizes.tokens, width)) for name in ("gathered_input", "input_gradient"))
    tape.op(
        "column_parallel_gemm",
        [x],
        [out],
        temporaries=[full] if gathers else [],
        backward_temporaries=[full_gradient, GRADIENTS] if gathers else [],
        library="te_gemm",
        flops=2 * sizes.tokens * width * out_width,
        communicated_bytes=sizes.from_tensor_ranks(full.bytes) if gathers else 0,
    )
    return out


def replicated(tape: Tape, sizes: Sizes, x: Value, width: int, out_width: int) -> Value:
    """`x` (shard rows, width) times a whole weight on every rank (`parallel_mode="duplicated"`)."""
    out = tape.value("output", (sizes.shard, out_width))
    tape.op(
        "gemm",
        [x],
        [out],
        saves=[x],
        views_gradient=True,
        weight=(out_width, width),
        library="te_gemm",
        flops=2 * sizes.shard * width * out_width,
    )
    return out


def bias_dropout_add(
    tape: Tape, workload: Workload, sizes: Sizes, branch: Value, residual: Value, *, biased: bool
) -> Value:
    """Residual addition after an optional bias and dropout (`fused_bias_dropout.py`).

    Compiled it makes the output alone, eager a tensor each step. Dropout saves a mask of one byte an element.
    """
    shape = (sizes.shard, sizes.hidden)
    dropped, fused = workload.model.hidden_dropout > 0, workload.training.kernels.bias_dropout_fusion
    steps = [tape.buffer("biased", shape)] * biased + [tape.buffer("dropped", shape)] * dropped
    gradient = [tape.buffer("bias_gradient", (sizes.hidden,))] * biased
    sum_ = tape.value("residual", shape)
    if not dropped:
        temporaries = [] if fused else steps
        tape.op(
            "bias_dropout_add",
            [branch, residual],
            [sum_],
            temporaries=temporaries,
            backward_temporaries=gradient,
            aliases=True,
        )
        return sum_
    # Two operations in one tensor: the residual's gradient is the sum's, the branch's goes through the mask.
    mask = tape.value("dropout_mask", shape, "bool", grad=False)
    tape.op(
        "dropout",
        [branch],
        [sum_, mask],
        saves=[mask],
        temporaries=[] if fused else steps,
        backward_temporaries=gradient,
    )
    out = tape.view(sum_, "residual", shape)
    tape.op("add", [sum_, residual], [out], aliases=True)
    return out


def dropout(tape: Tape, x: Value) -> Value:
    """Eager dropout of `x`, of any shape."""
    out = tape.value("dropped", x.shape)
    mask = tape.value("dropout_mask", x.shape, "bool", grad=False)
    tape.op("dropout", [x], [out, mask], saves=[mask])
    return out


def add_bias(tape: Tape, x: Value) -> Value:
    """Eager addition of a bias to `x` (rows, width)."""
    out = tape.like(x, "biased", x.shape)
    bias_gradient = tape.buffer("bias_gradient", x.shape[1:])
    tape.op("add_bias", [x], [out], backward_temporaries=[bias_gradient], aliases=True)
    return out
