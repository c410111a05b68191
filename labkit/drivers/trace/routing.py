"""Where tokens go: expert routing is data, and a trace has none, so the workload's plan answers for it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from labkit.workload import Workload
from labkit.workload.routing import ExpertRows, busiest_share, expert_rows

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Splits:
    """Rows one rank sends and receives in a layer's dispatch; the traced rank is the busiest."""

    input_splits: Counts
    """Rows sent to each expert-parallel rank."""
    output_splits: Counts
    """Rows received from each of them."""
    output_splits_tp: Counts
    """Rows gathered from each expert-tensor-parallel rank."""
    from_each_sender: Counts
    """Rows of each local expert from one sender."""
    senders: int

    @property
    def num_out_tokens(self) -> int:
        """Rows sent in all."""
        return int(self.input_splits.sum())

    @property
    def tokens_per_expert(self) -> Counts:
        """Rows each local expert works on."""
        return self.from_each_sender * self.senders


def splits(workload: Workload, layer: int | None, tokens: int, rank: int) -> Splits:
    """The plan of the expert-parallel rank `rank` in a decoder layer, with `tokens` rows before dispatch."""
    layout, moe = workload.parallelism, workload.model.mixture_of_experts
    if moe is None:
        raise ValueError("only a model with mixture_of_experts routes")
    rows: ExpertRows = expert_rows(workload, busiest_share(workload, layer), tokens)
    sent = np.insert(_evenly(rows.sent - rows.to_busiest, layout.ep - 1), rank, rows.to_busiest)
    received = np.full(layout.ep, rows.to_busiest, dtype=np.int64)
    gathered = np.full(layout.etp, received.sum(), dtype=np.int64)
    mine = _evenly(rows.to_busiest, moe.num_moe_experts // layout.ep)
    return Splits(sent, received, gathered, mine, layout.ep * layout.etp)


def _evenly(rows: int, parts: int) -> Counts:
    """`rows` over `parts` as evenly as integers allow, the first ones larger."""
    counts = np.full(parts, rows // max(parts, 1), dtype=np.int64)
    counts[: rows % max(parts, 1)] += 1
    return counts
