"""Attention whose sequence is split over ranks (Transformer Engine `context_parallel.py`), on rank 0.

Every rank has an early and a late chunk of each sequence, equally many rows. Causal attention of rank 0, which has the
very first chunk, needs the others' keys for its late half alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from labkit.memory.layers.inputs import sequence_ends
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Buffer, Free, Tape, Value


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
    """Keys and values go round in a ring (`AttnFuncWithCPAndKVP2P`): keeps q, the last of them, output, statistics.

    The halves of packed sequences are copied out of q, and where they end is kept for each step.
    """
    query, key, value = qkv
    heads, row = query.shape[1], _row(key) + _row(value)
    ends = _ends(tape, sizes)
    buffers = [tape.value("key_value", (sizes.tokens, row))]
    tape.op("cat", [key, value], buffers)
    halves: list[Value] = []
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
        ends += _ends(tape, sizes)
        attending = query if step == 0 else _late_half(tape, sizes, query)
        if attending is not query:
            tape.hold(halves[:-1][-1:])
            halves.append(attending)
        out = tape.value("output_of_step", (sizes.tokens // parts, heads, value.shape[-1]), grad=False)
        lse, state = _statistics(tape, sizes, heads, sizes.sequence // parts)
        splits = sizes.choices.flash_splits if parts == 1 else sizes.choices.flash_splits_of_half
        tape.op(
            kernel.name,
            [attending, buffers[step]],
            [out, lse, state],
            temporaries=kernel.forward(sizes, heads, sizes.sequence // parts, query.shape[-1], splits),
            flops=flops // sizes.cp,
        )
        tape.hold([*outputs[max(0, step - 2) : step - 1], *statistics[max(0, step - 2) : step - 1]])
        outputs.append(out)
        statistics.append(lse)
        states.append(state)
        if step:
            statistics[-2] = _by_heads(tape, sizes, kernel, statistics[-2])
        if step == 1 and sizes.cp > 2:
            running = [
                tape.value("output", (sizes.tokens, _row(query) // query.shape[-1] * value.shape[-1]), grad=False)
            ]
            tape.op("clone", [outputs[0]], running)
    statistics[-1] = _by_heads(tape, sizes, kernel, statistics[-1])
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
        saves=[query, buffers[-1], out, lse, *states, *ends],
        temporaries=[tape.buffer("old_softmax_lse", lse.shape, "fp32")],
        backward_temporaries=[
            tape.buffer("late_softmax_lse", (sizes.batch, heads, sizes.sequence // 2), "fp32"),
            *([tape.buffer("softmax_lse_by_rows", lse.shape, "fp32")] if sizes.packed and kernel is FUSED else []),
            *([GRADIENTS] if sizes.packed else []),
            tape.buffer("other_key_value", pair.shape),
            *(_halves_of_packed(tape, sizes, qkv, kernel) if sizes.packed else []),
            *(tape.buffer(f"{part.name}_gradient_of_step", part.shape) for part in qkv),
            *kernel.backward(sizes, heads, key.shape[1], sizes.sequence, query.shape[-1]),
            *(_padding_mask(tape, sizes) if sizes.packed and kernel is FUSED else []),
        ],
    )
    tape.hold([*halves[-2:], *buffers[-2:], *outputs[-2:], *statistics[-2:], *states, *ends])
    return out


def _ends(tape: Tape, sizes: Sizes) -> list[Value]:
    """Where a rank's parts of packed sequences end, for queries and for keys."""
    if not sizes.packed:
        return []
    ends = [tape.value(name, (len(sizes.packed) + 1,), "int32", grad=False) for name in ("ends", "key_ends")]
    tape.op("divide_ends", [], ends)
    return ends


def _late_half(tape: Tape, sizes: Sizes, query: Value) -> Value:
    """The late half of each sequence's queries: of packed ones a copy (`thd_read_half_tensor`)."""
    if not sizes.packed:
        return query
    half = tape.value("late_query", (sizes.tokens // 2, *query.shape[1:]), grad=False)
    tape.op("read_half", [query], [half])
    return half


def _by_heads(tape: Tape, sizes: Sizes, kernel: Kernel, statistics: Value) -> Value:
    """Statistics of packed sequences in the order of heads, which cuDNN has in that of rows."""
    if not sizes.packed or kernel is not FUSED:
        return statistics
    ordered = tape.value(statistics.name, statistics.shape, "fp32", grad=False)
    tape.op("transpose", [statistics], [ordered])
    return ordered


def _padding_mask(tape: Tape, sizes: Sizes) -> list[Buffer]:
    """Which rows pad packed sequences, found in the end (`get_thd_padding_mask`)."""
    rows = (sizes.tokens,)
    names = {"rows": "int64", "sequences": "int64", "begins": "int32", "next": "int64", "ends": "int32"}
    return [tape.buffer(f"{name}_of_padding", rows, dtype) for name, dtype in names.items()]


def _halves_of_packed(tape: Tape, sizes: Sizes, qkv: Sequence[Value], kernel: Kernel) -> Iterator[Buffer | Free]:
    """Backward of the steps before the last: late halves of queries, outputs and their gradients are copied out.

    A step's are there until the next one has its own.
    """
    query, key, value = qkv
    _, heads, width = query.shape
    late = sizes.tokens // 2
    shapes = {
        "late_query": (late, heads, width),
        "late_output": (late, heads, value.shape[-1]),
        "late_output_gradient": (late, heads, value.shape[-1]),
    }
    gradients = {"late_query_gradient": (late, heads, width), "key_gradient": key.shape, "value_gradient": value.shape}
    for step in range(sizes.cp - 1):
        yield from (tape.buffer(f"{name}_{step}", shape) for name, shape in shapes.items())
        yield from (Free(f"{name}_{step - 1}") for name in shapes if step)
        yield from (tape.buffer(name, shape) for name, shape in gradients.items())
        yield from _during(kernel.backward(sizes, heads, key.shape[1], late, width))
        yield from map(Free, gradients)
    yield from (Free(f"{name}_{sizes.cp - 2}") for name in shapes)


_WAYS = ("sent", "received")


def _all_to_all(tape: Tape, sizes: Sizes, qkv: Sequence[Value], flops: int, kernel: Kernel) -> Value:
    """Ranks swap rows for heads and back (`AttnFuncWithCPAndQKVOA2A`): keeps what the kernel saw and its statistics."""
    query, key, value = qkv
    heads, width = query.shape[1] // sizes.cp, value.shape[-1]
    whole = [
        tape.value(part.name, (part.shape[0] * sizes.cp, part.shape[1] // sizes.cp, part.shape[2])) for part in qkv
    ]
    # Each is put in order and sent; when the next is on its way, what has come is put in order again.
    sent, received = ([tape.value(f"{part.name}_{way}", part.shape, grad=False) for part in qkv] for way in _WAYS)
    for part, going, come, before in zip(qkv, sent, received, (None, *zip(received, whole, strict=True)), strict=False):
        tape.op("put_in_order", [part], [going])
        tape.op("all_to_all", [going], [come], communicated_bytes=part.bytes * (sizes.cp - 1) // sizes.cp)
        if before is not None:
            tape.op("put_in_order", before[:1], before[1:])
    tape.op("put_in_order", received[-1:], whole[-1:])
    tape.hold(sent)
    inner = tape.value("kernel_output", (sizes.tokens * sizes.cp, heads, width), grad=False)
    lse, state = _statistics(tape, sizes, heads, sizes.sequence * sizes.cp)
    rows, splits = sizes.sequence * sizes.cp, sizes.choices.flash_splits
    temporaries = kernel.forward(sizes, heads, rows, query.shape[-1], splits)
    tape.op(kernel.name, whole, [inner, lse, state], temporaries=temporaries, flops=flops)
    out = tape.value("output", (sizes.tokens, query.shape[1] * width))
    gradients = [tape.buffer(f"{part.name}_gradient", part.shape) for part in whole]
    outwards = [tape.buffer(f"output_gradient_{way}", out.shape) for way in _WAYS]
    ordered = [tape.buffer(f"{part.name}_gradient_sent", part.shape) for part in qkv]
    # Most is alive when the query's gradient is back and the key's is under way, or when the value's is the last.
    under_way = max(_row(query) - _row(value), _row(key))
    tape.op(
        "all_to_all_output",
        qkv,
        [out],
        saves=[*whole, inner, lse, state, *sequence_ends(tape, sizes)],
        temporaries=[tape.buffer("output_sent", out.shape), tape.buffer("output_received", out.shape)],
        backward_temporaries=[
            *outwards,
            tape.buffer("output_gradient", out.shape),
            *(Free(each.name) for each in outwards),
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
