"""Experts: routed ones (`transformer/moe/experts.py` `TEGroupedMLP`, `SequentialMLP`) and shared ones."""

from labkit.memory.layers.activation import (
    activation,
    eager_activation,
    fused_activation,
    input_width,
    weighted_activation,
)
from labkit.memory.layers.adapters import adapted_groups
from labkit.memory.layers.linear import add_bias, column_parallel, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Library, Tape, Value
from labkit.workload import Workload


def grouped_experts(tape: Tape, workload: Workload, sizes: Sizes, rows: Value, probabilities: Value) -> Value:
    """Grouped fc1, activation weighted by the probabilities, grouped fc2: (received, width) to the same shape.

    The width is the hidden size, or the latent one. Under expert tensor parallelism each rank has a part of every local
    expert's hidden width, and its output is a part of the sum.
    """
    moe = workload.model.mixture_of_experts
    if moe is None:
        raise ValueError("experts need mixture_of_experts")
    local, inner = moe.num_moe_experts // sizes.ep, moe.moe_ffn_hidden_size // sizes.etp
    biased = workload.model.add_bias_linear
    with tape.module("linear_fc1"):
        width = input_width(workload.model, inner)
        intermediate = _grouped_linear(tape, sizes, rows, width, local, biased=biased)
    with tape.module("@activation"):
        activated = weighted_activation(tape, workload, intermediate, probabilities, inner)
    with tape.module("linear_fc2"):
        output = _grouped_linear(tape, sizes, activated, rows.shape[1], local)
    if biased:
        output = _apply_bias(tape, output, probabilities, local)
    # Local variables of TEGroupedMLP.forward.
    tape.hold([rows, probabilities, intermediate, activated])
    return output


def sequential_experts(tape: Tape, workload: Workload, sizes: Sizes, rows: Value, probabilities: Value) -> Value:
    """One expert's `MLP` after the other (`SequentialMLP`): (received, width) to the same shape."""
    moe = workload.model.mixture_of_experts
    if moe is None:
        raise ValueError("experts need mixture_of_experts")
    local, inner = moe.num_moe_experts // sizes.ep, moe.moe_ffn_hidden_size // sizes.etp
    parts, weights = _of_experts(tape, rows, local), _of_experts(tape, probabilities, local)
    outputs = []
    for expert, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        with tape.module(f"local_experts.{expert}"):
            outputs.append(_expert(tape, workload, sizes, part, weight, inner))
    output = outputs[0]
    if local > 1:
        output = tape.value("output", rows.shape, routed=True)
        tape.op("cat", outputs, [output], aliases=True)
    # Local variables of its forward, and arguments.
    tape.hold([rows, probabilities, *outputs])
    return output


def _of_experts(tape: Tape, x: Value, local: int) -> list[Value]:
    """The rows of each local expert: as evenly many as integers allow, the first ones more (`torch.split`)."""
    if local == 1:
        return [x]
    counts = [(x.shape[0] + local - 1 - expert) // local for expert in range(local)]
    parts = [tape.view(x, f"{x.name}_{expert}", (count, *x.shape[1:])) for expert, count in enumerate(counts)]
    tape.op("split", [x], parts)
    return parts


def _expert(tape: Tape, workload: Workload, sizes: Sizes, rows: Value, weight: Value, inner: int) -> Value:
    """`MLP.forward` with a scale for each token."""
    fuses, biased = workload.training.fuses_activation, workload.model.add_bias_linear
    with tape.module("linear_fc1"):
        x = _expert_linear(tape, sizes, rows, input_width(workload.model, inner))
    with tape.module("@activation"):
        if biased and not fuses:
            x = add_bias(tape, x)
        activated = weighted_activation(tape, workload, x, weight, inner)
    with tape.module("linear_fc2"):
        output = _expert_linear(tape, sizes, activated, rows.shape[1])
    return _add_weighed_bias(tape, output, weight) if biased else output


def _add_weighed_bias(tape: Tape, output: Value, weight: Value) -> Value:
    """The bias times the probabilities, added in place."""
    product = tape.buffer("weighed_bias", output.shape, weight.dtype)
    total = tape.view(output, "output", output.shape)
    tape.op(
        "add_weighed_bias",
        [output, weight],
        [total],
        saves=[weight],
        temporaries=[product],
        backward_temporaries=[product],
    )
    return total


def _expert_linear(tape: Tape, sizes: Sizes, x: Value, out_width: int) -> Value:
    """A linear of one expert: it has all its rows, and nothing is reduced (`explicit_expert_comm`)."""
    rows, width = x.shape
    out = tape.value("output", (rows, out_width), routed=True)
    tape.op(
        "expert_linear",
        [x],
        [out],
        saves=[x],
        views_gradient=not sizes.local,
        weight=(out_width, width),
        library="aten_matmul" if sizes.local else "te_gemm",
        flops=2 * rows * width * out_width,
    )
    return out


def _apply_bias(tape: Tape, output: Value, probabilities: Value, local: int) -> Value:
    """`TEGroupedMLP._apply_bias`: each expert's rows plus its bias times their probabilities, joined again.

    Probabilities in fp32 make the sums fp32, and the gradients of the rows are cast back.
    """
    shape, dtype = output.shape, probabilities.dtype
    rows = tape.view(output, "rows_of_experts", shape)
    tape.op("split", [output], [rows])
    weighed = tape.value("weighed_bias", shape, dtype, routed=True)
    # The two products of an expert are summed up once both are there: to the bias's gradient and the probabilities'.
    product = tape.buffer("product", (-(-shape[0] // local), shape[1]), dtype)
    tape.op("weigh_bias", [probabilities], [weighed], saves=[probabilities], backward_temporaries=[product, product])
    wide = dtype != output.dtype
    if wide:
        narrow, rows = rows, tape.view(output, "rows_of_experts", shape)
        tape.op("promote", [narrow], [rows])
    total = tape.value("biased", shape, dtype, routed=True)
    tape.op("add_bias", [rows, weighed], [total], aliases=True)
    if not wide:
        return total
    out = tape.like(output, "output", shape)
    tape.op("to", [total], [out])
    tape.hold([output])
    return out


def _grouped_linear(tape: Tape, sizes: Sizes, x: Value, out_width: int, local: int, *, biased: bool = False) -> Value:
    """`GroupedLinear`: x (rows, width) in local experts' order; saves x where its weights train."""
    rows, width = x.shape
    out = tape.value("output", (rows, out_width), routed=True)
    tape.op(
        "grouped_gemm",
        [x],
        [out],
        saves=[x] if sizes.trains else [],
        backward_temporaries=[tape.buffer("bias_gradient", (out_width,))] * local if biased else [],
        weight=(out_width, width) if sizes.trains else None,
        weights=local,
        library="te_grouped_gemm",
        flops=2 * rows * width * out_width,
    )
    return adapted_groups(tape, sizes, x, out, local)


def shared_experts(tape: Tape, workload: Workload, sizes: Sizes, normed: Value, width: int, *, gated: bool) -> Value:
    """Shared experts on their own, as a dense MLP without norm (`SharedExpertMLP.forward`)."""
    with tape.module("linear_fc1"):
        fc1_width = input_width(workload.model, width)
        adapters = (width,) * (fc1_width // width)
        intermediate = column_parallel(tape, sizes, normed, sizes.hidden, fc1_width, adapters=adapters)
    with tape.module("@activation"):
        activated = activation(tape, workload, sizes.tokens, intermediate, width)
    with tape.module("linear_fc2"):
        output = row_parallel(tape, sizes, activated, width)
    return _scale(tape, output, _gate_score(tape, sizes, normed)) if gated else output


def _gate_score(tape: Tape, sizes: Sizes, normed: Value, library: Library = "aten_matmul") -> Value:
    """Sigmoid of a projection to one number a token: (shard rows, 1)."""
    logits = tape.value("gate_logits", (sizes.shard, 1))
    score = tape.value("gate_score", (sizes.shard, 1))
    tape.op(
        "gate",
        [normed],
        [logits],
        saves=[normed],
        backward_temporaries=[tape.buffer("weight_gradient", (1, sizes.hidden))] if sizes.trains else [],
        library=library,
        flops=2 * sizes.shard * sizes.hidden,
    )
    tape.op("sigmoid", [logits], [score], saves=[score])
    return score


def _scale(tape: Tape, output: Value, score: Value) -> Value:
    """The output times its gate's score."""
    scaled = tape.value("gated_output", output.shape)
    products = tape.buffer("score_gradient", output.shape)
    tape.op("scale", [output, score], [scaled], saves=[output, score], backward_temporaries=[products])
    return scaled


class OverlappedSharedExperts:
    """Shared experts in pieces that a dispatcher runs beside its communication (`moe_shared_expert_overlap`).

    Sequence numbers order the backward (`set_tensor_grad_fn_sequence_sr`): gathers and reductions start as soon as they
    can; multiplications run behind the backward of `beside`, the operation of the dispatcher they ran beside. All of it
    runs on a stream of its own, whose blocks the allocator keeps apart.
    """

    def __init__(self, tape: Tape, workload: Workload, sizes: Sizes, width: int, *, gated: bool) -> None:
        self._tape = tape
        self._workload = workload
        self._sizes = sizes
        self._width = width
        self._gated = gated
        self._score: Value | None = None
        self._fc1_input: Value | None = None
        self._fc2_input: Value | None = None

    def gather_input(self, normed: Value, beside: int | None) -> None:
        """`pre_forward_comm`: its gradient is reduced once fc1's backward has run beside `beside`.

        With None fc1 is still to find its place, before the permutation behind the gather runs backward.
        """
        tape, sizes = self._tape, self._sizes
        self._fc1_input = normed
        if self._gated:
            with tape.module("shared_experts"), tape.beside():
                self._score = _gate_score(tape, sizes, normed, "aten_matmul_on_side_stream")
        if sizes.sp > 1:
            gathered = tape.value("shared_expert_input", (sizes.tokens, sizes.hidden))
            tape.backward_at[len(tape.ops)] = len(tape.ops) + 1.4 if beside is None else beside - 0.6
            received = sizes.from_tensor_ranks(gathered.bytes)
            with tape.beside():
                tape.op("gather_from_sequence_parallel", [normed], [gathered], communicated_bytes=received)
            self._fc1_input = gathered

    def fc1(self, beside: int | None) -> None:
        """`linear_fc1_forward_and_act`."""
        tape, sizes = self._tape, self._sizes
        if self._fc1_input is None:
            raise ValueError("gather_input comes first")
        first = len(tape.ops)
        with tape.module("shared_experts"), tape.beside():
            with tape.module("linear_fc1"):
                width = input_width(self._workload.model, self._width)
                x = column_parallel(tape, sizes, self._fc1_input, sizes.hidden, width, gathered=True)
            with tape.module("@activation"):
                self._fc2_input = self._activation(x)
        if beside is not None:
            for place, index in enumerate(range(first, len(tape.ops))):
                tape.backward_at[index] = beside - 0.5 + place / 100

    def _activation(self, x: Value) -> Value:
        tape, model = self._tape, self._workload.model
        if self._workload.training.kernels.bias_activation_fusion:
            return fused_activation(tape, self._sizes.tokens, x, self._width)
        return eager_activation(tape, model, self._sizes.tokens, x, self._width, adds_offset=False)

    def fc2(self, beside: int | None, reduced_at: float | None = None) -> Value:
        """`linear_fc2_forward` and `post_forward_comm`, whose backward runs at `reduced_at`."""
        tape, sizes, width = self._tape, self._sizes, self._width
        if self._fc2_input is None:
            raise ValueError("fc1 comes first")
        with tape.module("shared_experts"), tape.beside():
            output = tape.value("output", (sizes.tokens, sizes.hidden))
            if beside is not None:
                tape.backward_at[len(tape.ops)] = beside - 0.5
            with tape.module("linear_fc2"):
                tape.op(
                    "gemm",
                    [self._fc2_input],
                    [output],
                    saves=[self._fc2_input],
                    weight=(sizes.hidden, width),
                    library="te_gemm",
                    flops=2 * sizes.tokens * width * sizes.hidden,
                )
            if sizes.sp > 1:
                shard = tape.value("reduced_output", (sizes.shard, sizes.hidden))
                if reduced_at is not None:
                    tape.backward_at[len(tape.ops)] = reduced_at
                tape.op("reduce_scatter", [output], [shard], communicated_bytes=sizes.from_tensor_ranks(output.bytes))
                output = shard
        return output

    def output(self, reduced: Value) -> Value:
        """`get_output`: what `fc2` returned, behind the gate."""
        if self._score is None:
            return reduced
        with self._tape.module("shared_experts"), self._tape.beside():
            return _scale(self._tape, reduced, self._score)
