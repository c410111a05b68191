"""What one training step reads."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from labkit.workload.base import Many, Part


class Packed(Part):
    """Whole sequences side by side in one row of the batch, a prefix they share stored once.

    >>> pack = Packed(lengths=[8192, 8192], shared_prefix=2457)
    >>> pack.segments, pack.rows, pack.logical_rows
    ((2457, 5735, 5735), 13927, 16384)
    """

    lengths: Many[PositiveInt] = Field(min_length=1)
    """Tokens of each sequence, the shared prefix included."""
    shared_prefix: NonNegativeInt = 0
    """Leading tokens that all sequences have in common."""
    busiest_rank_rows: PositiveInt | None = None
    """Rows of the busiest context-parallel rank; None: the even share."""

    @property
    def segments(self) -> tuple[int, ...]:
        """Tokens of each node of the prefix tree: the prefix, if there is one, then what follows it."""
        suffixes = tuple(length - self.shared_prefix for length in self.lengths)
        return (self.shared_prefix, *suffixes) if self.shared_prefix else suffixes

    @property
    def num_segments(self) -> int:
        """Nodes of the prefix tree."""
        return len(self.segments)

    def padded_rows(self, multiple: int) -> int:
        """Tokens of the tree, those of each node padded to a multiple."""
        return sum(-(-segment // multiple) * multiple for segment in self.segments)

    @property
    def rows(self) -> int:
        """Tokens that are computed."""
        return sum(self.segments)

    @property
    def logical_rows(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


class Batch(Part):
    """Sizes of the batch."""

    seq_length: Annotated[int, Field(gt=0, le=2**32)]
    """Rows of a packed batch where there is one: its tokens, padded to a multiple of the tensor-parallel ranks."""
    micro_batch_size: Annotated[int, Field(gt=0, le=2**48)] = 1
    global_batch_size: Annotated[int, Field(gt=0, le=2**48)]
    create_attention_mask_in_dataloader: bool = False
    """Every micro-batch brings a mask of `seq_length` squared bytes a sequence along, which causal kernels do not read;
    the forward step keeps it, and checkpoints around attention or layers do until their backward.

    Megatron-LM's default, which `--no-create-attention-mask-in-dataloader` turns off."""
    packed: Packed | None = None
    """Sequences of the micro-batch side by side in one row; None: each is `seq_length` tokens."""

    @property
    def sequences(self) -> Packed:
        """The micro-batch as sequences."""
        return self.packed or Packed(lengths=(self.seq_length,) * self.micro_batch_size)
