"""Cross entropy of vocabulary-parallel logits, and the loss that backward begins with.

Sources: Transformer Engine `cross_entropy.py`, `triton/cross_entropy.py`; Megatron Core
`fusions/fused_cross_entropy.py`, `tensor_parallel/cross_entropy.py`, `pipeline_parallel/schedules.py`.
"""

from labkit.memory.layers.inputs import sequence_first
from labkit.memory.layers.sizes import Sizes
from labkit.memory.tape import Tape, Value
from labkit.workload import Workload
from labkit.workload.behaviour import cross_entropy_gradient


def cross_entropy(tape: Tape, workload: Workload, sizes: Sizes, logits: Value, labels: Value) -> Value:
    """Loss of each token (tokens,) in fp32 of `logits` (tokens, vocabulary / tp) (`compute_language_model_loss`)."""
    kernels, labels = workload.training.kernels, sequence_first(tape, sizes, labels)
    if kernels.cross_entropy_loss_fusion and kernels.cross_entropy_fusion_impl == "te":
        loss = _transformer_engine(tape, workload, sizes, logits, labels)
    else:
        loss = _megatron(tape, sizes, logits, compiled=kernels.cross_entropy_loss_fusion)
    loss = sequence_first(tape, sizes, loss)
    tape.hold([labels])
    return loss


def _transformer_engine(tape: Tape, workload: Workload, sizes: Sizes, logits: Value, labels: Value) -> Value:
    """`CrossEntropyFunction`: a Triton kernel; where the gradient goes depends on the version."""
    behaviour = cross_entropy_gradient(workload.training.software)
    loss = tape.value("loss", (sizes.tokens,), "fp32")
    statistics = tape.value("softmax_statistics", (sizes.tokens, 2), "fp32", grad=False)
    outputs = [loss, statistics]
    gradient = logits
    if behaviour != "in_place":
        dtype = "fp32" if behaviour == "fp32_buffer" else logits.dtype
        gradient = tape.value("logits_gradient", logits.shape, dtype, grad=False)
        outputs.append(gradient)
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
    return loss


def _megatron(tape: Tape, sizes: Sizes, logits: Value, *, compiled: bool) -> Value:
    """`_VocabParallelCrossEntropy`: softmax in an fp32 copy of the logits, which is saved and becomes their gradient.

    Compiled, backward scatters into one more fp32 copy: Inductor cannot update the saved one in place, whose view the
    scatter reads.
    """
    wide = logits.dtype == "fp32"
    # `logits.float()`: the logits themselves, if they are fp32.
    softmax = logits if wide else tape.value("softmax", logits.shape, "fp32", grad=False)
    mask = tape.value("target_mask", (sizes.tokens,), "bool", grad=False)
    target = tape.value("masked_target", (sizes.tokens,), "int64", grad=False)
    loss = tape.value("loss", (sizes.tokens,), "fp32")
    # The compiled gradient is bf16; of fp32 logits autograd makes it fp32 again, after the scattered copy has gone.
    scratch = ("bf16_gradient", logits.shape, "bf16") if wide else ("scattered", logits.shape, "fp32")
    names = ("logits_max", "predicted_logits", "sum_exp_logits", *(() if compiled else ("log",)))
    tape.op(
        "cross_entropy",
        [logits],
        [*([] if wide else [softmax]), mask, target, loss],
        saves=[softmax, mask, target],
        temporaries=[tape.buffer(name, (sizes.tokens,), "fp32") for name in names],
        backward_temporaries=[tape.buffer(*scratch)] if compiled else [],
        gradient_in=softmax if wide and not compiled else None,
    )
    return loss


def mean_loss(tape: Tape, sizes: Sizes, loss: Value, loss_mask: Value) -> None:
    """Mean over the tokens that count (`loss_func`, `forward_step_calc_loss`): saves the mask and their number.

    The schedule keeps the loss until its backward is done, the report, and the number of tokens.
    """
    mean = tape.value("mean_loss", (1,), "fp32")
    report = tape.value("report", (2,), "fp32", grad=False)
    counts = [tape.value(name, (1,), "int32", grad=False) for name in ("num_tokens", "clamped_num_tokens")]
    outputs = [mean, report, *counts]
    tape.op(
        "mean_loss",
        [loss, loss_mask],
        outputs,
        saves=[loss_mask, *outputs],
        temporaries=[tape.buffer("masked_loss", (sizes.tokens,), "fp32")],
    )
