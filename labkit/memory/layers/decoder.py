"""The whole model of one rank on a tape: embedding, decoder layers, head (Megatron Core `GPTModel`)."""

from labkit.memory.layers.attention import multi_latent_attention
from labkit.memory.layers.ends import embedding, head_and_loss
from labkit.memory.layers.linear import add, rms_norm
from labkit.memory.layers.mlp import dense_mlp
from labkit.memory.layers.moe import moe_layer
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload


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
    """One decoder layer (`TransformerLayer`): norm, attention, add, norm, MLP or MoE, add."""
    model = workload.model
    with tape.module("input_layernorm"):
        tape.parameter("weight", (model.hidden_size,), replicated=sizes.sp > 1)
        normed = rms_norm(tape, hidden, sizes.shard, model.hidden_size)
    with tape.module("self_attention", kind="attention"):
        attention = multi_latent_attention(tape, model, sizes, normed)
    residual = add(tape, sizes, attention, hidden)
    if model.mlp_kinds[layer] == "dense":
        with tape.module("mlp", kind="mlp"):
            output = dense_mlp(tape, model, sizes, residual)
    else:
        with tape.module("pre_mlp_layernorm"):
            tape.parameter("weight", (model.hidden_size,), replicated=sizes.sp > 1)
            normed = rms_norm(tape, residual, sizes.shard, model.hidden_size)
        with tape.module("mlp", kind="moe"):
            output = moe_layer(tape, workload, sizes, normed)
    return add(tape, sizes, output, residual)
