"""Gated delta net (Megatron Core `ssm/gated_delta_net`, flash-linear-attention `ops/gated_delta_rule/chunk.py`).

Per rank: hk key heads of width dk, hv value heads of width dv. One projection makes query, key, value, gate, beta and
alpha side by side; query, key and value pass a short causal convolution, the delta rule runs over chunks of 64 tokens
with a state of (dk, dv) a value head, and its output is normed and gated before the output projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from labkit.memory.layers.exchange import heads_for_tokens, in_order, tokens_for_heads
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import GRADIENTS, Free, Tape, Value
from labkit.workload import Model, Workload
from labkit.workload.model import GatedDeltaNet

CHUNK = 64
"""Tokens of one chunk, of the convolution's kernel too (`fla`, `chunk_size`)."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """What the convolution and the delta rule run over."""

    rows: int
    """Tokens of whole sequences, all context-parallel ranks' parts together."""
    chunks: int
    """Chunks of those tokens; a chunk belongs to one sequence."""

    @classmethod
    def of(cls, sizes: Sizes) -> Self:
        """Whole sequences, one after the other."""
        if sizes.packed:
            return cls(sizes.tokens * sizes.cp, sum(-(-length // CHUNK) for length in sizes.packed))
        return cls(sizes.tokens * sizes.cp, sizes.batch * -(-sizes.sequence * sizes.cp // CHUNK))


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads and widths of one rank."""

    keys: int
    values: int
    key_width: int
    value_width: int

    @classmethod
    def of(cls, net: GatedDeltaNet, ranks: int) -> Self:
        """The heads of one of `ranks`."""
        return cls(
            net.linear_num_key_heads // ranks,
            net.linear_num_value_heads // ranks,
            net.linear_key_head_dim,
            net.linear_value_head_dim,
        )

    @property
    def query_key(self) -> int:
        """Columns of queries and keys."""
        return 2 * self.keys * self.key_width

    @property
    def value(self) -> int:
        """Columns of values, and of the gate."""
        return self.values * self.value_width

    @property
    def convolved(self) -> int:
        """Columns of queries, keys and values."""
        return self.query_key + self.value

    @property
    def projected(self) -> int:
        """Columns of the input projection."""
        return self.convolved + self.value + 2 * self.values


def gated_delta_net(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into the projection to (shard rows, hidden)."""
    model, net = workload.model, workload.model.gated_delta_net
    if net is None:
        raise ValueError("a gated delta net layer needs gated_delta_net")
    projected_heads, run = Heads.of(net, sizes.tp), Recurrence.of(sizes)
    gdn_parameters(tape, model, sizes, net, projected_heads)
    with tape.module("in_proj"):
        normed = norm(tape, model, hidden, sizes.shard, model.hidden_size)
        projected = column_parallel(tape, sizes, normed, model.hidden_size, projected_heads.projected)
    _remember_ends(tape, workload, sizes)
    places = _places(tape, run) if sizes.packed and sizes.cp > 1 else []
    if sizes.cp > 1:
        projected = _own_heads(tape, sizes, projected, places[:1])
    heads = Heads.of(net, sizes.tp * sizes.cp)
    sections = {"qkv": heads.convolved, "gate": heads.value, "beta": heads.values, "alpha": heads.values}
    views = {name: tape.view(projected, name, (run.rows, width)) for name, width in sections.items()}
    tape.op("split", [projected], list(views.values()))

    convolved = _convolution(tape, sizes, run, heads, views["qkv"], net.linear_conv_kernel_dim)
    query, key, value = _query_key_value(tape, run, heads, convolved)
    gate, beta_input, alpha = (_contiguous(tape, views[name]) for name in ("gate", "beta", "alpha"))
    decay = tape.value("g", (run.rows, heads.values), "fp32")
    tape.op("decay", [alpha], [decay], saves=[alpha])
    beta = tape.value("beta", (run.rows, heads.values))
    tape.op("sigmoid", [beta_input], [beta], saves=[beta])
    core = _delta_rule(tape, run, heads, [query, key, value, decay, beta])

    with tape.module("@norm_out"):
        gated = gated_norm(tape, model, run.rows, heads, core, gate)
        if workload.batch.micro_batch_size > 1:
            # Sequences came one after the other and go interleaved.
            gated = _contiguous(tape, gated)
        if sizes.cp > 1:
            gated = heads_for_tokens(tape, sizes, gated, places[1:])
    with tape.module("out_proj"):
        output = row_parallel(tape, sizes, gated, projected_heads.value)
    # Local variables of GatedDeltaNet.forward live until it returns.
    tape.hold([projected, convolved, query, key, value, gate, alpha, decay, beta, core, *places])
    return output


def _remember_ends(tape: Tape, workload: Workload, sizes: Sizes) -> None:
    """What is worked out of where packed sequences end is kept with its last four arguments (`fla`, `tensor_cache`)."""
    if sizes.packed:
        remembered = min(workload.distinct_microbatches, 4)
        ends = tape.buffer("cached_cu_seqlens", (remembered * (sizes.tokens * sizes.cp + 1),), "int32")
        tape.op("remember_ends", [], [], once=ends)


def _places(tape: Tape, run: Recurrence) -> list[Value]:
    """Where tokens of packed sequences are rank by rank, and where those are in order (`_build_thd_cp_a2a_perm`)."""
    rows = (run.rows,)
    places = [tape.value(name, rows, "int64", grad=False) for name in ("places", "places_in_order")]
    names = (
        "positions",
        "sequences",
        "half_lengths",
        "in_sequence",
        "chunks",
        "offsets",
        "balanced",
        "ranks",
        "in_half",
    )
    tape.op("find_places", [], places, temporaries=[tape.buffer(name, rows, "int64") for name in names])
    return places


def head_permutation(tape: Tape, net: GatedDeltaNet, sizes: Sizes) -> None:
    """The order of columns that serves `_own_heads`, cached for the process (`_build_head_perm_for_split_sections`)."""
    columns = Heads.of(net, sizes.tp).projected
    tape.op("head_permutation", [], [tape.value("head_permutation", (columns,), "int64", grad=False)], caches=8)


def _own_heads(tape: Tape, sizes: Sizes, projected: Value, places: Sequence[Value]) -> Value:
    """This rank's heads of all tokens, in order: columns are permuted first, and one exchange serves all sections."""
    permuted = tape.value("permuted", projected.shape)
    tape.op("index_select", [projected], [permuted])
    received = tokens_for_heads(tape, sizes, permuted)
    ordered = in_order(tape, received, places)
    # The argument of the function that exchanges.
    tape.hold([permuted])
    return ordered


def gdn_parameters(tape: Tape, model: Model, sizes: Sizes, net: GatedDeltaNet, heads: Heads) -> None:
    """In the order `_GDNBase` registers them: its own before its submodules'."""
    tape.parameter("dt_bias", (heads.values,))
    tape.parameter("A_log", (heads.values,))
    norm_parameters(tape, model, sizes.hidden, "in_proj.layer_norm_", replicated=sizes.sp > 1)
    tape.parameter("in_proj.weight", (heads.projected, sizes.hidden))
    tape.parameter("conv1d.weight", (heads.convolved, 1, net.linear_conv_kernel_dim))
    norm_parameters(tape, model, heads.value_width, "out_norm.", replicated=False)
    tape.parameter("out_proj.weight", (sizes.hidden, heads.value))


def _contiguous(tape: Tape, strided: Value) -> Value:
    """A copy of a strided tensor; its gradient passes through."""
    copy = tape.value(strided.name, strided.shape)
    tape.op("contiguous", [strided], [copy], aliases=True)
    return copy


def _convolution(tape: Tape, sizes: Sizes, run: Recurrence, heads: Heads, qkv: Value, width: int) -> Value:
    """`fla.modules.causal_conv1d`: saves its input, computes its output again in backward.

    Its weight's gradient comes in fp32 parts, one a chunk, summed and cast. Under context parallelism the weights of
    this rank's heads are put together first (`get_parameter_local_cp`).
    """
    weight = [tape.value("weight", (heads.convolved, 1, width), grad=False)] if sizes.cp > 1 else []
    if weight:
        tape.op("own_weight", [], weight)
    out = tape.value("convolved", (run.rows, heads.convolved))
    tape.op(
        "causal_conv1d",
        [qkv, *weight],
        [out],
        saves=[qkv, *weight],
        backward_temporaries=[
            tape.buffer("before_activation", out.shape),
            GRADIENTS,
            tape.buffer("weight_gradient_parts", (run.chunks, heads.convolved, width), "fp32"),
            tape.buffer("weight_gradient_sum", (heads.convolved, width), "fp32"),
            tape.buffer("weight_gradient", (heads.convolved, width)),
            Free("weight_gradient_sum"),
            Free("weight_gradient_parts"),
        ],
    )
    return out


def _query_key_value(tape: Tape, run: Recurrence, heads: Heads, convolved: Value) -> tuple[Value, Value, Value]:
    """`_prepare_input_for_gated_delta_rule`: l2-normed query and key, one for each value head, and the values."""
    query_key = tape.view(convolved, "query_key", (run.rows, heads.query_key))
    strided_value = tape.view(convolved, "value", (run.rows, heads.value))
    tape.op("split", [convolved], [query_key, strided_value])
    # `fla.modules.l2norm` saves its output and 1/norm; its contiguous input is gone when it returns.
    normed = tape.value("query_key_normed", query_key.shape)
    reciprocal = tape.value("reciprocal_norm", (2 * run.rows * heads.keys,), "fp32", grad=False)
    tape.op("l2norm", [query_key], [normed, reciprocal], saves=[normed, reciprocal])
    halves = [tape.view(normed, name, (run.rows, heads.query_key // 2)) for name in ("query", "key")]
    tape.op("split", [normed], halves)
    expanded = []
    for half in halves:
        each = tape.value(half.name, (run.rows, heads.values * heads.key_width))
        # Without a copy for each value head, `contiguous` copies all the same.
        tape.op("repeat_interleave", [half], [each], aliases=heads.values == heads.keys)
        expanded.append(each)
    return expanded[0], expanded[1], _contiguous(tape, strided_value)


def _delta_rule(tape: Tape, run: Recurrence, heads: Heads, inputs: Sequence[Value]) -> Value:
    """`ChunkGatedDeltaRuleFunction` of query, key, value, g and beta.

    It keeps its inputs, g summed up within each chunk instead of g, and each chunk's solved matrix A; backward makes w,
    u and the states h again.
    """
    query, key, value, decay, beta = inputs
    rows, states = run.rows, (run.chunks, heads.values, heads.key_width, heads.value_width)
    keys, values = (rows, heads.values * heads.key_width), (rows, heads.value)
    cumulative = tape.value("g_cumulative", decay.shape, "fp32", grad=False)
    solved = tape.value("A", (rows, heads.values, CHUNK), grad=False)
    made_again = {"w": keys, "u": values, "h": states, "v_new": values}
    chunks = [tape.value(name, shape, grad=False) for name, shape in made_again.items()]
    tape.op("solve_chunks", [key, value, decay, beta], [cumulative, solved, *chunks])
    out = tape.value("core_attn_out", values)
    before = {**made_again, "dv": values, "dh": states, "dv2": values}
    tape.op(
        "chunk_gated_delta_rule",
        [*inputs, cumulative, solved, *chunks],
        [out],
        saves=[query, key, value, cumulative, beta, solved],
        backward_temporaries=[
            *(tape.buffer(name, shape) for name, shape in before.items()),
            Free("dv"),
            GRADIENTS,
            tape.buffer("dw", keys),
            tape.buffer("dk2", keys),
            tape.buffer("dg2", decay.shape, "fp32"),
            Free("dv2"),
        ],
        flops=_delta_rule_flops(run, heads),
    )
    return out


def _delta_rule_flops(run: Recurrence, heads: Heads) -> int:
    """Forward: k k^T, A v, A k, q k^T and that times v_new within a chunk; w h, k^T v_new and q h with the states."""
    within = CHUNK * (3 * heads.key_width + 2 * heads.value_width)
    with_state = 3 * heads.key_width * heads.value_width
    return 2 * run.rows * heads.values * (within + with_state)


def gated_norm(tape: Tape, model: Model, tokens: int, heads: Heads, core: Value, gate: Value) -> Value:
    """`_apply_gated_norm`: norm over each head, times silu(gate), compiled: saves the norm's output and the gate."""
    with tape.module("out_norm"):
        normed = norm(tape, model, core, tokens * heads.values, heads.value_width)
    out = tape.value("gated", (tokens, heads.value))
    tape.op("output_gate", [normed, gate], [out], saves=[normed, gate])
    return out
