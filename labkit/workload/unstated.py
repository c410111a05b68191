"""Fields that reports and launch scripts leave out, that decide the peak, and that have more than one plausible value.

A field counts as stated when the workload file has it; its default is then labkit's reading no longer. What each
value does to memory is not known here: `labkit.memory.ranges` prices them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.workload.base import Part

if TYPE_CHECKING:
    from labkit.workload.workload import Workload


class Alternative(NamedTuple):
    """A plausible value, and the fields that state it."""

    value: str
    fields: Mapping[str, Any]
    """Dotted paths within the workload."""


class OpenField(NamedTuple):
    """A field that a workload does not state, and what it may be instead of what is assumed."""

    field: str
    """Dotted path within the workload."""
    cause: str
    """Why it cannot be known, in half a sentence."""
    assumed: str
    alternatives: tuple[Alternative, ...]


class _Question(NamedTuple):
    """An entry of the table."""

    field: str
    cause: str
    alternatives: tuple[Alternative, ...]
    matters: Callable[["Workload"], bool] | None = None
    """Asked whether it can decide anything in a workload; None: always."""


_KERNELS, _OPTIMIZER = "training.kernels", "training.optimizer"
_NARROW_MOMENTS = {f"{_OPTIMIZER}.exp_avg_dtype": "bf16", f"{_OPTIMIZER}.exp_avg_sq_dtype": "bf16"}

_QUESTIONS = (
    _Question(
        # `megatron/training/arguments.py`, validate_args: "accumulate and all-reduce gradients in fp32 for bf16 data
        # type"; `DistributedDataParallelConfig.grad_reduce_in_fp32` is False.
        "training.data_parallel.grad_reduce_in_fp32",
        "Megatron-LM's launcher turns it on by itself for bf16, Megatron Core's own default is off",
        (Alternative("true", {"training.data_parallel.grad_reduce_in_fp32": True}),),
        # The launcher leaves it alone where main gradients are bf16.
        lambda workload: workload.training.optimizer.main_grads_dtype == "fp32",
    ),
    _Question(
        # `labkit.workload.behaviour.cross_entropy_gradient`.
        "training.software.transformer_engine",
        "its cross entropy overwrites the logits up to 2.17, adds an fp32 buffer in 2.18, copies them from 2.19 on",
        tuple(
            Alternative(version, {"training.software.transformer_engine": version}) for version in ("2.17.0", "2.18.0")
        ),
        lambda workload: (
            workload.training.kernels.cross_entropy_loss_fusion
            and workload.training.kernels.cross_entropy_fusion_impl == "te"
        ),
    ),
    _Question(
        # `megatron/core/model_parallel_config.py`: False; recipes of Megatron Bridge set it.
        f"{_KERNELS}.cross_entropy_loss_fusion",
        "Megatron Core's default is off, recipes turn it on",
        (Alternative("false", {f"{_KERNELS}.cross_entropy_loss_fusion": False}),),
    ),
    _Question(
        # `megatron/core/model_parallel_config.py`: native.
        f"{_KERNELS}.cross_entropy_fusion_impl",
        "Megatron Core's default is native, recipes choose te",
        (Alternative("native", {f"{_KERNELS}.cross_entropy_fusion_impl": "native"}),),
        lambda workload: workload.training.kernels.cross_entropy_loss_fusion,
    ),
    _Question(
        # `megatron/core/model_parallel_config.py`: False, as it needs an extension that is built apart;
        # `megatron/training/arguments.py`: on unless --no-gradient-accumulation-fusion.
        f"{_KERNELS}.gradient_accumulation_fusion",
        "it needs an extension that is installed apart",
        (Alternative("false", {f"{_KERNELS}.gradient_accumulation_fusion": False}),),
    ),
    _Question(
        # Transformer Engine `dot_product_attention/utils.py`, get_attention_backend.
        f"{_KERNELS}.attention_backend",
        "Transformer Engine chooses among what is installed",
        (Alternative("flash", {f"{_KERNELS}.attention_backend": "flash"}),),
    ),
    _Question(
        # `OptimizerConfig.use_precision_aware_optimizer`: False; Bridge's `bf16_with_*` recipes set it.
        f"{_OPTIMIZER}.use_precision_aware_optimizer",
        "Megatron Core's default is off, recipes turn it on with bf16 moments",
        (Alternative("true, bf16 moments", {f"{_OPTIMIZER}.use_precision_aware_optimizer": True, **_NARROW_MOMENTS}),),
    ),
    _Question(
        f"{_OPTIMIZER}.exp_avg_dtype",
        "a precision-aware optimizer may keep its moments in fp32 or bf16",
        (Alternative("bf16, both moments", _NARROW_MOMENTS),),
        lambda workload: (
            workload.training.optimizer.use_precision_aware_optimizer
            and not is_stated(workload, f"{_OPTIMIZER}.exp_avg_sq_dtype")
        ),
    ),
    _Question(
        # `OptimizerConfig.use_precision_aware_optimizer_no_fp8_or_ds_fp8`; Bridge's mixed-precision presets.
        f"{_OPTIMIZER}.fp8_recipe",
        "recipes set tensorwise even for bf16, and Megatron Core then holds the main parameters",
        (Alternative("tensorwise", {f"{_OPTIMIZER}.fp8_recipe": "tensorwise"}),),
        lambda workload: workload.training.optimizer.use_precision_aware_optimizer,
    ),
)
"""Found by tracing runs that others published: where a report left one of these out, it decided the result."""


def open_fields(workload: "Workload") -> list[OpenField]:
    """What a workload leaves open of the fields that decide its peak; alternatives that could not run are left out."""
    found = []
    for question in _QUESTIONS:
        if is_stated(workload, question.field) or (question.matters is not None and not question.matters(workload)):
            continue
        runs = tuple(each for each in question.alternatives if with_fields(workload, each.fields) is not None)
        if runs:
            found.append(OpenField(question.field, question.cause, _shown(workload, question.field), runs))
    return found


def with_fields(workload: "Workload", fields: Mapping[str, Any]) -> "Workload | None":
    """`workload` with dotted fields changed; None if that could not run."""
    changed: Any = workload
    for path, value in fields.items():
        changed = _replaced(changed, path.split("."), value)
    return changed if changed.can_run else None


def is_stated(workload: "Workload", path: str) -> bool:
    """Whether the file (or mapping) that a workload was read from has the field."""
    part: Any = workload
    for name in path.split("."):
        if not isinstance(part, Part) or name not in part.model_fields_set:
            return False
        part = getattr(part, name)
    return True


def _replaced(part: Part, path: list[str], value: Any) -> Part:
    name, *below = path
    return part.model_copy(update={name: _replaced(getattr(part, name), below, value) if below else value})


def _shown(workload: "Workload", path: str) -> str:
    value: Any = workload
    for name in path.split("."):
        value = getattr(value, name)
    return {True: "true", False: "false", None: "null"}.get(value, str(value)) if not isinstance(value, str) else value
