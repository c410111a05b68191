"""Rotary positions.

Sources: Megatron Core `rotary_pos_embedding.py`, `rope_utils.py`; Transformer Engine `attention/rope.py`.
"""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Free, Tape, Value


def rotary_table(tape: Tape, sizes: Sizes, width: int) -> None:
    """The table of angles (sequence, width) in fp32 that a `RotaryEmbedding` caches at first use.

    `@lru_cache(maxsize=32)` around a method: one entry a module, 32 in all. It is two copies of the angles side by
    side, or a context-parallel rank's part of those of all positions.
    """
    with tape.module("rotary_pos_emb"):
        table = tape.value("angles", (sizes.sequence, width), "fp32", grad=False)
        angles = (sizes.sequence, width // 2) if sizes.cp == 1 else (sizes.sequence * sizes.cp, width)
        tape.op("rotary_angles", [], [table], temporaries=[tape.buffer("angles_once", angles, "fp32")], caches=32)


def fused_rotary(tape: Tape, x: Value) -> Value:
    """Rotated copy of `x` (tokens, heads, width) by one kernel that saves the cached table alone (`FusedRoPEFunc`)."""
    out = tape.value("rotated", x.shape)
    tape.op("fused_rotary", [x], [out])
    return out


def rotary(tape: Tape, sizes: Sizes, x: Value, width: int, *, interleaved: bool = False) -> Value:
    """Rotated copy of `x` (tokens, heads, head width), its first `width` elements turned, the others passed on.

    Eager, it saves cosine and sine (sequence, width) in the compute dtype (`_apply_rotary_pos_emb_bshd`).
    Compiled it is one kernel that makes them again from the table.
    `interleaved` is latent attention's order of the pairs, undone in a copy first (`mla_rotary_interleaved`).
    """
    if sizes.compiled:
        return fused_rotary(tape, x)
    tokens, heads, head_width = x.shape
    turned, passed = (tokens, heads, width), (tokens, heads, head_width - width)
    to_turn, to_pass = tape.view(x, "to_turn", turned), tape.view(x, "to_pass", passed)
    # A slice of all is no slice; the gradient of any other, even of an empty one, has the whole width.
    tape.op("slice", [x], [to_turn], aliases=width == head_width)
    tape.op("slice", [x], [to_pass])
    if interleaved:
        to_turn = _without_interleaving(tape, to_turn)
    cosine, sine = (_angles(tape, sizes, width, name) for name in ("cos", "sin"))
    product, half = tape.buffer("product", turned), tape.buffer("negative_half", (tokens, heads, width // 2))
    swapped = tape.buffer("swapped_halves", turned)
    rotated = tape.value("turned", turned)
    tape.op(
        "rotate",
        [to_turn, cosine, sine],
        [rotated],
        saves=[cosine, sine],
        temporaries=[product, half, swapped, Free(half.name), product, Free(swapped.name)],
        # The other product is added to the gradient.
        backward_temporaries=[product, half, GRADIENTS, Free(product.name), Free(half.name), product],
    )
    out = tape.value("rotated", x.shape)
    tape.op("cat", [rotated, to_pass], [out], aliases=True)
    return out


def _angles(tape: Tape, sizes: Sizes, width: int, name: str) -> Value:
    """Cosine or sine of the table (sequence, width), scaled and cast."""
    out = tape.value(name, (sizes.sequence, width), grad=False)
    wide, scaled = (tape.buffer(each, out.shape, "fp32") for each in (name, "scaled"))
    tape.op(name, [], [out], temporaries=[wide, scaled, Free(name)])
    return out


def _without_interleaving(tape: Tape, x: Value) -> Value:
    """Copy of `x` with the even elements of each head before the odd ones."""
    tokens, heads, width = x.shape
    even, odd = (tape.view(x, name, (tokens, heads, width // 2)) for name in ("even", "odd"))
    tape.op("slice", [x], [even])
    tape.op("slice", [x], [odd])
    out = tape.value("ordered", x.shape)
    tape.op("cat", [even, odd], [out], aliases=True)
    return out
