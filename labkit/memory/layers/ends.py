"""What stands before and after the layers: embedding, final norm, output head, losses (Megatron Core `GPTModel`)."""

from collections.abc import Callable

from labkit.memory.layers.embedding import (
    embedding,
    embedding_parameters,
    embeds_twice,
    saved_ids,
    shared_weight,
    word_weight,
)
from labkit.memory.layers.inputs import batch_tensor
from labkit.memory.layers.linear import global_buffer, norm, norm_parameters, unfused_norm
from labkit.memory.layers.loss import cross_entropy, mean_loss
from labkit.memory.layers.mtp import prediction_losses, predictions
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.stages import stage_layers


def front(tape: Tape, workload: Workload, sizes: Sizes) -> Value:
    """The embedding of the batch's tokens: hidden states (shard rows, hidden)."""
    embedding_parameters(tape, workload, sizes)
    words = word_weight(tape, workload, sizes)
    ids: dict[str, Value] = {}
    if sizes.trains:
        later = _later_gradient(workload)
        # The head's part of a shared weight's gradient is the dummy of a fused accumulation, which a sum leaves alone.
        shared = shared_weight(workload) and workload.parallelism.pp == 1
        summed = [tape.buffer("gradient_sum", words.shape)] if shared and not later else []
        tape.op("read_weight", [], [words], backward_temporaries=summed)
        tape.takes = words if later else None
        ids = {name: batch_tensor(tape, sizes, name) for name in saved_ids(workload)}
    return embedding(tape, workload, sizes, words, ids)


def _later_gradient(workload: Workload) -> bool:
    """Whether what comes after the layers makes a gradient of the words' weight, which waits for the embedding's."""
    if workload.parallelism.pp > 1:
        return False
    fused = workload.training.kernels.gradient_accumulation_fusion
    return bool(workload.model.mtp_num_layers) or (shared_weight(workload) and not fused)


def final_norm(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """The norm behind the last layer of the decoder."""
    model = workload.model
    with tape.module("decoder"), tape.module("final_layernorm" if model.hybrid_layer_pattern is None else "final_norm"):
        norm_parameters(tape, model, sizes.hidden, replicated=sizes.sp > 1)
        if model.mixture_of_experts is not None:
            return unfused_norm(tape, workload, hidden, sizes.shard, sizes.hidden)
        # Of dense models Transformer Engine's, whoever's their layers are (`transformer_block.LayerNormImpl`).
        return norm(tape, model, hidden, sizes.shard, sizes.hidden)


def back(tape: Tape, workload: Workload, sizes: Sizes, decoded: Value, layer: Callable[[Value], Value]) -> None:
    """Vocabulary-parallel logits and losses (`GPTModel._postprocess`, `forward_step`).

    `layer` records a transformer layer, for multi-token prediction.
    """
    model, normed = workload.model, decoded
    labels, loss_mask = (batch_tensor(tape, sizes, name) for name in ("labels", "loss_mask"))
    words = word_weight(tape, workload, sizes)
    predicted: list[Value] = []
    if embeds_twice(workload):
        tape.op("read_weight", [], [words])
    if model.mtp_num_layers:
        normed, predicted = predictions(tape, workload, sizes, normed, words, layer)
    with tape.module("output_layer"):
        weight = _output_weight(tape, workload, words)
    tape.leaves = words if _later_gradient(workload) else None

    def logits_of(state: Value) -> Value:
        return _logits(tape, workload, sizes, state, weight)

    normed = prediction_losses(tape, workload, sizes, normed, predicted, logits_of)
    with tape.module("output_layer"):
        logits = logits_of(normed)
    loss = cross_entropy(tape, workload, sizes, logits, labels)
    # Variables of GPTModel.forward.
    tape.hold([decoded, logits])
    mean_loss(tape, sizes, loss, loss_mask)


def _output_weight(tape: Tape, workload: Workload, words: Value) -> Value:
    """Weight of the output layer: the words' where it is shared."""
    if shared_weight(workload):
        if embeds_twice(workload):
            tape.parameter("weight", words.shape)  # which nothing uses (`skip_weight_param_allocation`)
        return words
    # A copy of the words' on a stage of its own, where it is not untied.
    tape.parameter("weight", words.shape, shared_embedding=not workload.model.untie_embeddings_and_output_weights)
    weight = tape.weight("weight", words.shape)
    tape.op("read_weight", [], [weight])
    return weight


def _logits(tape: Tape, workload: Workload, sizes: Sizes, normed: Value, weight: Value) -> Value:
    """Vocabulary-parallel logits (tokens, vocabulary / tp) by PyTorch's matrix product (`ColumnParallelLinear`)."""
    width = weight.shape[0]
    logits = tape.value("logits", (sizes.tokens, width))
    full_gradient = tape.buffer("input_gradient", (sizes.tokens, sizes.hidden))
    if sizes.sp > 1:
        layers = (layer for chunk in stage_layers(workload, workload.parallelism.pp - 1) for layer in chunk)
        experts = any(workload.model.layers[layer].mlp == "moe" for layer in layers)
        global_buffer(tape, workload, sizes, experts=experts)  # for forward and backward
    tape.op(
        "column_parallel_matmul",
        [normed, weight],
        [logits],
        saves=[normed],
        backward_temporaries=[full_gradient] if sizes.sp > 1 else [],
        weight=weight.shape,
        library="aten_matmul",
        flops=2 * sizes.tokens * width * sizes.hidden,
    )
    return logits
