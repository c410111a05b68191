"""Attention and gated delta nets over packed sequences that share a prefix, as OpenPipe ART's runtime runs them.

A batch is a tree of segments: the prefix, then what follows it in each sequence. Attention masks by segment
(FlexAttention). A delta net runs its kernels over the segments, each padded to whole chunks, and starts a suffix from
the state in which the prefix ended. Rows retained: traced module by module from that runtime's autograd code, and laid
against the cells of `data/published/h200_lora_peaks.csv`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from labkit.memory.layers.gdn import CHUNK, Heads, gated_norm, gdn_parameters
from labkit.memory.layers.linear import column_parallel, norm, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Buffer, Tape, Value
from labkit.workload import Workload


@dataclass(frozen=True, slots=True)
class Segments:
    """What the delta net's kernels run over."""

    rows: int
    """Tokens, each segment padded to whole chunks."""
    count: int
    """Segments; each keeps the state it ended in."""

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The segments of the whole tree: context-parallel ranks exchange their tokens for heads."""
        sequences = workload.batch.sequences
        return cls(sequences.padded_rows(CHUNK), sequences.num_segments)


_MASK_BLOCK = 128
"""Rows and columns of a block of FlexAttention's mask (`_DEFAULT_SPARSE_BLOCK_SIZE`)."""


def tree_tensors(workload: Workload) -> Iterator[Buffer]:
    """The batch on the device."""
    batch = workload.batch
    rows = batch.micro_batch_size * batch.seq_length
    yield from tensors_of_tree(rows, batch.sequences.logical_rows, Segments.of(workload).rows)


def tensors_of_tree(rows: int, logical_rows: int, padded_rows: int) -> Iterator[Buffer]:
    """The tokens, where they lie, and which blocks of the mask they see (`BlockMask`)."""
    for name in ("tokens", "positions", "segment", "slots"):
        yield Buffer(name, (rows,), "int64")
    yield Buffer("outputs", (logical_rows,), "int64")
    yield Buffer("sources", (padded_rows,), "int64")
    yield Buffer("counts", (padded_rows, 1), "bool")
    blocks = -(-rows // _MASK_BLOCK)
    for number in range(4):
        yield Buffer(f"mask_counts{number}", (blocks,), "int32")
        yield Buffer(f"mask_indices{number}", (blocks, blocks), "int32")


def tree_attention(tape: Tape, workload: Workload, query: Value, key: Value, value: Value) -> Value:
    """FlexAttention of (tokens, heads, width) tensors: (tokens, heads x width); saves q, k, v, output, log-sum-exp.

    Under context parallelism the attention over exchanged rows keeps its own copies of all five.
    """
    tokens, heads, width = query.shape
    out = tape.value("output", (tokens, heads * width))
    statistics = tape.value("softmax_lse", (heads, tokens), "fp32", grad=False)
    saves = [query, key, value, out, statistics]
    copies = []
    if workload.parallelism.cp > 1:
        copies = [tape.value(f"exchanged_{each.name}", each.shape, each.dtype, grad=False) for each in saves]
    flops = 2 * 2 * heads * width * tokens * tokens // 2
    tape.op(
        "flex_attention",
        [query, key, value],
        [out, statistics, *copies],
        saves=[*saves, *copies],
        flops=flops,
    )
    return out


def tree_delta_net(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into the projection to (shard rows, hidden).

    The recurrence under context parallelism: a rank has all tokens of its share of the heads. Empirical: retained
    bytes of h200-68, -69, -71 and -75 leave room for half of a layer's states, not for all.
    """
    net = workload.model.gated_delta_net
    if net is None:
        raise ValueError("a gated delta net layer needs gated_delta_net")
    heads, tokens = Heads.of(net, sizes.tp), sizes.tokens
    gdn_parameters(tape, workload.model, sizes, net, heads)
    with tape.module("in_proj"):
        normed = norm(tape, workload.model, hidden, sizes.shard, sizes.hidden)
        parts = (heads.convolved, heads.value)
        projected = column_parallel(tape, sizes, normed, sizes.hidden, heads.projected, adapters=parts)
    gate = tape.value("gate", (tokens, heads.value))
    tape.op("clone_gate", [projected], [gate])
    softplus_input = tape.value("softplus_input", (tokens, heads.values), "fp32")
    beta = tape.value("beta", (tokens, heads.values))
    decay = tape.value("g", (tokens, heads.values), "fp32")
    tape.op("gates", [projected], [softplus_input, beta, decay], saves=[softplus_input, beta])
    segments, own = Segments.of(workload), Heads.of(net, sizes.tp * workload.parallelism.cp)
    gathered, convolved = _convolution(tape, segments, own, projected, net.linear_conv_kernel_dim)
    recurrent = _recurrence(tape, segments, own, convolved, [beta, decay])
    # Variables: the convolution's input, and its output, of which the values are a view.
    tape.hold([gathered, convolved])
    core = tape.value("recurrent_output", (tokens, heads.value))
    tape.op("scatter_segments", [recurrent], [core])
    with tape.module("@norm_out"):
        gated = gated_norm(tape, workload.model, tokens, heads, core, gate)
    with tape.module("out_proj"):
        return row_parallel(tape, sizes, gated, heads.value)


def _convolution(
    tape: Tape, segments: Segments, heads: Heads, projected: Value, kernel_width: int
) -> tuple[Value, Value]:
    """Causal convolution of the gathered segments: (its input, output); saves its input and each segment's last."""
    shape = (segments.rows, heads.convolved)
    gathered = tape.value("conv_input", shape)
    tape.op("gather_segments", [projected], [gathered])
    out = tape.value("convolved", shape)
    state = tape.value("conv_state", (segments.count, heads.convolved, kernel_width - 1), grad=False)
    tape.op("causal_conv1d", [gathered], [out, state], saves=[gathered, state])
    return gathered, out


def _recurrence(tape: Tape, segments: Segments, heads: Heads, convolved: Value, gates: list[Value]) -> Value:
    """`ChunkGatedDeltaRuleFunction` with its l2 norms inside: saves normed queries and keys of every value head."""
    rows, keys, values = segments.rows, (segments.rows, heads.values * heads.key_width), (segments.rows, heads.value)
    query, key, value = tape.value("query", keys), tape.value("key", keys), tape.value("value", values)
    tape.op("split_and_repeat", [convolved], [query, key, value])
    beta = tape.value("segment_beta", (rows, heads.values))
    tape.op("gather_gates", gates, [beta])
    kept = [
        tape.value("query_normed", keys, grad=False),
        tape.value("key_normed", keys, grad=False),
        *(tape.value(name, (rows, heads.values), "fp32", grad=False) for name in ("q_rstd", "k_rstd", "g_cumulative")),
        tape.value("A", (rows, heads.values, CHUNK), grad=False),
        tape.value("state", (segments.count, heads.values, heads.key_width, heads.value_width), "fp32", grad=False),
    ]
    out = tape.value("core_output", values)
    states = (rows // CHUNK, heads.values, heads.key_width, heads.value_width)
    scratch = [
        tape.buffer("w", keys),
        tape.buffer("u", values),
        tape.buffer("h", states),
        tape.buffer("v_new", values),
    ]
    # Backward makes w, u, h and v_new again, then their gradients.
    gradients = [
        tape.buffer("dh", states),
        tape.buffer("dv2", values),
        tape.buffer("dw", keys),
        tape.buffer("dk2", keys),
    ]
    tape.op(
        "chunk_gated_delta_rule",
        [query, key, value, beta],
        [out, *kept],
        saves=[*kept, value, beta],
        temporaries=scratch,
        backward_temporaries=[*scratch, *gradients],
    )
    return out
