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


def weighted_activation(tape: Tape, workload: Workload, x: Value, weights: Value, width: int) -> Value:
    """Of routed rows, times their probabilities (`bias_act_func` in `TEGroupedMLP.forward`)."""
    model, kernels, rows = workload.model, workload.training.kernels, x.shape[0]
    one_kernel = model.activation_func == "squared_relu" and kernels.use_fused_weighted_squared_relu
    if workload.training.fuses_activation or one_kernel:
        out = tape.like(x, "activation", (rows, width))
        tape.op("weighted_activation", [x, weights], [out], saves=[x, weights])
        return out
    activated = eager_activation(tape, model, rows, x, width)
    # Probabilities in fp32 make the product and, before they are cast and summed, both factors' gradients fp32.
    product = tape.value("weighted", activated.shape, weights.dtype, routed=True)
    gradients = [tape.buffer(name, product.shape, product.dtype) for name in ("weight_products", "wide_gradient")]
    wide = product.dtype != x.dtype
    tape.op(
        "weigh",
        [activated, weights],
        [product],
        saves=[activated, weights],
        backward_temporaries=gradients if wide else gradients[:1],
    )
    if not wide:
        return product
    out = tape.like(x, "activation", product.shape)
    tape.op("to", [product], [out])
    return out


def eager_activation(tape: Tape, model: Model, rows: int, x: Value, width: int, *, adds_offset: bool = True) -> Value:
    """The same without fusion: (rows, `input_width`) to (rows, width).

    A gated unit saves its input, the activated gate and the up branch with its offset, which is a tensor even where
    the offset is 0 (`glu` in `MLP.forward`; overlapped shared experts add none).
    """
    if not model.gated_linear_unit:
        return _pointwise(tape, model, rows, x, width)
    gate = tape.view(x, "gate", (rows, width))
    up = tape.view(x, "up", (rows, width))
    tape.op("chunk", [x], [gate, up])
    activated = _pointwise(tape, model, rows, gate, width)
    if adds_offset:
        offset = tape.like(x, "up_and_offset", (rows, width))
        tape.op("add_offset", [up], [offset], aliases=True)
        up = offset
    out = tape.like(x, "activation", (rows, width))
    tape.op("multiply", [activated, up], [out], saves=[activated, up])
    # The variable of the input is bound to the result only now.
    tape.hold([x])
    return out


def _pointwise(tape: Tape, model: Model, rows: int, x: Value, width: int) -> Value:
    """silu, gelu (`torch.nn.functional`) and the compiled squared ReLU save their input."""
    out = tape.like(x, model.activation_func, (rows, width))
    tape.op(model.activation_func, [x], [out], saves=[x])
    return out
