"""LoRA adapters beside frozen linears, as OpenPipe ART's Megatron runtime adds them.

An adapter reads the linear's whole input, and keeps it together with its projection to the adapter's rank; its output
is added to the linear's. Parts of a fused linear (query, key and value; gate and up) have an adapter each.
"""

from collections.abc import Sequence

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value

_GROUPED_RANK_UNIT = 8
"""Elements of a rank that grouped kernels work on at once."""


def adapted(tape: Tape, sizes: Sizes, x: Value, shard: Value, base: Value, parts: Sequence[int]) -> Value:
    """`base` (rows, out) plus the adapters of its parts, of widths `parts`, that read `x` (rows, width).

    `shard` is the rank's part of `x`. Eager, the parts are laid side by side before they are added, and columns without
    an adapter get zeros; compiled, one kernel reads them where they are.
    """
    outputs = [_adapter(tape, sizes, x, shard, part, str(number)) for number, part in enumerate(parts)]
    total = tape.value("adapted_output", base.shape)
    if sizes.compiled or len(parts) == 1:
        tape.op("add_adapters", [base, *outputs], [total], aliases=True)
        tape.hold([x])
        return total
    joined = tape.value("adapter_outputs", base.shape)
    tape.op("concatenate", outputs, [joined])
    tape.op("add_adapters", [base, joined], [total], aliases=True)
    tape.hold([x, base, joined])
    return total


def adapted_row(tape: Tape, sizes: Sizes, x: Value, base: Value) -> Value:
    """`base` (shard rows, hidden) plus the adapter that reads `x` (tokens, width per rank), reduced like the base."""
    if not adapts(tape, sizes):
        return base
    output = _adapter(tape, sizes, x, x, sizes.hidden, "")
    if sizes.sp > 1:
        shard = tape.value("reduced_adapter_output", base.shape)
        tape.op("reduce_scatter", [output], [shard])
        output = shard
    total = tape.value("adapted_output", base.shape)
    tape.op("add_adapter", [base, output], [total], aliases=True)
    return total


def adapted_groups(tape: Tape, sizes: Sizes, x: Value, base: Value, experts: int) -> Value:
    """`base` (rows, out) of a grouped linear plus an adapter for each of its experts.

    Grouped kernels need ranks that are multiples of 8, so the factors are padded in copies that backward keeps.
    """
    if not adapts(tape, sizes):
        return base
    (rows, width), out_width = x.shape, base.shape[1]
    rank = -(-sizes.adapter_rank // _GROUPED_RANK_UNIT) * _GROUPED_RANK_UNIT
    tape.parameter("adapter.A", (experts, sizes.adapter_rank, width), expert=True, trainable=True)
    tape.parameter("adapter.B", (experts, out_width, sizes.adapter_rank), expert=True, trainable=True)
    factors = [
        tape.value("padded_A", (experts, rank, width), grad=False),
        tape.value("padded_B", (experts, out_width, rank), grad=False),
    ]
    down = tape.like(x, "adapter_down", (rows, rank))
    tape.op("grouped_adapter_a", [x], [*factors, down], saves=[x, *factors], library="te_grouped_gemm")
    output = tape.like(x, "adapter_output", base.shape)
    tape.op("grouped_adapter_b", [down], [output], saves=[down], library="te_grouped_gemm")
    total = tape.like(x, "adapted_output", base.shape)
    tape.op("add_adapter", [base, output], [total], aliases=True)
    tape.hold([base, output])
    return total


def _adapter(tape: Tape, sizes: Sizes, x: Value, shard: Value, out_width: int, name: str) -> Value:
    """`x` (rows, width) times A and B: (rows, out_width).

    Keeps x A, and its input: whole, or under `regather` the rank's shard, which backward gathers again.
    """
    rank, (rows, width) = sizes.adapter_rank, x.shape
    tape.parameter(f"adapter{name}.A", (rank, width), trainable=True)
    tape.parameter(f"adapter{name}.B", (out_width, rank), trainable=True)
    regathers = sizes.lora is not None and sizes.lora.regather and shard is not x
    source, whole = (shard, [tape.buffer("gathered_input", x.shape)]) if regathers else (x, [])
    down = tape.value("adapter_down", (rows, rank))
    tape.op(
        "adapter_a",
        [source],
        [down],
        saves=[source],
        backward_temporaries=whole,
        weight=(rank, width),
        library="aten_matmul",
    )
    out = tape.value("adapter_output", (rows, out_width))
    unscaled = tape.buffer("unscaled_output", (rows, out_width))
    tape.op(
        "adapter_b",
        [down],
        [out],
        saves=[down],
        temporaries=[] if sizes.compiled else [unscaled],
        weight=(out_width, rank),
        library="aten_matmul",
    )
    return out


def adapts(tape: Tape, sizes: Sizes) -> bool:
    """Whether the linear that is recorded has adapters."""
    return sizes.lora is not None and sizes.lora.adapts(tape.module_path.rpartition(".")[2])
