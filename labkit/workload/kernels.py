"""What kernels decide by the lengths they are given, where that changes what they allocate.

A sweep prices together only lengths that agree on `length_choices`; the estimator may branch on them.
"""

from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from labkit.workload.gpu import GPUS

if TYPE_CHECKING:
    from labkit.workload.workload import Workload

_LARGEST_SPLITS = 128
_FEWEST_PREPARED_ROWS = 512
"""`FlashAttention.forward`."""
_THREAD_BLOCKS_OF_MULTIPROCESSOR = 2


class LengthChoices(NamedTuple):
    """How a model runs at one pair of micro-batch size and sequence length."""

    one_sequence: bool
    """One sequence, or sequences of one token: to swap its batch and sequence dimensions is no copy."""
    softmax_kernel: bool
    """Unfused attention runs its library's softmax kernel, not PyTorch's."""
    wide_scores: bool
    """Megatron Core's own attention has more scores of a token than are gathered of it (`GlobalMemoryBuffer`)."""
    prepare_kernel: bool
    """Transformer Engine's own kernel unpacks interleaved queries, keys and values for flash-attention."""
    flash_splits: int
    """Parts of the keys that flash-attention's forward works on side by side."""
    flash_splits_of_half: int
    """The same for the late half of a context-parallel rank's queries."""
    flash_sums: int
    """Sums of the queries' gradient that flash-attention's backward keeps apart."""
    learned_positions: int
    """Rows of the table of learned positions: Megatron's `max_sequence_length`."""


def length_choices(workload: "Workload") -> LengthChoices:
    """What one rank's attention decides by its lengths; in a sweep's arrays of lengths, which agree, by the first."""
    model = workload.model
    batch, sequence = _first(workload.batch.micro_batch_size), _first(workload.batch.seq_length)
    sequences = len(workload.packed_lengths)
    layout = workload.parallelism
    heads, cp = model.num_attention_heads // layout.tp, layout.cp
    # What one kernel sees: all rows of some heads, or some rows of all heads.
    swapped = cp > 1 and layout.cp_comm_type == "a2a"
    rows, heads_seen = (sequence, max(1, heads // cp)) if swapped else (max(1, sequence // cp), heads)
    width, multiprocessors = model.widest_head, GPUS[workload.training.gpu].multiprocessors
    # `set_params_splitkv`: keys are not split where probabilities are dropped, or sequences packed (`mha_varlen_fwd`).
    whole, half = (
        1
        if model.attention_dropout or sequences
        else flash_splits(batch, heads_seen, (queries, rows), width, multiprocessors)
        for queries in (rows, max(1, rows // 2))
    )
    return LengthChoices(
        batch == 1 or sequence == 1,
        _has_softmax_kernel(workload, batch, heads, sequence),
        workload.training.kernels.local and heads * sequence > gathered_width(workload),
        batch * (sequence // cp) >= _FEWEST_PREPARED_ROWS,
        whole,
        half,
        flash_sums(sequences or batch, heads_seen, multiprocessors)
        if workload.training.kernels.attends_deterministically
        else 1,
        learned_positions(workload),
    )


def learned_positions(workload: "Workload") -> int:
    """Rows of the table of learned positions."""
    return _first(workload.batch.seq_length) if workload.model.position_embedding_type == "learned_absolute" else 0


def _first(length: Any) -> int:
    return length if isinstance(length, int) else int(length[0])


def _has_softmax_kernel(workload: "Workload", batch: int, heads: int, sequence: int) -> bool:
    kernels = workload.training.kernels
    if workload.training.precision == "fp32":
        return False
    if kernels.local:
        return kernels.masked_softmax_fusion and local_softmax_kernel_takes(batch, heads, sequence)
    return softmax_kernel_takes(batch, heads, sequence)


def gathered_width(workload: "Workload") -> int:
    """Elements of a token in the largest tensor that is gathered into Megatron Core's global memory buffer.

    Linears gather their input under sequence parallelism, the allgather dispatcher its tokens.
    """
    layout, moe = workload.parallelism, workload.model.mixture_of_experts
    width = workload.model.hidden_size if layout.sp > 1 else 0
    senders = layout.ep * layout.etp
    if moe is not None and workload.training.kernels.moe_token_dispatcher_type == "allgather" and senders > 1:
        width = max(width, (moe.moe_latent_size or workload.model.hidden_size) * senders // layout.sp)
    return width


def local_softmax_kernel_takes(batch: int, heads: int, sequence: int) -> bool:
    """Megatron Core's `FusedScaleMaskSoftmax.is_kernel_available` for causal scores.

    A block of APEX's kernel (`get_batch_per_block`) works on whole rows of several heads.
    """
    elements = 1 << max(0, sequence - 1).bit_length()
    in_block = 128 // min(elements, 32) * (2 if elements <= 128 else 1)
    return 16 < sequence <= 4096 and sequence % 4 == 0 and batch * heads % 4 == 0 and batch * heads % in_block == 0


def softmax_kernel_takes(batch: int, heads: int, sequence: int) -> bool:
    """Transformer Engine's `FusedScaleMaskSoftmax.is_kernel_available` for square bf16 scores."""
    return 16 < sequence < 16384 and sequence % 8 == 0 and batch * heads % 4 == 0


def flash_splits(batch: int, heads: int, rows: tuple[int, int], width: int, multiprocessors: int) -> int:
    """flash-attention 2.8, `flash_api.cpp`: `set_params_splitkv` and `num_splits_heuristic`; rows of queries, of keys.

    Where the query blocks alone would not fill the GPU, the keys are split; each part's output is an fp32 tensor.
    """
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    queries, keys = rows
    key_blocks, query_blocks = ceil(keys / block), batch * heads * ceil(queries / 64)
    places = multiprocessors * _THREAD_BLOCKS_OF_MULTIPROCESSOR
    if query_blocks >= 0.8 * places:
        return 1
    splits = range(1, min(_LARGEST_SPLITS, places, key_blocks) + 1)
    eligible = [n for n in splits if n == 1 or ceil(key_blocks / n) != ceil(key_blocks / (n - 1))]
    waves = {n: query_blocks * n / places for n in eligible}
    efficiency = {n: waves[n] / ceil(waves[n]) for n in eligible}
    return next(n for n in eligible if efficiency[n] >= 0.85 * max(efficiency.values()))


def flash_sums(batch: int, heads: int, multiprocessors: int) -> int:
    """flash-attention 2.8, `flash_api.cpp`: `mha_bwd`, deterministic: a sum of dQ for each block at work on a head."""
    return ceil(multiprocessors / (batch * heads))
