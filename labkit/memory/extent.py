"""What of a micro-batch decides its memory, and what `faces` and `tables` say of many of them at once."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from labkit.memory.estimate import estimate
from labkit.memory.margin import FIXED_BYTES, relative_margin
from labkit.memory.outline import tensor
from labkit.workload import Workload
from labkit.workload.caching import AllocatorSettings
from labkit.workload.gpu import MIB

type Levels = NDArray[np.float64]


class Extent(NamedTuple):
    """What of a packed micro-batch decides its memory: numbers, or arrays of them."""

    rows: Any
    """Tokens that are computed, and what pads them (`Batch.seq_length`)."""
    busiest: Any
    """Of those, the busiest context-parallel rank's."""
    padded_rows: Any
    """Tokens of the tree's nodes, each padded to whole chunks of a delta net."""
    segments: Any
    """Nodes of the tree."""
    logical_rows: Any
    """Tokens of all sequences."""
    longest: Any
    """Tokens of the longest sequence."""
    sequences: Any


class Peaks(NamedTuple):
    """Of extents, an array each."""

    bytes: Levels
    """The largest over phases."""
    covered_bytes: Levels
    """With the margin that an estimate sets aside."""
    increment_bytes: Levels
    """What the peak has above what is alive before the first step."""
    phase_of: Callable[[int], tuple[int, str]]
    """Iteration and phase of an extent's peak, by its position."""


def with_margin(workload: Workload, peak: Levels, tuned: Levels, increment: Levels) -> Levels:
    """A peak with its margin (`labkit.memory.margin.margin_over`); `tuned` has the tuning allowance in it."""
    most: Levels = np.maximum(peak, tuned) + increment * relative_margin(workload) + FIXED_BYTES
    return most


@lru_cache(maxsize=64)
def covering(settings: AllocatorSettings) -> Callable[[Any], Any]:
    """The largest block that the caching allocator may hold a tensor of so many (rounded) bytes in.

    `should_split`, `get_free_block` and `round_size` of `c10/cuda/CUDACachingAllocator.cpp`: a free block may be larger
    by up to 1 MiB, which is not split off, or, from `max_split_size_mb` on, by `max_non_split_rounding_mb`.
    """
    if settings.roundup_power2_divisions is not None:
        return lambda nbytes: 2 * nbytes + MIB * (nbytes > MIB // 2)
    if settings.expandable_segments:
        return tensor
    if settings.max_split_size_mb is None:
        return lambda nbytes: nbytes + MIB * (nbytes > MIB)
    split, more = settings.max_split_size_mb * MIB, settings.max_non_split_rounding_mb * MIB
    return lambda nbytes: nbytes + MIB * (nbytes > MIB) + more * (nbytes >= split - MIB)


@lru_cache(maxsize=16)
def known_blocks(workload: Workload) -> int:
    """How far `covering` exceeds the blocks that the allocator has for what is built before any batch, and stays."""
    size, ledger = covering(workload.training.allocator), estimate(workload).ledger
    first = ledger.start(1, "forward")
    batch = min((row.born for row in ledger.rows if row.module == "batch"), default=first)
    kept = [row for row in ledger.rows if row.born < min(batch, first) and row.dies is None]
    excess: int = sum(size(row.bytes // row.count) * row.count - row.block_bytes for row in kept)
    return excess
