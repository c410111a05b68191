"""The router of a mixture of experts (Megatron Core `transformer/moe/router.py` `TopKRouter`, `moe_utils.py`)."""

from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Buffer, Tape, Value
from labkit.workload import MixtureOfExperts
from labkit.workload.training import Kernels


def router(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, normed: Value, kernels: Kernels) -> tuple[Value, Value]:
    """From the normed residual (shard rows, hidden) to probabilities and a boolean map, both (shard rows, experts).

    Fused it takes the kernels of `transformer_engine/pytorch/router.py`, which keep one fp32 tensor each.
    """
    fused = kernels.moe_router_fusion
    logits = _gating(tape, moe, sizes, normed)
    if moe.moe_z_loss_coeff is not None:
        _z_loss(tape, sizes, logits)
    if fused:
        probabilities, routing_map = _fused_top_k(tape, moe, sizes, logits)
    else:
        probabilities, routing_map = _top_k(tape, moe, sizes, logits, indexed=kernels.deterministic_mode)
    if moe.moe_expert_capacity_factor is not None:
        probabilities, routing_map = _drop(tape, moe, sizes, probabilities, routing_map)
    if moe.moe_router_load_balancing_type != "none" and moe.moe_aux_loss_coeff > 0:
        _auxiliary_loss(tape, moe, sizes, logits, probabilities, fused=fused)
    return probabilities, routing_map


def _gating(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, normed: Value) -> Value:
    """`RouterGatingLinearFunction` multiplies in the router's dtype; its backward casts what it needs."""
    tokens, dtype = sizes.shard, moe.moe_router_dtype or tape.dtype
    logits = tape.value("logits", (tokens, moe.num_moe_experts), dtype)
    casts = [tape.buffer(name, (tokens, sizes.hidden), dtype) for name in ("input_gradient", "input")]
    tape.op(
        "gating",
        [normed],
        [logits],
        saves=[normed],
        backward_temporaries=casts if dtype != tape.dtype else [],
        library="te_gemm",
        flops=2 * tokens * sizes.hidden * moe.num_moe_experts,
    )
    return logits


def _z_loss(tape: Tape, sizes: Sizes, logits: Value) -> None:
    """`z_loss_func`: the square of log-sum-exp, attached to the logits by `MoEAuxLossAutoScaler`."""
    log_sum = tape.value("logsumexp", (sizes.shard,), logits.dtype)
    loss = tape.value("z_loss", (), logits.dtype, grad=False)
    scratch = tape.buffer("exponentials", logits.shape, logits.dtype)
    tape.op("z_loss", [logits], [log_sum, loss], saves=[logits, log_sum, loss], backward_temporaries=[scratch] * 2)


def _scratch(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, count: int) -> list[Buffer]:
    shape = (sizes.shard, moe.num_moe_experts)
    return [tape.buffer(name, shape, "fp32") for name in ("biased", "group_mask", "int_map", "zeros")[:count]]


def _top_k(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, logits: Value, *, indexed: bool) -> tuple[Value, Value]:
    """`topk_routing_with_score_function`; `indexed` probabilities are put at (row, expert), not scattered by expert."""
    tokens, experts, topk = sizes.shard, moe.num_moe_experts, moe.moe_router_topk
    probabilities = tape.value("probabilities", (tokens, experts), logits.dtype)
    routing_map = tape.value("routing_map", (tokens, experts), "bool", grad=False)
    saved = [tape.value("top_indices", (tokens, topk), "int64", grad=False)]
    if moe.moe_router_score_function == "sigmoid" or moe.moe_router_pre_softmax:
        saved.append(tape.value("scores", (tokens, experts), "fp32", grad=False))
    else:
        saved.append(tape.value("top_probabilities", (tokens, topk), "fp32", grad=False))
    if moe.moe_router_score_function == "sigmoid" and topk > 1:
        saved.append(tape.value("top_scores", (tokens, topk), "fp32", grad=False))
        saved.append(tape.value("top_score_sum", (tokens, 1), "fp32", grad=False))
    if moe.moe_router_group_topk is not None and not moe.moe_router_enable_expert_bias:
        # `group_limited_topk` fills the scores of other groups; with a bias the scores are gathered without it.
        saved.append(tape.value("outside_groups", (tokens, experts), "bool", grad=False))
    if indexed:
        saved.append(tape.value("rows", (tokens, 1), "int64", grad=False))
    outputs = [probabilities, routing_map, *saved]
    tape.op("topk_routing", [logits], outputs, saves=saved, temporaries=_scratch(tape, moe, sizes, 4))
    return probabilities, routing_map


def _fused_top_k(tape: Tape, moe: MixtureOfExperts, sizes: Sizes, logits: Value) -> tuple[Value, Value]:
    """`FusedTopkScoreFunction`."""
    shape = (sizes.shard, moe.num_moe_experts)
    probabilities = tape.value("probabilities", shape, logits.dtype)
    routing_map = tape.value("routing_map", shape, "bool", grad=False)
    scores = tape.value("intermediate_output", shape, "fp32", grad=False)
    tape.op("fused_topk", [logits], [probabilities, routing_map, scores], saves=[routing_map, scores])
    return probabilities, routing_map


def _drop(
    tape: Tape, moe: MixtureOfExperts, sizes: Sizes, probabilities: Value, routing_map: Value
) -> tuple[Value, Value]:
    """`apply_router_token_dropping`: the map within each expert's capacity, and probabilities masked by it."""
    mask = tape.value("capacity_map", routing_map.shape, "bool", grad=False)
    kept = tape.value("kept_probabilities", probabilities.shape, probabilities.dtype)
    tape.op("capacity_mask", [routing_map], [mask], temporaries=_scratch(tape, moe, sizes, 2))
    tape.op("mask", [probabilities, mask], [kept], saves=[mask])
    return kept, mask


def _auxiliary_loss(
    tape: Tape, moe: MixtureOfExperts, sizes: Sizes, logits: Value, probabilities: Value, *, fused: bool
) -> None:
    """`compute_routing_scores_for_aux_loss` and `switch_load_balancing_loss_func`, attached to the probabilities."""
    experts = moe.num_moe_experts
    kept = [tape.value("aux_scores", (sizes.shard, experts), "fp32", grad=False)]
    if moe.moe_router_score_function == "sigmoid" and not fused:
        kept.append(tape.value("aux_score_sum", (sizes.shard, 1), "fp32", grad=False))
    # Per sequence the counts of a micro-batch's samples lie side by side.
    counted = experts * (sizes.batch if moe.moe_router_load_balancing_type == "seq_aux_loss" else 1)
    dtype = "fp32" if moe.moe_router_load_balancing_type == "global_aux_loss" else "int64"
    kept.append(tape.value("tokens_per_expert", (counted,), dtype, grad=False))
    kept.append(tape.value("aux_loss", (), "fp32", grad=False))
    if fused:
        kept.append(tape.value("coefficient", (), "fp32", grad=False))
    scratch = _scratch(tape, moe, sizes, 3)
    inputs = [logits, probabilities]
    tape.op("aux_loss", inputs, kept, saves=kept, temporaries=scratch, backward_temporaries=scratch[:2])
