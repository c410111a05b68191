"""The whole model of one rank on a tape: embedding, decoder layers, head (Megatron Core `GPTModel`)."""

from collections.abc import Callable

from labkit.memory.layers.ends import embedding, head_and_loss
from labkit.memory.layers.linear import add, rms_norm
from labkit.memory.layers.mla import multi_latent_attention
from labkit.memory.layers.mlp import dense_mlp
from labkit.memory.layers.moe import moe_layer
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.model import Mixer, MlpKind

MIXERS: dict[Mixer, Callable[[Tape, Workload, Sizes, Value], Value]] = {"mla": multi_latent_attention}
"""From the normed hidden state (shard rows, hidden) to the mixer's output of the same shape."""


def record(workload: Workload) -> Tape:
    """Record one micro-batch's forward pass of `workload` on one rank."""
    tape, sizes = Tape(workload.training.precision), Sizes.of(workload)
    with tape.module("embedding", kind="embedding"):
        hidden = embedding(tape, workload, sizes)
    with tape.module("decoder"):
        for layer in range(workload.model.num_layers):
            with tape.module(f"layers.{layer}", layer=layer, kind="norm"):
                hidden = _layer(tape, workload, sizes, hidden, layer)
    with tape.module("", kind="head"):
        head_and_loss(tape, workload, sizes, hidden)
    return tape


def _layer(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value, layer: int) -> Value:
    """One decoder layer (`TransformerLayer`): norm, mixer, add, then norm, MLP or MoE, add."""
    kind = workload.model.layers[layer]
    if kind.mixer is not None:
        hidden = _mixer(tape, workload, sizes, hidden, kind.mixer)
    if kind.mlp is not None:
        hidden = _mlp(tape, workload, sizes, hidden, kind.mlp)
    return hidden


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
