"""Rules of hybrid patterns and of layers with a state: gated delta net, Mamba.

Sources: `TransformerConfig.__post_init__`, `models/hybrid/hybrid_layer_allocation.py`, `ssm/gated_delta_net/common.py`,
`ssm/mamba_mixer.py`, `ssm/mamba_context_parallel.py`; the kernels of flash-linear-attention, mamba_ssm and
causal_conv1d.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Authority, Finding
from labkit.workload.model import HYBRID_SYMBOLS, Mamba

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_PATTERN = "model.hybrid_layer_pattern"
_GDN = "model.gated_delta_net"
_MAMBA = "model.mamba"
_WIDEST_KEY = 256
"""`fla.ops.common.chunk_delta_h`: a kernel holds a state's rows in four blocks of 64."""


_WIDEST_GROUP = 65536 // 2
"""`mamba_ssm.ops.triton.layernorm_gated`: bf16 columns of one norm."""
_CHANNELS_UNIT = 8
"""`causal_conv1d`: channels of its channel-last kernel."""


def pattern_symbols(workload: "Workload") -> Iterator[Finding]:
    """Symbols that name no layer labkit knows; until they do, the model has no layers to judge."""
    model = workload.model
    for symbol in dict.fromkeys(model.hybrid_layer_pattern or ()):
        if symbol not in HYBRID_SYMBOLS and symbol not in "|/":
            known = " ".join(HYBRID_SYMBOLS)
            reason = f"{symbol!r} " + (
                "(sparse attention) is not supported by this version of labkit" if symbol == "D" else "names no layer"
            )
            yield Finding("error", _PATTERN, reason, f"use the symbols {known}", Authority.HYBRID)
    depths = model.pattern_depths
    if any(depth != depths[0] or not depth or "|" in depth for depth in depths):
        reason = "what follows each / are the layers of one depth of multi-token prediction, in all of them the same"
        yield Finding("error", _PATTERN, reason, "give each depth the same layers, without |", Authority.HYBRID)


def mixer_findings(workload: "Workload") -> Iterator[Finding]:
    """Every rule of these layers that `workload` breaks."""
    yield from _pattern(workload)
    yield from _gated_delta_net(workload)
    yield from _mamba(workload)


def _pattern(workload: "Workload") -> Iterator[Finding]:
    model, pattern = workload.model, workload.model.hybrid_layer_pattern
    if pattern is None:
        return
    depths = model.pattern_depths
    if (model.mtp_num_layers or 0) != len(depths):
        reason = f"hybrid_layer_pattern has {len(depths)} depths of multi-token prediction (each behind a /)"
        remedy = f"set it to {len(depths)}" if depths else "leave it out or give the layers of each depth behind a /"
        yield Finding("error", "model.mtp_num_layers", reason, remedy, Authority.LABKIT)
    if len(model.layers) != model.num_layers:
        reason = f"it names {len(model.layers)} layers but num_layers is {model.num_layers}"
        yield Finding("error", _PATTERN, reason, f"give {model.num_layers} symbols", Authority.LABKIT)
    if "*" in pattern and "+" in pattern:
        reason = "Megatron Core mixes no attention (*) with multi-latent attention (+)"
        yield Finding("error", _PATTERN, reason, "use one of them", Authority.HYBRID)
    elif "*" in pattern and model.multi_latent_attention is not None:
        reason = "attention layers (*) lose their positions in a model of multi-latent attention"
        yield Finding(
            "error", "model.multi_latent_attention", reason, "use the symbol + or leave it out", Authority.LABKIT
        )
    sections = {
        "M": ("mamba", model.mamba),
        "G": ("gated_delta_net", model.gated_delta_net),
        "+": ("multi_latent_attention", model.multi_latent_attention),
        "E": ("mixture_of_experts", model.mixture_of_experts),
    }
    for symbol, (name, section) in sections.items():
        if symbol in pattern and section is None:
            reason = f"the pattern's {symbol} layers have no sizes"
            yield Finding("error", f"model.{name}", reason, f"give model.{name}", Authority.LABKIT)
    yield from _pattern_stages(workload)


def _pattern_stages(workload: "Workload") -> Iterator[Finding]:
    """`select_pipeline_segment`; `megatron.training.arguments.validate_args`."""
    layout, stages = workload.parallelism, len(workload.model.pattern_stages)
    field = "parallelism.virtual_pipeline_model_parallel_size"
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if getattr(layout, name):
            yield Finding(
                "error",
                f"parallelism.{name}",
                "a hybrid pattern marks its stages itself",
                "use | in it",
                Authority.ARGUMENTS,
            )
    if stages == 1:
        if layout.vpp > 1:
            reason = "Megatron Core interleaves a hybrid pattern only at stages the pattern itself marks"
            yield Finding(
                "error", field, reason, "mark the stages by | in the pattern or leave it out", Authority.LABKIT
            )
        return
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(layout, name) is not None:
            yield Finding(
                "error",
                f"parallelism.{name}",
                "the hybrid pattern marks its stages",
                "leave it out",
                Authority.ARGUMENTS,
            )
    if stages % layout.pp or layout.pp == 1:
        reason = f"its {stages} stages are no multiple of {layout.pp} pipeline ranks"
        remedy = f"mark as many, or set pipeline_model_parallel_size: {stages}"
        yield Finding(
            "error",
            _PATTERN,
            reason if layout.pp > 1 else "it marks stages but there is one",
            remedy,
            Authority.ARGUMENTS,
        )
    elif not all(workload.model.pattern_stages[1:-1]):
        reason = "a stage without layers between others is not supported by this version of labkit"
        yield Finding("error", _PATTERN, reason, "give every stage between | a layer", Authority.LABKIT)
    elif stages != layout.pp * layout.vpp:
        reason = f"the hybrid pattern has {stages // layout.pp} chunks for each of {layout.pp} pipeline ranks"
        remedy = f"set it to {stages // layout.pp}" if stages > layout.pp else "leave it out"
        yield Finding("error", field, reason, remedy, Authority.LABKIT)


def _gated_delta_net(workload: "Workload") -> Iterator[Finding]:
    model, layout = workload.model, workload.parallelism
    net = model.gated_delta_net
    if net is None:
        if "gdn_norm_out" in workload.recompute.modules:
            reason = "gdn_norm_out needs gated-delta-net layers, this model has none"
            yield Finding("error", "recompute.recompute_modules", reason, "remove it", Authority.CONFIG)
        return
    frequency, hybrid = net.linear_attention_freq, model.hybrid_layer_pattern is not None
    if frequency is None and not hybrid:
        reason = "nothing says which layers are gated delta net"
        yield Finding(
            "error", f"{_GDN}.linear_attention_freq", reason, "give it or a hybrid_layer_pattern", Authority.LABKIT
        )
    if isinstance(frequency, tuple) and len(frequency) != model.num_layers and not hybrid:
        reason = f"it names {len(frequency)} layers but num_layers is {model.num_layers}"
        yield Finding(
            "error", f"{_GDN}.linear_attention_freq", reason, f"give {model.num_layers} entries", Authority.GDN
        )
    if net.linear_num_value_heads % net.linear_num_key_heads:
        reason = f"{net.linear_num_value_heads} is not a multiple of linear_num_key_heads ({net.linear_num_key_heads})"
        yield Finding(
            "error",
            f"{_GDN}.linear_num_value_heads",
            reason,
            "give every key head as many value heads",
            Authority.CONFIG,
        )
    # Context-parallel ranks exchange their tokens for heads.
    at, ranks = "parallelism.tensor_model_parallel_size", layout.tp * layout.cp
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(net, name) % ranks:
            reason = f"tensor x context parallel = {ranks} does not divide {name} ({getattr(net, name)})"
            yield Finding("error", at, reason, "use fewer tensor- or context-parallel ranks", Authority.CONFIG)
    if not any(layer.mixer == "gdn" for layer in model.kinds):
        if "gdn_norm_out" in workload.recompute.modules:
            reason = "gdn_norm_out saves nothing: the model has no gated-delta-net layer"
            yield Finding("warning", "recompute.recompute_modules", reason, "remove gdn_norm_out", Authority.SPECS)
        return
    if net.linear_key_head_dim > _WIDEST_KEY:
        reason = f"the delta rule's kernels take key heads of at most {_WIDEST_KEY}, not {net.linear_key_head_dim}"
        yield Finding("error", f"{_GDN}.linear_key_head_dim", reason, f"use at most {_WIDEST_KEY}", Authority.KERNELS)
    if model.activation_func != "silu":
        reason = f"the convolution of gated-delta-net layers takes silu, not {model.activation_func}"
        yield Finding("error", "model.activation_func", reason, "set silu", Authority.GDN)


def _mamba(workload: "Workload") -> Iterator[Finding]:
    model, layout = workload.model, workload.parallelism
    if model.mamba is None:
        return
    if not any(layer.mixer == "mamba" for layer in model.kinds):
        yield Finding(
            "warning",
            _MAMBA,
            "the model has no Mamba layer",
            "leave it out or use M in a hybrid pattern",
            Authority.HYBRID,
        )
        return
    mamba, heads = model.mamba, model.mamba_heads
    groups, tp, cp = mamba.mamba_num_groups, layout.tp, layout.cp
    at = "parallelism.tensor_model_parallel_size"
    if mamba.mamba_num_heads is None and 2 * model.hidden_size % mamba.mamba_head_dim:
        reason = f"{mamba.mamba_head_dim} does not divide twice hidden_size ({2 * model.hidden_size})"
        yield Finding(
            "error", f"{_MAMBA}.mamba_head_dim", reason, "use a divisor or give mamba_num_heads", Authority.MAMBA
        )
        return
    for name, number in (("Mamba heads", heads), ("mamba_num_groups", groups)):
        if number % tp:
            yield Finding(
                "error", at, f"{tp} does not divide {name} ({number})", f"use a divisor of {number}", Authority.MAMBA
            )
    if heads % groups:
        reason = f"{groups} groups cannot be shared evenly by {heads} heads"
        yield Finding("error", f"{_MAMBA}.mamba_num_groups", reason, f"use a divisor of {heads}", Authority.MAMBA)
    if heads % tp or groups % tp or heads % groups:
        return
    # Context-parallel ranks exchange their tokens for heads, and share a group where there are fewer.
    local = groups // tp
    if (heads // tp) % cp or (cp % local if local < cp else local % cp):
        reason = f"{heads // tp} heads in {local} groups of a tensor-parallel rank cannot be spread over {cp} ranks"
        yield Finding(
            "error", "parallelism.context_parallel_size", reason, "use fewer context-parallel ranks", Authority.MAMBA
        )
        return
    yield from _mamba_kernels(mamba, heads, groups, tp, cp)


def _mamba_kernels(mamba: Mamba, heads: int, groups: int, tp: int, cp: int) -> Iterator[Finding]:
    group_width = heads // groups * mamba.mamba_head_dim
    if group_width > _WIDEST_GROUP:
        reason = f"the gated norm's kernel takes groups of at most {_WIDEST_GROUP} columns, not {group_width}"
        yield Finding("error", f"{_MAMBA}.mamba_num_groups", reason, "use more groups", Authority.KERNELS)
    local_groups = max(groups // tp // cp, 1)
    channels = heads // tp // cp * mamba.mamba_head_dim + 2 * local_groups * mamba.mamba_state_dim
    if channels % _CHANNELS_UNIT:
        reason = f"the convolution's kernel takes multiples of {_CHANNELS_UNIT} channels a rank, not {channels}"
        yield Finding(
            "error", f"{_MAMBA}.mamba_state_dim", reason, "use multiples of 8 for heads and states", Authority.KERNELS
        )
