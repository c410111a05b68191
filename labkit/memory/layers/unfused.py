"""Attention as products and a softmax, scores and all (Transformer Engine `UnfusedDotProductAttention`)."""

from collections.abc import Sequence

from labkit.memory.layers.linear import dropout
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def causal_mask(tape: Tape, sizes: Sizes) -> None:
    """The triangle that PyTorch's softmax is masked with, made once a process (`_get_default_causal_mask`)."""
    if not sizes.choices.softmax_kernel:
        triangle = tape.buffer("causal_mask", (sizes.sequence, sizes.sequence), "bool")
        tape.op("causal_mask", [], [], once=triangle)


def unfused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """Scores, softmax, context; the scores' probabilities (batch, heads, queries, keys) are kept for backward."""
    query, key, value = qkv
    _, heads, width = query.shape
    with tape.module("unfused_attention"):
        mask = _mask(tape, sizes)
        if key.shape[1] != heads:
            key, value = _repeated(tape, sizes, key, heads), _repeated(tape, sizes, value, heads)
        scores = tape.value("scores", (sizes.batch, heads, sizes.sequence, sizes.sequence))
        empty = tape.value("matmul_result", scores.shape, grad=False)
        tape.op("empty", [], [empty])
        tape.op(
            "baddbmm",
            [empty, query, key],
            [scores],
            saves=[query, key],
            # Each gradient is scaled into a copy.
            backward_temporaries=[tape.buffer("unscaled_gradient", query.shape)],
            library="aten_matmul",
            flops=flops * width // (width + value.shape[-1]),
        )
        with tape.module("scale_mask_softmax"):
            probabilities = _softmax(tape, sizes, scores, mask)
        if sizes.attention_dropout:
            with tape.module("attention_dropout"):
                probabilities = dropout(tape, probabilities)
        context = tape.value("context", (sizes.tokens, heads, value.shape[-1]))
        tape.op(
            "bmm",
            [probabilities, value],
            [context],
            saves=[probabilities, value],
            library="aten_matmul",
            flops=flops * value.shape[-1] // (width + value.shape[-1]),
        )
        out = tape.value("output", (sizes.tokens, heads * value.shape[-1]))
        tape.op("contiguous", [context], [out], aliases=True)
        # Local variables of its forward.
        tape.hold([key, value, scores, mask, probabilities])
    return out


def _mask(tape: Tape, sizes: Sizes) -> Value:
    """`get_full_mask`: positions compared in int32, together with the batch's mask."""
    square = (1, 1, sizes.sequence, sizes.sequence)
    mask = tape.value("attention_mask", square, "bool", grad=False)
    distances = [tape.buffer(name, square, "int32") for name in ("distance", "from_left", "from_right")]
    compared = [tape.buffer(name, square, "bool") for name in ("inside_left", "inside_right")]
    tape.op("full_mask", [], [mask], temporaries=[*distances, *compared])
    if not sizes.masked:
        return mask
    whole = tape.value("attention_mask", (sizes.batch, *square[1:]), "bool", grad=False)
    tape.op("logical_or", [mask], [whole])
    return whole


def _repeated(tape: Tape, sizes: Sizes, x: Value, heads: int) -> Value:
    """A copy of each key-value head for each of its query heads (`repeat_interleave`)."""
    out = tape.value(x.name, (sizes.tokens, heads, x.shape[-1]))
    tape.op("repeat_interleave", [x], [out])
    return out


def _softmax(tape: Tape, sizes: Sizes, scores: Value, mask: Value) -> Value:
    """Masked softmax of the scores, in one kernel where the lengths allow; else PyTorch's, in fp32."""
    probabilities = tape.value("probabilities", scores.shape)
    if sizes.choices.softmax_kernel:
        tape.op(
            "scaled_masked_softmax",
            [scores],
            [probabilities],
            saves=[probabilities],
            aliases=sizes.softmax_in_place,
        )
        return probabilities
    either = tape.value("mask", mask.shape, "bool", grad=False)
    tape.op("logical_or", [mask], [either])
    wide, narrow = scores, scores.dtype != "fp32"
    if narrow:
        wide = tape.value("scores", scores.shape, "fp32")
        tape.op("float", [scores], [wide])
    masked = tape.view(wide, "scores", wide.shape)
    # Scores in fp32 are filled where they lie, in a view of the product: autograd's `CopySlices` clones and fills.
    clones = [] if narrow else [tape.buffer(name, scores.shape) for name in ("sliced_gradient", "filled_gradient")]
    tape.op("masked_fill_", [wide, either], [masked], saves=[either], backward_temporaries=clones)
    normal = tape.value("probabilities", scores.shape, "fp32")
    tape.op("softmax", [masked], [normal], saves=[normal])
    if narrow:
        tape.op("to_compute_dtype", [normal], [probabilities])
    tape.hold([wide, either, normal])
    return probabilities if narrow else normal
