"""What stands before and after the layers: embedding, final norm, output head, loss.

Sources: Megatron Core `models/common/embeddings/language_model_embedding.py`, `tensor_parallel/layers.py`,
`transformer_engine/pytorch/cross_entropy.py`.
"""

from labkit.memory.layers.linear import dropout, global_buffer, norm, norm_parameters
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.behaviour import cross_entropy_gradient


def embedding(tape: Tape, workload: Workload, sizes: Sizes) -> Value:
    """Token ids to hidden states (shard rows, hidden): a vocabulary-parallel lookup, reduced over its ranks."""
    width = workload.padded_vocab_size // sizes.tp
    out = tape.value("hidden_states", (sizes.shard, sizes.hidden))
    with tape.module("word_embeddings"):
        tape.parameter("weight", (width, sizes.hidden))
        lookup = tape.value("lookup", (sizes.tokens, sizes.hidden))
        saves = []
        if sizes.tp > 1:
            saves.append(tape.value("input_mask", (sizes.tokens,), "bool", grad=False))
            saves.append(tape.value("masked_input", (sizes.tokens,), "int64", grad=False))
        else:
            saves.append(tape.value("token_ids", (sizes.tokens,), "int64", grad=False))
        # The gradient of the lookup is a whole weight, made outside any fused accumulation.
        gradient = tape.buffer("weight_gradient", (width, sizes.hidden))
        masked_gradient = tape.buffer("masked_gradient", (sizes.tokens, sizes.hidden))
        gradients = [gradient, *([masked_gradient] if sizes.tp > 1 else [])]
        tape.op(
            "embedding",
            [],
            [lookup, *saves],
            saves=saves if sizes.trains else [],
            backward_temporaries=gradients if sizes.trains else [],
        )
        if sizes.sp > 1:
            reduced = tape.value("reduced", (sizes.shard, sizes.hidden))
            tape.op("reduce_scatter", [lookup], [reduced])
            lookup = reduced
    # LanguageModelEmbedding clones so that the scattered view does not keep the whole alive.
    tape.op("clone", [lookup], [out], aliases=True)
    return dropout(tape, out) if workload.model.hidden_dropout > 0 else out


def head_and_loss(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> None:
    """Final norm, vocabulary-parallel logits and Transformer Engine's fused cross entropy."""
    width = workload.padded_vocab_size // sizes.tp
    hybrid = workload.model.hybrid_layer_pattern is not None
    with tape.module("decoder"), tape.module("final_norm" if hybrid else "final_layernorm"):
        norm_parameters(tape, workload.model, sizes.hidden, replicated=sizes.sp > 1)
        normed = norm(tape, workload.model, hidden, sizes.shard, sizes.hidden)
    with tape.module("output_layer"):
        tape.parameter("weight", (width, sizes.hidden))
        logits = tape.value("logits", (sizes.tokens, width))
        full_gradient = tape.buffer("input_gradient", (sizes.tokens, sizes.hidden))
        if sizes.sp > 1:
            global_buffer(tape, (sizes.tokens, sizes.hidden))  # for forward and backward
        tape.op(
            "column_parallel_matmul",
            [normed],
            [logits],
            saves=[normed],
            backward_temporaries=[full_gradient] if sizes.sp > 1 else [],
            weight=(width, sizes.hidden),
            library="aten_matmul",
            flops=2 * sizes.tokens * width * sizes.hidden,
        )
    _cross_entropy(tape, workload, sizes, logits)


def _cross_entropy(tape: Tape, workload: Workload, sizes: Sizes, logits: Value) -> None:
    behaviour = cross_entropy_gradient(workload.training.software)
    loss = tape.value("loss", (sizes.tokens,), "fp32")
    statistics = tape.value("softmax_statistics", (sizes.tokens, 2), "fp32", grad=False)
    outputs = [loss, statistics]
    gradient = logits
    if behaviour != "in_place":
        dtype = "fp32" if behaviour == "fp32_buffer" else logits.dtype
        gradient = tape.value("logits_gradient", logits.shape, dtype, grad=False)
        outputs.append(gradient)
    labels = tape.value("labels", (sizes.tokens,), "int64", grad=False)
    loss_mask = tape.value("loss_mask", (sizes.tokens,), "fp32", grad=False)
    tape.op("batch", [], [labels, loss_mask])
    exchanged = [
        tape.buffer("local_statistics", (sizes.tokens, 4), "fp32"),
        tape.buffer("gathered_statistics", (sizes.tp * sizes.tokens, 4), "fp32"),
    ]
    tape.op(
        "cross_entropy",
        [logits, labels],
        outputs,
        saves=[gradient, statistics, labels],
        temporaries=exchanged if sizes.tp > 1 else [],
        # Autograd casts a gradient of another dtype: a new tensor.
        gradient_in=gradient if gradient.dtype == logits.dtype else None,
    )
    # forward() returns the loss alone: logits live on only where backward needs them.
    tape.op("mean", [loss, loss_mask], [tape.value("mean_loss", (1,), "fp32")], saves=[loss_mask])
