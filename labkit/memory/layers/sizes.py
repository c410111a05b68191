"""Row spaces: how many rows of which tensor a rank holds, resolved once per workload."""

from dataclasses import dataclass
from typing import Self

from labkit.workload import Workload


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers every layer needs. Rows are tokens of one micro-batch."""

    tokens: int
    """Rows of the full sequence, as tensor-parallel regions see them."""
    shard: int
    """Rows between tensor-parallel regions: tokens / tp under sequence parallelism."""
    tp: int
    sp: int
    ep: int
    world_size: int
    hidden: int
    batch: int
    sequence: int

    def from_tensor_ranks(self, nbytes: int) -> int:
        """Bytes of a tensor of `nbytes`, gathered or reduced over the tensor-parallel group, that others send."""
        return nbytes * (self.tp - 1) // self.tp

    def from_expert_ranks(self, nbytes: int) -> int:
        """Bytes of an all-to-all over the expert-parallel group that others send."""
        return nbytes * (self.ep - 1) // self.ep

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The sizes of a workload."""
        layout, batch = workload.parallelism, workload.batch
        tokens = batch.micro_batch_size * batch.seq_length
        return cls(
            tokens=tokens,
            shard=tokens // layout.sp,
            tp=layout.tp,
            sp=layout.sp,
            ep=layout.ep,
            world_size=layout.world_size,
            hidden=workload.model.hidden_size,
            batch=batch.micro_batch_size,
            sequence=batch.seq_length,
        )
