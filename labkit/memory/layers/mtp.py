"""Multi-token prediction (Megatron Core `transformer/multi_token_prediction.py`): layers and losses after the decoder.

Each depth embeds the tokens one further on, joins them with the hidden states of the depth before and runs a
transformer layer; the output layer is shared, and the losses hang on the hidden states of the decoder.
"""

from collections.abc import Callable

from labkit.memory.layers.embedding import embedding, saved_ids
from labkit.memory.layers.inputs import rolled, take_arguments
from labkit.memory.layers.linear import column_parallel, norm, norm_parameters
from labkit.memory.layers.loss import cross_entropy
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload

type Layer = Callable[[Value], Value]
"""A transformer layer, from the residual stream to the residual stream."""


def predictions(
    tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, words: Value, layer: Layer
) -> tuple[Value, list[Value]]:
    """Hidden states of the decoder and of each depth: parts of one tensor (`MultiTokenPredictionBlock.forward`)."""
    first = tape.view(hidden, "hidden_states_list", hidden.shape)  # the one part, whose gradient `cat` copies
    tape.op("chunk", [hidden], [first])
    states = [first]
    for depth in range(workload.model.mtp_num_layers or 0):
        with tape.module(f"mtp.layers.{depth}", kind="head"):
            _parameters(tape, workload, sizes)
            states.append(_depth(tape, workload, sizes, states[-1], words, layer))
    whole = tape.value("hidden_states", (len(states) * sizes.shard, sizes.hidden))
    tape.op("cat", states, [whole], aliases=True)
    parts = [tape.view(whole, f"hidden_states_{depth}", (sizes.shard, sizes.hidden)) for depth in range(len(states))]
    tape.op("chunk", [whole], parts)
    return parts[0], parts[1:]


def _parameters(tape: Tape, workload: Workload, sizes: Sizes) -> None:
    """Those before the transformer layer's own."""
    for name in ("enorm", "hnorm"):
        norm_parameters(tape, workload.model, sizes.hidden, f"{name}.", replicated=sizes.sp > 1)
    tape.parameter("eh_proj.weight", (sizes.hidden // sizes.tp, 2 * sizes.hidden))


def _depth(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, words: Value, layer: Layer) -> Value:
    """`MultiTokenPredictionLayer.forward`; full recompute checkpoints what follows the embedding."""
    model = workload.model
    ids = {name: rolled(tape, sizes, name) for name in ("tokens", "position_ids")}
    with tape.module("embedding", kind="embedding"):
        embedded = embedding(tape, workload, sizes, words, {name: ids[name] for name in saved_ids(workload)})
    with tape.module("@proj_and_transformer_layer"):
        take_arguments(tape, workload, sizes)
        joined = tape.value("joined", (sizes.shard, 2 * sizes.hidden))
        normed = []
        for name, x in (("enorm", embedded), ("hnorm", hidden)):
            with tape.module(name):
                out = norm(tape, model, x, sizes.shard, sizes.hidden)
                # Each norm makes its strided part of the gradient contiguous.
                part = tape.view(out, "part", out.shape)
                tape.op("part", [out], [part])
                normed.append(part)
        tape.op("cat", normed, [joined], aliases=True)
        with tape.module("eh_proj"):
            projected = column_parallel(tape, sizes, joined, 2 * sizes.hidden, sizes.hidden // sizes.tp)
        tape.hold(normed)
        with tape.module("mtp_model_layer", kind="norm"):
            out = layer(_gathered(tape, sizes, projected))
        with tape.module("final_layernorm"):
            norm_parameters(tape, model, sizes.hidden, replicated=sizes.sp > 1)
            out = norm(tape, model, out, sizes.shard, sizes.hidden)
    # Variables of MultiTokenPredictionLayer.forward.
    tape.hold([*ids.values(), embedded])
    return out


def _gathered(tape: Tape, sizes: Sizes, projected: Value) -> Value:
    """All columns on each rank; under sequence parallelism a view of its rows, which keeps the whole alive."""
    if sizes.tp == 1:
        return projected
    whole = tape.value("gathered", (sizes.tokens, sizes.hidden))
    tape.op("all_gather_last_dim", [projected], [whole], temporaries=[tape.buffer("ranks", whole.shape)])
    if sizes.sp == 1:
        return whole
    shard = tape.view(whole, "shard", (sizes.shard, sizes.hidden))
    tape.op("scatter_to_sequence_parallel", [whole], [shard])
    return shard


def prediction_losses(
    tape: Tape,
    workload: Workload,
    sizes: Sizes,
    hidden: Value,
    states: list[Value],
    logits_of: Callable[[Value], Value],
) -> Value:
    """Losses of the depths, hung on the decoder's hidden states (`process_mtp_loss`, `MTPLossAutoScaler`)."""
    held: list[Value] = []
    for state in states:
        with tape.module("output_layer"):
            logits = logits_of(state)
        labels, mask = rolled(tape, sizes, "labels"), rolled(tape, sizes, "loss_mask")
        loss = cross_entropy(tape, workload, sizes, logits, labels)
        tape.hold([logits, *held])
        masked = tape.value("masked_loss", loss.shape, "fp32")
        tape.op("mask", [loss, mask], [masked], saves=[mask])
        scaled = tape.value("scaled_loss", loss.shape, "fp32")
        count = tape.value("safe_num_tokens", (1,), "fp32", grad=False)
        product = tape.buffer("product", loss.shape, "fp32")
        tape.op("scale", [masked], [scaled, count], saves=[count], temporaries=[product])
        attached = tape.view(hidden, hidden.name, hidden.shape)
        tape.op("attach_loss", [hidden, scaled], [attached], saves=[scaled], aliases=True)
        hidden, held = attached, [logits, labels, mask]
    tape.hold(held)
    return hidden
