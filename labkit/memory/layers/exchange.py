"""Context parallelism of layers with a state: a rank gives its tokens of other heads for all tokens of its own.

Source: Megatron Core `ssm/mamba_context_parallel.py` with `tensor_parallel/mappings.py`. Attention's context-parallel
ranks hold a front and a back part of a sequence; what runs along the sequence puts the parts in order first.
"""

from collections.abc import Sequence

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def tokens_for_heads(tape: Tape, sizes: Sizes, x: Value, *, joined: bool = False) -> Value:
    """`_all_to_all_cp2hp`: (tokens, width) of all heads to (tokens of all ranks, this rank's width).

    If the result is `joined` with others, its gradient is a strided slice, which backward's all-to-all copies first.
    """
    rows, width = x.shape
    shape = (rows * sizes.cp, width // sizes.cp)
    grouped, received = tape.value("by_rank", shape), tape.value("own_heads", shape)
    tape.op("cat", [x], [grouped])
    strided = [tape.buffer("contiguous_gradient", shape)] if joined else []
    tape.op(
        "all_to_all",
        [grouped],
        [received],
        backward_temporaries=strided,
        communicated_bytes=received.bytes * (sizes.cp - 1) // sizes.cp,
    )
    return received


def heads_for_tokens(tape: Tape, sizes: Sizes, x: Value, order: Sequence[Value] = ()) -> Value:
    """`_redo_attention_load_balancing` and `_all_to_all_hp2cp`: (tokens of all ranks, width) to this rank's tokens."""
    rows, width = x.shape
    balanced = in_order(tape, x, order)
    received = tape.value("own_tokens", x.shape)
    tape.op("all_to_all", [balanced], [received], communicated_bytes=received.bytes * (sizes.cp - 1) // sizes.cp)
    joined = tape.value("all_heads", (rows // sizes.cp, width * sizes.cp))
    tape.op("cat", [received], [joined])
    # Arguments of the functions around.
    tape.hold([x, balanced])
    return joined


def in_order(tape: Tape, x: Value, order: Sequence[Value] = ()) -> Value:
    """A copy with the parts of the sequences in another order (`_undo_attention_load_balancing` and its inverse).

    That of packed sequences is a tensor of places, which is saved.
    """
    ordered = tape.value("in_order", x.shape)
    tape.op("cat", [x, *order], [ordered], saves=order)
    return ordered
