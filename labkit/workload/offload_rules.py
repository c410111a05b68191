"""Rules of activations that wait in host memory, where the launch asks for it (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `megatron.training.arguments`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.errors import nearest
from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.launched import Launched, launched

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

OFFLOAD_MODULES = (
    "attn_norm",
    "attn_proj",
    "core_attn",
    "expert_fc1",
    "fused_group_mlp",
    "mlp_norm",
    "moe_act",
    "qkv_linear",
)
"""What `--offload-modules` may name."""
_AT, _FINE = "launch.arguments", "--fine-grained-activation-offloading"
_CONFIG, _ARGUMENTS = Authority.CONFIG, Authority.ARGUMENTS


def offload_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    options = launched(workload.launch)
    if options.cpu_offloading_num_layers > 0:
        yield from _layers(workload, options)
    if options.fine_grained_activation_offloading:
        yield from _modules(workload, options)
    if options.moe_paged_stash:
        yield from _stash(options)
    yield from _optimizer(workload, options)


def _layers(workload: "Workload", options: Launched) -> Iterator[Finding]:
    number, layers = options.cpu_offloading_num_layers, workload.model.num_layers
    yield from refuse(
        number >= layers,
        _AT,
        f"--cpu-offloading-num-layers {number} leaves none of {layers} layers on the GPU",
        f"use at most {layers - 1}",
        _CONFIG,
    )
    yield from refuse(
        workload.parallelism.pp > 1,
        _AT,
        "--cpu-offloading-num-layers goes with no pipeline",
        "leave it out or use pipeline_model_parallel_size 1",
        _CONFIG,
    )
    yield from refuse(
        workload.recompute.recompute_granularity is not None,
        "recompute.recompute_granularity",
        "what --cpu-offloading-num-layers offloads cannot be recomputed as well",
        "leave one of the two out",
        _CONFIG,
    )


def _modules(workload: "Workload", options: Launched) -> Iterator[Finding]:
    named = set(options.offload_modules)
    yield from refuse(
        options.cpu_offloading_num_layers > 0,
        _AT,
        f"{_FINE} and --cpu-offloading-num-layers exclude each other",
        "leave one of the two out",
        _CONFIG,
    )
    yield from refuse(not named, _AT, f"{_FINE} needs --offload-modules", "name some", _CONFIG)
    unknown = sorted(named.difference(OFFLOAD_MODULES))
    yield from refuse(
        bool(unknown),
        _AT,
        f"--offload-modules: there is no {', '.join(unknown)[:80]!r}",
        nearest("".join(unknown[:1])[:80], OFFLOAD_MODULES).removeprefix("; "),
        _CONFIG,
    )
    yield from refuse(
        "attn_proj" in named and "core_attn" not in named,
        _AT,
        "--offload-modules attn_proj is core_attn's output, which its backward needs",
        "add core_attn",
        _CONFIG,
    )
    inside = sorted(named & {"expert_fc1", "fused_group_mlp", "moe_act"})
    yield from refuse(
        bool(inside) and "moe" in workload.recompute.modules,
        "recompute.recompute_modules",
        f"moe replays what --offload-modules {' '.join(inside)} would offload",
        "remove moe or leave them out",
        _CONFIG,
    )
    yield from refuse(
        "fused_group_mlp" in named and not options.use_transformer_engine_op_fuser,
        _AT,
        "--offload-modules fused_group_mlp needs --use-transformer-engine-op-fuser",
        "add it",
        _CONFIG,
    )
    yield from refuse(
        "fused_group_mlp" in named and len(inside) > 1,
        _AT,
        "--offload-modules fused_group_mlp contains expert_fc1 and moe_act",
        "leave those out",
        _CONFIG,
    )
    yield from _numbers(options)
    yield from refuse(
        workload.training.kernels.local,
        "training.kernels.transformer_impl",
        f"{_FINE} is for Transformer Engine's layers",
        "use transformer_engine",
        _ARGUMENTS,
    )
    variables = {} if workload.launch is None else workload.launch.variables
    yield from refuse(
        variables.get("NVTE_CPU_OFFLOAD_V1", "0") != "1",
        "launch.environment",
        f"{_FINE} would take weights along with Transformer Engine from 2.10 on",
        "add NVTE_CPU_OFFLOAD_V1=1",
        _ARGUMENTS,
    )


def _numbers(options: Launched) -> Iterator[Finding]:
    for option, number in (
        ("--min-offloaded-tensor-size", options.min_offloaded_tensor_size),
        ("--delta-offload-bytes-across-pp-ranks", options.delta_offload_bytes_across_pp_ranks),
    ):
        yield from refuse(number < 0, _AT, f"{option} {number} is no number of bytes", "use 0 or more", _CONFIG)
    part = options.activation_offload_fraction
    yield from refuse(
        not 0 <= part <= 1, _AT, f"--activation-offload-fraction {part:g} is no part of all", "use 0 to 1", _CONFIG
    )


def _stash(options: Launched) -> Iterator[Finding]:
    yield from refuse(
        options.cpu_offloading_num_layers > 0,
        _AT,
        "--moe-paged-stash and --cpu-offloading-num-layers exclude each other",
        "leave one of the two out",
        _CONFIG,
    )
    yield from refuse(
        options.moe_expert_rank_capacity_factor is None,
        _AT,
        "--moe-paged-stash needs a capacity of each rank",
        "give --moe-expert-rank-capacity-factor",
        _CONFIG,
    )
    inside = sorted(set(options.offload_modules) & {"expert_fc1", "fused_group_mlp", "moe_act"})
    yield from refuse(
        bool(inside),
        _AT,
        f"--moe-paged-stash covers --offload-modules {' '.join(inside)}",
        "leave them out",
        _CONFIG,
    )


def _optimizer(workload: "Workload", options: Launched) -> Iterator[Finding]:
    if not options.optimizer_cpu_offload:
        return
    yield from refuse(
        not workload.training.optimizer.use_precision_aware_optimizer,
        "training.optimizer.use_precision_aware_optimizer",
        "--optimizer-cpu-offload is part of it",
        "set it to true or leave the offload out",
        _ARGUMENTS,
    )
    yield from refuse(
        options.fp8_param_gather and workload.fp8_recipe != "delayed",
        _AT,
        "--optimizer-cpu-offload with --fp8-param-gather is for --fp8-recipe delayed",
        "leave one of them out",
        _ARGUMENTS,
    )
