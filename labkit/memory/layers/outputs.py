"""What a pass of the `lora` runtime hands its caller, and the caller's loss."""

from labkit.memory.layers.linear import norm, norm_parameters
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload


def hidden_state_outputs(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """Final norm, then the hidden states of every sequence: (logical rows, hidden), on each rank.

    A shared prefix is repeated for each sequence; context-parallel ranks exchange their rows.
    """
    with tape.module("decoder"), tape.module("final_layernorm"):
        norm_parameters(tape, workload.model, sizes.hidden, replicated=sizes.sp > 1)
        normed = norm(tape, workload.model, hidden, sizes.shard, sizes.hidden)
        if sizes.sp > 1:
            gathered = tape.value("gathered", (sizes.tokens, sizes.hidden))
            tape.op("gather_from_sequence_parallel", [normed], [gathered])
            normed = gathered
    if workload.model.untie_embeddings_and_output_weights:
        tape.parameter("output_layer.weight", (workload.padded_vocab_size // sizes.tp, sizes.hidden))
    with tape.module("outputs"):
        outputs = tape.value("hidden_states", (workload.batch.sequences.logical_rows, sizes.hidden))
        tape.op("select_sequences", [normed], [outputs])
    return outputs


def mean_square_loss(tape: Tape, workload: Workload, outputs: Value) -> None:
    """The mean square of each sequence's outputs in fp32, summed; the caller keeps `outputs` until backward is done.

    `x.float().square().mean()`: square saves its input, and its backward computes `grad * (2 * x.pow(1))`, whose
    three factors are alive at once (PyTorch `FunctionsManual.cpp`, `pow_backward`).
    """
    hidden = outputs.shape[1]
    lengths = workload.batch.sequences.lengths
    views = [tape.view(outputs, f"sequence_{number}", (length, hidden)) for number, length in enumerate(lengths)]
    tape.op("unbind", [outputs], views, keeps=[outputs])
    losses = []
    for view in views:
        widened = tape.value("fp32_outputs", view.shape, "fp32")
        tape.op("float", [view], [widened])
        squared = tape.value("squared", view.shape, "fp32")
        factors = [tape.buffer(name, view.shape, "fp32") for name in ("power", "twice_power")]
        tape.op("square", [widened], [squared], saves=[widened], backward_temporaries=factors)
        losses.append(tape.value("mean", (1,), "fp32"))
        tape.op("mean", [squared], losses[-1:])
    tape.op("sum", losses, [tape.value("loss", (1,), "fp32")])
