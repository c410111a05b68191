"""Row spaces: how many rows of which tensor a rank holds, resolved once per workload."""

from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

from labkit.workload import Lora, Workload
from labkit.workload.behaviour import softmax_gradient_in_place
from labkit.workload.kernels import LengthChoices, length_choices


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers every layer needs. Rows are tokens of one micro-batch, in a sweep arrays over sequence lengths."""

    tokens: int
    """Rows of this context-parallel rank's part of the sequences, as tensor-parallel regions see them."""
    shard: int
    """Rows between tensor-parallel regions: tokens / tp under sequence parallelism."""
    tp: int
    sp: int
    ep: int
    etp: int
    cp: int
    hidden: int
    batch: int
    sequence: int
    """Of this context-parallel rank."""
    choices: LengthChoices
    """What kernels decide by the lengths; a sweep prices together only lengths that agree on it."""
    attention_dropout: bool
    """Some of attention's probabilities are dropped."""
    masked: bool
    """The batch brings a mask for each of its sequences."""
    softmax_in_place: bool
    """Transformer Engine's softmax kernel writes its gradient over the incoming one."""
    packed: tuple[int, ...]
    """Tokens of each packed sequence, over all context-parallel ranks; empty where each sequence is a row of its own.

    Packed ones are one row of the batch. Those of the `lora` runtime are not meant."""
    local: bool
    """Layers are Megatron Core's own."""
    lora: Lora | None
    """Weights are frozen and linears have adapters; None: weights train."""
    head: bool = True
    """The rank has the output head, or nothing depends on it."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, over all context-parallel ranks."""
        return reduce(_larger, self.packed) if self.packed else self.sequence * self.cp

    @property
    def token_pairs(self) -> int:
        """Tokens of a sequence times those that they may see, summed over sequences: of the rank's own tokens."""
        if self.packed:
            return sum(length**2 for length in self.packed) // self.cp
        return self.batch * self.sequence**2 * self.cp

    def from_tensor_ranks(self, nbytes: int) -> int:
        """Bytes of a tensor of `nbytes`, gathered or reduced over the tensor-parallel group, that others send."""
        return nbytes * (self.tp - 1) // self.tp

    def from_expert_ranks(self, nbytes: int) -> int:
        """Bytes of an all-to-all over the expert-parallel group that others send."""
        return nbytes * (self.ep - 1) // self.ep

    @property
    def trains(self) -> bool:
        """Weights have gradients."""
        return self.lora is None

    @property
    def adapter_rank(self) -> int:
        """Inner width of the adapters."""
        return 0 if self.lora is None else self.lora.rank

    @property
    def compiled(self) -> bool:
        """Layers run under `torch.compile`."""
        return self.lora is not None and self.lora.compile_layers

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The sizes of a workload."""
        layout, batch = workload.parallelism, workload.batch
        tokens = batch.micro_batch_size * batch.seq_length
        sequence = batch.seq_length // layout.cp
        if workload.training.runtime == "megatron":
            tokens //= layout.cp
        else:
            busiest = batch.sequences.busiest_rank_rows
            sequence = tokens = -(-tokens // layout.cp) if busiest is None else busiest
        return cls(
            tokens=tokens,
            shard=tokens // layout.sp,
            tp=layout.tp,
            sp=layout.sp,
            ep=layout.ep,
            etp=layout.etp,
            cp=layout.cp,
            hidden=workload.model.hidden_size,
            batch=batch.micro_batch_size,
            sequence=sequence,
            choices=length_choices(workload),
            attention_dropout=workload.model.attention_dropout > 0,
            masked=batch.create_attention_mask_in_dataloader,
            softmax_in_place=softmax_gradient_in_place(workload.training.software),
            packed=workload.packed_lengths,
            local=workload.training.kernels.local,
            lora=workload.training.lora,
        )


def _larger(one: Any, other: Any) -> Any:
    """The larger one, element by element where they are arrays."""
    return one + (other - one) * (other > one)
