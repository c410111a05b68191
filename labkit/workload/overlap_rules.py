"""Rules of communication that runs beside computation, where the launch asks for it (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `ModelParallelConfig.__post_init__`, `megatron.training.arguments`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.graph_rules import graphs
from labkit.workload.launched import Launched, launched

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_AT, _EP = "launch.arguments", "--overlap-moe-expert-parallel-comm"
_CONFIG, _ARGUMENTS = Authority.CONFIG, Authority.ARGUMENTS


def overlap_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    options = launched(workload.launch)
    if options.overlap_moe_expert_parallel_comm:
        yield from _experts(workload, options)
        yield from _replayed(workload)
    yield from _weight_gradients(workload, options)
    yield from _embedding(workload, options)
    yield from _pipeline(workload, options)
    yield from refuse(
        options.tp_comm_overlap and not workload.parallelism.sequence_parallel,
        _AT,
        "--tp-comm-overlap needs sequence parallelism",
        "set parallelism.sequence_parallel: true or leave it out",
        _ARGUMENTS,
    )


def _experts(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """The dispatch of one micro-batch beside the computation of another."""
    layout, kernels = workload.parallelism, workload.training.kernels
    yield from refuse(
        layout.pp > 1 and workload.chunks == 1,
        "parallelism.virtual_pipeline_model_parallel_size",
        f"{_EP} in a pipeline needs model chunks",
        "give it or use pipeline_model_parallel_size 1",
        _CONFIG,
    )
    yield from refuse(
        layout.ep == 1,
        "parallelism.expert_model_parallel_size",
        f"{_EP} needs expert parallelism",
        "raise it or leave the overlap out",
        _CONFIG,
    )
    yield from refuse(
        workload.model.mixture_of_experts is None or kernels.moe_token_dispatcher_type == "allgather",
        "training.kernels.moe_token_dispatcher_type",
        f"{_EP} is for the alltoall and flex dispatchers",
        "use one of them or leave the overlap out",
        _CONFIG,
    )
    yield from refuse(
        workload.training.precision == "fp32" and not options.fp16,
        "training.precision",
        f"{_EP} is for bf16 and fp16",
        "set bf16 or leave the overlap out",
        _CONFIG,
    )
    yield from refuse(
        kernels.moe_shared_expert_overlap,
        "training.kernels.moe_shared_expert_overlap",
        f"{_EP} leaves shared experts no dispatch to overlap with",
        "set it to false",
        _CONFIG,
    )
    yield from refuse(
        (workload.model.mtp_num_layers or 0) > 1,
        "model.mtp_num_layers",
        f"{_EP} goes with one layer of multi-token prediction at most",
        "use 1 or leave the overlap out",
        _CONFIG,
    )
    captured = graphs(options)
    yield from refuse(
        captured.impl == "transformer_engine" and bool(captured.modules & {"moe", "mlp"}),
        _AT,
        f"{_EP} splits what --cuda-graph-modules moe and mlp would capture",
        "leave them out",
        _CONFIG,
    )
    yield from refuse(
        kernels.moe_token_dispatcher_type == "flex"
        and workload.flex_backend == "ncclep"
        and options.fine_grained_activation_offloading
        and "expert_fc1" in options.offload_modules,
        _AT,
        f"{_EP} with ncclep frees what --offload-modules expert_fc1 would offload",
        "leave expert_fc1 out",
        _CONFIG,
    )


def _replayed(workload: "Workload") -> Iterator[Finding]:
    """Whole layers and whole experts are split between micro-batches."""
    choice, at = workload.recompute, "recompute.recompute_"
    yield from refuse(
        choice.recompute_granularity == "full",
        f"{at}granularity",
        f"{_EP} splits the layers that full recompute would replay whole",
        "use selective",
        _CONFIG,
    )
    for name in ("method", "num_layers"):
        yield from refuse(
            getattr(choice, f"recompute_{name}") is not None,
            f"{at}{name}",
            f"{_EP} takes no full recompute",
            "leave it out",
            _CONFIG,
        )
    yield from refuse(
        "moe" in (choice.recompute_modules or ()),
        f"{at}modules",
        f"{_EP} splits what moe would replay whole",
        "remove moe: moe_act or layernorm keep their parts",
        _CONFIG,
    )


def _weight_gradients(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """Gradients of weights that wait for a dispatch to run beside."""
    overlaps = options.overlap_moe_expert_parallel_comm
    yield from refuse(
        options.delay_wgrad_compute and not overlaps,
        _AT,
        f"--delay-wgrad-compute needs {_EP}",
        "add it or leave --delay-wgrad-compute out",
        _CONFIG,
    )
    yield from refuse(
        options.ep_overlap_early_attn_memory_release and not overlaps,
        _AT,
        f"--ep-overlap-early-attn-memory-release needs {_EP}",
        "add it or leave --ep-overlap-early-attn-memory-release out",
        _CONFIG,
    )
    yield from refuse(
        options.overlap_dispatch_backward_with_experts_wgrad and (overlaps or options.delay_wgrad_compute),
        _AT,
        f"--overlap-dispatch-backward-with-experts-wgrad is another way than {_EP} and --delay-wgrad-compute",
        "use one of them",
        _CONFIG,
    )
    if options.delay_wgrad_compute:
        yield from _delayed(workload, options)


def _delayed(workload: "Workload", options: Launched) -> Iterator[Finding]:
    model, kernels, moe = workload.model, workload.training.kernels, workload.model.mixture_of_experts
    yield from refuse(
        kernels.local,
        "training.kernels.transformer_impl",
        "--delay-wgrad-compute is for Transformer Engine's layers",
        "use transformer_engine or leave it out",
        _ARGUMENTS,
    )
    modules = graphs(options).modules
    shared = moe is not None and moe.moe_shared_expert_intermediate_size is not None
    alone = shared and not kernels.moe_shared_expert_overlap
    captured = "attn" in modules or ("moe_router" in modules and alone)
    if not (captured and workload.training.data_parallel.overlap_grad_reduce):
        return
    yield from refuse(
        not kernels.gradient_accumulation_fusion,
        "training.kernels.gradient_accumulation_fusion",
        "--delay-wgrad-compute inside CUDA graphs adds gradients up where they lie",
        "set it to true",
        _ARGUMENTS,
    )
    yield from refuse(
        "attn" in modules and (model.add_bias_linear or model.add_qkv_bias),
        "model.add_qkv_bias",
        "--delay-wgrad-compute inside graphs of attn has no biases",
        "set it and add_bias_linear to false, or leave attn out of --cuda-graph-modules",
        _ARGUMENTS,
    )


def _embedding(workload: "Workload", options: Launched) -> Iterator[Finding]:
    if not options.defer_embedding_wgrad_compute:
        return
    yield from refuse(
        workload.parallelism.pp == 1,
        _AT,
        "--defer-embedding-wgrad-compute waits for the flush of a pipeline",
        "leave it out or raise pipeline_model_parallel_size",
        _CONFIG,
    )
    yield from refuse(
        not workload.training.kernels.gradient_accumulation_fusion,
        "training.kernels.gradient_accumulation_fusion",
        "--defer-embedding-wgrad-compute needs it",
        "set it to true",
        _CONFIG,
    )
    yield from refuse(
        options.wgrad_deferral_limit < 0,
        _AT,
        f"--wgrad-deferral-limit {options.wgrad_deferral_limit} is no number of micro-batches",
        "use 0 for all, or more",
        _CONFIG,
    )


def _pipeline(workload: "Workload", options: Launched) -> Iterator[Finding]:
    chunks = workload.chunks
    yield from refuse(
        options.overlap_p2p_comm_warmup_flush and (chunks == 1 or not options.overlap_p2p_comm),
        _AT,
        "--overlap-p2p-communication-warmup-flush needs an interleaved schedule that overlaps its communication",
        "leave it out",
        _CONFIG,
    )
    yield from refuse(
        chunks > 1 and not options.overlap_p2p_comm and workload.parallelism.pp <= 2,
        _AT,
        "--no-overlap-p2p-communication needs more than 2 stages in an interleaved schedule",
        "leave it out",
        _ARGUMENTS,
    )
    yield from refuse(
        options.overlap_param_gather_with_optimizer_step,
        _AT,
        "--overlap-param-gather-with-optimizer-step does not go with distributed checkpoints",
        "leave it out",
        _ARGUMENTS,
    )
