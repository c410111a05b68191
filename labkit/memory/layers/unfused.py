"""Attention as products and a softmax, scores and all (Transformer Engine `UnfusedDotProductAttention`)."""

from collections.abc import Sequence

from labkit.memory.layers.linear import dropout
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def causal_mask(tape: Tape, sizes: Sizes) -> None:
    """The triangle that PyTorch's softmax is masked with, made once a process (`_get_default_causal_mask`)."""
    if not sizes.choices.softmax_kernel:
        triangle = tape.value("causal_mask", (sizes.sequence, sizes.sequence), "bool", grad=False)
        tape.op("causal_mask", [], [triangle], caches=1)


def unfused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """Scores, softmax, context; the scores' probabilities (batch, heads, queries, keys) are kept for backward."""
    query, key, value = qkv
    _, heads, width = query.shape
    with tape.module("unfused_attention"):
        mask = _mask(tape, sizes)
        if key.shape[1] != heads:
            key, value = _repeated(tape, sizes, key, heads), _repeated(tape, sizes, value, heads)
        scores = tape.value("scores", (sizes.batch, heads, sizes.sequence, sizes.sequence))
        tape.op(
            "baddbmm",
            [query, key],
            [scores],
            saves=[query, key],
            temporaries=[tape.buffer("matmul_result", scores.shape)],
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
    """`get_full_mask`: positions compared in int32."""
    square = (1, 1, sizes.sequence, sizes.sequence)
    mask = tape.value("attention_mask", square, "bool", grad=False)
    distances = [tape.buffer(name, square, "int32") for name in ("distance", "from_left", "from_right")]
    compared = [tape.buffer(name, square, "bool") for name in ("inside_left", "inside_right")]
    tape.op("full_mask", [], [mask], temporaries=[*distances, *compared])
    return mask


def _repeated(tape: Tape, sizes: Sizes, x: Value, heads: int) -> Value:
    """A copy of each key-value head for each of its query heads (`repeat_interleave`)."""
    out = tape.value(x.name, (sizes.tokens, heads, x.shape[-1]))
    tape.op("repeat_interleave", [x], [out])
    return out


def _softmax(tape: Tape, sizes: Sizes, scores: Value, mask: Value) -> Value:
    """Masked softmax of the scores, in one kernel where the lengths allow; else PyTorch's, in fp32."""
    probabilities = tape.value("probabilities", scores.shape)
    if sizes.choices.softmax_kernel:
        tape.op("scaled_masked_softmax", [scores], [probabilities], saves=[probabilities])
        return probabilities
    square = (1, 1, sizes.sequence, sizes.sequence)
    either = tape.value("mask", square, "bool", grad=False)
    tape.op("logical_or", [mask], [either])
    wide = tape.value("scores", scores.shape, "fp32")
    tape.op("float", [scores], [wide])
    masked = tape.view(wide, "scores", wide.shape)
    tape.op("masked_fill_", [wide, either], [masked], saves=[either])
    normal = tape.value("probabilities", scores.shape, "fp32")
    tape.op("softmax", [masked], [normal], saves=[normal])
    tape.op("to_compute_dtype", [normal], [probabilities])
    tape.hold([wide, either, normal])
    return probabilities
