"""Multi-head and grouped-query attention (Megatron Core `transformer/attention.py`, `SelfAttention`)."""

from typing import NamedTuple

from labkit.memory.layers.core import core_attention
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters, row_parallel, unfused_norm
from labkit.memory.layers.local import has_torch_norms
from labkit.memory.layers.prefix_tree import tree_attention
from labkit.memory.layers.rotary import fused_rotary, rotary
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload


class _Heads(NamedTuple):
    """Heads of one rank.

    Key-value heads fewer than ranks are replicated: every rank gathers the packed projection of all, and takes its
    query heads out of those of its one group.
    """

    query: int
    key_value: int
    in_group: int
    """Query heads of a key-value head, before a rank of a shared one takes its own."""
    gate: int
    """Gate heads of a query head: 1 or 0."""
    width: int
    packed_width: int
    """Of the projection over all ranks."""

    @property
    def shared(self) -> bool:
        """Whether several ranks share a key-value head."""
        return self.query < self.in_group * self.key_value

    @classmethod
    def of(cls, workload: Workload, sizes: Sizes) -> "_Heads":
        model = workload.model
        heads, groups, gate = model.num_attention_heads, model.key_value_heads, int(model.attention_output_gate)
        packed = (heads * (1 + gate) + 2 * groups) * model.head_width
        shared = max(1, groups // sizes.tp)
        return cls(heads // sizes.tp, shared, heads // groups, gate, model.head_width, packed)


def self_attention(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """From the residual (shard rows, hidden) through the norm fused into linear_qkv to (shard rows, hidden).

    Megatron Core's own layers have the norm before them.
    """
    model, heads = workload.model, _Heads.of(workload, sizes)
    _parameters(tape, workload, sizes, heads)
    with tape.module("linear_qkv"):
        normed = hidden if sizes.local else norm(tape, model, hidden, sizes.shard, sizes.hidden)
        width, biased = heads.packed_width // sizes.tp, model.add_qkv_bias or model.add_bias_linear
        adapters = _adapted_parts(workload, sizes)
        packed = column_parallel(tape, sizes, normed, sizes.hidden, width, biased=biased, adapters=adapters)
    if heads.shared:
        packed = _gather_last_dim(tape, sizes, packed, heads)
    query, key, value, gate = _split(tape, sizes, packed, heads)
    if model.qk_layernorm:
        with tape.module("q_layernorm"):
            query = _head_norm(tape, workload, query)
        with tape.module("k_layernorm"):
            key = _head_norm(tape, workload, key)
    if gate is not None:
        gate = _own_heads(tape, _reshaped(tape, gate, heads), heads)
    held = [packed, query, key, *([gate] if gate is not None else [])]
    if model.turns_positions:
        query, key = _rotated(tape, workload, sizes, query), _rotated(tape, workload, sizes, key)
    with tape.module("core_attention"):
        if sizes.lora is None:
            core = core_attention(tape, workload, sizes, query, key, value)
        else:
            core = tree_attention(tape, workload, query, key, value)
    held += [query, key, core]
    if gate is not None:
        gated = tape.value("gated_output", core.shape)
        # Compiled: it keeps its two inputs and nothing of what lies between.
        tape.op("output_gate", [core, gate], [gated], saves=[core, gate])
        core = gated
    with tape.module("linear_proj"):
        output = row_parallel(tape, sizes, core, heads.query * heads.width)
    # Local variables of Attention.forward live until it returns.
    tape.hold(held)
    return output


def _parameters(tape: Tape, workload: Workload, sizes: Sizes, heads: _Heads) -> None:
    """In the order `Attention` and `SelfAttention` register them."""
    model = workload.model
    width = heads.packed_width // sizes.tp
    tape.parameter("linear_proj.weight", (sizes.hidden, heads.query * heads.width))
    if model.add_bias_linear:
        tape.parameter("linear_proj.bias", (sizes.hidden,), replicated=sizes.sp > 1)
    if not sizes.local:
        norm_parameters(tape, model, sizes.hidden, "linear_qkv.layer_norm_", replicated=sizes.sp > 1)
    tape.parameter("linear_qkv.weight", (width, sizes.hidden))
    if model.add_qkv_bias or model.add_bias_linear:
        tape.parameter("linear_qkv.bias", (width,))
    if model.qk_layernorm:
        # Each rank norms its own heads: summed over the tensor-parallel group with and without sequence parallelism.
        for name in ("q_layernorm", "k_layernorm"):
            norm_parameters(tape, model, heads.width, f"{name}.", replicated=sizes.tp > 1)


def _adapted_parts(workload: Workload, sizes: Sizes) -> tuple[int, int, int]:
    """Columns of the packed projection that have an adapter each: queries with their gates, keys, values."""
    model = workload.model
    queries = model.num_attention_heads * (1 + model.attention_output_gate) * model.head_width // sizes.tp
    keys = model.key_value_heads * model.head_width // sizes.tp
    return queries, keys, keys


def _gather_last_dim(tape: Tape, sizes: Sizes, local: Value, heads: _Heads) -> Value:
    """All ranks' parts of the packed projection (`all_gather_last_dim_from_tensor_parallel_region`), of it one group's.

    Both ways take a copy in the other order of dimensions.
    """
    whole = tape.value("gathered_qkv", (sizes.tokens, heads.packed_width))
    reordered = tape.buffer("gathered_ranks", whole.shape)
    tape.op(
        "all_gather_last_dim",
        [local],
        [whole],
        temporaries=[reordered],
        backward_temporaries=[reordered],
        communicated_bytes=sizes.from_tensor_ranks(whole.bytes),
    )
    groups = heads.packed_width // (_group_heads(heads) * heads.width)
    group = tape.view(whole, "qkv_of_group", (sizes.tokens, heads.packed_width // groups))
    tape.op("slice", [whole], [group])
    return group


def _group_heads(heads: _Heads) -> int:
    """Heads of one group in the packed projection: queries, gates, key and value."""
    return heads.in_group * (1 + heads.gate) + 2


def _split(tape: Tape, sizes: Sizes, packed: Value, heads: _Heads) -> tuple[Value, Value, Value, Value | None]:
    """Query, key, value and gate of the rank: views where the layout allows (`get_query_key_value_tensors`)."""
    queries = (sizes.tokens, heads.key_value * heads.in_group, heads.width)
    keys = (sizes.tokens, heads.key_value, heads.width)
    query, key, value = (
        tape.view(packed, name, shape) for name, shape in (("query", queries), ("key", keys), ("value", keys))
    )
    gate = tape.view(packed, "gate", queries) if heads.gate else None
    # Where the gradients of the parts are one tensor already, it is handed on (`SplitAlongDim`).
    tape.op("split", [packed], [query, *([gate] if gate is not None else []), key, value], aliases=True)
    return _own_heads(tape, _reshaped(tape, query, heads), heads), key, value, gate


def _reshaped(tape: Tape, x: Value, heads: _Heads) -> Value:
    """`x` with its groups flattened: a copy where there are several groups of several heads."""
    if heads.key_value == 1 or heads.in_group == 1:
        return x
    copy = tape.value(x.name, x.shape)
    tape.op("reshape", [x], [copy], aliases=True)
    return copy


def _own_heads(tape: Tape, x: Value, heads: _Heads) -> Value:
    """The rank's heads of `x`, which has all heads of its group."""
    if not heads.shared:
        return x
    own = tape.view(x, x.name, (x.shape[0], heads.query, heads.width))
    tape.op("slice", [x], [own])
    return own


def _head_norm(tape: Tape, workload: Workload, x: Value) -> Value:
    """Norm of each head of `x` (tokens, heads, width), made contiguous first (`ops/basic/rmsnorm.py`, APEX)."""
    tokens, heads, width = x.shape
    if x.base is not None and not (workload.training.kernels.local and has_torch_norms(workload)):
        copy = tape.value("input", x.shape)
        tape.op("contiguous", [x], [copy], aliases=True)
        x = copy
    rows = unfused_norm(tape, workload, x, tokens * heads, width)
    out = tape.view(rows, "norm_output", (tokens, heads, width))
    tape.op("view", [rows], [out], aliases=True)
    return out


def _rotated(tape: Tape, workload: Workload, sizes: Sizes, x: Value) -> Value:
    if workload.training.kernels.apply_rope_fusion:
        return fused_rotary(tape, sizes, x)
    return rotary(tape, sizes, x, workload.model.rotary_width)
