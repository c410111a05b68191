"""Recompute as data: each label is a rule over module paths with one of two verbs.

*checkpoint* a region: forward keeps the region's inputs instead of what it saved; backward replays the region, then
runs its backward (`tensor_parallel.checkpoint`). *discard* a region's outputs: they are dropped once their consumer
`until` has run, and the region is replayed just before the consumer's backward (`CheckpointWithoutOutput`).
Full recompute checkpoints whole layers, or runs of them.
"""

from typing import Literal, NamedTuple

from labkit.memory.tape import Tape

Verb = Literal["checkpoint", "discard"]


class Rule(NamedTuple):
    """What one label does in every layer that has the module."""

    verb: Verb
    module: str
    """Path below the layer, empty for the layer itself; a leading `@` marks a stretch of code inside a module
    (see `Tape.path`)."""
    until: str = ""
    """For discard: the module that consumes the output."""
    kind: str | None = None
    """Only where the module is of this kind."""
    parent: str = ""
    """Only in layers that the module of this name lists."""


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
    # multi_token_prediction.py, _checkpointed_forward: of full recompute by the uniform method
    # and hybrid_block.py, checkpointed_forward, once more each layer of the stack in there
    "full": (Rule("checkpoint", "@proj_and_transformer_layer"), Rule("checkpoint", "", parent=".mtp_model_layer")),
    # gated_delta_net/gdn.py, norm_out_checkpoint
    "gdn_norm_out": (Rule("discard", "self_attention.@norm_out", until="self_attention.out_proj"),),
}


class Region(NamedTuple):
    """A stretch of operations `first..last` (inclusive) that a label replays."""

    label: str
    verb: Verb
    first: int
    last: int
    until: int
    """For discard: index of the consumer's last operation."""


def whole(tape: Tape) -> Region:
    """Full recompute's region: all of a unit."""
    last = len(tape.ops) - 1
    return Region("full", "checkpoint", 0, last, last)


def regions(tape: Tape) -> list[Region]:
    """The regions that labels make of a unit's tape, outer before inner; a recompute choice takes those it names."""
    spans = _spans(tape)
    layers = {path for path in spans if _is_layer(path)}
    found = []
    for label in sorted(RULES):
        for rule in RULES[label]:
            for layer in layers:
                path = f"{layer}.{rule.module}".rstrip(".")
                if not layer.rpartition(".layers.")[0].endswith(rule.parent):
                    continue
                if path not in spans or (rule.kind is not None and tape.ops[spans[path][0]].kind != rule.kind):
                    continue
                first, last = spans[path]
                until = spans[f"{layer}.{rule.until}"][1] if rule.until else last
                found.append(Region(label, rule.verb, first, last, until))
    return sorted(found, key=lambda region: (region.first, -region.last))


def _is_layer(path: str) -> bool:
    """A layer of the decoder, of multi-token prediction, or a layer in one of those."""
    return path.rpartition(".")[0].endswith("layers") or path.endswith(".mtp_model_layer")


def _spans(tape: Tape) -> dict[str, tuple[int, int]]:
    """First and last operation of every module path."""
    spans: dict[str, tuple[int, int]] = {}
    module, first = "", 0
    for index, op in enumerate([*tape.ops, None]):
        if op is not None and op.module == module:
            continue
        path = module
        while path:
            spans[path] = (spans[path][0] if path in spans else first, index - 1)
            path = path.rpartition(".")[0]
        module, first = "" if op is None else op.module, index
    return spans
