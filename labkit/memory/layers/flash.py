"""flash-attention 2.8 through Transformer Engine (`FlashAttention`; `flash_attn_interface.py`, `flash_api.cpp`)."""

from collections.abc import Sequence

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value

_PREPARED_WIDTH = 128
"""Head width at which Transformer Engine unpacks `sbh3d` with a kernel of its own."""


def flash_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """Queries, keys and values with the batch first, the kernel, its output with the sequence first again.

    Saves q, k, v, output, log-sum-exp, RNG state. Its heads have one width: narrower values (latent attention's) are
    padded, and the output trimmed (`_pad_qkv_head_dim`, `_trim_output`).
    """
    value_width = qkv[2].shape[-1]
    width = max(part.shape[-1] for part in qkv)
    query, key, value = (_padded(tape, part, width) for part in qkv)
    heads = query.shape[1]
    with tape.module("flash_attention"):
        query, key, value = _batch_first(tape, sizes, [query, key, value])
        statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence), "fp32", grad=False)
        rng_state = tape.value("rng_state", (2,), "int64", grad=False)
        out = tape.value("output", (sizes.tokens, heads * width))
        # Rows in blocks of 128, and columns of 32.
        rows = (sizes.sequence + 127) // 128 * 128
        columns = -(-width // 32) * 32 if width <= 192 else 256
        splits = sizes.choices.flash_splits
        parts = [
            tape.buffer("softmax_lse_accum", (splits, sizes.batch, heads, sizes.sequence), "fp32"),
            tape.buffer("out_accum", (splits, sizes.batch, heads, sizes.sequence, columns), "fp32"),
        ]
        expanded = tape.buffer("expanded_gradient", (sizes.tokens, heads, width))
        tape.op(
            "flash_attention",
            [query, key, value],
            [out, statistics, rng_state],
            saves=[query, key, value, out, statistics, rng_state],
            temporaries=parts if splits > 1 else [],
            backward_temporaries=[
                tape.buffer("softmax_d", (sizes.batch, heads, rows), "fp32"),
                tape.buffer("dq_accum", (sizes.batch, rows, heads, columns), "fp32"),
                *([expanded, expanded] if key.shape[1] != heads else []),
            ],
            flops=flops,
        )
        if not sizes.choices.one_sequence:
            kernel_out, out = out, tape.value("output", out.shape)
            tape.op("contiguous", [kernel_out], [out], aliases=True)
        # Local variables of its forward.
        tape.hold([query, key, value])
    if value_width == width:
        return out
    narrow = tape.view(out, "output", (sizes.tokens, heads, value_width))
    tape.op("slice", [out], [narrow])
    trimmed = tape.value("output", (sizes.tokens, heads * value_width))
    tape.op("reshape", [narrow], [trimmed], aliases=True)
    tape.hold([query, key, value])
    return trimmed


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
    packed = interleaved(qkv)
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
