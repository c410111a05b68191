"""The units of a model on tapes: embedding, halves of decoder layers, head (Megatron Core `GPTModel`).

A transformer layer (`TransformerLayer`) is norm, mixer, add, then norm, MLP or MoE, add: two halves that share nothing
but the residual stream, so that any order of kinds is priced from its distinct halves.
"""

from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

from labkit.ledger import Certainty
from labkit.memory.layers.attention import self_attention
from labkit.memory.layers.embedding import embedding_parameters
from labkit.memory.layers.ends import back, final_norm, front
from labkit.memory.layers.gdn import gated_delta_net, head_permutation
from labkit.memory.layers.inputs import read_batch, take_arguments
from labkit.memory.layers.linear import bias_dropout_add, global_buffer, norm_parameters, unfused_norm
from labkit.memory.layers.mamba import mamba
from labkit.memory.layers.mla import multi_latent_attention
from labkit.memory.layers.mlp import dense_mlp
from labkit.memory.layers.moe import moe_layer
from labkit.memory.layers.outputs import hand_over, mean_square_loss, pass_outputs
from labkit.memory.layers.prefix_tree import tree_delta_net
from labkit.memory.layers.rotary import rotary_table, yarn_tables
from labkit.memory.layers.sizes import Sizes
from labkit.memory.layers.unfused import causal_mask
from labkit.memory.tape import Tape, Value
from labkit.workload import Routing, Workload
from labkit.workload.attention_backends import attention_backend
from labkit.workload.model import Mixer, MlpKind
from labkit.workload.routing import busiest_share

type Half = Mixer | MlpKind
"""What stands between two points of the residual stream."""


class Place(NamedTuple):
    """A half in a stretch of layers; equal ones hold the same bytes."""

    layer: int
    """Counted from the stretch's first."""
    half: Half
    share: Fraction | None = None
    """Of a MoE layer's rows, what the busiest rank gets (`labkit.workload.routing`)."""


MIXERS: dict[Mixer, Callable[[Tape, Workload, Sizes, Value], Value]] = {
    "attention": self_attention,
    "mla": multi_latent_attention,
    "gdn": gated_delta_net,
    "mamba": mamba,
}
"""From the hidden state (shard rows, hidden) to the mixer's output of the same shape."""
LORA_MIXERS: dict[Mixer, Callable[[Tape, Workload, Sizes, Value], Value]] = {"gdn": tree_delta_net}
"""Those of the `lora` runtime that are code of its own."""
FUSED_NORM: frozenset[Mixer] = frozenset(("attention", "gdn", "mamba"))
"""Mixers that norm their input in their first linear (`TELayerNormColumnParallelLinear`); the others get it normed."""
_SCORED: frozenset[Half] = frozenset(("attention", "mla"))
"""Mixers with a core attention."""


def record_front(workload: Workload, sizes: Sizes) -> Tape:
    """What a rank runs before its layers: the embedding."""
    tape = _tape(workload)
    if sizes.trains:
        read_batch(tape, workload, sizes, first=True, last=workload.parallelism.pp == 1)
    with tape.module("embedding", kind="embedding"):
        tape.exit = front(tape, workload, sizes)
    return tape


def record_layers(workload: Workload, sizes: Sizes, places: Sequence[Place]) -> Tape:
    """A stretch of layers, as halves in order."""
    tape = _tape(workload)
    hidden = tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    _made_once(tape, workload, sizes, {place.half for place in places})
    take_arguments(tape, workload, sizes)
    inputs = {0: hidden}
    with tape.module("decoder"):
        for layer, half, share in places:
            inputs.setdefault(layer, hidden)
            with tape.module(f"layers.{layer}", layer=layer, kind="norm"):
                hidden = _half(tape, workload, sizes, hidden, half, share or Fraction(1, sizes.ep))
            if layer or not workload.training.differentiates:
                # `hidden_states` in the loop over layers (`custom_forward`) is a layer's input until it has returned.
                tape.hold([inputs[layer]])
    tape.exit = hidden
    return tape


def _made_once(tape: Tape, workload: Workload, sizes: Sizes, halves: Collection[Half]) -> None:
    """What all layers of a model chunk share, and what it makes even where it has none."""
    model = workload.model
    if model.has_rotary_table:
        rotary_table(tape, sizes, model.rotary_width)  # an attribute of the model
        if model.position_embedding_type == "yarn":
            yarn_tables(tape, model.rotary_width, model.original_max_position_embeddings // sizes.cp)
    if model.gated_delta_net is not None and sizes.cp > 1 and "gdn" in halves:
        head_permutation(tape, model.gated_delta_net, sizes)
    if sizes.local:
        if sizes.sp > 1 or sizes.choices.wide_scores:
            global_buffer(tape, workload, sizes)
    elif attention_backend(workload) == "unfused" and not _SCORED.isdisjoint(halves):
        causal_mask(tape, sizes)


def _half(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, half: Half, share: Fraction) -> Value:
    """A mixer or an MLP and the norm before it; `share` is of a MoE layer's rows."""
    if half == "dense":
        return _mlp(tape, workload, sizes, hidden)
    if half == "moe":
        return _moe(tape, workload, sizes, hidden, share)
    mixed = _mixer(tape, workload, sizes, hidden, half)
    alone = workload.model.hybrid_layer_pattern is not None and half != "mamba"
    return _no_mlp(tape, mixed) if alone else mixed


def record_received(workload: Workload, sizes: Sizes) -> Tape:
    """What a later pipeline stage begins with: the residual stream it receives.

    Sources: `p2p_communication.recv_forward`; `TransformerBlock.set_input_tensor`, which keeps it, and so its gradient,
    until the next forward.
    """
    tape = _receiving(workload, sizes)
    if sizes.packed:
        read_batch(tape, workload, sizes, first=False, last=False)
    return tape


def _receiving(workload: Workload, sizes: Sizes) -> Tape:
    tape = _tape(workload)
    with tape.module("pipeline", kind="pipeline"):
        tape.exit = tape.value("received", (sizes.shard, sizes.hidden))
        tape.op("recv_forward", [], [tape.exit], persists=[tape.exit])
    return tape


def record_received_by_last(workload: Workload, sizes: Sizes) -> Tape:
    """The same where the stage ends in the loss, for which it reads the batch.

    Where it predicts several tokens it has a copy of the embedding.
    """
    tape = _receiving(workload, sizes)
    read_batch(tape, workload, sizes, first=False, last=True)
    if workload.model.mtp_num_layers:
        with tape.module("embedding", kind="embedding"):
            embedding_parameters(tape, workload, sizes)
    return tape


def record_sent(workload: Workload, sizes: Sizes) -> Tape:
    """What an earlier stage ends with: what it sends is freed, the gradient it gets for it stays while backward runs.

    Sources: `schedules.deallocate_output_tensor`, `schedules.backward_step`.
    """
    tape = _tape(workload)
    tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    _send(tape, workload, sizes, tape.entry)
    return tape


def _send(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> None:
    _made_once(tape, workload, sizes, ())
    with tape.module("pipeline", kind="pipeline"):
        sent = tape.view(hidden, "sent", hidden.shape)
        instead = tape.value("deallocated_output", (1,), grad=False)  # its `.data` from now on
        tape.op("send_forward", [hidden], [sent, instead], saves=[instead], aliases=True, keeps_gradient=True)


def record_normed_and_sent(workload: Workload, sizes: Sizes) -> Tape:
    """The same of the decoder's last layers where the last stage has none, and predicts tokens.

    Source: `TransformerBlock.has_final_layernorm_in_this_stage`.
    """
    tape = _tape(workload)
    tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    _send(tape, workload, sizes, final_norm(tape, workload, sizes, tape.entry))
    return tape


def record_passed_on(workload: Workload, sizes: Sizes) -> Tape:
    """What a later stage without layers ends with: it sends a copy of what it has received."""
    tape = _tape(workload)
    tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    _send(tape, workload, sizes, _copied(tape, tape.entry))
    return tape


def _copied(tape: Tape, received: Value) -> Value:
    """What a block without layers and norm makes of its input, which else were its output's node of the graph.

    Sources: `TransformerBlock.forward`; `schedules.forward_step`, whose list keeps the input, as layers do elsewhere.
    """
    with tape.module("decoder", kind="pipeline"):
        copy = tape.value("hidden_states", received.shape)
        tape.op("clone", [received], [copy], saves=[received], aliases=True)
    return copy


def record_back(workload: Workload, sizes: Sizes) -> Tape:
    """What a rank runs after its layers: final norm, head, loss; in the `lora` runtime the outputs."""
    return _back(workload, sizes, alone=False)


def record_back_alone(workload: Workload, sizes: Sizes) -> Tape:
    """What a rank runs that has no layers but those of multi-token prediction: its input is normed already."""
    return _back(workload, sizes, alone=True)


def _back(workload: Workload, sizes: Sizes, *, alone: bool) -> Tape:
    tape = _tape(workload)
    tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    predicted = workload.model.prediction_layers
    _made_once(tape, workload, sizes, {half for kind in predicted for half in kind if half is not None})
    with tape.module("", kind="head"):
        if workload.training.runtime == "lora":
            tape.exit = pass_outputs(tape, workload, sizes, tape.entry)
        else:
            decoded = _copied(tape, tape.entry) if alone else final_norm(tape, workload, sizes, tape.entry)
            back(tape, workload, sizes, decoded, lambda hidden: _predicted(tape, workload, sizes, hidden))
    return tape


def _predicted(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """The layers of one depth of multi-token prediction: one like the decoder's last, or a `HybridStack`."""
    model = workload.model
    for layer, kind in enumerate(model.prediction_layers):
        given, stack = hidden, model.hybrid_layer_pattern is not None
        with tape.module(f"layers.{layer}" if stack else ""):
            for half in kind:
                if half is not None:
                    share = busiest_share(workload, None) if half == "moe" else Fraction(1, sizes.ep)
                    hidden = _half(tape, workload, sizes, hidden, half, share)
        # A variable of the caller.
        tape.hold([given])
    return hidden


def record_loss(workload: Workload, sizes: Sizes) -> Tape:
    """What the caller of the `lora` runtime does with the model's outputs."""
    tape, outputs = _tape(workload), record_back(workload, sizes).exit
    if outputs is None:
        raise ValueError("only the lora runtime has outputs")
    with tape.module("loss", kind="head"):
        tape.entry = tape.value(outputs.name, outputs.shape, outputs.dtype)
        if workload.training.differentiates:
            mean_square_loss(tape, workload, tape.entry)
        else:
            hand_over(tape, tape.entry)
    return tape


def _tape(workload: Workload) -> Tape:
    training = workload.training
    return Tape(training.precision, _routed_certainty(workload.routing), frozen=training.runtime == "lora")


def _mixer(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, mixer: Mixer) -> Value:
    mixed = (
        hidden if mixer in FUSED_NORM and not sizes.local else _norm(tape, workload, sizes, hidden, "input_layernorm")
    )
    with tape.module("mixer" if mixer == "mamba" else "self_attention", kind="attention"):
        mixers = MIXERS if sizes.trains else {**MIXERS, **LORA_MIXERS}
        output = mixers[mixer](tape, workload, sizes, mixed)
    biased = workload.model.add_bias_linear and mixer in ("attention", "mla")
    added = bias_dropout_add(tape, workload, sizes, output, hidden, biased=biased)
    # `input_layernorm_output`, a local variable of TransformerLayer.
    tape.hold([mixed])
    return added


def _mlp(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    normed = _norm(tape, workload, sizes, hidden, "pre_mlp_layernorm") if sizes.local else hidden
    with tape.module("mlp", kind="mlp"):
        output = dense_mlp(tape, workload, sizes, normed)
    added = bias_dropout_add(tape, workload, sizes, output, hidden, biased=workload.model.add_bias_linear)
    # `pre_mlp_layernorm_output`, a local variable of TransformerLayer.
    tape.hold([normed])
    return added


def _no_mlp(tape: Tape, hidden: Value) -> Value:
    """The MLP of a `TransformerLayer` that has none (`IdentityOp`): recompute takes it for one, and keeps its input."""
    with tape.module("mlp", kind="mlp"):
        same = tape.view(hidden, "hidden_states", hidden.shape)
        tape.op("identity", [hidden], [same], aliases=True)
    return same


def _moe(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, share: Fraction) -> Value:
    normed = _norm(tape, workload, sizes, hidden, "pre_mlp_layernorm")
    with tape.module("mlp", kind="moe"):
        output = moe_layer(tape, workload, sizes, normed, share)
    # Experts add their biases themselves.
    added = bias_dropout_add(tape, workload, sizes, output, hidden, biased=False)
    # `pre_mlp_layernorm_output`, a local variable of TransformerLayer.
    tape.hold([normed])
    return added


def _norm(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, name: str) -> Value:
    with tape.module(name):
        norm_parameters(tape, workload.model, sizes.hidden, replicated=sizes.sp > 1)
        return unfused_norm(tape, workload, hidden, sizes.shard, sizes.hidden)


def _routed_certainty(routing: Routing | None) -> Certainty:
    """A stated routing is exact, a measured one is measured; without either its rows are set aside."""
    if routing is None or routing.kind == "allowance":
        return "allowance"
    return "measured" if routing.kind == "measured" else "exact"
