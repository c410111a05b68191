"""Ways of tokens to their experts and back (Megatron Core `transformer/moe/token_dispatcher.py`).

A dispatcher is a class with two methods, in the order `MoELayer` calls them: `dispatch` from this rank's tokens to the
rows of its experts, `combine` from the experts' output back to the tokens. Where shared experts overlap with the
communication, it runs their pieces in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from labkit.memory.layers.experts import OverlappedSharedExperts
from labkit.memory.layers.linear import global_buffer
from labkit.memory.layers.permutation import permute, permute_to_capacity, sort_chunks, unpermute
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import MixtureOfExperts, Workload
from labkit.workload.routing import ExpertRows


class Routed(NamedTuple):
    """What is dispatched."""

    tokens: Value
    """(shard rows, width)."""
    probabilities: Value
    """(shard rows, experts)."""
    routing_map: Value
    """(shard rows, experts)."""


class Dispatched(NamedTuple):
    """What the experts get, in their order."""

    rows: Value
    """(received, width)."""
    probabilities: Value
    """(received,)."""


@dataclass(slots=True)
class Context:
    """What a dispatcher works with."""

    tape: Tape
    sizes: Sizes
    workload: Workload
    moe: MixtureOfExperts
    rows: ExpertRows
    shared: OverlappedSharedExperts | None
    held: list[Value] = field(default_factory=list)
    """What local variables of `MoELayer.forward` keep until it returns."""

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.moe.num_moe_experts // self.sizes.ep

    @property
    def fused(self) -> bool:
        """Permutation by Transformer Engine's kernels."""
        return self.workload.training.kernels.moe_permute_fusion

    @property
    def adds_rows(self) -> bool:
        """The sum of rows is an `index_add_`, which saves what it adds."""
        return self.workload.training.kernels.deterministic_mode and not self.fused


class Dispatcher(Protocol):
    """One layer's dispatcher."""

    def dispatch(self, routed: Routed) -> Dispatched:
        """From this rank's tokens to the rows of its experts."""

    def combine(self, expert_output: Value) -> Value:
        """From the experts' output (received, width) to this rank's tokens (shard rows, width)."""


class _Permuting:
    """What dispatchers that permute rows themselves know between dispatch and combine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mapping: Value | None = None
        self._held: list[Value] = []
        """What `routed_experts_compute` keeps until it returns."""
        self._sum_dtype = ""


class AllToAll(_Permuting):
    """Permute, all-to-all over expert ranks, gather over their tensor ranks, sort (`MoEAlltoAllTokenDispatcher`)."""

    def dispatch(self, routed: Routed) -> Dispatched:
        """`dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`."""
        context, tape, sizes = self._context, self._context.tape, self._context.sizes
        self._sum_dtype = routed.probabilities.dtype
        self._keep_attributes(routed)
        if context.shared is not None:
            context.shared.gather_input(routed.tokens, None)
        tokens, probabilities, self._mapping = self._permute(routed)
        context.held.append(tokens)
        received = context.rows.to_busiest * sizes.ep
        if sizes.ep > 1:
            tokens = self._exchange("dispatched_tokens", tokens, received)
        if context.shared is not None:
            context.shared.fc1(len(tape.ops) - 1 if sizes.ep > 1 else None)
        if sizes.ep > 1:
            probabilities = self._exchange("dispatched_probabilities", probabilities, received)
        context.held += [tokens, probabilities]
        if sizes.etp > 1:
            tokens = self._gather("gathered_tokens", tokens)
            probabilities = self._gather("gathered_probabilities", probabilities)
        if context.local_experts > 1:
            tokens, probabilities = self._sort(tokens, probabilities)
        self._held = [tokens, probabilities]
        return Dispatched(tokens, probabilities)

    def combine(self, expert_output: Value) -> Value:
        """`combine_preprocess`, `token_combine`, `combine_postprocess`."""
        context, tape, sizes, output = self._context, self._context.tape, self._context.sizes, expert_output
        if context.local_experts > 1:
            output = self._unsort(output)
        if sizes.etp > 1:
            output = self._reduce(output)
        tape.hold([*self._held, expert_output])
        combined, reduced = output, None
        if sizes.ep > 1:
            combined = self._exchange("combined_tokens", output, context.rows.sent)
        if context.shared is not None:
            beside = len(tape.ops) - 1 if sizes.ep > 1 else None
            # The reduction's backward precedes that of the unpermutation behind it.
            reduced = context.shared.fc2(beside, len(tape.ops) + 2.5)
            tape.hold([output])  # the argument of `token_combine`
        context.held.append(combined)
        total = unpermute(tape, combined, _made(self._mapping), sizes.shard, saved=context.adds_rows)
        if context.shared is None or reduced is None:
            return total
        return add_in_place(tape, total, context.shared.output(reduced))

    def _keep_attributes(self, routed: Routed) -> None:
        """`self.probs`, `self.routing_map` and, on the device for fused sorting, the rows of each chunk."""
        context, tape, sizes = self._context, self._context.tape, self._context.sizes
        attributes = [routed.probabilities, routed.routing_map]
        counts = []
        if context.local_experts > 1 and context.fused:
            shape = (sizes.etp, sizes.ep, context.local_experts)
            counts.append(tape.value("num_global_tokens_per_local_expert", shape, "int64", grad=False))
        tape.op("preprocess", attributes, counts, persists=[*attributes, *counts])

    def _permute(self, routed: Routed) -> tuple[Value, Value, Value]:
        context = self._context
        tokens, probabilities, routing_map = routed
        if context.moe.moe_pad_expert_input_to_capacity and not context.fused:
            return permute_to_capacity(context.tape, tokens, routing_map, probabilities, context.rows.capacity)
        permuted, chosen, mapping = permute(
            context.tape, tokens, routing_map, probabilities, context.rows.sent, fused=context.fused
        )
        return permuted, _made(chosen), mapping

    def _exchange(self, name: str, x: Value, rows: int) -> Value:
        """All-to-all over the expert-parallel ranks."""
        tape = self._context.tape
        out = tape.value(name, (rows, *x.shape[1:]), x.dtype, routed=True)
        tape.op("all_to_all", [x], [out], communicated_bytes=self._context.sizes.from_expert_ranks(out.bytes))
        return out

    def _gather(self, name: str, x: Value) -> Value:
        """All-gather over the experts' tensor-parallel ranks."""
        sizes, tape = self._context.sizes, self._context.tape
        out = tape.value(name, (x.shape[0] * sizes.etp, *x.shape[1:]), x.dtype, routed=True)
        tape.op("gather_from_expert_tensor_ranks", [x], [out], communicated_bytes=out.bytes - x.bytes)
        return out

    def _reduce(self, x: Value) -> Value:
        """Reduce-scatter over the experts' tensor-parallel ranks, in the dtype of the probabilities."""
        sizes, tape = self._context.sizes, self._context.tape
        shape = (x.shape[0] // sizes.etp, *x.shape[1:])
        return reduce_scatter(tape, x, shape, self._sum_dtype)

    def _sort(self, tokens: Value, probabilities: Value) -> tuple[Value, Value]:
        context = self._context
        if context.moe.moe_pad_expert_input_to_capacity:
            return self._transpose(tokens), self._transpose(probabilities)
        ordered, chosen = sort_chunks(context.tape, tokens, probabilities, fused=context.fused)
        return ordered, _made(chosen)

    def _unsort(self, rows: Value) -> Value:
        context = self._context
        if context.moe.moe_pad_expert_input_to_capacity:
            return self._transpose(rows)
        return sort_chunks(context.tape, rows, None, fused=context.fused, name="unsorted")[0]

    def _transpose(self, x: Value) -> Value:
        """With equal chunks sorting is a transposed copy; no copy where there is one sender."""
        sizes, tape = self._context.sizes, self._context.tape
        if sizes.ep * sizes.etp == 1:
            return x
        out = tape.value(f"transposed_{x.name}", x.shape, x.dtype)
        tape.op("transpose", [x], [out])
        return out


class AllGather(_Permuting):
    """Gather all tokens of all expert ranks, take those of local experts (`MoEAllGatherTokenDispatcher`)."""

    def dispatch(self, routed: Routed) -> Dispatched:
        """`token_dispatch` and `dispatch_postprocess`."""
        context, tape = self._context, self._context.tape
        self._sum_dtype = routed.probabilities.dtype
        tokens, probabilities, routing_map = self._gather(routed)
        context.held += [tokens, probabilities]
        local_map, local_probabilities = self._local(routing_map, probabilities)
        rows, _, self._mapping = permute(tape, tokens, local_map, None, context.rows.received, fused=context.fused)
        chosen = self._select(local_probabilities, local_map)
        attributes = [local_map, chosen]
        tape.op("dispatcher_attributes", attributes, [], persists=attributes)
        self._held = [rows, chosen]
        return Dispatched(rows, chosen)

    def combine(self, expert_output: Value) -> Value:
        """`combine_preprocess` and `token_combine`."""
        tape, sizes = self._context.tape, self._context.sizes
        senders = sizes.ep * sizes.etp
        mapping, tokens = _made(self._mapping), sizes.shard * senders
        output = unpermute(tape, expert_output, mapping, tokens, saved=self._context.adds_rows)
        tape.hold([*self._held, expert_output])
        if senders > 1:
            output = reduce_scatter(tape, output, (sizes.shard, *output.shape[1:]), self._sum_dtype)
        return output

    def _gather(self, routed: Routed) -> Routed:
        """All ranks' tokens, in the process's one buffer for such, their probabilities and map."""
        tape, sizes = self._context.tape, self._context.sizes
        senders = sizes.ep * sizes.etp
        if senders == 1:
            return routed
        tokens, probabilities, routing_map = routed
        count, experts = sizes.shard * senders, routing_map.shape[1]
        gathered_map = tape.value("gathered_map", (count, experts), "bool", grad=False)
        tape.op("all_gather", [routing_map], [gathered_map])
        gathered_probabilities = tape.value("gathered_probabilities", (count, experts), probabilities.dtype)
        tape.op("all_gather", [probabilities], [gathered_probabilities])
        global_buffer(tape, self._context.workload, sizes)
        # It lies in that buffer, and so does the gradient of `tokens`: neither takes memory of its own.
        gathered = tape.view(tokens, "gathered_input", (count, tokens.shape[1]))
        place = tape.value("place_in_global_buffer", (0,), grad=False)
        tape.op(
            "all_gather",
            [tokens],
            [gathered, place],
            saves=[place],
            persists=[place],
            gradient_in=place,
            communicated_bytes=gathered.bytes - tokens.bytes,
        )
        return Routed(gathered, gathered_probabilities, gathered_map)

    def _local(self, routing_map: Value, probabilities: Value) -> tuple[Value, Value]:
        """Columns of the local experts."""
        context, tape = self._context, self._context.tape
        if context.sizes.ep == 1:
            return routing_map, probabilities
        shape = (routing_map.shape[0], context.local_experts)
        local_map = tape.value("local_map", shape, "bool", grad=False)
        tape.op("slice", [routing_map], [local_map])
        local = tape.value("local_probabilities", shape, probabilities.dtype)
        tape.op("slice", [probabilities], [local])
        return local_map, local

    def _select(self, probabilities: Value, local_map: Value) -> Value:
        """`masked_select` of both transposed: keeps them, and finds the places first (int64 pairs)."""
        context, tape = self._context, self._context.tape
        shape = probabilities.shape[::-1]
        transposed = tape.value("transposed_probabilities", shape, probabilities.dtype)
        tape.op("transpose", [probabilities], [transposed], aliases=True)
        mask = local_map
        if context.local_experts > 1:  # else one row is contiguous as it is
            mask = tape.value("transposed_map", shape, "bool", grad=False)
            tape.op("transpose", [local_map], [mask])
        rows = context.rows.received
        chosen = tape.value("permuted_probabilities", (rows,), probabilities.dtype, routed=True)
        places = tape.buffer("places", (rows, 2), "int64")
        tape.op("masked_select", [transposed, mask], [chosen], saves=[transposed, mask], temporaries=[places])
        return chosen


class HybridEP:
    """One fused kernel permutes and exchanges (`MoEFlexTokenDispatcher` with `_HybridEPManager`, `fused_a2a.py`).

    Its symmetric buffers are its own, outside PyTorch's allocator. The handle's tensors were seen on an H200; they
    live on with the module, whose attribute leads to the autograd node that keeps them, and from there to those of all
    layers before it in the same graph.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._handle: list[Value] = []
        self._held: list[Value] = []

    def dispatch(self, routed: Routed) -> Dispatched:
        """`dispatch_preprocess`, `token_dispatch`."""
        context, tape = self._context, self._context.tape
        tokens, probabilities, routing_map = self._over_tensor_ranks(routed)
        rows = tape.value("dispatched_tokens", (context.rows.received, tokens.shape[1]), routed=True)
        chosen = tape.value("dispatched_probabilities", rows.shape[:1], "fp32", routed=True)
        # The `lora` runtime sizes the handle for the tokens of all tensor-parallel ranks.
        senders = tokens.shape[0] if context.sizes.trains else context.sizes.tokens
        self._handle = self._handle_of(senders, probabilities.shape[1])
        attributes = [probabilities, routing_map, chosen]
        tape.op(
            "hybrid_ep_dispatch",
            [tokens, probabilities, routing_map],
            [rows, chosen, *self._handle],
            saves=self._handle,
            persists=attributes,
            node_keeps=self._handle,
            communicated_bytes=context.sizes.from_expert_ranks(rows.bytes),
        )
        if context.shared is not None:
            beside = len(tape.ops) - 1
            context.shared.gather_input(routed.tokens, beside)
            context.shared.fc1(beside)
        context.held += [tokens, rows, chosen]
        return Dispatched(rows, chosen)

    def combine(self, expert_output: Value) -> Value:
        """`token_combine` and `combine_postprocess`."""
        context, tape, sizes = self._context, self._context.tape, self._context.sizes
        output = tape.value("combined_tokens", (sizes.shard, expert_output.shape[1]))
        received = sizes.from_expert_ranks(expert_output.bytes)
        tape.op("hybrid_ep_combine", [expert_output], [output], saves=self._handle, communicated_bytes=received)
        if context.shared is None:
            return output
        return add_in_place(tape, output, context.shared.output(context.shared.fc2(len(tape.ops) - 1)))

    def _over_tensor_ranks(self, routed: Routed) -> Routed:
        """`_initialize_metadata` and `setup_metadata`: every tensor rank of an expert gets its rows; fp32."""
        context, tape, sizes = self._context, self._context.tape, self._context.sizes
        tokens, probabilities, routing_map = routed
        if sizes.etp > 1:
            shape = (sizes.shard, context.moe.num_moe_experts * sizes.etp)
            wide_map = tape.value("expanded_map", shape, "bool", grad=False)
            wide = tape.value("expanded_probabilities", shape, probabilities.dtype)
            tape.op("expand", [routing_map, probabilities], [wide_map, wide])
            probabilities, routing_map = wide, wide_map
        if probabilities.dtype != "fp32":
            cast = tape.value("fp32_probabilities", probabilities.shape, "fp32")
            tape.op("to_fp32", [probabilities], [cast])
            probabilities = cast
        return Routed(tokens, probabilities, routing_map)

    def _handle_of(self, tokens: int, experts: int) -> list[Value]:
        """Where rows go: by token and rank, by dispatched row and local expert."""
        tape, ranks = self._context.tape, self._context.sizes.ep * self._context.sizes.etp
        dispatched, local = tokens * ranks, experts // ranks
        return [
            tape.value("sparse_to_dense_map", (tokens, ranks), "int32", grad=False),
            tape.value("rdma_to_attn_map", (tokens, 1), "bool", grad=False),
            tape.value("local_expert_routing_map", (dispatched, local), "bool", grad=False),
            tape.value("dense_to_expert_map", (dispatched, local), "int32", grad=False),
        ]


DISPATCHERS: dict[str, Callable[[Context], Dispatcher]] = {
    "alltoall": AllToAll,
    "allgather": AllGather,
    "flex": HybridEP,
}
"""By `moe_token_dispatcher_type`."""


def reduce_scatter(tape: Tape, x: Value, shape: tuple[int, ...], dtype: str) -> Value:
    """Sum over ranks in another dtype and back: `reduce_scatter(x.to(dtype)).to(x.dtype)`."""
    wide, reduced = x, tape.value("reduced", shape, dtype, routed=True)
    if dtype != x.dtype:
        wide = tape.value(f"{dtype}_{x.name}", x.shape, dtype, routed=True)
        tape.op("to", [x], [wide])
    tape.op("reduce_scatter", [wide], [reduced], communicated_bytes=wide.bytes - reduced.bytes)
    if dtype != x.dtype:
        out = tape.value("reduced", shape, x.dtype, routed=True)
        tape.op("to", [reduced], [out])
        tape.hold([x])
        return out
    return reduced


def add_in_place(tape: Tape, output: Value, shared_output: Value) -> Value:
    """`output += shared_expert_output`."""
    total = tape.view(output, "output", output.shape)
    tape.op("add", [output, shared_output], [total], aliases=True)
    return total


def _made(value: Value | None) -> Value:
    """A value that an earlier step has made."""
    if value is None:
        raise ValueError("dispatch comes before combine")
    return value
