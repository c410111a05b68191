"""Mixture of experts (Megatron Core `transformer/moe/moe_layer.py` `MoELayer`).

Expert rows: `sent` leave this rank (its shard rows times top-k), `received` reach its local experts: those of the
busiest rank (`labkit.workload.routing`). Values whose rows depend on routing are marked as such.
"""

from collections.abc import Sequence
from fractions import Fraction

from labkit.memory.layers.activation import input_width
from labkit.memory.layers.dispatch import DISPATCHERS, Context, Routed
from labkit.memory.layers.experts import OverlappedSharedExperts, grouped_experts, sequential_experts, shared_experts
from labkit.memory.layers.linear import replicated
from labkit.memory.layers.router import router
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Shape, Tape, Value
from labkit.workload import MixtureOfExperts, Model, Workload
from labkit.workload.routing import expert_rows


def moe_layer(tape: Tape, workload: Workload, sizes: Sizes, normed: Value, share: Fraction) -> Value:
    """From the normed residual (shard rows, hidden) to the layer's output (shard rows, hidden).

    `share` is the busiest rank's part of the layer's rows.
    """
    moe, kernels = workload.model.mixture_of_experts, workload.training.kernels
    if moe is None:
        raise ValueError("a MoE layer needs mixture_of_experts")
    shared_width = (moe.moe_shared_expert_intermediate_size or 0) // sizes.tp
    overlaps = kernels.moe_shared_expert_overlap and shared_width > 0
    _parameters(tape, workload.model, moe, sizes, shared_width, grouped=kernels.groups_experts)
    shared_output, overlapped, gated = None, None, moe.moe_shared_expert_gate
    if overlaps:
        overlapped = OverlappedSharedExperts(tape, workload, sizes, shared_width, gated=gated)
    elif shared_width:
        with tape.module("shared_experts"):
            shared_output = shared_experts(tape, workload, sizes, normed, shared_width, gated=gated)
    with tape.module("router"):
        probabilities, routing_map = router(tape, moe, sizes, normed, kernels)
    tokens = normed
    if moe.moe_latent_size is not None:
        with tape.module("fc1_latent_proj"):
            tokens = replicated(tape, sizes, normed, sizes.hidden, moe.moe_latent_size)
    rows = expert_rows(workload, share, sizes.shard)
    context = Context(tape, sizes, workload, moe, rows, overlapped)
    dispatcher = DISPATCHERS[kernels.moe_token_dispatcher_type](context)
    dispatched = dispatcher.dispatch(Routed(tokens, probabilities, routing_map))
    with tape.module("experts"):
        experts = grouped_experts if kernels.groups_experts else sequential_experts
        expert_output = experts(tape, workload, sizes, dispatched.rows, dispatched.probabilities)
    output = dispatcher.combine(expert_output)
    if moe.moe_latent_size is not None:
        with tape.module("fc2_latent_proj"):
            output = replicated(tape, sizes, output, moe.moe_latent_size, sizes.hidden)
    if shared_output is not None:
        total = tape.value("output", output.shape)
        tape.op("add", [output, shared_output], [total], aliases=True)
        output = total
    # Local variables of MoELayer.forward, and the argument it and TransformerLayer hold.
    tape.hold([normed, *context.held])
    return output


def _parameters(
    tape: Tape, model: Model, moe: MixtureOfExperts, sizes: Sizes, shared_width: int, *, grouped: bool
) -> None:
    """In the order `MoELayer` registers them, which is not that in which they are used."""
    hidden, replicated_here = sizes.hidden, sizes.sp > 1
    outer, inner = moe.moe_latent_size or hidden, moe.moe_ffn_hidden_size // sizes.etp
    # `use_expert_pgs` of `TEGroupedLinear`.
    split, local = sizes.ep > 1 or sizes.etp != sizes.tp, moe.num_moe_experts // sizes.ep
    biased = model.add_bias_linear
    tape.parameter("router.weight", (moe.num_moe_experts, hidden), replicated=replicated_here)
    if biased:
        tape.parameter("router.bias", (moe.num_moe_experts,), replicated=replicated_here)
    if moe.moe_latent_size is not None:
        for name, shape in (("fc1_latent_proj", (outer, hidden)), ("fc2_latent_proj", (hidden, outer))):
            tape.parameter(f"{name}.weight", shape, replicated=replicated_here)
            if biased:
                tape.parameter(f"{name}.bias", shape[:1], replicated=replicated_here)
    with tape.module("experts"):
        _expert_parameters(
            tape,
            (("linear_fc1", (input_width(model, inner), outer)), ("linear_fc2", (outer, inner))),
            local,
            biased=biased,
            split=split,
            grouped=grouped,
        )
    if shared_width:
        with tape.module("shared_experts"):
            if moe.moe_shared_expert_gate:
                tape.parameter("gate_weight", (1, hidden), replicated=replicated_here)
            tape.parameter("linear_fc1.weight", (input_width(model, shared_width), hidden))
            tape.parameter("linear_fc2.weight", (hidden, shared_width))


def _expert_parameters(
    tape: Tape,
    linears: Sequence[tuple[str, Shape]],
    local: int,
    *,
    biased: bool,
    split: bool,
    grouped: bool,
) -> None:
    """Of `TEGroupedMLP`, one linear after the other; else of `SequentialMLP`, one expert after the other."""
    if not grouped:
        for expert in range(local):
            for name, shape in linears:
                tape.parameter(f"local_experts.{expert}.{name}.weight", shape, expert=split)
                if biased:
                    tape.parameter(f"local_experts.{expert}.{name}.bias", shape[:1], expert=split)
        return
    for name, shape in linears:
        if not biased:
            tape.parameter(f"{name}.weight", shape, expert=split, copies=local)
        for expert in range(local if biased else 0):
            tape.parameter(f"{name}.weight{expert}", shape, expert=split)
            tape.parameter(f"{name}.bias{expert}", shape[:1], expert=split)
