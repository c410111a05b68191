"""Embedding (Megatron Core `models/common/embeddings/language_model_embedding.py`, `tensor_parallel/layers.py`)."""

from collections.abc import Mapping

from labkit.memory.layers.inputs import sequence_first
from labkit.memory.layers.linear import dropout
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload


def embedding_parameters(tape: Tape, workload: Workload, sizes: Sizes) -> None:
    """In the order `LanguageModelEmbedding` registers them."""
    model = workload.model
    tied = not model.untie_embeddings_and_output_weights and workload.parallelism.pp > 1
    shared = tied or embeds_twice(workload)
    shape = workload.padded_vocab_size // sizes.tp, sizes.hidden
    tape.parameter("word_embeddings.weight", shape, shared_embedding=shared)
    if model.position_embedding_type == "learned_absolute":
        tape.parameter("position_embeddings.weight", (sizes.choices.learned_positions, sizes.hidden))


def embedding(tape: Tape, workload: Workload, sizes: Sizes, weight: Value, ids: Mapping[str, Value]) -> Value:
    """Token ids to hidden states (shard rows, hidden) (`LanguageModelEmbedding.forward`).

    `ids` are the tensors of the batch it saves (`saved_ids`), by name; `weight` is that of the words.
    """
    model = workload.model
    learned = model.position_embedding_type == "learned_absolute"
    with tape.module("word_embeddings"):
        words = _words(tape, sizes, weight, ids)
        if not learned and sizes.sp > 1:
            words = _reduce_scattered(tape, sizes, words)
    out, held = words, [words]
    if learned:
        positions = _positions(tape, sizes, ids["position_ids"])
        held.append(positions)
        out = tape.value("embeddings", (sizes.tokens, sizes.hidden))
        tape.op("add", [words, positions], [out], aliases=True)
    if learned or sizes.sp == 1:
        out = sequence_first(tape, sizes, out)
    if sizes.sp > 1:
        # Cloned so that the scattered view does not keep the whole alive; backward gathers what it scattered.
        clone = tape.value("hidden_states", (sizes.shard, sizes.hidden))
        tape.op("clone", [out], [clone], aliases=not learned)
        out = clone
    if model.hidden_dropout > 0:
        with tape.module("embedding_dropout"):
            out = dropout(tape, out)
    # Local variables of LanguageModelEmbedding.forward live until it returns.
    tape.hold(held)
    return out


def saved_ids(workload: Workload) -> list[str]:
    """Which tensors of the batch an embedding saves; over several ranks it saves the words of its share instead."""
    words = ["tokens"] if workload.parallelism.tp == 1 else []
    return [*words, "position_ids"] if workload.model.position_embedding_type == "learned_absolute" else words


def embeds_twice(workload: Workload) -> bool:
    """Whether the last pipeline stage has an embedding of its own, for multi-token prediction."""
    return workload.parallelism.pp > 1 and workload.model.mtp_num_layers is not None


def shared_weight(workload: Workload) -> bool:
    """Whether the output layer multiplies with the weight of an embedding on its rank."""
    beside = workload.parallelism.pp == 1 or embeds_twice(workload)
    return beside and not workload.model.untie_embeddings_and_output_weights


def word_weight(tape: Tape, workload: Workload, sizes: Sizes) -> Value:
    """The words' weight: its gradient is a whole tensor, made outside any fused accumulation."""
    return tape.weight("word_embeddings.weight", (workload.padded_vocab_size // sizes.tp, sizes.hidden))


def _words(tape: Tape, sizes: Sizes, weight: Value, ids: Mapping[str, Value]) -> Value:
    """Vocabulary-parallel lookup (tokens, hidden), summed in place over the ranks unless it is reduce-scattered.

    Saves the ids: over several ranks those of the rank's share, and which ids are not in it.
    """
    lookup = tape.value("lookup", (sizes.tokens, sizes.hidden))
    if not sizes.trains:
        tape.op("embedding", [], [lookup])
    elif sizes.tp == 1:
        tape.op("embedding", [weight, ids["tokens"]], [lookup], saves=[ids["tokens"]])
    else:
        mask = tape.value("input_mask", (sizes.tokens,), "bool", grad=False)
        masked = tape.value("masked_input", (sizes.tokens,), "int64", grad=False)
        tape.op("embedding", [weight], [lookup, mask, masked], saves=[masked])
        # In place; backward masks a copy of the gradient.
        whole, lookup = lookup, tape.view(lookup, "lookup", lookup.shape)
        tape.op("mask_rows", [whole, mask], [lookup], saves=[mask])
    return lookup


def _positions(tape: Tape, sizes: Sizes, ids: Value) -> Value:
    """Learned absolute positions (tokens, hidden), on each rank in full (`torch.nn.Embedding`)."""
    with tape.module("position_embeddings"):
        gradient = tape.buffer("weight_gradient", (sizes.choices.learned_positions, sizes.hidden))
        positions = tape.value("positions", (sizes.tokens, sizes.hidden))
        tape.op("embedding", [ids], [positions], saves=[ids], backward_temporaries=[gradient])
    return positions


def _reduce_scattered(tape: Tape, sizes: Sizes, words: Value) -> Value:
    reduced = tape.value("reduced", (sizes.shard, sizes.hidden))
    tape.op("reduce_scatter", [sequence_first(tape, sizes, words)], [reduced])
    return reduced
