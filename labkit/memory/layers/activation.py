"""Activation functions of an MLP: compiled kernels and the eager operations they stand for.

Sources: Megatron Core `transformer/mlp.py`, `fusions/fused_bias_{swiglu,geglu,gelu}.py`, `activations.py`.
"""

from labkit.memory.layers.linear import add_bias
from labkit.memory.tape import Tape, Value
from labkit.workload import Model, Workload


def input_width(model: Model, width: int) -> int:
    """Width of what an activation to `width` reads: gate and up of a gated unit."""
    return 2 * width if model.gated_linear_unit else width


def activation(tape: Tape, workload: Workload, rows: int, x: Value, width: int) -> Value:
    """`MLP.forward` between its linears: `x` (rows, `input_width`), without its bias, to (rows, width)."""
    biased = workload.model.add_bias_linear
    if workload.training.fuses_activation:
        return fused_activation(tape, rows, x, width, biased=biased)
    if biased:
        x = add_bias(tape, x)
    return eager_activation(tape, workload.model, rows, x, width)


def fused_activation(tape: Tape, rows: int, x: Value, width: int, *, biased: bool = False) -> Value:
    """One compiled kernel that saves its input: `SwiGLUFunction`, `GeGLUFunction`, `GeLUFunction` and with bias."""
    out = tape.like(x, "activation", (rows, width))
    bias_gradient = tape.buffer("bias_gradient", x.shape[1:])
    tape.op("fused_activation", [x], [out], saves=[x], backward_temporaries=[bias_gradient] if biased else [])
    return out


def eager_activation(tape: Tape, model: Model, rows: int, x: Value, width: int) -> Value:
    """The same without fusion: (rows, `input_width`) to (rows, width).

    A gated unit saves its input, the activated gate and the up branch with its offset, which is a tensor even where
    the offset is 0 (`glu` in `MLP.forward`).
    """
    if not model.gated_linear_unit:
        return _pointwise(tape, model, rows, x, width)
    gate = tape.view(x, "gate", (rows, width))
    up = tape.view(x, "up", (rows, width))
    tape.op("chunk", [x], [gate, up])
    activated = _pointwise(tape, model, rows, gate, width)
    offset = tape.like(x, "up_and_offset", (rows, width))
    tape.op("add_offset", [up], [offset], aliases=True)
    out = tape.like(x, "activation", (rows, width))
    tape.op("multiply", [activated, offset], [out], saves=[activated, offset])
    # The variable of the input is bound to the result only now.
    tape.hold([x])
    return out


def _pointwise(tape: Tape, model: Model, rows: int, x: Value, width: int) -> Value:
    """silu, gelu (`torch.nn.functional`) and the compiled squared ReLU save their input."""
    out = tape.like(x, model.activation_func, (rows, width))
    tape.op(model.activation_func, [x], [out], saves=[x])
    return out
