"""The units of a model on tapes: embedding, halves of decoder layers, head (Megatron Core `GPTModel`).

A transformer layer (`TransformerLayer`) is norm, mixer, add, then norm, MLP or MoE, add: two halves that share nothing
but the residual stream, so that any order of kinds is priced from its distinct halves.
"""

from collections.abc import Callable, Sequence

from labkit.memory.layers.ends import embedding, head_and_loss
from labkit.memory.layers.linear import add, rms_norm
from labkit.memory.layers.mla import multi_latent_attention
from labkit.memory.layers.mlp import dense_mlp
from labkit.memory.layers.moe import moe_layer
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.model import Mixer, MlpKind

type Half = Mixer | MlpKind
"""What stands between two points of the residual stream."""

MIXERS: dict[Mixer, Callable[[Tape, Workload, Sizes, Value], Value]] = {"mla": multi_latent_attention}
"""From the normed hidden state (shard rows, hidden) to the mixer's output of the same shape."""


def record_front(workload: Workload, sizes: Sizes) -> Tape:
    """What a rank runs before its layers: the embedding."""
    tape = Tape(workload.training.precision)
    with tape.module("embedding", kind="embedding"):
        tape.exit = embedding(tape, workload, sizes)
    return tape


def record_layers(workload: Workload, sizes: Sizes, halves: Sequence[tuple[int, Half]]) -> Tape:
    """A stretch of layers, as halves in order: (layer, counted from the stretch's first, and its mixer or MLP)."""
    tape = Tape(workload.training.precision)
    hidden = tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    with tape.module("decoder"):
        for layer, half in halves:
            with tape.module(f"layers.{layer}", layer=layer, kind="norm"):
                if half == "dense" or half == "moe":  # noqa: PLR1714 (the type checker narrows equalities alone)
                    hidden = _mlp(tape, workload, sizes, hidden, half)
                else:
                    hidden = _mixer(tape, workload, sizes, hidden, half)
    tape.exit = hidden
    return tape


def record_back(workload: Workload, sizes: Sizes) -> Tape:
    """What a rank runs after its layers: final norm, head, loss."""
    tape = Tape(workload.training.precision)
    tape.entry = tape.value("residual", (sizes.shard, sizes.hidden))
    with tape.module("", kind="head"):
        head_and_loss(tape, workload, sizes, tape.entry)
    return tape


def _mixer(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, mixer: Mixer) -> Value:
    model = workload.model
    with tape.module("input_layernorm"):
        tape.parameter("weight", (model.hidden_size,), replicated=sizes.sp > 1)
        normed = rms_norm(tape, hidden, sizes.shard, model.hidden_size)
    with tape.module("self_attention", kind="attention"):
        output = MIXERS[mixer](tape, workload, sizes, normed)
    return add(tape, sizes, output, hidden)


def _mlp(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, kind: MlpKind) -> Value:
    model = workload.model
    if kind == "dense":
        with tape.module("mlp", kind="mlp"):
            output = dense_mlp(tape, model, sizes, hidden)
    else:
        with tape.module("pre_mlp_layernorm"):
            tape.parameter("weight", (model.hidden_size,), replicated=sizes.sp > 1)
            normed = rms_norm(tape, hidden, sizes.shard, model.hidden_size)
        with tape.module("mlp", kind="moe"):
            output = moe_layer(tape, workload, sizes, normed)
    return add(tape, sizes, output, hidden)
