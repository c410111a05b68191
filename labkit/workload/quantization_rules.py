"""Rules of FP8 and FP4, which the launch asks for (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `megatron.training.arguments`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.launched import Launched, launched

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_AT = "launch.arguments"
_CONFIG, _ARGUMENTS = Authority.CONFIG, Authority.ARGUMENTS


def quantization_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    options = launched(workload.launch)
    if options.fp8 is not None:
        yield from _fp8(workload, options)
        yield from _ends(workload, options)
    yield from _parts(workload, options)
    yield from refuse(
        options.fp8 is not None and options.fp4 is not None,
        _AT,
        "--fp8-format and --fp4-format exclude each other",
        "leave one of the two out",
        _CONFIG,
    )
    yield from refuse(
        options.fp4 is not None and options.fp4_recipe == "custom" and not options.fp4_quantizer_factory,
        _AT,
        "--fp4-recipe custom needs its quantizers",
        "give --fp4-quantizer-factory or use nvfp4",
        _CONFIG,
    )
    if options.moe_router_padding_for_quantization or options.moe_router_padding_for_fp8:
        yield from _padding(workload, options)


def _fp8(workload: "Workload", options: Launched) -> Iterator[Finding]:
    recipe, labels = workload.fp8_recipe, workload.recompute.modules
    replayed = sorted(labels & {"layernorm", "moe_act"})
    yield from refuse(
        bool(replayed) and recipe == "delayed",
        "recompute.recompute_modules",
        f"{' and '.join(replayed)}: delayed scaling of FP8 discards no output to compute it again",
        f"remove {' and '.join(replayed)}, or use another --fp8-recipe, such as tensorwise or mxfp8",
        _CONFIG,
    )
    yield from refuse(
        recipe == "custom" and not options.fp8_quantizer_factory,
        _AT,
        "--fp8-recipe custom needs its quantizers",
        "give --fp8-quantizer-factory or use another recipe",
        _CONFIG,
    )


def _ends(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """Layers at both ends that stay in bf16."""
    if not options.first_last_layers_bf16:
        return
    yield from refuse(
        workload.fp8_recipe == "delayed",
        _AT,
        "--first-last-layers-bf16: delayed scaling of FP8 leaves no layers in bf16",
        "use another --fp8-recipe",
        _CONFIG,
    )
    most = workload.model.num_layers // workload.parallelism.pp
    for option, number in (
        ("--num-layers-at-start-in-bf16", options.num_layers_at_start_in_bf16),
        ("--num-layers-at-end-in-bf16", options.num_layers_at_end_in_bf16),
    ):
        yield from refuse(
            not 0 <= number <= most,
            _AT,
            f"{option} {number}: a pipeline stage has {most} layers",
            f"use 0 to {most}",
            _CONFIG,
        )


def _parts(workload: "Workload", options: Launched) -> Iterator[Finding]:
    yield from refuse(
        options.fp8_param_gather and options.fp8 is None and not options.use_torch_fsdp2,
        _AT,
        "--fp8-param-gather needs FP8",
        "give --fp8-format or leave it out",
        _CONFIG,
    )
    distributed = workload.training.data_parallel.use_distributed_optimizer or options.use_megatron_fsdp
    yield from refuse(
        options.fp8_param_gather and not distributed and not options.use_torch_fsdp2,
        _AT,
        "--fp8-param-gather is for parameters that are gathered",
        "set training.data_parallel.use_distributed_optimizer: true or leave it out",
        _ARGUMENTS,
    )
    yield from refuse(
        options.fp8_output_proj and (options.fp8 is None or workload.fp8_recipe != "mxfp8"),
        _AT,
        "--fp8-output-proj needs FP8 of the mxfp8 recipe",
        "give --fp8-format and --fp8-recipe mxfp8, or leave it out",
        _CONFIG,
    )
    yield from refuse(
        options.fp4_param_gather and options.fp4 is None,
        _AT,
        "--fp4-param-gather needs FP4",
        "give --fp4-format or leave it out",
        _CONFIG,
    )


def _padding(workload: "Workload", options: Launched) -> Iterator[Finding]:
    yield from refuse(
        options.fp8 is None and options.fp4 is None,
        _AT,
        "--moe-router-padding-for-quantization pads for FP8 or FP4, and there is none",
        "leave it out",
        _CONFIG,
    )
    kernels = workload.training.kernels
    yield from refuse(
        workload.model.mixture_of_experts is None or kernels.moe_token_dispatcher_type == "allgather",
        _AT,
        "--moe-router-padding-for-quantization is for experts behind the alltoall and flex dispatchers",
        "leave it out or set another training.kernels.moe_token_dispatcher_type",
        _CONFIG,
    )
