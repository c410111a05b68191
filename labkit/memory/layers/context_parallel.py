"""Attention whose sequence is split over ranks (Transformer Engine `context_parallel.py`), on rank 0.

Every rank has an early and a late chunk of each sequence, equally many rows. Causal attention of rank 0, which has the
very first chunk, needs the others' keys for its late half alone.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Buffer, Free, Tape, Value


class Kernel(NamedTuple):
    """An attention kernel, and what it holds while it runs beside its outputs or the gradients."""

    name: str
    forward: Callable[[Sizes, int, int, int, int], list[Buffer]]
    """Of query heads, their rows, their width and the parts that keys are split into."""
    backward: Callable[[Sizes, int, int, int, int], list[Buffer]]
    """Of query heads, key-value heads, rows and width."""


FUSED = Kernel("fused_attention", lambda *_: [], lambda *_: [])
"""cuDNN's, whose own workspace is not priced."""


def context_parallel_attention(
    tape: Tape, sizes: Sizes, qkv: Sequence[Value], exchange: str, flops: int, kernel: Kernel
) -> Value:
    """From query, key and value (tokens, heads, width) to (tokens, heads x value width), by `cp_comm_type`."""
    return _EXCHANGES[exchange](tape, sizes, qkv, flops, kernel)


def _row(x: Value) -> int:
    _, heads, width = x.shape
    return heads * width


def _statistics(tape: Tape, sizes: Sizes, heads: int, rows: int) -> tuple[Value, Value]:
    """Log-sum-exp and RNG state of one kernel."""
    lse = tape.value("softmax_lse", (sizes.batch, heads, rows, 1), "fp32", grad=False)
    return lse, tape.value("rng_state", (2,), "int64", grad=False)


def _point_to_point(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int, kernel: Kernel) -> Value:
    """Keys and values go round in a ring (`AttnFuncWithCPAndKVP2P`): keeps q, the last of them, output, statistics."""
    query, key, value = qkv
    heads, row = query.shape[1], _row(key) + _row(value)
    buffers = [tape.value("key_value", (sizes.tokens, row))]
    tape.op("cat", [key, value], buffers)
    outputs: list[Value] = []
    statistics: list[Value] = []
    states: list[Value] = []
    running: list[Value] = []
    for step in range(sizes.cp):
        if step < sizes.cp - 1:
            received = tape.value("key_value", (sizes.tokens, row))
            tape.op("send_and_receive", [buffers[step]], [received], communicated_bytes=received.bytes)
            buffers.append(received)
        # Two lists of two take turns: what a step leaves there goes when the step after next puts its own.
        tape.hold(buffers[max(0, step - 2) : step - 1])
        parts = 1 if step == 0 else 2
        out = tape.value("output_of_step", (sizes.tokens // parts, heads, value.shape[-1]), grad=False)
        lse, state = _statistics(tape, sizes, heads, sizes.sequence // parts)
        splits = sizes.choices.flash_splits if parts == 1 else sizes.choices.flash_splits_of_half
        tape.op(
            kernel.name,
            [query, buffers[step]],
            [out, lse, state],
            temporaries=kernel.forward(sizes, heads, sizes.sequence // parts, query.shape[-1], splits),
            flops=flops // sizes.cp,
        )
        tape.hold([*outputs[max(0, step - 2) : step - 1], *statistics[max(0, step - 2) : step - 1]])
        outputs.append(out)
        statistics.append(lse)
        states.append(state)
        if step == 1 and sizes.cp > 2:
            running = [
                tape.value("output", (sizes.tokens, _row(query) // query.shape[-1] * value.shape[-1]), grad=False)
            ]
            tape.op("clone", [outputs[0]], running)
    tape.hold([*running, *buffers[-2:], *outputs[-2:], *statistics[-2:]])
    # The gradients of keys and values lie in one of two buffers that go round with them.
    pair = tape.view(buffers[-1], "key_value", (2 * sizes.tokens, row))
    tape.op("key_and_value", [key, value], [pair], aliases=True)
    tape.hold(running)
    out = tape.value("output", (sizes.tokens, heads * value.shape[-1]))
    lse = tape.value("softmax_lse", (sizes.batch, heads, sizes.sequence), "fp32", grad=False)
    tape.op(
        "context_parallel_attention",
        [query, pair],
        [out, lse],
        saves=[query, buffers[-1], out, lse, *states],
        temporaries=[tape.buffer("old_softmax_lse", lse.shape, "fp32")],
        backward_temporaries=[
            tape.buffer("late_softmax_lse", (sizes.batch, heads, sizes.sequence // 2), "fp32"),
            tape.buffer("other_key_value", pair.shape),
            *(tape.buffer(f"{part.name}_gradient_of_step", part.shape) for part in qkv),
            *kernel.backward(sizes, heads, key.shape[1], sizes.sequence, query.shape[-1]),
        ],
    )
    tape.hold([*buffers[-2:], *outputs[-2:], *statistics[-2:], *states])
    return out


def _all_to_all(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int, kernel: Kernel) -> Value:
    """Ranks swap rows for heads and back (`AttnFuncWithCPAndQKVOA2A`): keeps what the kernel saw and its statistics."""
    query, key, value = qkv
    heads, width = query.shape[1] // sizes.cp, value.shape[-1]
    whole = [
        tape.value(part.name, (part.shape[0] * sizes.cp, part.shape[1] // sizes.cp, part.shape[2])) for part in qkv
    ]
    # Each is put in order, sent, and put in order again, one after the other.
    sent = [tape.buffer(f"{part.name}_sent", part.shape) for part in qkv]
    received = tape.buffer("received", key.shape)
    tape.op(
        "all_to_all",
        qkv,
        whole,
        temporaries=[*sent, received],
        communicated_bytes=sum(part.bytes for part in qkv) * (sizes.cp - 1) // sizes.cp,
    )
    inner = tape.value("kernel_output", (sizes.tokens * sizes.cp, heads, width), grad=False)
    lse, state = _statistics(tape, sizes, heads, sizes.sequence * sizes.cp)
    rows, splits = sizes.sequence * sizes.cp, sizes.choices.flash_splits
    temporaries = kernel.forward(sizes, heads, rows, query.shape[-1], splits)
    tape.op(kernel.name, whole, [inner, lse, state], temporaries=temporaries, flops=flops)
    out = tape.value("output", (sizes.tokens, query.shape[1] * width))
    gradients = [tape.buffer(f"{part.name}_gradient", part.shape) for part in whole]
    ordered = [tape.buffer(f"{part.name}_gradient_sent", part.shape) for part in qkv]
    # Most is alive when the query's gradient is back and the key's is under way, or when the value's is the last.
    under_way = max(_row(query) - _row(value), _row(key))
    tape.op(
        "all_to_all_output",
        qkv,
        [out],
        saves=[*whole, inner, lse, state],
        temporaries=[tape.buffer("output_sent", out.shape), tape.buffer("output_received", out.shape)],
        backward_temporaries=[
            tape.buffer("output_gradient", out.shape),
            *gradients,
            *_during(kernel.backward(sizes, heads, whole[1].shape[1], rows, query.shape[-1])),
            *ordered,
            tape.buffer("received", (sizes.tokens, under_way)),
        ],
        communicated_bytes=out.bytes * (sizes.cp - 1) // sizes.cp,
    )
    tape.hold([*whole, inner, lse, state])
    return out


def _during(buffers: list[Buffer]) -> list[Buffer | Free]:
    """Buffers that are free again before what follows them in a list of temporaries."""
    return [*buffers, *(Free(each.name) for each in buffers)]


def _all_gather(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int, kernel: Kernel) -> Value:
    """Every rank gathers all keys and values (`AttnFuncWithCPAndKVAllGather`), again in backward: keeps its own."""
    query, key, value = qkv
    tokens, heads, width = sizes.tokens, query.shape[1], value.shape[-1]
    gathered = [tape.value(f"{part.name}_gathered", (tokens * sizes.cp, *part.shape[1:])) for part in (key, value)]
    for part, whole in zip((key, value), gathered, strict=True):
        tape.op("all_gather", [part], [whole], communicated_bytes=whole.bytes * (sizes.cp - 1) // sizes.cp)
    ordered = [tape.value(whole.name, whole.shape) for whole in gathered]
    for whole, inorder in zip(gathered, ordered, strict=True):
        tape.op("index_select", [whole], [inorder])
    scratch = tape.value("output_scratch", (tokens, heads * width), grad=False)
    tape.op("empty", [], [scratch])
    halves = [tape.value("output_of_step", (tokens // 2, heads, width), grad=False) for _ in range(2)]
    kept: list[Value] = []
    for half in halves:
        lse, state = _statistics(tape, sizes, heads, sizes.sequence // 2)
        tape.op(kernel.name, [query, *ordered], [half, lse, state], flops=flops // 2)
        kept += [lse, state]
    # Gradients of all keys and values, in this rank's order, are reduced to those of its own.
    sums = [tape.view(part, part.name, whole.shape) for part, whole in zip((key, value), gathered, strict=True)]
    for part, total in zip((key, value), sums, strict=True):
        tape.op("reduce_scatter", [part], [total])
    out = tape.value("output", (tokens, heads * width))
    of_step = [tape.buffer("query_gradient_of_step", (tokens // 2, *query.shape[1:]))] * 2
    for rows in (tokens // 2, tokens * sizes.cp):
        of_step += [tape.buffer(f"{part.name}_gradient_of_step", (rows, *part.shape[1:])) for part in (key, value)]
    tape.op(
        "context_parallel_attention",
        [query, *sums],
        [out],
        saves=[query, key, value, out, *kept],
        backward_temporaries=[
            tape.buffer("key_gradient", gathered[0].shape),
            *(tape.buffer(whole.name, whole.shape) for whole in gathered),
            *of_step,
        ],
    )
    tape.hold([*ordered, scratch, *halves, *kept])
    return out


_EXCHANGES: dict[str, Callable[[Tape, Sizes, Sequence[Value], int, Kernel], Value]] = {
    "p2p": _point_to_point,
    "a2a": _all_to_all,
    "all_gather": _all_gather,
}
