"""CUDA graphs: an operation is captured once, with memory of its graph's pool, and replayed without allocating any.

While a graph is captured its operators run here as ever, and what they make comes from the pool of the graph. A block
that is freed during a capture goes back to that pool and to nobody else (`CUDACachingAllocator.cpp`, `PrivatePool`):
no longer allocated, but reserved as long as the graph lives. So does the allocator's simulation know a pool: as streams
with numbers below zero, which no other allocation is on and whose segments `empty_cache` leaves. Every stream that
takes part in a capture allocates from its pool (`CUDAGraph::capture_begin` gives the allocator a filter of streams),
also cuBLAS' workspace for a stream that had none. So a captured whole step (`full_iteration`) has its activations
there, once more beside what the common pool keeps of the steps before it, and a replay allocates nothing.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from labkit.drivers.trace.cuda_surface import Stream, on_stream
from labkit.drivers.trace.patches import NOTHING, Replacement
from labkit.drivers.trace.tracker import StorageTracker

type _Pool = tuple[int, int]

_pools = itertools.count(1)


class CUDAGraph:
    """`torch.cuda.CUDAGraph`: a replay computes again what was captured, where it was captured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pool = new_pool()

    def pool(self) -> _Pool:
        """Where its memory comes from."""
        return self._pool

    def capture_begin(self, pool: _Pool | None = None, **_options: Any) -> None:
        """From here on memory comes from `pool`."""
        self._pool = pool or self._pool
        Capture.pools.append(self._pool)

    def capture_end(self) -> None:
        """The graph is complete."""
        Capture.pools.pop()

    def replay(self) -> None:
        """Allocates nothing."""

    def reset(self) -> None:
        """Its pool goes back with the last graph that uses it, which is no part of a step."""

    def register_generator_state(self, state: Any) -> None:
        """Random numbers are none of memory's business."""


class Capture:
    """Where memory comes from while something is captured."""

    pools: ClassVar[list[_Pool]] = []
    """Those that now allocate, the innermost last."""
    _shared: ClassVar[Stream | None] = None
    _numbers: ClassVar[dict[tuple[_Pool, int], int]] = {}

    @classmethod
    def stream(cls) -> int:
        """The current stream as the allocator's simulation knows it."""
        current = Stream.current.stream_id
        if not cls.pools:
            return current
        return cls._numbers.setdefault((cls.pools[-1], current), -1 - len(cls._numbers))

    @classmethod
    @contextmanager
    def into(cls, graph: Any, pool: Any = None, stream: Stream | None = None, **_options: Any) -> Iterator[None]:
        """`torch.cuda.graph`, which captures on a stream that all graphs share where none is named."""
        torch.cuda.empty_cache()
        if stream is None and cls._shared is None:
            cls._shared = Stream()
        with on_stream(stream or cls._shared):
            graph.capture_begin(*(() if pool is None else (pool,)))
            try:
                yield
            finally:
                graph.capture_end()


def new_pool() -> _Pool:
    """`torch.cuda.graph_pool_handle`."""
    return 0, next(_pools)


def replacements(tracker: StorageTracker) -> Iterator[Replacement]:
    """What Megatron Core and Transformer Engine capture with; imports both."""
    from megatron.core.transformer import cuda_graphs
    from transformer_engine.pytorch import graph

    yield Replacement(torch.cuda, "empty_cache", tracker.empty_cache, "nothing: what is cached goes back to the GPU")
    private = "the memory of what runs while it is captured, from a pool of its own"
    yield Replacement(torch.cuda, "CUDAGraph", CUDAGraph, private)
    yield Replacement(torch.cuda, "graph", Capture.into, private)
    yield Replacement(torch.cuda, "graph_pool_handle", new_pool, NOTHING)
    yield Replacement(torch.cuda, "is_current_stream_capturing", lambda: bool(Capture.pools), NOTHING)
    yield Replacement(graph, "_graph_pool_handle", new_pool, NOTHING)
    for owner in (graph, cuda_graphs):
        yield Replacement(
            owner, "make_weak_ref", _weak(tracker), "nothing: it shows memory that its pool may use again"
        )
    # Megatron Core's own graphs (`local`).
    into_pool = "what is made until it ends, from that pool"
    yield Replacement(torch._C, "_cuda_beginAllocateCurrentThreadToPool", _begin_pool, into_pool)
    yield Replacement(torch._C, "_cuda_endAllocateToPool", lambda device, pool: Capture.pools.remove(pool), NOTHING)
    yield Replacement(torch.cuda, "memory_stats", lambda device=None: Counter(), NOTHING)
    yield Replacement(torch.cuda, "set_stream", _set_stream, NOTHING)
    yield _own_captures(tracker, cuda_graphs._CudagraphGlobalRecord)


def _begin_pool(device: int, pool: _Pool) -> None:
    Capture.pools.append(pool)


def _set_stream(stream: Stream) -> None:
    Stream.current = stream


def _own_captures(tracker: StorageTracker, record: Any) -> Replacement:
    """Megatron Core captures its own graphs at the end of the first step's schedule, which no timer tells."""
    original = record._create_cudagraphs

    def create_cudagraphs(_record: Any) -> Any:
        if record.cudagraph_record and not record.cudagraph_created:
            tracker.phase(tracker.moments[-1].iteration, "capture")
        return original()

    return Replacement(record, "_create_cudagraphs", classmethod(create_cudagraphs), NOTHING)


def _weak(tracker: StorageTracker) -> Callable[[Any], Any]:
    def weak(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tracker.shown(value)
        if isinstance(value, tuple):
            return tuple(map(weak, value))
        return value

    return weak
