"""Rows in experts' order and back (`transformer/moe/moe_utils.py`), by fused kernels or by PyTorch's operators.

Sources of the fused ones: `transformer_engine/pytorch/permutation.py`, `triton/permutation.py`.
"""

from labkit.memory.tape import Tape, Value


def permute(
    tape: Tape,
    tokens: Value,
    routing_map: Value,
    probabilities: Value | None,
    rows: int,
    *,
    fused: bool,
) -> tuple[Value, Value | None, Value]:
    """Copies of `tokens` (tokens, width) in experts' order, their probabilities, and the mapping that leads back.

    `routing_map` and `probabilities` are (tokens, experts), `rows` how many copies there are.
    """
    if not fused:
        return _permute_by_index(tape, tokens, routing_map, probabilities, rows)
    count, experts = routing_map.shape
    permuted = tape.value("permuted_tokens", (rows, tokens.shape[1]), routed=True)
    mapping = tape.value("row_id_map", (count, 2 * experts + 1), "int32", grad=False)
    chosen = None
    if probabilities is not None:
        chosen = tape.value("permuted_probabilities", (rows,), probabilities.dtype, routed=True)
    inputs = [value for value in (tokens, probabilities, routing_map) if value is not None]
    outputs = [value for value in (permuted, chosen, mapping) if value is not None]
    tape.op(
        "permute",
        inputs,
        outputs,
        saves=[mapping],
        persists=[mapping],
    )
    return permuted, chosen, mapping


def _permute_by_index(
    tape: Tape,
    tokens: Value,
    routing_map: Value,
    probabilities: Value | None,
    rows: int,
) -> tuple[Value, Value | None, Value]:
    """Sorts the whole map; autograd keeps the sorted positions of all tokens and experts for the probabilities."""
    count, experts = routing_map.shape
    by_expert = tape.value("map_by_expert", (experts, count), "bool", grad=False)
    order = tape.value("order", (experts * count,), "int64", grad=False)
    tape.op("argsort", [routing_map], [by_expert, order], temporaries=[tape.buffer("sorted", order.shape, "bool")])
    mapping = tape.value("sorted_indices", (rows,), "int64", grad=False, routed=True)
    tape.op("remainder", [order], [mapping])
    chosen = None
    if probabilities is not None:
        chosen = tape.value("permuted_probabilities", (rows,), probabilities.dtype, routed=True)
        transposed = tape.buffer("transposed_probabilities", (experts, count), probabilities.dtype)
        tape.op("index", [probabilities, order], [chosen], saves=[order], temporaries=[transposed])
    permuted = tape.value("permuted_tokens", (rows, tokens.shape[1]), routed=True)
    tape.op(
        "index_select",
        [tokens, mapping],
        [permuted],
        saves=[mapping],
        persists=[mapping],
    )
    tape.hold([by_expert, order])
    return permuted, chosen, mapping


def permute_to_capacity(
    tape: Tape, tokens: Value, routing_map: Value, probabilities: Value, capacity: int
) -> tuple[Value, Value, Value]:
    """As `permute` without fusion, every expert with exactly `capacity` rows (`drop_and_pad`)."""
    count, experts = routing_map.shape
    narrow = [tape.buffer(name, (count, experts), "uint8") for name in ("int8_map", "sorted")]
    by_expert = tape.value("map_by_expert", (experts, count), "uint8", grad=False)
    mapping = tape.value("sorted_indices", (experts * capacity,), "int64", grad=False)
    order = tape.buffer("order", (experts, count), "int64")
    tape.op("argsort", [routing_map], [by_expert, mapping], temporaries=[*narrow, order])
    transposed = tape.value("transposed_probabilities", (experts, count), probabilities.dtype)
    tape.op("transpose", [probabilities], [transposed], aliases=True)
    chosen = tape.value("permuted_probabilities", mapping.shape, probabilities.dtype)
    positions = tape.value("positions", mapping.shape, "int64", grad=False)
    tape.op("index_select", [transposed], [chosen, positions], saves=[positions])
    permuted = tape.value("permuted_tokens", (experts * capacity, tokens.shape[1]))
    tape.op("index_select", [tokens, mapping], [permuted], saves=[mapping], persists=[mapping])
    tape.hold([by_expert, transposed, positions])
    return permuted, chosen, mapping


def unpermute(tape: Tape, rows: Value, mapping: Value, tokens: int, *, saved: bool) -> Value:
    """The sum of each token's rows: (tokens, width); `saved` by an addition that keeps the rows too."""
    output = tape.value("unpermuted", (tokens, rows.shape[1]))
    tape.op("unpermute", [rows], [output], saves=[mapping, rows] if saved else [mapping])
    return output


def sort_chunks(
    tape: Tape, rows: Value, probabilities: Value | None, *, fused: bool, name: str = "sorted"
) -> tuple[Value, Value | None]:
    """Rows between senders' order and local experts' order (`sort_chunks_by_idxs`)."""
    ordered = tape.value(f"{name}_tokens", rows.shape, routed=True)
    chosen = None
    if probabilities is not None:
        chosen = tape.value(f"{name}_probabilities", probabilities.shape, probabilities.dtype, routed=True)
    if fused:
        mapping = tape.value("sort_row_id_map", rows.shape[:1], "int32", grad=False, routed=True)
        inputs = [value for value in (rows, probabilities) if value is not None]
        outputs = [value for value in (ordered, chosen, mapping) if value is not None]
        tape.op("sort_chunks", inputs, outputs, saves=[mapping])
        return ordered, chosen
    tape.op("cat", [rows], [ordered])
    if probabilities is not None and chosen is not None:
        tape.op("cat", [probabilities], [chosen])
    return ordered, chosen
