"""What a step does on one rank: arithmetic, memory traffic, messages and launches, by phase and module.

A `WorkRow` is what the trace counts (`labkit.drivers.trace.work`); a roofline turns it into the least time it can take.
"""

from collections.abc import Iterable

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from labkit.workload.base import Many, Part


class Work(Part):
    """An amount of work."""

    checkpoints: NonNegativeInt = 0
    """Regions that were run again. Each costs the host more than its launches: generator states, a graph of its own."""
    launches: NonNegativeInt
    """Calls that start work on the GPU. One may be several kernels."""
    flops: NonNegativeInt
    """Of products, convolutions, attention and scans (`torch.utils.flop_counter`); pointwise work counts none."""
    hbm_bytes: NonNegativeInt
    """Read and written, each input and output of a launch once."""
    communicated_bytes: NonNegativeInt
    """What this rank puts on the wire in a ring: (n - 1) / n of the whole, twice that for an all-reduce."""
    seconds: NonNegativeFloat
    """Lower bound: each launch at the slower of compute and memory, each message at NVLink's speed, one after another,
    all at data-sheet speeds."""


class Exchange(Part):
    """Messages of one kind in groups of one size."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `send`, `receive`, `broadcast`, ..."""
    ranks: PositiveInt
    calls: NonNegativeInt
    bytes: NonNegativeInt
    """Their part of `communicated_bytes`."""


class WorkRow(Work):
    """What one module does in one phase of the steady step, all of its micro-batches."""

    module: str
    """Its path, with `*` for numbers: layers of a kind share a row. `-` where no module runs. Replayed code that is no
    module counts to the one whose backward asked for it."""
    phase: str
    replayed: bool = False
    """Backward doing again what forward did: recompute's price."""
    exchanges: Many[Exchange] = ()


class PhaseWork(Work):
    """What a phase of the steady step does; what backward replays is apart from the rest of it."""

    phase: str
    replayed: bool = False


def total(rows: Iterable[Work]) -> Work:
    """What `rows` come to."""
    listed = list(rows)
    return Work.model_validate({name: sum(getattr(row, name) for row in listed) for name in Work.model_fields})


def replay(rows: Iterable[WorkRow]) -> Work:
    """What backward does again."""
    return total(row for row in rows if row.replayed)


def by_phase(rows: Iterable[WorkRow]) -> tuple[PhaseWork, ...]:
    """The sums of each phase, in the order of a step."""
    listed = list(rows)
    return tuple(
        PhaseWork(phase=phase, replayed=replayed, **total(part).model_dump())
        for phase, replayed in _ORDER
        if (part := [row for row in listed if (row.phase, row.replayed) == (phase, replayed)])
    )


_ORDER = (("forward", False), ("backward", False), ("backward", True), ("grad_sync", False), ("optimizer", False))
