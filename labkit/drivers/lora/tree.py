"""Packed sequences that share a prefix, as attention and gated delta nets run over them.

A batch is a tree of segments side by side in one row: the prefix, where there is one, then what follows it in each
sequence. A token attends to the earlier ones of its segment and to the prefix (FlexAttention). A delta net runs over
the prefix first and starts every other segment from the state in which the prefix ended.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from megatron.core.ssm.gated_delta_net import common
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention

from labkit.workload import Workload

CHUNK = 64
"""Tokens of a chunk of the delta rule (`fla.ops.gated_delta_rule`): a segment is padded to whole ones."""


class Level(NamedTuple):
    """Segments that run at once, in the buffer of padded segments."""

    rows: slice
    ends: Tensor
    """Cumulative lengths, on the device."""
    host_ends: Tensor
    segments: int


class Tree:
    """The segments of a batch, and where their tokens lie."""

    def __init__(self, workload: Workload, device: Any) -> None:
        packed = workload.batch.sequences
        self.rows, self.lengths = workload.batch.micro_batch_size * workload.batch.seq_length, packed.lengths
        self.tokens = torch.randint(workload.model.vocab_size, (self.rows,), device=device)
        """(rows,)."""
        # Rows that pad the batch for tensor parallelism belong to the last segment.
        segments = [*packed.segments]
        segments[-1] += self.rows - packed.rows
        begins = [0, *accumulate(segments)][:-1]
        prefix = packed.shared_prefix
        starts = [0 if prefix and not number else prefix for number in range(len(segments))]
        spans = [torch.arange(length) for length in segments]
        self.positions = torch.cat([span + start for span, start in zip(spans, starts, strict=True)]).to(device)
        """Of each token in its sequence (rows,)."""
        numbers = torch.arange(len(segments))
        self.segment = numbers.repeat_interleave(torch.tensor(segments)).to(device)
        """Number of each token's segment (rows,)."""
        self.has_prefix = bool(prefix)
        shared = torch.arange(prefix)
        suffixes = zip(packed.lengths, begins[-len(packed.lengths) :], strict=True)
        own = [torch.cat([shared, torch.arange(begin, begin + length - prefix)]) for length, begin in suffixes]
        self.outputs = torch.cat(own).to(device)
        """The row of each token of each sequence, the prefix's repeated."""
        self._pad(segments, begins, device)
        self.mask = _mask(self)

    def _pad(self, segments: Sequence[int], begins: Sequence[int], device: Any) -> None:
        padded = [-(-length // CHUNK) * CHUNK for length in segments]
        starts = [0, *accumulate(padded)]
        places = [torch.arange(length) for length in padded]
        # What pads a segment repeats its last token, without a weight in the delta rule.
        sources = [
            place.clamp(max=length - 1) + begin for place, length, begin in zip(places, segments, begins, strict=True)
        ]
        self.sources = torch.cat(sources).to(device)
        """The token in each row of the padded buffer."""
        counts = [place < length for place, length in zip(places, segments, strict=True)]
        self.counts = torch.cat(counts)[:, None].to(device)
        """Whether that is its place (padded rows, 1)."""
        slots = [torch.arange(length) + start for length, start in zip(segments, starts, strict=False)]
        self.slots = torch.cat(slots).to(device)
        """The row of each token in the padded buffer."""
        groups = [[0], [*range(1, len(segments))]] if self.has_prefix else [[*range(len(segments))]]
        self.levels = []
        for group in groups:
            first, last = group[0], group[-1]
            ends = torch.tensor([start - starts[first] for start in starts[first : last + 2]])
            self.levels.append(Level(slice(starts[first], starts[last + 1]), ends.to(device), ends, len(group)))
        self.prefix_rows = segments[0]


def _mask(tree: Tree) -> Any:
    """Which token sees which, as FlexAttention has it."""
    segment, has_prefix = tree.segment, tree.has_prefix

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:  # noqa: ARG001 (FlexAttention's call)
        own = segment[query] == segment[key]
        if has_prefix:
            own = own | (segment[key] == 0)
        return own & (query >= key)

    return flex_attention.create_block_mask(sees, None, None, tree.rows, tree.rows, device=segment.device)


class TreeAttention(torch.nn.Module):
    """In place of Megatron's core attention."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self._tree = tree
        self._attend: Any = torch.compile(flex_attention.flex_attention)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:  # noqa: ARG002
        """Of (rows, 1, heads, width) tensors: (rows, 1, heads x width). Megatron's masks and lengths are the tree's."""
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        output: Tensor = self._attend(query, key, value, block_mask=self._tree.mask, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


def delta_net_forward(net: Any, tree: Tree, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """`GatedDeltaNet.forward` over a tree: (rows, 1, hidden) to the same shape, and the output projection's bias."""
    projected, _ = net.in_proj(hidden)
    qkv, gate, beta, alpha = projected.squeeze(1).split(net.feat_dim_split, -1)
    gate = gate.contiguous()  # the projection can go
    decay = -net.A_log.exp() * functional.softplus(alpha.float() + net.dt_bias)
    beta = beta.sigmoid()
    rows = qkv.index_select(0, tree.sources)
    del projected, qkv, alpha
    gates = [_padded(each, tree) for each in (decay, beta)]
    core = _recurrence(net, tree, rows, gates).index_select(0, tree.slots)
    del rows, decay, beta, gates
    gated_norm = partial(net._gated_norm_and_a2a, thd_cp_a2a_inv=None, batch=1, seq_len=tree.rows)
    if not net.recompute_norm_out:
        output: tuple[Tensor, Tensor | None] = net.out_proj(gated_norm(core, gate))
        return output
    checkpoint = CheckpointWithoutOutput()
    output = net.out_proj(checkpoint.checkpoint(gated_norm, core, gate))
    checkpoint.discard_output_and_register_recompute(output[0])
    return output


def _padded(gates: Tensor, tree: Tree) -> Tensor:
    """Of each row (rows, heads) in the padded buffer: 0 where it pads, which leaves the state as it is."""
    return gates.index_select(0, tree.sources) * tree.counts


def _recurrence(net: Any, tree: Tree, rows: Tensor, gates: Sequence[Tensor]) -> Tensor:
    """Convolution and delta rule of (padded rows, channels): (padded rows, value heads, width).

    Every segment starts from states: zeros, or those in which the prefix has ended.
    """
    width, repeats = net.conv_kernel_dim, net.num_value_heads // net.num_key_heads
    before = rows.new_zeros(1, rows.shape[1], width)
    state = rows.new_zeros(1, gates[0].shape[1], net.key_head_dim, net.value_head_dim, dtype=torch.float32)
    outputs = []
    for level in tree.levels:
        lengths = {"cu_seqlens": level.ends, "cu_seqlens_cpu": level.host_ends}
        convolved, _ = common.causal_conv1d(
            x=rows[None, level.rows],
            weight=net.conv1d.weight.squeeze(1),
            bias=net.conv1d.bias,
            activation=net.activation,
            initial_state=before.expand(level.segments, -1, -1).contiguous(),
            **lengths,
        )
        sections = [net.qk_dim_local_tp, net.qk_dim_local_tp, net.v_dim_local_tp]
        query, key, value = convolved.split(sections, -1)
        query, key = (each.unflatten(-1, (-1, net.key_head_dim)).repeat_interleave(repeats, 2) for each in (query, key))
        decay, beta = (each[None, level.rows] for each in gates)
        output, state = common.chunk_gated_delta_rule(
            query,
            key,
            value.unflatten(-1, (-1, net.value_head_dim)),
            g=decay,
            beta=beta,
            initial_state=state.expand(level.segments, -1, -1, -1).contiguous(),
            output_final_state=level is not tree.levels[-1],
            use_qk_l2norm_in_kernel=True,
            **lengths,
        )
        del convolved, query, key, value, decay, beta
        outputs.append(output.squeeze(0))
        first = max(tree.prefix_rows - width, 0)
        before = functional.pad(rows[first : tree.prefix_rows].T[None], (width - tree.prefix_rows + first, 0))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
