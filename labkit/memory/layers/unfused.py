"""Attention as products and a softmax, scores and all (Transformer Engine `UnfusedDotProductAttention`)."""

from collections.abc import Sequence

from labkit.memory.layers.linear import dropout
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Shape, Tape, Value


def causal_mask(tape: Tape, sizes: Sizes) -> None:
    """The triangle that PyTorch's softmax is masked with, made once a process (`_get_default_causal_mask`)."""
    if not sizes.choices.softmax_kernel:
        triangle = tape.buffer("causal_mask", (sizes.sequence, sizes.sequence), "bool")
        tape.op("causal_mask", [], [], once=triangle)


def unfused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """Scores, softmax, context; the scores' probabilities (batch, heads, queries, keys) are kept for backward."""
    query, key, value = qkv
    _, heads, width = query.shape
    share = flops // (width + value.shape[-1])
    with tape.module("unfused_attention"):
        mask = _mask(tape, sizes)
        if key.shape[1] != heads:
            key, value = repeated(tape, sizes, key, heads), repeated(tape, sizes, value, heads)
        result = tape.value("matmul_result", _square(sizes, heads), grad=False)
        tape.op("empty", [], [result])
        scores = scores_of(tape, sizes, query, key, share * width, result)
        with tape.module("scale_mask_softmax"):
            probabilities = _softmax(tape, sizes, scores, mask)
        return values_of(tape, sizes, probabilities, value, share * value.shape[-1], held=[key, scores, mask])


def _square(sizes: Sizes, heads: int) -> Shape:
    return sizes.batch, heads, sizes.sequence, sizes.sequence


def scores_of(tape: Tape, sizes: Sizes, query: Value, key: Value, flops: int, *given: Value) -> Value:
    """Scores of (tokens, heads, width) queries and keys: (batch, heads, queries, keys).

    `given` is a result tensor that the operation reads, and does not write.
    """
    scores = tape.value("scores", _square(sizes, query.shape[1]))
    tape.op(
        "baddbmm",
        [*given, query, key],
        [scores],
        saves=[query, key],
        # Each gradient is scaled into a copy.
        backward_temporaries=[tape.buffer("unscaled_gradient", query.shape)],
        library="aten_matmul",
        flops=flops,
    )
    return scores


def values_of(
    tape: Tape, sizes: Sizes, probabilities: Value, value: Value, flops: int, *, held: Sequence[Value]
) -> Value:
    """Values weighed by their probabilities, after these's dropout: (tokens, heads x value width).

    With it ends the function whose local variables `held` are.
    """
    if sizes.attention_dropout:
        with tape.module("attention_dropout"):
            probabilities = dropout(tape, probabilities)
    _, heads, width = value.shape
    context = tape.value("context", value.shape)
    tape.op(
        "bmm",
        [probabilities, value],
        [context],
        saves=[probabilities, value],
        library="aten_matmul",
        flops=flops,
    )
    out = tape.value("output", (sizes.tokens, heads * width))
    tape.op("contiguous", [context], [out], aliases=True)
    tape.hold([*held, value, probabilities])
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


def repeated(tape: Tape, sizes: Sizes, x: Value, heads: int) -> Value:
    """A copy of each key-value head for each of its query heads (`repeat_interleave`)."""
    out = tape.value(x.name, (sizes.tokens, heads, x.shape[-1]))
    tape.op("repeat_interleave", [x], [out])
    return out


def softmax_kernel(tape: Tape, scores: Value, *, in_place: bool) -> Value:
    """Softmax and mask in one kernel, which saves its result; backward is `in_place` of the incoming gradient."""
    probabilities = tape.value("probabilities", scores.shape)
    tape.op("scaled_masked_softmax", [scores], [probabilities], saves=[probabilities], aliases=in_place)
    return probabilities


def _softmax(tape: Tape, sizes: Sizes, scores: Value, mask: Value) -> Value:
    """Masked softmax of the scores, in one kernel where the lengths allow; else PyTorch's, in fp32."""
    if sizes.choices.softmax_kernel:
        return softmax_kernel(tape, scores, in_place=sizes.softmax_in_place)
    probabilities = tape.value("probabilities", scores.shape)
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
