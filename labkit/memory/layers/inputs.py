"""The tensors of a batch (`get_batch_on_this_tp_rank`): alive while the forward step runs, or longer where saved."""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value

_DTYPES = {"tokens": "int64", "labels": "int64", "loss_mask": "fp32", "position_ids": "int64"}


def batch_inputs(tape: Tape, sizes: Sizes, *names: str) -> list[Value]:
    """Tensors of the batch, one number a token, by name."""
    values = [tape.value(name, (sizes.tokens,), _DTYPES[name], grad=False) for name in names]
    for value in values:
        value.module, value.kind = "", "input"
    if values:
        tape.op("read_batch", [], values)
    return values


def rolled(tape: Tape, sizes: Sizes, name: str) -> Value:
    """A tensor of the batch moved on by one token (`roll_tensor`): under context parallelism each of its two chunks."""
    value = tape.value(name, (sizes.tokens,), _DTYPES[name], grad=False)
    chunks = [tape.buffer("rolled_chunk", (sizes.tokens // 2,), value.dtype)] * 2 if sizes.cp > 1 else []
    tape.op("roll", [], [value], temporaries=chunks)
    return value


def sequence_first(tape: Tape, sizes: Sizes, x: Value) -> Value:
    """`x` (batch, sequence, ...) with the sequence first, or back: a copy where there are several sequences."""
    if sizes.choices.one_sequence:
        return x
    copy = tape.value(x.name, x.shape, x.dtype, grad=x.differentiable)
    tape.op("transpose", [x], [copy], aliases=True)
    return copy
