"""Rules of layers with a state: gated delta net.

Sources: `TransformerConfig.__post_init__`, `ssm/gated_delta_net/common.py`, and the kernels of flash-linear-attention.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.workload.finding import Finding

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_GDN = "model.gated_delta_net"
_WIDEST_KEY = 256
"""`fla.ops.common.chunk_delta_h`: a kernel holds a state's rows in four blocks of 64."""


def mixer_findings(workload: "Workload") -> Iterator[Finding]:
    """Every rule of these layers that `workload` breaks."""
    yield from _gated_delta_net(workload)


def _gated_delta_net(workload: "Workload") -> Iterator[Finding]:
    model, layout = workload.model, workload.parallelism
    net = model.gated_delta_net
    if net is None:
        if "gdn_norm_out" in workload.recompute.modules:
            reason = "gdn_norm_out needs gated-delta-net layers, this model has none"
            yield Finding("error", "recompute.recompute_modules", reason, "remove it")
        return
    frequency = net.linear_attention_freq
    if not isinstance(frequency, int) and len(frequency) != model.num_layers:
        reason = f"it names {len(frequency)} layers but num_layers is {model.num_layers}"
        yield Finding("error", f"{_GDN}.linear_attention_freq", reason, f"give {model.num_layers} entries")
    if net.linear_num_value_heads % net.linear_num_key_heads:
        reason = f"{net.linear_num_value_heads} is not a multiple of linear_num_key_heads ({net.linear_num_key_heads})"
        yield Finding("error", f"{_GDN}.linear_num_value_heads", reason, "give every key head as many value heads")
    # Context-parallel ranks exchange their tokens for heads.
    at, ranks = "parallelism.tensor_model_parallel_size", layout.tp * layout.cp
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        if getattr(net, name) % ranks:
            reason = f"tensor x context parallel = {ranks} does not divide {name} ({getattr(net, name)})"
            yield Finding("error", at, reason, "use fewer tensor- or context-parallel ranks")
    if not any(layer.mixer == "gdn" for layer in model.layers):
        if "gdn_norm_out" in workload.recompute.modules:
            reason = "gdn_norm_out saves nothing: the model has no gated-delta-net layer"
            yield Finding("warning", "recompute.recompute_modules", reason, "remove gdn_norm_out")
        return
    if net.linear_key_head_dim > _WIDEST_KEY:
        reason = f"the delta rule's kernels take key heads of at most {_WIDEST_KEY}, not {net.linear_key_head_dim}"
        yield Finding("error", f"{_GDN}.linear_key_head_dim", reason, f"use at most {_WIDEST_KEY}")
    if model.activation_func != "silu":
        reason = f"the convolution of gated-delta-net layers takes silu, not {model.activation_func}"
        yield Finding("error", "model.activation_func", reason, "set silu")
