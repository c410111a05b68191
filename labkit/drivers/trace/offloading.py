"""Fine-grained activation offloading: what Megatron Core and Transformer Engine decide of it outside a step.

Everything else is their own code: a tensor's memory on the device ends when autograd lets go of it, and a reload makes
a new tensor. `record_stream` delays when the block is used again, which changes no allocated bytes: the allocator takes
a block off its count when it is freed, whatever still reads it (`CUDACachingAllocator.cpp`, `free`). Copies in host
memory are never written.
"""

from collections.abc import Iterator
from typing import Any

from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.workload import Workload

CHUNK_MISMATCH = (
    "Megatron Core 0.19 takes a pipeline chunk of which nothing is offloaded for finished after its first group, and a "
    "real run of it ends with 'Chunk mismatch'; the trace goes on as 0.18 does"
)


def replacements(workload: Workload, mended: set[str]) -> Iterator[Replacement]:
    """What the launch decides; `mended` gets a sentence where the trace goes on and Megatron would not."""
    yield from _first_version(workload)
    yield _counting_every_group(mended)


def _first_version(workload: Workload) -> Iterator[Replacement]:
    """Transformer Engine reads when it is imported which of its two ways of offloading is on."""
    from transformer_engine.pytorch import cpu_offload
    from transformer_engine.pytorch.attention.dot_product_attention import backends

    variables = {} if workload.launch is None else workload.launch.variables
    for owner in (cpu_offload, backends):
        yield Replacement(owner, "NVTE_CPU_OFFLOAD_V1", variables.get("NVTE_CPU_OFFLOAD_V1") == "1", NOTHING)


def _counting_every_group(mended: set[str]) -> Replacement:
    """A chunk is finished when no group of that name is left.

    Megatron also takes one for finished that has nothing to offload or reload: from 0.19 on a group that stays on the
    device is struck off when it ends (`bulk_offload`), where 0.18 left it pending, so that the last chunk before its
    own backward looks finished in its midst and the groups that follow are booked on the next one.
    """
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        ChunkOffloadHandler,
        PipelineOffloadManager,
    )

    original = ChunkOffloadHandler.finish_all_groups

    def finish_all_groups(chunk: Any, name: str) -> bool:
        left = chunk.find_group_with_name(chunk.offload_groups, name, chunk._offloaded_group_index)
        manager = PipelineOffloadManager.get_instance()
        others = manager._cached_chunks_index_forward < len(manager._cached_chunks_forward)
        if left is not None and others and original(chunk, name):
            mended.add(CHUNK_MISMATCH)
        return left is None

    return Replacement(ChunkOffloadHandler, "finish_all_groups", finish_all_groups, NOTHING)
