"""What `launch.arguments` say of the options that rules read, without Megatron's parser.

Names, types, choices and defaults are those of Megatron-LM's parser; a test compares them.
"""

import ast
import types
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from labkit.errors import nearest

if TYPE_CHECKING:
    from labkit.workload.launch import Launch

GRAPH_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""Megatron Core `CudaGraphModule`: the parts of a layer that a graph may capture."""
_MOST_LAYERS = 2**16


@dataclass(frozen=True)
class Launched:
    """Options by the names of their values (`dest`), which are those of `TransformerConfig` where it has them."""

    # CUDA graphs
    cuda_graph_impl: Literal["none", "local", "transformer_engine", "full_iteration"] = "none"
    cuda_graph_modules: tuple[str, ...] = ()
    cuda_graph_scope_deprecated: tuple[str, ...] | None = None
    inference_cuda_graph_scope: Literal["none", "layer", "block"] | None = None
    enable_cuda_graph: bool = False
    external_cuda_graph: bool = False
    cuda_graph_warmup_steps: int = 3
    inference_dynamic_batching_num_cuda_graphs: int = 16
    check_for_nan_in_loss_and_grad: bool = True
    # Communication beside computation
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    overlap_dispatch_backward_with_experts_wgrad: bool = False
    ep_overlap_early_attn_memory_release: bool = False
    overlap_p2p_comm: bool = True
    overlap_p2p_comm_warmup_flush: bool = False
    overlap_param_gather_with_optimizer_step: bool = False
    tp_comm_overlap: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    # Offloading
    cpu_offloading_num_layers: int = 0
    fine_grained_activation_offloading: bool = False
    offload_modules: tuple[str, ...] = ()
    min_offloaded_tensor_size: int = 1024 * 1024
    activation_offload_fraction: float = 1.0
    delta_offload_bytes_across_pp_ranks: int = 0
    fine_grained_offloading_max_inflight_offloads: int | None = None
    moe_paged_stash: bool = False
    optimizer_cpu_offload: bool = False
    # Quantization
    fp8: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise", "custom"] | None = None
    fp8_quantizer_factory: str | None = None
    fp8_param_gather: bool = False
    fp8_output_proj: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1
    fp4: Literal["e2m1"] | None = None
    fp4_recipe: Literal["nvfp4", "custom"] = "nvfp4"
    fp4_quantizer_factory: str | None = None
    fp4_param_gather: bool = False
    fp16: bool = False
    fp16_lm_cross_entropy: bool = False
    fp32_residual_connection: bool = False
    # Mixture of experts
    moe_router_load_balancing_type: tuple[str, ...] | None = None
    moe_router_padding_for_quantization: bool = False
    moe_router_padding_for_fp8: bool = False
    moe_single_grouped_weight: bool = False
    moe_single_grouped_bias: bool = False
    moe_enable_deepep: bool = False
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep", "ncclep"] | None = None
    moe_flex_dispatcher_num_sms: int | None = None
    moe_deepep_num_sms: int | None = None
    moe_hybridep_num_sms: int | None = None
    moe_expert_rank_capacity_factor: float | None = None
    moe_input_jitter_eps: float | None = None
    use_transformer_engine_op_fuser: bool = False
    # Attention, activations, everything else
    distribute_saved_activations: bool = False
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = None
    flash_attention_version: Literal[2, 3, 4] | None = None
    batch_invariant_mode: bool = False
    position_embedding_type: Literal["learned_absolute", "rope", "yarn", "mrope", "relative", "none"] | None = None
    cp_comm_type: tuple[str, ...] | None = None
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None
    no_rope_freq: int | tuple[int, ...] | None = None
    rotary_interleaved: bool = False
    cache_mla_latents: bool = False
    mla_down_proj_fusion: bool = False
    experimental_attention_variant: Literal["gated_delta_net", "dsa"] | None = None
    quick_geglu: bool = False
    glu_linear_offset: float = 0.0
    use_te_activation_func: bool = False
    fused_residual_rmsnorm: bool = False
    init_method_xavier_uniform: bool = False
    use_mup: bool = False
    mup_base_hidden_size: int | None = None
    tensor_parallel_num_weight_shards: int | None = None
    expert_tensor_parallel_num_weight_shards: int | None = None
    inference_fuse_tp_communication: bool = False
    inference_disable_triton_nvls_kernels: bool = False
    train_iters: int | None = None
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    freeze_all_layers: bool = False

    @property
    def graphs(self) -> tuple[str, ...]:
        """The parts of layers that are captured, by either name of the option."""
        return self.cuda_graph_scope_deprecated or self.cuda_graph_modules


class Unread(NamedTuple):
    """An option whose value is none."""

    option: str
    reason: str


_SPELLED = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
    "check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
}
"""Options that are not spelled as their values are named."""
OPTION_OF = {field.name: _SPELLED.get(field.name, f"--{field.name.replace('_', '-')}") for field in fields(Launched)}
"""The option of each."""
CHOICES = {
    "cuda_graph_modules": (*GRAPH_MODULES, "full", "full_iteration", "full_iteration_inference"),
    "cuda_graph_scope_deprecated": (*GRAPH_MODULES, "full", "full_iteration", "full_iteration_inference"),
    "moe_router_load_balancing_type": (
        "aux_loss",
        "seq_aux_loss",
        "global_aux_loss",
        "sinkhorn",
        "quantile_balancing",
        "none",
    ),
}
"""What the entries of a list may be, where the parser says so."""
_NAME_OF = {option: name for name, option in OPTION_OF.items()}
_TYPES = get_type_hints(Launched)


def launched(launch: "Launch | None") -> Launched:
    """What the launch says; what it does not say well is left at its default."""
    return _read(launch)[0]


def unread(launch: "Launch | None") -> tuple[Unread, ...]:
    """Options whose values are none, and why."""
    return _read(launch)[1]


@lru_cache(maxsize=256)
def _read(launch: "Launch | None") -> tuple[Launched, tuple[Unread, ...]]:
    said: dict[str, Any] = {}
    failed: list[Unread] = []
    for option, values in () if launch is None else launch.options:
        name = _NAME_OF.get(option)
        if name is None:
            continue
        try:
            said[name] = _value(name, values)
        except ValueError as error:
            failed.append(Unread(option, str(error)))
    return replace(Launched(), **said), tuple(failed)


def _value(name: str, words: tuple[str, ...]) -> Any:
    """The value of an option.

    Raises:
        ValueError: the words are none.
    """
    wanted = _TYPES[name]
    if wanted is bool:
        if words:
            raise ValueError("takes no value")
        return not getattr(Launched(), name)
    if not words:
        raise ValueError("needs a value")
    kinds = get_args(wanted) if get_origin(wanted) in (Union, types.UnionType) else (wanted,)
    if name == "no_rope_freq":
        return _frequency(words)
    listed_kind = next((kind for kind in kinds if get_origin(kind) is tuple), None)
    if listed_kind is not None:
        kind = get_args(listed_kind)[:1]
        return tuple(_single(_chosen(word, CHOICES.get(name, ())), kind) for word in words)
    if len(words) > 1:
        raise ValueError("takes one value")
    return _single(words[0], kinds)


def _single(word: str, kinds: tuple[Any, ...]) -> Any:
    for kind in kinds:
        if get_origin(kind) is Literal:
            named = {str(choice): choice for choice in get_args(kind)}
            return named[_chosen(word, tuple(named))]
        if kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                raise ValueError(f"{word[:80]!r} is no {'whole ' if kind is int else ''}number") from None
    return word


def _chosen(word: str, choices: tuple[str, ...]) -> str:
    if choices and word not in choices:
        raise ValueError(f"there is no {word[:80]!r}{nearest(word[:80], choices)}")
    return word


def _frequency(words: tuple[str, ...]) -> int | tuple[int, ...]:
    """`--no-rope-freq`: a number, or a list with a flag for each layer, such as `([0]*3+[1])*2`."""
    if len(words) > 1:
        raise ValueError("takes one value")
    return listed(words[0]) if "[" in words[0] else int(_single(words[0], (int,)))


def listed(text: str) -> tuple[int, ...]:
    """The numbers that Megatron's notation of a list stands for.

    Raises:
        ValueError: it is none, or one longer than any model.

    >>> listed("([0]*3+[1])*2")
    (0, 0, 0, 1, 0, 0, 0, 1)
    """
    found: int | tuple[int, ...] | None
    try:
        found = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        found = None
    if not isinstance(found, tuple):
        raise ValueError("it is no list such as ([0]*1+[1]*3), or too long")  # noqa: TRY004 (of the text)
    return found


def _evaluated(node: Any) -> int | tuple[int, ...]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.List(elts=elements):
            numbers = tuple(_evaluated(element) for element in elements)
            if all(isinstance(number, int) for number in numbers):
                return numbers  # type: ignore[return-value]
        case ast.BinOp(left=left, op=ast.Add() | ast.Mult() as operator, right=right):
            first, second = _evaluated(left), _evaluated(right)
            size = [number if isinstance(number, int) else len(number) for number in (first, second)]
            many = sum(size) if isinstance(operator, ast.Add) else size[0] * size[1]
            if many <= _MOST_LAYERS:
                return first + second if isinstance(operator, ast.Add) else first * second  # type: ignore[operator]
    raise ValueError
