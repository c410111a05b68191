"""What one training step reads."""

from pydantic import PositiveInt

from labkit.workload.base import Part


class Batch(Part):
    """Sizes of the batch."""

    seq_length: PositiveInt
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt
