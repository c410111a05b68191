"""Values as recipes of Megatron Bridge have them, as plain data, as command lines and in Megatron's notation."""

import re
from typing import Any

from labkit.errors import InputError
from labkit.importers.keys import Keys
from labkit.workload.megatron_options import OPTIONS
from labkit.workload.workload import shown

DTYPES = {
    **dict.fromkeys(("float32", "float", "fp32"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bf16"),
    **dict.fromkeys(("float16", "half", "fp16"), "fp16"),
}
_OPTION_NAMES = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
_NOT_TRACED = ("tp_comm_overlap",)
"""Options of Megatron-LM that its trace does not run."""
_PIPELINE_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Of `PipelineParallelLayerLayout`."""
_EXPONENT = re.compile(r"[-+]?[0-9]{1,20}(\.[0-9]{0,20})?[eE][-+]?[0-9]{1,3}")
_MOST_LAYERS = 2000


def fields_of(section: Keys) -> dict[str, Any]:
    """A section's fields as plain data."""
    return {name: resolved(value) for name, value in section.mapping.items()}


def resolved(value: Any) -> Any:
    """Plain data for what names a function, an enumeration or a dtype (`_target_`); nothing is imported."""
    if isinstance(value, list):
        return [resolved(each) for each in value]
    if isinstance(value, str):
        # YAML 1.1 has a text for 1e-5, OmegaConf a number.
        return float(value) if _EXPONENT.fullmatch(value) else DTYPES.get(value.removeprefix("torch."), value)
    if not isinstance(value, dict):
        return value
    target = value.get("_target_")
    if isinstance(target, str) and ("_call_" in value or "_args_" in value or len(value) == 1):
        if isinstance(value.get("_name_"), str):
            return value["_name_"]
        return DTYPES.get(target.removeprefix("torch."), target)
    return {name: resolved(each) for name, each in value.items()}


def words(name: str, value: Any) -> list[str] | None:
    """A field as Megatron-LM's command line has it; None if that has no such option."""
    option = _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
    if option not in OPTIONS or name in _NOT_TRACED or value is None or value is False:
        return None
    if value is True:
        return [option]
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str | int | float) for each in values):
        return None
    texts = [str(each) for each in values]
    return [option, ",".join(texts)] if name == "window_size" else [option, *texts]


def pattern(model: Keys) -> str | None:
    """A hybrid model's layers, those of multi-token prediction behind a /."""
    main = model.text("hybrid_layer_pattern", "") or model.text("hybrid_override_pattern", "")
    depths = model.integer("mtp_num_layers", 0, least=0, most=64)
    one = model.text("mtp_hybrid_override_pattern", "")
    if not main or len(main) > 2 * _MOST_LAYERS:
        return main or None
    return main if "/" in main or not one else main + f"/{one}" * depths


def layout(model: Keys) -> str | None:
    """The pipeline's stages in Megatron's notation: Bridge has lists of names, one a stage."""
    stages = model.plain("pipeline_model_parallel_layout")
    if stages is None or isinstance(stages, str):
        return stages
    if isinstance(stages, list) and all(isinstance(stage, list) for stage in stages):
        flat = [name for stage in stages for name in stage]
        if all(isinstance(name, str) and name in _PIPELINE_SYMBOLS for name in flat) and len(flat) <= 2 * _MOST_LAYERS:
            return "|".join("".join(_PIPELINE_SYMBOLS[name] for name in stage) for stage in stages)
    raise InputError(
        f"{model.source}: model.pipeline_model_parallel_layout: should be a text, or a list of stages of "
        f"{', '.join(_PIPELINE_SYMBOLS)}"
    )


def backend(model: Keys) -> str:
    """`attention_backend`; null is Megatron's own default."""
    return model.choice("attention_backend", ("auto", "fused", "flash", "unfused", "local"), "auto")


def exchange(model: Keys) -> Any:
    """`cp_comm_type`: one for all layers, or a list of one."""
    kind = model.plain("cp_comm_type", "p2p")
    return kind[0] if isinstance(kind, list) and len(kind) == 1 else kind


def coefficient(model: Keys) -> float:
    """`moe_aux_loss_coeff`: a number, or the largest of several."""
    stated = model.plain("moe_aux_loss_coeff", 0.0)
    values = stated if isinstance(stated, list) else [stated]
    if not values or not all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        raise InputError(f"{model.source}: model.moe_aux_loss_coeff: should be a number (got {shown(stated)})")
    return float(max(values))
