"""Rotary positions.

Sources: Megatron Core `rotary_pos_embedding.py`, `rope_utils.py`; Transformer Engine `attention/rope.py`.
"""

from labkit.memory.layers.inputs import sequence_ends
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Free, Tape, Value

_AS_MANY_AS_MODULES = 2**20


def rotary_table(tape: Tape, sizes: Sizes, width: int) -> None:
    """The table of angles (sequence, width) in fp32 that a `RotaryEmbedding` caches at first use.

    `@lru_cache(maxsize=32)` around a method: one entry a module, 32 in all. It is two copies of the angles side by
    side, or a context-parallel rank's part of those of all positions; of packed sequences, of those of the longest.
    """
    own, whole = (sizes.longest,) * 2 if sizes.packed else (sizes.sequence, sizes.sequence * sizes.cp)
    with tape.module("rotary_pos_emb"):
        table = tape.value("angles", (own, width), "fp32", grad=False)
        angles = (own, width // 2) if own is whole or sizes.cp == 1 else (whole, width)
        tape.op("rotary_angles", [], [table], temporaries=[tape.buffer("angles_once", angles, "fp32")], caches=32)


def yarn_tables(tape: Tape, width: int, rows: int) -> None:
    """Cosines and sines (rows, width) in the model's dtype, buffers of a `YarnRotaryEmbedding`.

    They are made with the module for its original positions, and are those of the sequence from the first forward on
    where a fused kernel reads them (`get_cached_cos_sin`).
    """
    with tape.module("rotary_pos_emb"):
        tables = [tape.value(name, (rows, width), grad=False) for name in ("cos_cached", "sin_cached")]
        wide = tape.buffer("table", (rows, width), "fp32")
        tape.op("yarn_tables", [], tables, temporaries=[wide, wide], caches=_AS_MANY_AS_MODULES)


def fused_rotary(tape: Tape, sizes: Sizes, x: Value) -> Value:
    """Rotated copy of `x` (tokens, heads, width) by one kernel (`FusedRoPEFunc`).

    It saves the cached table and where packed sequences end.
    """
    out = tape.value("rotated", x.shape)
    tape.op("fused_rotary", [x], [out], saves=sequence_ends(tape, sizes))
    return out


def rotary(tape: Tape, sizes: Sizes, x: Value, width: int, *, interleaved: bool = False) -> Value:
    """Rotated copy of `x` (tokens, heads, head width), its first `width` elements turned, the others passed on.

    Compiled it is one kernel that makes cosine and sine again from the table. `interleaved` is latent attention's order
    of the pairs, undone in a copy first (`mla_rotary_interleaved`). Packed sequences are turned one by one.
    """
    if sizes.compiled:
        return fused_rotary(tape, sizes, x)
    if len(sizes.packed) > 1:
        return _rotary_of_each(tape, sizes, x, width, interleaved=interleaved)
    if sizes.packed:
        angles = _own_angles(tape, sizes.sequence, width)
        # A list has the ranks' parts of the sequences, of which there is one, and they are joined.
        angles += _own_angles(tape, sizes.sequence, width) if sizes.cp > 1 else []
        turned = _turned(tape, x, sizes.sequence, width, interleaved=interleaved)
        tape.hold(angles)
        return turned
    return _turned(tape, x, sizes.sequence, width, interleaved=interleaved)


def _rotary_of_each(tape: Tape, sizes: Sizes, x: Value, width: int, *, interleaved: bool) -> Value:
    """Packed sequences turned one by one, each copied into its place (`_apply_rotary_pos_emb_thd`).

    Backward of each of those copies (`CopySlices`) copies the whole gradient.
    """
    _, heads, head_width = x.shape
    rows = [length // sizes.cp for length in sizes.packed]
    parts = [tape.view(x, x.name, (own, heads, head_width)) for own in rows]
    lengths = tape.buffer("lengths", (len(rows),), "int32")
    tape.op("split", [x], parts, temporaries=[lengths, lengths])
    out = base = tape.value("rotated", x.shape)
    tape.op("empty", [], [base])
    before: list[Value] = []
    for part, own in zip(parts, rows, strict=True):
        angles = _own_angles(tape, own, width) if sizes.cp > 1 else []
        turned = _turned(tape, part, own, width, interleaved=interleaved)
        filled = tape.view(base, base.name, base.shape)
        zeros = tape.buffer("gradient_of_overwritten", turned.shape)
        tape.hold(before)
        tape.op("copy_", [out, turned], [filled], backward_temporaries=[zeros])
        # Variables of the loop.
        before = [*angles, turned]
        tape.hold(before)
        out = filled
    return out


def _own_angles(tape: Tape, rows: int, width: int) -> list[Value]:
    """A copy of the table's rows that a context-parallel rank has of a sequence (`_get_thd_freqs_on_this_cp_rank`)."""
    copy = tape.value("freqs", (rows, width), "fp32", grad=False)
    tape.op("cat", [], [copy])
    return [copy]


def _turned(tape: Tape, x: Value, rows: int, width: int, *, interleaved: bool) -> Value:
    """Eager, it saves cosine and sine (rows, width) in the compute dtype (`_apply_rotary_pos_emb_bshd`)."""
    tokens, heads, head_width = x.shape
    turned, passed = (tokens, heads, width), (tokens, heads, head_width - width)
    to_turn, to_pass = tape.view(x, "to_turn", turned), tape.view(x, "to_pass", passed)
    # A slice of all is no slice; the gradient of any other, even of an empty one, has the whole width.
    tape.op("slice", [x], [to_turn], aliases=width == head_width)
    tape.op("slice", [x], [to_pass])
    if interleaved:
        to_turn = _without_interleaving(tape, to_turn)
    cosine, sine = (_angles(tape, rows, width, name) for name in ("cos", "sin"))
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


def _angles(tape: Tape, rows: int, width: int, name: str) -> Value:
    """Cosine or sine of the table (rows, width), scaled and cast."""
    out = tape.value(name, (rows, width), grad=False)
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
