"""What a pass of the `lora` runtime hands its caller, and the caller's loss."""

from typing import Any

from labkit.memory.layers.linear import norm, norm_parameters
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Lora, Workload


def pass_outputs(tape: Tape, workload: Workload, sizes: Sizes, hidden: Value) -> Value:
    """Final norm, then what `training.lora.outputs` says of every token of every sequence, on each rank."""
    lora, model = workload.training.lora, workload.model
    if lora is None:
        raise ValueError("only the lora runtime has outputs")
    with tape.module("decoder"), tape.module("final_layernorm"):
        norm_parameters(tape, model, sizes.hidden, replicated=sizes.sp > 1)
        normed = norm(tape, model, hidden, sizes.shard, sizes.hidden)
        if sizes.sp > 1:
            gathered = tape.value("gathered", (sizes.tokens, sizes.hidden))
            tape.op("gather_from_sequence_parallel", [normed], [gathered])
            normed = gathered
    if model.untie_embeddings_and_output_weights:
        tape.parameter("output_layer.weight", (workload.padded_vocab_size // sizes.tp, sizes.hidden))
    with tape.module("outputs"):
        states = _hidden_states(tape, workload, sizes, normed)
        if lora.outputs == "hidden_states":
            return states
        return _of_vocabulary(tape, workload, sizes, lora, states)


def _hidden_states(tape: Tape, workload: Workload, sizes: Sizes, normed: Value) -> Value:
    """(logical rows, hidden): a shared prefix is repeated, context-parallel ranks exchange their rows."""
    states = tape.value("hidden_states", (workload.batch.sequences.logical_rows, sizes.hidden))
    tape.op("select_sequences", [normed], [states])
    return states


def _of_vocabulary(tape: Tape, workload: Workload, sizes: Sizes, lora: Lora, states: Value) -> Value:
    """Chunk by chunk the vocabulary-parallel logits, and what is made of them; the chunks' results are joined.

    As PyTorch computes it: `logits.float()`, its maximum and the sum of its exponentials over the ranks; the likeliest
    candidates and whole logits need the gathered vocabulary.
    """
    rows = workload.batch.sequences.logical_rows
    parts: list[list[Value]] = []
    for chunk, results in _chunks(rows, lora):
        logits = tape.value("logits", (chunk, workload.padded_vocab_size // sizes.tp))
        tape.op(
            "output_layer", [states], [logits], library="aten_matmul", flops=2 * chunk * logits.shape[1] * sizes.hidden
        )
        if lora.outputs == "log_probs":
            parts.append([_log_probs(tape, logits, results)])
        elif lora.outputs == "top_k":
            parts.append(_candidates(tape, _gathered(tape, workload, sizes, logits), lora.top_k or 1, results))
        else:
            parts = [[_gathered(tape, workload, sizes, logits)]]  # the caller has dropped the chunk before
    if lora.outputs == "logits":
        return parts[0][0]
    joined: list[Value] = []
    for pieces in zip(*parts, strict=True):
        whole = tape.value(pieces[0].name, (rows, *pieces[0].shape[1:]), pieces[0].dtype)
        tape.op("cat", pieces, [whole], keeps=[whole] if joined else [])  # the first is handed over
        joined.append(whole)
    tape.hold([piece for part in parts for piece in part])
    return joined[0]


def _chunks(rows: Any, lora: Lora) -> list[tuple[Any, Any]]:
    """Rows of each chunk that is recorded, and of its results.

    Whole logits leave nothing behind: of those the first and the last chunk. Of many numbers of rows at once (arrays)
    the bound of all is a chunk with everybody's results and one more.
    """
    most = lora.output_chunk_rows
    if not isinstance(rows, int):
        return [(most, rows // most * most + most), (most, most)]
    whole, rest = divmod(rows, most)
    chunks = [most] * (min(whole, 1) if lora.outputs == "logits" else whole)
    return [(chunk, chunk) for chunk in ([*chunks, rest] if rest else chunks)]


def _log_probs(tape: Tape, logits: Value, rows: int) -> Value:
    """Log-probability of each token's successor (rows,) in fp32."""
    widened, exponentials = (tape.buffer(name, logits.shape, "fp32") for name in ("fp32_logits", "exponentials"))
    out = tape.value("log_probs", (rows,), "fp32")
    tape.op("log_probs", [logits], [out], temporaries=[widened, exponentials])
    return out


def _candidates(tape: Tape, logits: Value, count: int, rows: int) -> list[Value]:
    """Log-probabilities (rows, count) in fp32 and ids in int64 of the likeliest."""
    shape = (rows, count)
    widened, normalised = (tape.buffer(name, logits.shape, "fp32") for name in ("fp32_logits", "log_softmax"))
    out = [tape.value("top_log_probs", shape, "fp32"), tape.value("top_ids", shape, "int64", grad=False)]
    tape.op("top_k", [logits], out, temporaries=[widened, normalised])
    return out


def _gathered(tape: Tape, workload: Workload, sizes: Sizes, logits: Value) -> Value:
    """Logits over the whole vocabulary."""
    if sizes.tp == 1:
        return logits
    whole = tape.value("gathered_logits", (logits.shape[0], workload.padded_vocab_size))
    ranks = tape.buffer("gathered_ranks", whole.shape)
    received = sizes.from_tensor_ranks(whole.bytes)
    tape.op("gather_from_tensor_ranks", [logits], [whole], temporaries=[ranks], communicated_bytes=received)
    return whole


def hand_over(tape: Tape, outputs: Value) -> None:
    """The caller of a pass without gradients keeps `outputs` for a while."""
    tape.op("hand_over", [outputs], [], keeps=[outputs])


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
