"""Rules of CUDA graphs, which the launch asks for (see `labkit.workload.rules`).

Sources: `TransformerConfig.__post_init__`, `transformer/cuda_graph_config.py`, `megatron.training.arguments`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from labkit.workload.finding import Authority, Finding, refuse
from labkit.workload.launched import Launched, launched

if TYPE_CHECKING:
    from labkit.workload.model import MixtureOfExperts
    from labkit.workload.workload import Workload

_AT = "launch.arguments"
_CONFIG, _ARGUMENTS = Authority.CONFIG, Authority.ARGUMENTS
_WHOLE = ("full", "full_iteration", "full_iteration_inference")
"""Former names among the parts of a layer."""
_SCOPES = {"none": ("none",), "local": ("layer", "block"), "transformer_engine": ("none",), "full_iteration": ("none",)}
_INSIDE_EXPERTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
_MOST_WARMUP = 1000
"""labkit's own bound: a trace runs every step before the capture."""


class Graphs(NamedTuple):
    """What is captured, with former names of options replaced (`normalize_cuda_graph_modules`)."""

    impl: str
    modules: frozenset[str]
    inference: str

    @property
    def of_layers(self) -> bool:
        """Each layer, or a part of it, has a graph of its own."""
        return self.impl in ("local", "transformer_engine")

    @property
    def whole_layers(self) -> bool:
        """Nothing of a layer is left out of a graph."""
        return self.impl == "full_iteration" or not self.modules


def graphs(options: Launched) -> Graphs:
    """What the launch says is captured."""
    impl = _impl(options)
    inference = options.inference_cuda_graph_scope
    if "full_iteration" in options.graphs:
        impl = "full_iteration"
    elif "full_iteration_inference" in options.graphs and impl != "none":
        inference = "block"
    modules = set(options.graphs).difference(_WHOLE)
    if impl == "local" and modules & {"moe_router", "moe_preprocess"}:
        modules |= {"moe_router", "moe_preprocess"}
    return Graphs(impl, frozenset(modules), inference or ("layer" if impl == "local" else "none"))


def _impl(options: Launched) -> str:
    """What captures, by its former names too (`validate_args`)."""
    if options.external_cuda_graph:
        return "transformer_engine"
    return "local" if options.enable_cuda_graph else options.cuda_graph_impl


def graph_findings(workload: "Workload") -> Iterator[Finding]:
    """Every such rule the workload breaks."""
    options = launched(workload.launch)
    yield from _names(options)
    yield from _training(workload, options)
    captured = graphs(options)
    allowed = _SCOPES[captured.impl]
    yield from refuse(
        captured.inference not in allowed,
        _AT,
        f"--inference-cuda-graph-scope {captured.inference} does not go with --cuda-graph-impl {captured.impl}",
        f"use {' or '.join(allowed)}",
        _CONFIG,
    )
    yield from refuse(
        captured.impl == "full_iteration" and bool(captured.modules),
        _AT,
        "--cuda-graph-impl full_iteration captures everything, not --cuda-graph-modules",
        "leave --cuda-graph-modules out",
        _CONFIG,
    )
    if captured.impl == "none":
        return
    if captured.of_layers:
        yield from _modules(workload, captured, options)
    yield from refuse(
        captured.of_layers and options.cpu_offloading_num_layers > 0,
        _AT,
        "CUDA graphs of layers do not go with --cpu-offloading-num-layers",
        "leave one of the two out",
        _CONFIG,
    )
    yield from _recompute(workload, captured)
    yield from _offloading(captured, options)


def _names(options: Launched) -> Iterator[Finding]:
    """Options that say the same twice, and their former names."""
    former = options.enable_cuda_graph or options.external_cuda_graph
    yield from refuse(
        former and options.cuda_graph_impl != "none",
        _AT,
        "--enable-cuda-graph and --external-cuda-graph are former names of --cuda-graph-impl",
        "keep --cuda-graph-impl alone",
        _ARGUMENTS,
    )
    yield from refuse(
        options.enable_cuda_graph and options.external_cuda_graph,
        _AT,
        "--enable-cuda-graph and --external-cuda-graph exclude each other",
        "use --cuda-graph-impl local or transformer_engine",
        _ARGUMENTS,
    )
    yield from refuse(
        bool(options.cuda_graph_modules) and options.cuda_graph_scope_deprecated is not None,
        _AT,
        "--cuda-graph-scope is the former name of --cuda-graph-modules",
        "keep --cuda-graph-modules alone",
        _ARGUMENTS,
    )
    named = options.graphs
    yield from refuse(
        "full" in named and len(named) > 1,
        _AT,
        "full among --cuda-graph-modules means whole layers, and stands alone",
        "leave --cuda-graph-modules out for whole layers",
        _CONFIG,
    )
    if "full" in named:
        return
    yield from refuse(
        {"full_iteration", "full_iteration_inference"} <= set(named),
        _AT,
        "full_iteration and full_iteration_inference exclude each other",
        "use --cuda-graph-impl full_iteration",
        _CONFIG,
    )
    impl, inference = _impl(options), options.inference_cuda_graph_scope
    for name, impls, scope in (
        ("full_iteration", ("none", "local", "full_iteration"), "none"),
        ("full_iteration_inference", ("none", "local"), "block"),
    ):
        yield from refuse(
            name in named and (impl not in impls or inference not in (None, scope)),
            _AT,
            f"{name} among --cuda-graph-modules contradicts --cuda-graph-impl or --inference-cuda-graph-scope",
            "use --cuda-graph-impl full_iteration or --inference-cuda-graph-scope alone",
            _CONFIG,
        )


def _training(workload: "Workload", options: Launched) -> Iterator[Finding]:
    """`validate_args`, and what a training step with graphs cannot do."""
    captured = graphs(options)
    yield from refuse(
        captured.impl == "full_iteration" and options.check_for_nan_in_loss_and_grad and not options.fp16,
        _AT,
        "--cuda-graph-impl full_iteration looks at no loss on the way",
        "add --no-check-for-nan-in-loss-and-grad",
        _ARGUMENTS,
    )
    yield from refuse(
        captured.inference == "block" and options.fp8 is not None,
        _AT,
        "--inference-cuda-graph-scope block takes no FP8 in training's layers",
        "leave it out",
        _ARGUMENTS,
    )
    number = options.inference_dynamic_batching_num_cuda_graphs
    yield from refuse(
        captured.impl == "local" and number != -1 and number <= 0,
        _AT,
        f"{number} is no number of --inference-dynamic-batching-num-cuda-graphs",
        "leave it out",
        _ARGUMENTS,
    )
    yield from refuse(
        captured.impl == "local" and workload.parallelism.pp > 1,
        _AT,
        "--cuda-graph-impl local: Megatron Core cannot free the outputs of pipeline stages that its graphs hand on",
        "use transformer_engine",
        Authority.SCHEDULES,
    )
    yield from refuse(
        captured.impl != "none" and workload.batch.packed is not None,
        _AT,
        "--cuda-graph-impl captures no layers with packed sequences",
        "leave it out or unpack the batch",
        Authority.LABKIT,
    )
    yield from refuse(
        not 0 <= options.cuda_graph_warmup_steps <= _MOST_WARMUP,
        _AT,
        f"--cuda-graph-warmup-steps {options.cuda_graph_warmup_steps} is no number of steps before a capture",
        f"use 0 to {_MOST_WARMUP}",
        Authority.LABKIT,
    )


def _modules(workload: "Workload", captured: Graphs, options: Launched) -> Iterator[Finding]:
    """Which parts of a layer can be captured."""
    modules, moe = captured.modules, workload.model.mixture_of_experts
    yield from refuse(
        {"moe", "moe_router"} <= modules,
        _AT,
        "--cuda-graph-modules moe contains moe_router",
        "use one of the two",
        _CONFIG,
    )
    yield from refuse(
        "moe_preprocess" in modules and "moe_router" not in modules,
        _AT,
        "--cuda-graph-modules moe_preprocess is captured together with moe_router alone",
        "add moe_router",
        _CONFIG,
    )
    if moe is None or moe.num_moe_experts == 1:
        yield from refuse(
            bool(modules & {"moe", "moe_router"}),
            _AT,
            "--cuda-graph-modules moe and moe_router need experts",
            "leave them out",
            _CONFIG,
        )
        return
    frequency = moe.moe_layer_freq
    yield from refuse(
        "mlp" in modules and (frequency == 1 or (not isinstance(frequency, int) and 0 not in frequency)),
        _AT,
        "--cuda-graph-modules mlp needs dense layers, and moe_layer_freq names none",
        "leave mlp out",
        _CONFIG,
    )
    if moe.moe_pad_expert_input_to_capacity and moe.moe_expert_capacity_factor is not None:
        return
    yield from refuse(
        "moe" in modules,
        _AT,
        "--cuda-graph-modules moe needs experts that are padded to a capacity",
        "set moe_expert_capacity_factor and moe_pad_expert_input_to_capacity, or use moe_router",
        _CONFIG,
    )
    yield from refuse(
        "moe_preprocess" in modules and _reads_counts(workload, moe, options),
        _AT,
        "--cuda-graph-modules moe_preprocess: the dispatcher copies counts to the host there",
        "leave moe_preprocess out",
        _CONFIG,
    )


def _reads_counts(workload: "Workload", moe: "MixtureOfExperts", options: Launched) -> bool:
    dispatched = workload.training.kernels.moe_token_dispatcher_type == "alltoall"
    return dispatched and (moe.moe_expert_capacity_factor is not None or options.moe_router_padding_for_fp8)


def _recompute(workload: "Workload", captured: Graphs) -> Iterator[Finding]:
    """A checkpoint lies inside a graph or outside of it, and replays no random numbers there."""
    choice, model, modules = workload.recompute, workload.model, captured.modules
    if choice.recompute_granularity == "full":
        yield from refuse(
            captured.impl != "full_iteration",
            "recompute.recompute_granularity",
            "full recompute straddles the graphs of layers",
            "use selective, or --cuda-graph-impl full_iteration",
            _CONFIG,
        )
    labels, whole = choice.modules, captured.whole_layers
    field = "recompute.recompute_modules"
    yield from refuse(
        captured.impl == "transformer_engine" and "moe" in labels and "moe_router" in modules,
        field,
        "moe straddles the graph of moe_router",
        "remove moe, or moe_router from --cuda-graph-modules",
        _CONFIG,
    )
    yield from refuse(
        model.attention_dropout != 0.0 and "core_attn" in labels and (whole or "attn" in modules),
        field,
        "core_attn replays attention_dropout inside a graph",
        "remove core_attn or set model.attention_dropout: 0.0",
        _CONFIG,
    )
    replayed = [label for label in ("mlp", "moe") if label in labels and (whole or label in modules)]
    yield from refuse(
        model.hidden_dropout != 0.0 and bool(replayed),
        field,
        f"{' and '.join(replayed)} replays hidden_dropout inside a graph",
        "remove it or set model.hidden_dropout: 0.0",
        _CONFIG,
    )
    options = launched(workload.launch)
    yield from refuse(
        options.moe_input_jitter_eps is not None and "moe" in replayed,
        field,
        "moe replays --moe-input-jitter-eps inside a graph",
        "remove moe or leave the jitter out",
        _CONFIG,
    )
    yield from refuse(
        "shared_experts" in labels and _shards_shared_experts(workload, captured, options),
        field,
        "shared_experts of sharded weights in FP8 or FP4 cannot be replayed inside graphs of --cuda-graph-impl local",
        "remove shared_experts or use --cuda-graph-impl full_iteration",
        _CONFIG,
    )


def _shards_shared_experts(workload: "Workload", captured: Graphs, options: Launched) -> bool:
    """Weights rematerialised from more shards than tensor-parallel ranks, in a graph that has shared experts."""
    moe, kernels = workload.model.mixture_of_experts, workload.training.kernels
    shards = (options.tensor_parallel_num_weight_shards or 0) // workload.parallelism.tp
    return (
        shards > 1
        and captured.impl == "local"
        and (options.fp8 is not None or options.fp4 is not None)
        and moe is not None
        and moe.moe_shared_expert_intermediate_size is not None
        and not kernels.moe_shared_expert_overlap
        and bool(captured.whole_layers or captured.modules & {"moe", "moe_router"})
    )


def _offloading(captured: Graphs, options: Launched) -> Iterator[Finding]:
    """Activations that leave the GPU from inside a graph."""
    if not options.fine_grained_activation_offloading:
        return
    named = set(options.offload_modules)
    local = captured.impl == "local"
    yield from refuse(
        local and not (named and named <= _INSIDE_EXPERTS),
        _AT,
        "--offload-modules beside --cuda-graph-impl local offload expert_fc1, moe_act and fused_group_mlp alone",
        "leave the others out or use transformer_engine",
        _CONFIG,
    )
    yield from refuse(
        local and not captured.modules,
        _AT,
        "--fine-grained-activation-offloading leaves no graph of whole layers of --cuda-graph-impl local",
        "give --cuda-graph-modules",
        _CONFIG,
    )
    yield from refuse(
        "moe" in captured.modules,
        _AT,
        "--fine-grained-activation-offloading leaves no graph of moe",
        "leave moe out of --cuda-graph-modules",
        _CONFIG,
    )
    yield from refuse(
        options.cuda_graph_warmup_steps <= 0,
        _AT,
        "--fine-grained-activation-offloading needs a step before the capture",
        "set --cuda-graph-warmup-steps to at least 1",
        _CONFIG,
    )
    most = options.fine_grained_offloading_max_inflight_offloads
    yield from refuse(
        captured.impl == "full_iteration" and (most is None or most < 0),
        _AT,
        "--fine-grained-activation-offloading in --cuda-graph-impl full_iteration needs a bound of copies under way",
        "give --fine-grained-offloading-max-inflight-offloads",
        _CONFIG,
    )
