"""Experts: grouped ones (`transformer/moe/experts.py` `TEGroupedMLP`) and shared ones (`shared_experts.py`)."""

from labkit.memory.layers.activation import activation, eager_activation, fused_activation
from labkit.memory.layers.adapters import adapted_groups
from labkit.memory.layers.linear import column_parallel, row_parallel
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload


def grouped_experts(tape: Tape, workload: Workload, sizes: Sizes, rows: Value, probabilities: Value) -> Value:
    """Grouped fc1, activation weighted by the probabilities, grouped fc2: (received, width) to the same shape.

    The width is the hidden size, or the latent one. Under expert tensor parallelism each rank has a part of every local
    expert's hidden width, and its output is a part of the sum.
    """
    moe = workload.model.mixture_of_experts
    if moe is None:
        raise ValueError("experts need mixture_of_experts")
    received, outer = rows.shape
    local, inner = moe.num_moe_experts // sizes.ep, moe.moe_ffn_hidden_size // sizes.etp
    with tape.module("linear_fc1"):
        gate_and_up = _grouped_linear(tape, sizes, rows, 2 * inner, local)
    with tape.module("@activation"):
        activation = _weighted_activation(tape, workload, gate_and_up, probabilities, (received, inner))
    with tape.module("linear_fc2"):
        output = _grouped_linear(tape, sizes, activation, outer, local)
    # Local variables of TEGroupedMLP.forward.
    tape.hold([rows, probabilities, gate_and_up, activation])
    return output


def _weighted_activation(
    tape: Tape, workload: Workload, gate_and_up: Value, probabilities: Value, shape: tuple[int, int]
) -> Value:
    """SwiGLU times the probabilities: one kernel that saves both inputs, or eager a product that saves its factors."""
    kept = [gate_and_up, probabilities]
    if not workload.training.fuses_activation:
        activated = eager_activation(tape, workload.model, shape[0], gate_and_up, shape[1])
        kept = [activated, probabilities]
    out = tape.value("weighted_activation", shape, routed=True)
    tape.op("weighted_activation", kept, [out], saves=kept)
    return out


def _grouped_linear(tape: Tape, sizes: Sizes, x: Value, out_width: int, local: int) -> Value:
    """`GroupedLinear`: x (rows, width) in local experts' order; saves x where its weights train."""
    rows, width = x.shape
    out = tape.value("output", (rows, out_width), routed=True)
    tape.op(
        "grouped_gemm",
        [x],
        [out],
        saves=[x] if sizes.trains else [],
        weight=(out_width, width) if sizes.trains else None,
        weights=local,
        library="te_grouped_gemm",
        flops=2 * rows * width * out_width,
    )
    return adapted_groups(tape, sizes, x, out, local)


def shared_experts(tape: Tape, workload: Workload, sizes: Sizes, normed: Value, width: int) -> Value:
    """Shared experts on their own (`SharedExpertMLP.forward`): a dense MLP without norm, gated where the model says."""
    gate = _shared_gate(tape, workload, sizes, normed)
    with tape.module("linear_fc1"):
        gate_and_up = column_parallel(tape, sizes, normed, sizes.hidden, 2 * width, adapters=(width, width))
    with tape.module("@activation"):
        activated = activation(tape, workload, sizes.tokens, gate_and_up, width)
    with tape.module("linear_fc2"):
        output = row_parallel(tape, sizes, activated, width)
    if gate is None:
        return output
    gated = tape.value("gated_output", output.shape)
    tape.op("gate", [output, gate], [gated], saves=[output, gate])
    return gated


def _shared_gate(tape: Tape, workload: Workload, sizes: Sizes, normed: Value) -> Value | None:
    """The sigmoid of `normed` (shard rows, hidden) times one vector."""
    moe = workload.model.mixture_of_experts
    if moe is None or not moe.moe_shared_expert_gate:
        return None
    tape.parameter("gate_weight", (1, sizes.hidden), replicated=sizes.sp > 1)
    logits = tape.value("gate_logits", (sizes.shard, 1))
    weight = (1, sizes.hidden) if sizes.trains else None
    tape.op("gate_linear", [normed], [logits], saves=[normed], weight=weight, library="aten_matmul")
    score = tape.value("gate_score", (sizes.shard, 1))
    tape.op("sigmoid", [logits], [score], saves=[score])
    return score


class OverlappedSharedExperts:
    """Shared experts in pieces that a dispatcher runs beside its communication (`moe_shared_expert_overlap`).

    Sequence numbers order the backward (`set_tensor_grad_fn_sequence_sr`): gathers and reductions start as soon as they
    can; multiplications run behind the backward of `beside`, the operation of the dispatcher they ran beside.
    """

    def __init__(self, tape: Tape, sizes: Sizes, width: int) -> None:
        self._tape = tape
        self._sizes = sizes
        self._width = width
        self._fc1_input: Value | None = None
        self._fc2_input: Value | None = None

    def gather_input(self, normed: Value, backward_at: float) -> None:
        """`pre_forward_comm`; its gradient is reduced at `backward_at` in the order of operations."""
        tape, sizes = self._tape, self._sizes
        self._fc1_input = normed
        if sizes.sp > 1:
            gathered = tape.value("shared_expert_input", (sizes.tokens, sizes.hidden))
            tape.backward_at[len(tape.ops)] = backward_at
            received = sizes.from_tensor_ranks(gathered.bytes)
            tape.op("gather_from_sequence_parallel", [normed], [gathered], communicated_bytes=received)
            self._fc1_input = gathered

    def fc1(self, beside: int | None) -> None:
        """`linear_fc1_forward_and_act`."""
        tape, sizes = self._tape, self._sizes
        if self._fc1_input is None:
            raise ValueError("gather_input comes first")
        if beside is not None:
            tape.backward_at[len(tape.ops)] = beside - 0.5
            tape.backward_at[len(tape.ops) + 1] = beside - 0.4
        with tape.module("shared_experts"):
            with tape.module("linear_fc1"):
                x = column_parallel(tape, sizes, self._fc1_input, sizes.hidden, 2 * self._width, gathered=True)
            with tape.module("@activation"):
                self._fc2_input = fused_activation(tape, sizes.tokens, x, self._width)

    def fc2(self, beside: int | None, reduced_at: float | None = None) -> Value:
        """`linear_fc2_forward` and `post_forward_comm`, whose backward runs at `reduced_at`."""
        tape, sizes, width = self._tape, self._sizes, self._width
        if self._fc2_input is None:
            raise ValueError("fc1 comes first")
        with tape.module("shared_experts"):
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
