"""Megatron Core's own attention, scores and all (`transformer_impl: local`).

Sources: `transformer/dot_product_attention.py`, `fusions/fused_softmax.py`, `transformer/utils.py`.
"""

from labkit.memory.layers.inputs import batch_tensor
from labkit.memory.layers.sizes import Sizes
from labkit.memory.layers.unfused import repeated, scores_of, softmax_kernel, values_of
from labkit.memory.tape import Free, Tape, Value
from labkit.workload import Workload


def local_attention(tape: Tape, workload: Workload, sizes: Sizes, query: Value, key: Value, value: Value) -> Value:
    """Causal attention of (tokens, heads, width) tensors, read where they lie; returns (tokens, heads x value width).

    The product of queries and keys is given a part of the global memory buffer, which it does not write.
    """
    _, heads, width = query.shape
    flops = sizes.batch * sizes.sequence**2 * heads * width
    if query.base is not None and key.shape[1] == 1 < heads and workload.batch.micro_batch_size > 1:
        # Beside one key and value head the queries of several samples do not lie evenly: `reshape` copies them.
        evenly = tape.value("query", query.shape)
        tape.op("reshape", [query], [evenly])
        query = evenly
    if key.shape[1] != heads:
        key, value = repeated(tape, sizes, key, heads), repeated(tape, sizes, value, heads)
    scores = scores_of(tape, sizes, query, key, flops)
    with tape.module("scale_mask_softmax"):
        probabilities = _softmax(tape, workload, sizes, scores)
    return values_of(tape, sizes, probabilities, value, flops, held=[key, scores])


def _softmax(tape: Tape, workload: Workload, sizes: Sizes, scores: Value) -> Value:
    """`FusedScaleMaskSoftmax`: APEX's kernel where it takes the lengths, else PyTorch's operations."""
    kernels = workload.training.kernels
    if sizes.choices.softmax_kernel:
        return softmax_kernel(tape, scores, in_place=True)
    narrow = scores.dtype != "fp32"
    widened = narrow and kernels.softmax_in_fp32
    x = scores
    if widened:
        x = tape.value("scores", scores.shape, "fp32")
        tape.op("float", [scores], [x])
    if kernels.apply_query_key_layer_scaling:
        unscaled, x = x, tape.value("scaled", scores.shape, x.dtype)
        tape.op("scale", [unscaled], [x])
    mask = batch_tensor(tape, sizes, "attention_mask") if sizes.masked else _causal_mask(tape, sizes)
    masked = tape.view(x, "scores", x.shape)
    # The product's scores are a view, filled where they lie: autograd's `CopySlices` clones and fills.
    names = ("sliced_gradient", "filled_gradient") if x is scores else ()
    clones = [tape.buffer(name, scores.shape) for name in names]
    tape.op("masked_fill_", [x, mask], [masked], saves=[mask], backward_temporaries=clones)
    probabilities = tape.value("probabilities", scores.shape, masked.dtype)
    tape.op("softmax", [masked], [probabilities], saves=[probabilities])
    if widened:
        wide, probabilities = probabilities, tape.value("probabilities", scores.shape)
        tape.op("to_compute_dtype", [wide], [probabilities])
    tape.hold([masked, mask])
    return probabilities


def _causal_mask(tape: Tape, sizes: Sizes) -> Value:
    """`get_default_causal_mask`: a triangle of each layer's own, made in fp32."""
    square = (sizes.sequence, sizes.sequence)
    mask = tape.value("causal_mask", square, "bool", grad=False)
    ones, triangle = (tape.buffer(name, square, "fp32") for name in ("ones", "triangle"))
    tape.op("causal_mask", [], [mask], temporaries=[ones, triangle, Free(ones.name)])
    return mask
