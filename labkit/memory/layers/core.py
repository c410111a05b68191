"""The core attention: what Transformer Engine's `DotProductAttention` keeps with each of its kernels.

Source: `transformer_engine/pytorch/attention/dot_product_attention/{dot_product_attention,backends,utils}.py`.
"""

from collections.abc import Sequence

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value


def core_attention(tape: Tape, sizes: Sizes, query: Value, key: Value, value: Value) -> Value:
    """Causal attention of (tokens, heads, width) tensors; returns (tokens, heads x value width).

    The three views of one packed tensor that Transformer Engine knows (`sbh3d`) are read where they lie, and their
    gradients made in one; any other view is copied first (`get_qkv_layout`).
    """
    _, heads, width = query.shape
    value_width = heads * value.shape[-1]
    flops = 2 * sizes.batch * sizes.sequence**2 * (heads * width + value_width) // 2
    packed = query.base
    if packed is not None and key.base is value.base is packed and packed.shape[-1] == 3 * heads * width:
        return _fused_attention(tape, sizes, [packed], heads, value_width, flops)
    qkv = [_contiguous(tape, part) for part in (query, key, value)]
    return _fused_attention(tape, sizes, qkv, heads, value_width, flops)


def _contiguous(tape: Tape, x: Value) -> Value:
    if x.base is None or x.bytes == x.base.bytes:
        return x
    copy = tape.value(x.name, x.shape)
    tape.op("contiguous", [x], [copy], aliases=True)
    return copy


def _fused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], heads: int, value_width: int, flops: int) -> Value:
    """cuDNN fused attention (`transformer_engine` `FusedAttnFunc`): saves q, k, v, output, log-sum-exp, RNG state."""
    with tape.module("fused_attention"):
        out = tape.value("output", (sizes.tokens, value_width))
        statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence, 1), "fp32", grad=False)
        rng_state = tape.value("rng_state", (2,), "int64", grad=False)
        saves = [*qkv, out, statistics, rng_state]
        tape.op("fused_attention", qkv, [out, statistics, rng_state], saves=saves, flops=flops)
    return out
