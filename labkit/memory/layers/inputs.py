"""The tensors of a batch: alive while the forward step runs, or longer where saved.

Sources: Megatron Core `utils.get_batch_on_this_tp_rank`, `get_batch_on_this_cp_rank`, `pretrain_gpt.forward_step`.
"""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Shape, Tape, Value
from labkit.workload import Workload

_OF_TOKENS = {"tokens": "int64", "labels": "int64", "loss_mask": "fp32", "position_ids": "int64"}
"""In the order in which they are made."""
_DTYPES = {
    **_OF_TOKENS,
    "attention_mask": "bool",
    "cu_seqlens": "int32",
    "max_seqlen": "int32",
    "seq_idx": "int32",
}
_ENDS = ("cu_seqlens", "max_seqlen")
"""Of packed sequences: where they end, and the tokens of the longest."""


def read_batch(tape: Tape, workload: Workload, sizes: Sizes, *, first: bool, last: bool) -> None:
    """A stage's micro-batch: all of it is made, then what the stage does not need is dropped.

    A context-parallel rank goes on with its part of each tensor, copied out. Stages between the first and the last read
    only what is packed.
    """
    predicts = last and bool(workload.model.mtp_num_layers)
    needed = {"attention_mask", *_ENDS}
    if first or predicts:
        needed |= {"tokens", "position_ids"}
    if last:
        needed |= {"labels", "loss_mask"}
    masked = workload.batch.create_attention_mask_in_dataloader
    names = [*_OF_TOKENS, *(["attention_mask"] if masked else []), *(_ENDS if sizes.packed else [])]
    whole = {name: _tensor(tape, sizes, name, ranks=sizes.cp) for name in names}
    tape.op("read_batch", [], [*whole.values()])
    if sizes.packed:
        _join_sequences(tape, sizes, whole)
    mine = {name: tensor for name, tensor in whole.items() if name in needed}
    if sizes.cp > 1 and (first or last):
        mine = _own_tokens(tape, sizes, mine)
    if "seq_idx" in layer_arguments(workload):
        mine["seq_idx"] = _sequence_numbers(tape, sizes)
    tape.batch |= mine


def _join_sequences(tape: Tape, sizes: Sizes, batch: dict[str, Value]) -> None:
    """The samples' sequences as one row, and their lengths counted.

    Sources: `flatten_batch_for_packed_sequences`, `training.update_seqlen_stats_from_cu_seqlens`.
    """
    ends, longest = batch["cu_seqlens"], _tensor(tape, sizes, "max_seqlen")
    padding = (ends.shape[0] - len(sizes.packed), 1)
    temporaries = [tape.buffer("is_end", ends.shape, "bool"), tape.buffer("ends_found", padding, "int64")]
    tape.op("strip_padding", [ends], [], temporaries=temporaries)
    tape.op("max", [batch["max_seqlen"]], [longest])
    batch["max_seqlen"] = longest
    lengths = tape.buffer("lengths", (len(sizes.packed),), "fp64")
    tape.op("count_tokens", [ends], [], temporaries=[lengths, lengths], once=tape.buffer("seqlen_stats", (2,), "fp64"))


def _sequence_numbers(tape: Tape, sizes: Sizes) -> Value:
    """The number of each token's sequence, which Mamba's layers want (`PackedSeqParams.__post_init__`)."""
    numbers = _tensor(tape, sizes, "seq_idx")
    repeated = [tape.buffer(name, numbers.shape, "int64") for name in ("repeats", "numbers")]
    tape.op("repeat_interleave", [], [numbers], temporaries=repeated)
    return numbers


def _own_tokens(tape: Tape, sizes: Sizes, batch: dict[str, Value]) -> dict[str, Value]:
    """A context-parallel rank's two chunks of each sequence (`get_batch_on_this_cp_rank`)."""
    own = {**batch}
    index = [tape.value("index", (sizes.tokens,), "int32", grad=False)] if sizes.packed else []
    tape.op("partition", [], index)
    chunks = [] if index else [tape.buffer("chunks", (2,), "int64")]
    for name in [name for name in batch if name not in _ENDS]:
        own[name] = _tensor(tape, sizes, name)
        tape.op("select", [batch[name], *index], [own[name]], temporaries=chunks)
    return own


def batch_tensor(tape: Tape, sizes: Sizes, name: str) -> Value:
    """A tensor of the batch, which the tape or another one of its chunk has read."""
    if name not in tape.batch:
        tape.batch[name] = _tensor(tape, sizes, name)
    return tape.batch[name]


def sequence_ends(tape: Tape, sizes: Sizes) -> list[Value]:
    """Where packed sequences end, a tensor of the batch; nothing where none are packed."""
    return [batch_tensor(tape, sizes, "cu_seqlens")] if sizes.packed else []


def layer_arguments(workload: Workload) -> list[str]:
    """Tensors of the batch that every layer is given: the mask, and what tells packed sequences apart."""
    names = ["attention_mask"] if workload.batch.create_attention_mask_in_dataloader else []
    if workload.packed_lengths:
        names += ["cu_seqlens"] if workload.model.hybrid_layer_pattern is None else ["cu_seqlens", "seq_idx"]
    return names


def take_arguments(tape: Tape, workload: Workload, sizes: Sizes) -> None:
    """A layer's tensors of the batch, which a checkpoint keeps; causal kernels do not read the mask."""
    for name in layer_arguments(workload):
        tape.op(name, [batch_tensor(tape, sizes, name)], [])


def _tensor(tape: Tape, sizes: Sizes, name: str, ranks: int = 1) -> Value:
    """What `ranks` context-parallel ranks have of a tensor together."""
    shapes: dict[str, Shape] = {
        "attention_mask": (sizes.batch, 1, sizes.sequence * ranks, sizes.sequence * sizes.cp),
        # As many as there could be sequences, and one more.
        "cu_seqlens": (sizes.tokens * sizes.cp + 1,),
        "max_seqlen": (1,),
        "seq_idx": (sizes.tokens * sizes.cp,),
    }
    tensor = tape.value(name, shapes.get(name, (sizes.tokens * ranks,)), _DTYPES[name], grad=False)
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
