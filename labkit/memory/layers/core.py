"""The core attention: Megatron Core's own, or what Transformer Engine's keeps with each of its kernels.

Source: `transformer_engine/pytorch/attention/dot_product_attention/{dot_product_attention,backends,utils}.py`.
"""

from collections.abc import Callable, Sequence

from labkit.memory.layers.context_parallel import FUSED, context_parallel_attention
from labkit.memory.layers.flash import as_packed, flash_attention, interleaved
from labkit.memory.layers.inputs import sequence_ends, take_arguments
from labkit.memory.layers.local_attention import local_attention
from labkit.memory.layers.sizes import Sizes
from labkit.memory.layers.unfused import unfused_attention
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.attention_backends import attention_backend


def core_attention(tape: Tape, workload: Workload, sizes: Sizes, query: Value, key: Value, value: Value) -> Value:
    """Causal attention of (tokens, heads, width) tensors; returns (tokens, heads x value width).

    The three views of one packed tensor that Transformer Engine knows (`sbh3d`) are read where they lie; any other
    view is copied first (`get_qkv_layout`).
    """
    take_arguments(tape, workload, sizes)
    if sizes.local:
        return local_attention(tape, workload, sizes, query, key, value)
    qkv, backend = [query, key, value], attention_backend(workload)
    if interleaved(qkv) is None or (sizes.cp > 1 and backend == "fused"):
        qkv = [_contiguous(tape, part) for part in qkv]
    _, heads, width = query.shape
    flops = sizes.token_pairs * heads * (width + value.shape[-1])
    exchange = workload.parallelism.cp_comm_type
    if sizes.cp == 1:
        out = _BACKENDS[backend](tape, sizes, qkv, flops)
    elif backend == "flash":
        out = flash_attention(tape, sizes, qkv, flops, exchange)
    else:
        with tape.module("fused_attention"):
            out = context_parallel_attention(tape, sizes, qkv, exchange, flops, FUSED)
    # Local variables of DotProductAttention.forward live until it returns.
    tape.hold(qkv)
    return out


def _contiguous(tape: Tape, x: Value) -> Value:
    if not x.is_part:
        return x
    copy = tape.value(x.name, x.shape)
    tape.op("contiguous", [x], [copy], aliases=True)
    return copy


def _fused_attention(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int) -> Value:
    """cuDNN fused attention (`FusedAttnFunc`): saves q, k, v, output, log-sum-exp, RNG state.

    Of one packed tensor it makes one packed gradient.
    """
    query, _, value = qkv
    heads = query.shape[1]
    with tape.module("fused_attention"):
        inputs = as_packed(tape, qkv)
        out = tape.value("output", (sizes.tokens, heads * value.shape[-1]))
        statistics = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence, 1), "fp32", grad=False)
        rng_state = tape.value("rng_state", (2,), "int64", grad=False)
        saves = [*inputs, out, statistics, rng_state, *sequence_ends(tape, sizes)]
        tape.op("fused_attention", inputs, [out, statistics, rng_state], saves=saves, flops=flops)
    return out


_BACKENDS: dict[str, Callable[[Tape, Sizes, Sequence[Value], int], Value]] = {
    "fused": _fused_attention,
    "flash": flash_attention,
    "unfused": unfused_attention,
}
"""From query, key and value to (tokens, heads x value width); the last argument is the forward's work."""
