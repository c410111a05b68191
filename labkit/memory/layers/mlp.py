"""Dense MLP (Megatron Core `transformer/mlp.py` with `TELayerNormColumnParallelLinear`)."""

from labkit.memory.layers.linear import column_parallel, rms_norm, row_parallel, swiglu
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Model


def dense_mlp(tape: Tape, model: Model, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into fc1 to (shard rows, hidden)."""
    width = model.ffn_hidden_size // sizes.tp
    tape.parameter("linear_fc1.layer_norm_weight", (model.hidden_size,), replicated=sizes.sp > 1)
    tape.parameter("linear_fc1.weight", (2 * width, model.hidden_size))
    tape.parameter("linear_fc2.weight", (model.hidden_size, width))
    with tape.module("linear_fc1"):
        normed = rms_norm(tape, hidden, sizes.shard, model.hidden_size)
        gate_and_up = column_parallel(tape, sizes, normed, model.hidden_size, 2 * width, adapters=(width, width))
    with tape.module("@activation"):
        activation = swiglu(tape, sizes.tokens, gate_and_up, width)
    with tape.module("linear_fc2"):
        return row_parallel(tape, sizes, activation, width)
