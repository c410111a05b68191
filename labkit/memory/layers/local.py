"""Megatron Core's own norms and linears (`transformer_impl: local`): what they save, gather and reduce.

Sources: `fusions/fused_layer_norm.py` and the kernels of APEX it calls, `transformer/torch_norm.py`,
`tensor_parallel/layers.py` and `mappings.py`.
Products are PyTorch's. A linear saves its input as it got it and gathers it in the global memory buffer, in forward and
again in backward.
"""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Tape, Value
from labkit.workload import Workload

_PARTIAL_ROWS = 16
"""APEX, `layer_norm_cuda_kernel.cu`, `part_size`: rows of partial fp32 sums of a weight's and a bias's gradient."""


def has_torch_norms(workload: Workload) -> bool:
    """Whether norms are PyTorch's (`WrappedTorchNorm`), not APEX's."""
    return not workload.training.software.apex or workload.model.normalization == "RMSNorm"


def local_norm(tape: Tape, workload: Workload, x: Value, rows: int, width: int) -> Value:
    """LayerNorm of `x` (rows, width) by APEX or PyTorch, RMSNorm by PyTorch: saves its input and fp32 statistics."""
    root_mean_square, torch = workload.model.normalization == "RMSNorm", has_torch_norms(workload)
    statistics = [
        tape.value(name, (rows,), "fp32", grad=False) for name in (("rstd",) if root_mean_square else ("mean", "rstd"))
    ]
    out = tape.value("norm_output", (rows, width))
    names = ("weight",) if root_mean_square else ("weight", "bias")
    gradients = [tape.buffer(f"{name}_gradient", (width,)) for name in names]
    # PyTorch's make their input contiguous for themselves, forward and backward.
    rows_copied = [tape.buffer("contiguous_input", (rows, width))] if torch and x.is_part else []
    if not torch:
        gradients += [tape.buffer(f"partial_{name}_gradients", (_PARTIAL_ROWS, width), "fp32") for name in names]
    tape.op(
        "rmsnorm" if root_mean_square else "layernorm",
        [x],
        [out, *statistics],
        saves=[x, *statistics],
        temporaries=rows_copied,
        backward_temporaries=[*rows_copied, GRADIENTS, *gradients],
    )
    return out


def local_column_parallel(
    tape: Tape, sizes: Sizes, x: Value, width: int, out_width: int, *, gathered: bool = False, biased: bool = False
) -> Value:
    """`x` (shard rows, width) times a weight split over its outputs: (tokens, out_width) (`ColumnParallelLinear`).

    With `gathered` the input already has all tokens. `biased` where it adds its bias itself, into a second tensor.
    """
    gathers = sizes.sp > 1 and not gathered
    out = tape.value("output", (sizes.tokens, out_width))
    full_gradient = tape.buffer("input_gradient", (sizes.tokens, width))
    tape.op(
        "column_parallel_matmul",
        [x],
        [out],
        saves=[x],
        temporaries=[tape.buffer("product", out.shape)] if biased else [],
        backward_temporaries=[
            *([full_gradient] if gathers else []),
            GRADIENTS,
            *([tape.buffer("bias_gradient", (out_width,))] if biased else []),
        ],
        weight=(out_width, width),
        library="aten_matmul",
        flops=2 * sizes.tokens * width * out_width,
        communicated_bytes=sizes.from_tensor_ranks(full_gradient.bytes) if gathers else 0,
    )
    return out


def local_row_parallel(tape: Tape, sizes: Sizes, x: Value, width: int) -> Value:
    """`x` (tokens, width per rank) times a weight split over its inputs, reduced to (shard rows, hidden).

    Source: `RowParallelLinear`. Under sequence parallelism to reduce is an operation of its own, whose backward gathers
    the gradient; otherwise it happens in place.
    """
    partial = tape.value("output", (sizes.tokens, sizes.hidden))
    received = sizes.from_tensor_ranks(partial.bytes)
    scatters = sizes.sp > 1
    tape.op(
        "row_parallel_matmul",
        [x],
        [partial],
        saves=[x],
        weight=(sizes.hidden, width),
        library="aten_matmul",
        flops=2 * sizes.tokens * width * sizes.hidden,
        # An all-reduce moves twice what a reduce-scatter does.
        communicated_bytes=0 if scatters else 2 * received,
    )
    if not scatters:
        return partial
    out = tape.value("output", (sizes.shard, sizes.hidden))
    tape.op("reduce_scatter", [partial], [out], communicated_bytes=received)
    # A local variable of its forward.
    tape.hold([partial])
    return out
