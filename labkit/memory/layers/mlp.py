"""Dense MLP (Megatron Core `transformer/mlp.py`; of Transformer Engine with `TELayerNormColumnParallelLinear`)."""

from labkit.memory.layers.activation import activation, input_width
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Model, Workload


def dense_mlp(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into fc1 to (shard rows, hidden), without bias.

    Megatron Core's own layers have the norm before them.
    """
    model = workload.model
    width = model.ffn_hidden_size // sizes.tp
    fc1_width = input_width(model, width)
    _parameters(tape, model, sizes, width, fc1_width)
    with tape.module("linear_fc1"):
        normed = hidden if sizes.local else norm(tape, model, hidden, sizes.shard, model.hidden_size)
        adapted = (width, width) if model.gated_linear_unit else (width,)
        intermediate = column_parallel(tape, sizes, normed, model.hidden_size, fc1_width, adapters=adapted)
    with tape.module("@activation"):
        activated = activation(tape, workload, sizes.tokens, intermediate, width)
    with tape.module("linear_fc2"):
        return row_parallel(tape, sizes, activated, width)


def _parameters(tape: Tape, model: Model, sizes: Sizes, width: int, fc1_width: int) -> None:
    if not sizes.local:
        norm_parameters(tape, model, model.hidden_size, "linear_fc1.layer_norm_", replicated=sizes.sp > 1)
    tape.parameter("linear_fc1.weight", (fc1_width, model.hidden_size))
    if model.add_bias_linear:
        tape.parameter("linear_fc1.bias", (fc1_width,))
    tape.parameter("linear_fc2.weight", (model.hidden_size, width))
    if model.add_bias_linear:
        tape.parameter("linear_fc2.bias", (model.hidden_size,), replicated=sizes.sp > 1)
