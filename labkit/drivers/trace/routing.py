"""Where tokens go: expert routing is data, and a trace has none, so a plan answers for it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows one rank sends and receives in a layer's all-to-all."""

    input_splits: Counts
    """Rows sent to each expert-parallel rank."""
    output_splits: Counts
    """Rows received from each of them."""
    tokens_per_expert: Counts
    """Rows each local expert works on."""


def balanced(tokens: int, topk: int, num_experts: int, expert_parallel: int, rank: int) -> Splits:
    """Every rank sends the same: `tokens * topk` rows, spread over the experts as evenly as integers allow.

    Args:
        tokens: rows of this rank before dispatch.
        topk: experts a token goes to.
        num_experts: experts in all.
        expert_parallel: ranks the experts lie on.
        rank: this rank among them.
    """
    each, left = divmod(tokens * topk, num_experts)
    sent = np.full(num_experts, each, dtype=np.int64)
    sent[:left] += 1
    by_rank = sent.reshape(expert_parallel, num_experts // expert_parallel)
    mine = by_rank[rank]
    return Splits(by_rank.sum(axis=1), np.full(expert_parallel, mine.sum()), mine * expert_parallel)
