"""Row spaces: how many rows of which tensor a rank holds, resolved once per workload."""

from dataclasses import dataclass
from typing import Self

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
    lora: Lora | None
    """Weights are frozen and linears have adapters; None: weights train."""
    head: bool = True
    """The rank has the output head, or nothing depends on it."""

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
            lora=workload.training.lora,
        )
