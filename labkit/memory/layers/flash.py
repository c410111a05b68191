"""flash-attention 2.8 through Transformer Engine (`FlashAttention`; `flash_attn_interface.py`, `flash_api.cpp`)."""

from collections.abc import Sequence

from labkit.memory.layers.context_parallel import Kernel, context_parallel_attention
from labkit.memory.layers.inputs import sequence_ends
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Buffer, Tape, Value

_PREPARED_WIDTH = 128
"""Head width at which Transformer Engine unpacks `sbh3d` with a kernel of its own."""


def flash_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int, exchange: str | None = None) -> Value:
    """Queries, keys and values with the batch first, the kernel, its output with the sequence first again.

    Its heads have one width: narrower values (latent attention's) are padded, and the output trimmed
    (`_pad_qkv_head_dim`, `_trim_output`). `exchange` is that of context-parallel ranks, if there are several.
    """
    value_width = qkv[2].shape[-1]
    width = max(part.shape[-1] for part in qkv)
    padded = [_padded(tape, part, width) for part in qkv]
    with tape.module("flash_attention"):
        parts = _batch_first(tape, sizes, padded)
        if exchange is None:
            out = _kernel(tape, sizes, parts, flops)
        else:
            out = context_parallel_attention(tape, sizes, parts, exchange, flops, _FLASH)
        if not sizes.choices.one_sequence:
            kernel_out, out = out, tape.value("output", out.shape)
            tape.op("contiguous", [kernel_out], [out], aliases=True)
        # Local variables of its forward.
        tape.hold(parts)
    if value_width == width:
        return out
    heads = padded[0].shape[1]
    narrow = tape.view(out, "output", (sizes.tokens, heads, value_width))
    tape.op("slice", [out], [narrow])
    trimmed = tape.value("output", (sizes.tokens, heads * value_width))
    tape.op("reshape", [narrow], [trimmed], aliases=True)
    # Local variables of DotProductAttention.forward.
    tape.hold(padded)
    return trimmed


def _kernel(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """`FlashAttnFunc`, `FlashAttnVarlenFunc`: saves q, k, v, output, log-sum-exp, RNG state, where sequences end."""
    query, key, _ = qkv
    _, heads, width = query.shape
    statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence), "fp32", grad=False)
    rng_state = tape.value("rng_state", (2,), "int64", grad=False)
    out = tape.value("output", (sizes.tokens, heads * width))
    tape.op(
        "flash_attention",
        qkv,
        [out, statistics, rng_state],
        saves=[*qkv, out, statistics, rng_state, *sequence_ends(tape, sizes)],
        temporaries=_parts(sizes, heads, sizes.sequence, width, sizes.choices.flash_splits),
        backward_temporaries=_sums(sizes, heads, key.shape[1], sizes.sequence, width),
        flops=flops,
    )
    return out


def _columns(width: int) -> int:
    """`mha_fwd`, `mha_bwd`: columns in blocks of 32."""
    return -(-width // 32) * 32 if width <= 192 else 256


def _parts(sizes: Sizes, heads: int, rows: int, width: int, splits: int) -> list[Buffer]:
    """What the forward kernel makes of each part of the keys, where it splits them."""
    if splits == 1:
        return []
    shape = (splits, sizes.batch, heads, rows)
    return [Buffer("softmax_lse_accum", shape, "fp32"), Buffer("out_accum", (*shape, _columns(width)), "fp32")]


def _sums(sizes: Sizes, heads: int, key_heads: int, rows: int, width: int) -> list[Buffer]:
    """What the backward kernel holds: sums in blocks of 128 rows, gradients of a key head for each query head.

    Of packed sequences it sums a block more each.
    """
    padded = rows + 128 * len(sizes.packed) if sizes.packed else (rows + 127) // 128 * 128
    expanded = (sizes.batch * rows, heads, width)
    return [
        Buffer("softmax_d", (sizes.batch, heads, padded), "fp32"),
        Buffer("dq_accum", (sizes.choices.flash_sums, sizes.batch, padded, heads, _columns(width)), "fp32"),
        *(Buffer(f"expanded_{name}", expanded, "bf16") for name in ("dk", "dv") if key_heads != heads),
    ]


_FLASH = Kernel("flash_attention", _parts, _sums)


def _padded(tape: Tape, x: Value, width: int) -> Value:
    tokens, heads, own = x.shape
    if own == width:
        return x
    out = tape.value(x.name, (tokens, heads, width))
    tape.op("pad", [x], [out])
    return out


def interleaved(qkv: Sequence[Value]) -> Value | None:
    """The packed tensor of which query, key and value are all, head by head (`sbh3d` of `get_qkv_layout`)."""
    query, key, value = qkv
    packed = query.base
    if packed is None or key.base is not packed or value.base is not packed:
        return None
    _, heads, width = query.shape
    return packed if packed.shape[-1] == 3 * heads * width else None


def as_packed(tape: Tape, qkv: Sequence[Value]) -> Sequence[Value]:
    """Query, key and value, or the packed tensor that they are, whose one gradient is then that of each."""
    packed = interleaved(qkv)
    if packed is None:
        return qkv
    whole = tape.view(packed, "qkv", packed.shape)
    tape.op("packed", qkv, [whole], aliases=True)
    return [whole]


def _batch_first(tape: Tape, sizes: Sizes, qkv: Sequence[Value]) -> list[Value]:
    """Packed sequences have no batch: they are read where they lie, but by context-parallel ranks."""
    packed = interleaved(qkv)
    if sizes.packed and (packed is None or sizes.cp == 1):
        return list(qkv)
    if packed is not None and qkv[0].shape[-1] == _PREPARED_WIDTH and sizes.choices.prepare_kernel:
        # `_PrepareQKVForFA`: one copy of all three, and one gradient.
        whole = tape.value("qkv", packed.shape)
        parts = [tape.view(whole, part.name, part.shape) for part in qkv]
        tape.op("prepare_qkv", as_packed(tape, qkv), [whole, *parts])
        return parts
    if packed is None and sizes.choices.one_sequence:
        return list(qkv)
    copies = [tape.value(part.name, part.shape) for part in qkv]
    for part, copy in zip(qkv, copies, strict=True):
        tape.op("contiguous", [part], [copy], aliases=True)
    return copies
