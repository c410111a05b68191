"""Mixture of experts (Megatron Core `transformer/moe/`): router, all-to-all dispatch, grouped experts, shared experts.

Expert rows: `sent` leave this rank (its shard rows times top-k), `received` reach its local experts: those of the
busiest rank (`labkit.workload.routing`). Values whose rows depend on routing are marked as such.
"""

from dataclasses import dataclass
from fractions import Fraction

from labkit.memory.layers.linear import column_parallel, row_parallel, swiglu
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import MixtureOfExperts, Workload
from labkit.workload.routing import expert_rows


@dataclass(frozen=True, slots=True)
class _Routed:
    """Rows and experts of one rank."""

    sent: int
    received: int
    local_experts: int

    @classmethod
    def of(cls, workload: Workload, moe: MixtureOfExperts, sizes: Sizes, share: Fraction) -> "_Routed":
        rows = expert_rows(workload, share, sizes.shard)
        return cls(rows.sent, rows.received, moe.num_moe_experts // sizes.ep)


def moe_layer(tape: Tape, workload: Workload, sizes: Sizes, normed: Value, share: Fraction) -> Value:
    """From the normed residual (shard rows, hidden) to the layer's output (shard rows, hidden) (`MoELayer`).

    `share` is the busiest rank's part of the layer's rows.
    """
    moe = workload.model.mixture_of_experts
    if moe is None:
        raise ValueError("a MoE layer needs mixture_of_experts")
    kernels = workload.training.kernels
    routed = _Routed.of(workload, moe, sizes, share)
    overlaps = kernels.moe_shared_expert_overlap and moe.moe_shared_expert_intermediate_size is not None
    shared_width = (moe.moe_shared_expert_intermediate_size or 0) // sizes.tp
    _parameters(tape, moe, sizes, routed, shared_width)

    shared_output = None
    if shared_width and not overlaps:
        with tape.module("shared_experts"):
            shared_output = _shared_experts(tape, sizes, normed, shared_width)
    with tape.module("router"):
        routing = _router(tape, moe, sizes, normed)
    dispatched = _dispatch(tape, sizes, routed, normed, routing, shared_width if overlaps else 0)
    with tape.module("experts"):
        expert_output = _experts(tape, moe, sizes, routed, dispatched)
    if routed.local_experts > 1:
        expert_output = _sort_chunks(tape, sizes, routed, expert_output, None)[0]
    combined = expert_output
    if sizes.ep > 1:
        combined = tape.value("combined_tokens", (routed.sent, sizes.hidden), routed=True)
        tape.op("all_to_all", [expert_output], [combined], communicated_bytes=sizes.from_expert_ranks(combined.bytes))
    if dispatched.shared_activation is not None:
        with tape.module("shared_experts"):
            shared_output = _overlapped_fc2(tape, sizes, dispatched.shared_activation, shared_width)
        tape.hold([expert_output])
    output = tape.value("output", (sizes.shard, sizes.hidden))
    tape.op("unpermute", [combined], [output], saves=[dispatched.row_id_map])
    if shared_output is not None:
        # Overlapped shared experts are added in place (`output += shared_expert_output`).
        total = tape.view(output, "output", output.shape) if overlaps else tape.value("output", output.shape)
        tape.op("add", [output, shared_output], [total], aliases=True)
        output = total
    # Local variables of MoELayer.forward live until it returns.
    tape.hold(dispatched.held)
    return output


def _parameters(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, routed: _Routed, shared_width: int) -> None:
    hidden, width, split = sizes.hidden, moe.moe_ffn_hidden_size, sizes.ep > 1 or sizes.tp > 1
    tape.parameter("router.weight", (moe.num_moe_experts, hidden), replicated=sizes.sp > 1)
    with tape.module("experts"):
        tape.parameter("linear_fc1.weight", (2 * width, hidden), expert=split, count=routed.local_experts)
        tape.parameter("linear_fc2.weight", (hidden, width), expert=split, count=routed.local_experts)
    if shared_width:
        with tape.module("shared_experts"):
            tape.parameter("linear_fc1.weight", (2 * shared_width, hidden))
            tape.parameter("linear_fc2.weight", (hidden, shared_width))


def _router(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, normed: Value) -> tuple[Value, Value]:
    """Probabilities (shard rows, experts) and boolean map of the same shape (`router.py`, `moe_utils.py`)."""
    tokens, experts, topk = sizes.shard, moe.num_moe_experts, moe.moe_router_topk
    dtype = moe.moe_router_dtype or tape.dtype
    logits = tape.value("logits", (tokens, experts), dtype)
    # RouterGatingLinearFunction multiplies in the router's dtype; its backward casts what it needs.
    casts = [
        tape.buffer("input_gradient", (tokens, sizes.hidden), dtype),
        tape.buffer("input", (tokens, sizes.hidden), dtype),
    ]
    tape.op(
        "gating",
        [normed],
        [logits],
        saves=[normed],
        backward_temporaries=casts if dtype != tape.dtype else [],
        library="te_gemm",
        flops=2 * tokens * sizes.hidden * experts,
    )
    probabilities = tape.value("probabilities", (tokens, experts), dtype)
    routing_map = tape.value("routing_map", (tokens, experts), "bool", grad=False)
    indices = tape.value("top_indices", (tokens, topk), "int64", grad=False)
    saved = [indices]
    if moe.moe_router_score_function == "sigmoid" or moe.moe_router_pre_softmax:
        saved.append(tape.value("scores", (tokens, experts), "fp32", grad=False))
    else:
        saved.append(tape.value("top_probabilities", (tokens, topk), "fp32", grad=False))
    if moe.moe_router_score_function == "sigmoid" and topk > 1:
        saved.append(tape.value("top_scores", (tokens, topk), "fp32", grad=False))
        saved.append(tape.value("top_score_sum", (tokens, 1), "fp32", grad=False))
    scratch = [tape.buffer(name, (tokens, experts), "fp32") for name in ("biased", "group_mask", "int_map", "zeros")]
    tape.op(
        "topk_routing",
        [logits],
        [probabilities, routing_map, *saved],
        saves=saved,
        temporaries=scratch,
        persists=[probabilities, routing_map],
    )
    if moe.moe_router_load_balancing_type != "none" and moe.moe_aux_loss_coeff > 0:
        auxiliary = [tape.value("aux_scores", (tokens, experts), "fp32", grad=False)]
        if moe.moe_router_score_function == "sigmoid":
            auxiliary.append(tape.value("aux_score_sum", (tokens, 1), "fp32", grad=False))
        tape.op(
            "aux_loss",
            [logits, probabilities],
            auxiliary,
            saves=auxiliary,
            temporaries=scratch[:3],
            backward_temporaries=scratch[:2],
        )
    return probabilities, routing_map


@dataclass(frozen=True, slots=True)
class _Dispatched:
    """What the dispatch hands on."""

    rows: Value
    """Input of the local experts: (received, hidden), in their order."""
    probabilities: Value
    """(received,)"""
    row_id_map: Value
    held: list[Value]
    """What local variables keep until the MoE layer returns."""
    shared_activation: Value | None
    """Of overlapped shared experts, which began with the dispatch."""


def _dispatch(
    tape: Tape, sizes: Sizes, routed: _Routed, normed: Value, routing: tuple[Value, Value], overlapped_width: int
) -> _Dispatched:
    """Permute, all-to-all, sort by local expert (`MoEAlltoAllTokenDispatcher`, fused permutation).

    Overlapped shared experts (`overlapped_width` > 0, per rank) start here on the gathered input and keep it.
    """
    probabilities, routing_map = routing
    shared_input = None
    if overlapped_width:
        shared_input = normed
        if sizes.sp > 1:
            shared_input = tape.value("shared_expert_input", (sizes.tokens, sizes.hidden))
            # Its gradient is reduced at once, before the rows are permuted back.
            tape.backward_at[len(tape.ops)] = len(tape.ops) + 1.4
            tape.op(
                "gather_from_sequence_parallel",
                [normed],
                [shared_input],
                communicated_bytes=sizes.from_tensor_ranks(shared_input.bytes),
            )
    permuted = tape.value("permuted_tokens", (routed.sent, sizes.hidden), routed=True)
    permuted_probabilities = tape.value("permuted_probabilities", (routed.sent,), probabilities.dtype, routed=True)
    experts = probabilities.shape[1]
    mapping = tape.value("row_id_map", (sizes.shard, 2 * experts + 1), "int32", grad=False)
    tape.op(
        "permute",
        [normed, probabilities, routing_map],
        [permuted, permuted_probabilities, mapping],
        saves=[mapping],
        persists=[mapping],
    )
    held = [permuted]
    rows, row_probabilities = permuted, permuted_probabilities
    if sizes.ep > 1:
        rows = tape.value("dispatched_tokens", (routed.received, sizes.hidden), routed=True)
        tape.op("all_to_all", [permuted], [rows], communicated_bytes=sizes.from_expert_ranks(rows.bytes))
    shared_activation = None
    if shared_input is not None:
        # Backward runs these after the tokens' all-to-all, which it launches first.
        if sizes.ep > 1:
            tape.backward_at[len(tape.ops)] = len(tape.ops) - 1.5
            tape.backward_at[len(tape.ops) + 1] = len(tape.ops) - 1.4
        with tape.module("shared_experts"):
            with tape.module("linear_fc1"):
                gate_and_up = column_parallel(
                    tape, sizes, shared_input, sizes.hidden, 2 * overlapped_width, gathered=True
                )
            with tape.module("@activation"):
                shared_activation = swiglu(tape, sizes.tokens, gate_and_up, overlapped_width)
    if sizes.ep > 1:
        row_probabilities = tape.value("dispatched_probabilities", (routed.received,), probabilities.dtype, routed=True)
        tape.op("all_to_all", [permuted_probabilities], [row_probabilities])
        held += [rows, row_probabilities]
    if routed.local_experts > 1:
        rows, row_probabilities = _sort_chunks(tape, sizes, routed, rows, row_probabilities)
    return _Dispatched(rows, row_probabilities, mapping, held, shared_activation)


def _sort_chunks(
    tape: Tape, sizes: Sizes, routed: _Routed, rows: Value, probabilities: Value | None
) -> tuple[Value, Value]:
    """Reorder expert rows between sender order and local-expert order (`moe_sort_chunks_by_index`)."""
    ordered = tape.value("sorted_tokens", (routed.received, sizes.hidden), routed=True)
    mapping = tape.value("sort_row_id_map", (routed.received,), "int32", grad=False, routed=True)
    if probabilities is None:
        tape.op("sort_chunks", [rows], [ordered, mapping], saves=[mapping])
        return ordered, ordered
    ordered_probabilities = tape.value("sorted_probabilities", (routed.received,), probabilities.dtype, routed=True)
    tape.op("sort_chunks", [rows, probabilities], [ordered, ordered_probabilities, mapping], saves=[mapping])
    return ordered, ordered_probabilities


def _experts(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, routed: _Routed, dispatched: _Dispatched) -> Value:
    """Grouped fc1, weighted SwiGLU, grouped fc2 (`TEGroupedMLP`): (received, hidden) to the same shape."""
    received, width = routed.received, moe.moe_ffn_hidden_size
    rows, probabilities = dispatched.rows, dispatched.probabilities
    flops = 2 * received * sizes.hidden * width
    with tape.module("linear_fc1"):
        gate_and_up = tape.value("output", (received, 2 * width), routed=True)
        tape.op(
            "grouped_gemm",
            [rows],
            [gate_and_up],
            saves=[rows],
            weight=(2 * width, sizes.hidden),
            weights=routed.local_experts,
            library="te_grouped_gemm",
            flops=2 * flops,
        )
    with tape.module("@activation"):
        activation = tape.value("activation", (received, width), routed=True)
        tape.op("weighted_swiglu", [gate_and_up, probabilities], [activation], saves=[gate_and_up, probabilities])
    with tape.module("linear_fc2"):
        output = tape.value("output", (received, sizes.hidden), routed=True)
        tape.op(
            "grouped_gemm",
            [activation],
            [output],
            saves=[activation],
            weight=(sizes.hidden, width),
            weights=routed.local_experts,
            library="te_grouped_gemm",
            flops=flops,
        )
    # Local variables of TEGroupedMLP.forward, and of its caller, live until it returns.
    tape.hold([rows, gate_and_up, activation])
    return output


def _overlapped_fc2(tape: Tape, sizes: Sizes, activation: Value, width: int) -> Value:
    """Second half of shared experts beside the combining all-to-all (`linear_fc2_forward`, `post_forward_comm`).

    Sequence numbers let backward start the communication early and the multiplication late: reduce-scatter before
    unpermute, fc2 after the all-to-all (`set_tensor_grad_fn_sequence_sr`).
    """
    output = tape.value("output", (sizes.tokens, sizes.hidden))
    if sizes.ep > 1:
        tape.backward_at[len(tape.ops)] = len(tape.ops) - 1.5
    with tape.module("linear_fc2"):
        tape.op(
            "gemm",
            [activation],
            [output],
            saves=[activation],
            weight=(sizes.hidden, width),
            library="te_gemm",
            flops=2 * sizes.tokens * width * sizes.hidden,
        )
    if sizes.sp > 1:
        shard = tape.value("reduced_output", (sizes.shard, sizes.hidden))
        tape.backward_at[len(tape.ops)] = len(tape.ops) + 1.5
        tape.op("reduce_scatter", [output], [shard], communicated_bytes=sizes.from_tensor_ranks(output.bytes))
        output = shard
    return output


def _shared_experts(tape: Tape, sizes: Sizes, normed: Value, width: int) -> Value:
    """Shared experts on their own, as a dense MLP without norm (`SharedExpertMLP.forward`)."""
    with tape.module("linear_fc1"):
        gate_and_up = column_parallel(tape, sizes, normed, sizes.hidden, 2 * width)
    with tape.module("@activation"):
        activation = swiglu(tape, sizes.tokens, gate_and_up, width)
    with tape.module("linear_fc2"):
        return row_parallel(tape, sizes, activation, width)
