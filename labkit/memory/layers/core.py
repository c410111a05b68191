"""What all attention layers share: rotary positions (`rotary_pos_embedding.py`) and the core attention."""

from collections.abc import Sequence

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def rotary_table(tape: Tape, sequence: int, width: int) -> None:
    """The table of angles (sequence, width) in fp32 that each layer's `RotaryEmbedding` caches at first use.

    `rotary_pos_embedding.py`: `@lru_cache(maxsize=32)` around a method, so one entry a layer, 32 in all.
    """
    with tape.module("rotary_pos_emb"):
        table = tape.value("angles", (sequence, width), "fp32", grad=False)
        tape.op("rotary_angles", [], [table], caches=32)


def rotary(tape: Tape, sizes: Sizes, packed: Value, heads: int, width: int) -> Value:
    """Unfused rotary embedding of a slice (tokens, heads, width) of `packed` (`rope_utils.py`).

    Saves cosine and sine (sequence, width) in the compute dtype; its temporaries are the interleaved copy, the rotated
    halves and the two products.
    """
    shape = (sizes.tokens, heads, width)
    cosine = tape.value("cos", (sizes.sequence, width), grad=False)
    sine = tape.value("sin", (sizes.sequence, width), grad=False)
    out = tape.value("rotated", shape)
    temporaries = [tape.buffer(name, shape) for name in ("interleaved", "half_rotated", "cos_product", "sin_product")]
    tape.op(
        "rotary",
        [packed],
        [out, cosine, sine],
        saves=[cosine, sine],
        temporaries=temporaries,
        backward_temporaries=temporaries[:3],
    )
    return out


def fused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], heads: int, value_width: int, flops: int) -> Value:
    """cuDNN fused attention (`transformer_engine` `FusedAttnFunc`): saves q, k, v, output, log-sum-exp, RNG state."""
    with tape.module("fused_attention"):
        out = tape.value("output", (sizes.tokens, value_width))
        statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence, 1), "fp32", grad=False)
        rng_state = tape.value("rng_state", (2,), "int64", grad=False)
        saves = [*qkv, out, statistics, rng_state]
        tape.op("fused_attention", qkv, [out, statistics, rng_state], saves=saves, flops=flops)
    return out
