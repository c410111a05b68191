"""The tensors of a batch: alive while the forward step runs, or longer where saved.

Sources: Megatron Core `utils.get_batch_on_this_tp_rank`, `get_batch_on_this_cp_rank`, `pretrain_gpt.forward_step`.
"""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Shape, Tape, Value
from labkit.workload import Workload

_DTYPES = {"tokens": "int64", "labels": "int64", "loss_mask": "fp32", "position_ids": "int64", "attention_mask": "bool"}
"""In the order in which they are made."""


def read_batch(tape: Tape, workload: Workload, sizes: Sizes, *, first: bool, last: bool) -> None:
    """A stage's micro-batch: all of it is made, then what the stage does not need is dropped.

    A context-parallel rank goes on with its part of each tensor, copied out.
    """
    predicts = last and bool(workload.model.mtp_num_layers)
    unneeded = {"tokens", "position_ids"} if last else {"labels", "loss_mask"}
    names = [*_DTYPES] if workload.batch.create_attention_mask_in_dataloader else [*_DTYPES][:-1]
    whole = {name: _tensor(tape, sizes, name, ranks=sizes.cp) for name in names}
    tape.op("read_batch", [], [*whole.values()])
    for name, tensor in whole.items():
        if name in unneeded and first != last and not predicts:
            continue
        if sizes.cp > 1:
            tape.batch[name] = _tensor(tape, sizes, name)
            chunks = tape.buffer("chunks", (2,), "int64")
            tape.op("select", [tensor], [tape.batch[name]], temporaries=[chunks])
        else:
            tape.batch[name] = tensor


def batch_tensor(tape: Tape, sizes: Sizes, name: str) -> Value:
    """A tensor of the batch, which the tape or another one of its chunk has read."""
    if name not in tape.batch:
        tape.batch[name] = _tensor(tape, sizes, name)
    return tape.batch[name]


def take_mask(tape: Tape, workload: Workload, sizes: Sizes) -> None:
    """The mask as an argument, which a checkpoint saves; causal kernels do not read it."""
    if workload.batch.create_attention_mask_in_dataloader:
        tape.op("attention_mask", [batch_tensor(tape, sizes, "attention_mask")], [])


def _tensor(tape: Tape, sizes: Sizes, name: str, ranks: int = 1) -> Value:
    """What `ranks` context-parallel ranks have of a tensor together."""
    tokens: Shape = (sizes.tokens * ranks,)
    square = (sizes.batch, 1, sizes.sequence * ranks, sizes.sequence * sizes.cp)
    tensor = tape.value(name, square if name == "attention_mask" else tokens, _DTYPES[name], grad=False)
    tensor.module, tensor.kind = "", "input"
    return tensor


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
