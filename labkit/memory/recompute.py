"""Recompute as data: each label is a rule over module paths with one of two verbs.

*checkpoint* a region: forward keeps the region's inputs instead of what it saved; backward replays the region, then
runs its backward (`tensor_parallel.checkpoint`). *discard* a region's outputs: they are dropped once their consumer
`until` has run, and the region is replayed just before the consumer's backward (`CheckpointWithoutOutput`).
Full recompute checkpoints whole layers.
"""

from typing import Literal, NamedTuple

from labkit.memory.tape import Tape
from labkit.workload import Workload

Verb = Literal["checkpoint", "discard"]


class Rule(NamedTuple):
    """What one label does in every layer that has the module."""

    verb: Verb
    module: str
    """Path below the layer; a leading `@` marks a stretch of code inside a module (see `Tape.path`)."""
    until: str = ""
    """For discard: the module that consumes the output."""
    kind: str | None = None
    """Only where the module is of this kind."""


RULES: dict[str, tuple[Rule, ...]] = {
    # attention.py, MultiLatentAttention._checkpointed_attention_forward
    "core_attn": (Rule("checkpoint", "self_attention.core_attention"),),
    # multi_latent_attention.py, qkv_up_checkpoint
    "mla_up_proj": (Rule("discard", "self_attention.@qkv_up_proj", until="self_attention.core_attention"),),
    # transformer_layer.py, input_layernorm_checkpoint and pre_mlp_norm_checkpoint: standalone norms only
    "layernorm": (
        Rule("discard", "input_layernorm", until="self_attention"),
        Rule("discard", "pre_mlp_layernorm", until="mlp"),
    ),
    # transformer_layer.py, recompute_mlp: dense layers only
    "mlp": (Rule("checkpoint", "mlp", kind="mlp"),),
    # moe_layer.py, moe_layer_recompute
    "moe": (Rule("checkpoint", "mlp", kind="moe"),),
    # experts.py, activation_checkpoint
    "moe_act": (Rule("discard", "mlp.experts.@activation", until="mlp.experts.linear_fc2"),),
    # moe_layer.py, shared_experts_recompute
    "shared_experts": (Rule("checkpoint", "mlp.shared_experts", kind="moe"),),
    # gated_delta_net.py; workloads with such layers are refused until they are priced
    "gdn_norm_out": (),
}


class Region(NamedTuple):
    """A stretch of operations `first..last` (inclusive) that a label replays."""

    label: str
    verb: Verb
    first: int
    last: int
    until: int
    """For discard: index of the consumer's last operation."""


def regions(tape: Tape, workload: Workload) -> list[Region]:
    """The regions the workload's recompute choice makes of a tape, outer before inner."""
    choice = workload.recompute
    spans = _spans(tape)
    if choice.recompute_granularity == "full":
        found = _full(workload, spans)
    else:
        rules = [(label, rule) for label in sorted(choice.modules) for rule in RULES[label]]
        found = []
        for layer in range(workload.model.num_layers):
            below = f"decoder.layers.{layer}."
            for label, rule in rules:
                path = below + rule.module
                if path not in spans or (rule.kind is not None and tape.ops[spans[path][0]].kind != rule.kind):
                    continue
                first, last = spans[path]
                until = spans[below + rule.until][1] if rule.until else last
                found.append(Region(label, rule.verb, first, last, until))
    return sorted(found, key=lambda region: (region.first, -region.last))


def _spans(tape: Tape) -> dict[str, tuple[int, int]]:
    """First and last operation of every module path."""
    spans: dict[str, tuple[int, int]] = {}
    for index, op in enumerate(tape.ops):
        parts = op.module.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            spans[path] = (spans[path][0] if path in spans else index, index)
    return spans


def _full(workload: Workload, spans: dict[str, tuple[int, int]]) -> list[Region]:
    """`TransformerBlock._checkpointed_forward`: uniform chunks of layers, or the first layers one by one."""
    layers, number = workload.model.num_layers, workload.recompute.recompute_num_layers or 1
    if workload.recompute.recompute_method == "uniform":
        chunks = [(start, min(start + number, layers) - 1) for start in range(0, layers, number)]
    else:
        chunks = [(layer, layer) for layer in range(min(number, layers))]
    bounds = [(spans[f"decoder.layers.{a}"][0], spans[f"decoder.layers.{b}"][1]) for a, b in chunks]
    return [Region("full", "checkpoint", first, last, last) for first, last in bounds]
