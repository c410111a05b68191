"""What was live at a moment, by the source line that asked for it."""

from typing import TYPE_CHECKING, NamedTuple, get_args

import numpy as np

from labkit.diagnose.snapshot_frames import NATIVE, UNRECORDED, Moment, Site, described, moment_of, site_of
from labkit.diagnose.snapshot_timeline import Lives, Timeline
from labkit.snapshot import Snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

BEFORE = Site("allocated before the recording began", "")
_DEEPEST = 100
"""Frames of a stack that are shown."""
MOMENTS: tuple[Moment, ...] = get_args(Moment)


def step_ends(moments: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The last entry of every stretch in the optimizer that something follows."""
    inside = moments == MOMENTS.index("optimizer")
    return np.flatnonzero(inside[:-1] & ~inside[1:])


class Origin(NamedTuple):
    """Where allocations come from."""

    site: Site
    moment: Moment


class Group(NamedTuple):
    """Allocations of one origin."""

    origin: Origin
    nbytes: int
    tensors: int
    stack: int
    """Of the largest of them; place in `Snapshot.stacks`, or `NO_STACK`."""


class Origins:
    """Where the allocations of a snapshot come from, by stack trace."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._stacks = snapshot.stacks
        self._any = any(snapshot.stacks)
        """Whether stack traces were recorded: where they were not, each is empty."""
        self._known: dict[int, Origin] = {}

    def of(self, stack: int, *, early: bool = False) -> Origin:
        """That of a stack trace, by its place; `early`: of before the recording began."""
        if stack < 0 or not self._any:
            return Origin(BEFORE if early else UNRECORDED, "unknown")
        found = self._known.get(stack)
        if found is None:
            frames = self._stacks[stack]
            found = self._known[stack] = Origin(site_of(frames), moment_of(frames))
        return Origin(BEFORE, "unknown") if early and found.site == NATIVE else found

    def groups(self, live: Lives) -> list[Group]:
        """Allocations by origin, those with most bytes first."""
        keys = np.stack([live.stack, (live.born < 0).astype(np.int64)], axis=1)
        pairs, group = np.unique(keys, axis=0, return_inverse=True)
        sums, counts = np.zeros(len(pairs), np.int64), np.bincount(group.ravel(), minlength=len(pairs))
        np.add.at(sums, group.ravel(), live.nbytes)
        found: dict[Origin, Group] = {}
        order = np.argsort(-sums, kind="stable")
        for (stack, early), nbytes, count in zip(
            pairs[order].tolist(), sums[order].tolist(), counts[order].tolist(), strict=True
        ):
            origin = self.of(stack, early=bool(early))
            known = found.get(origin)
            found[origin] = Group(
                origin,
                nbytes + (known.nbytes if known else 0),
                count + (known.tensors if known else 0),
                known.stack if known else stack,
            )
        return sorted(found.values(), key=lambda each: -each.nbytes)

    def moments(self, timeline: Timeline) -> "NDArray[np.int64]":
        """Behind each entry in which phase the step is, as a place in `MOMENTS`: that of the latest allocation."""
        trace = timeline.trace
        stacks, place = np.unique(trace.stack, return_inverse=True)
        codes = np.array([MOMENTS.index(self.of(stack).moment) for stack in stacks.tolist()], np.int64)
        known = (trace.action == trace.code("alloc")) | (trace.action == trace.code("oom"))
        latest = np.maximum.accumulate(np.where(known, np.arange(len(trace)), -1))
        unknown = MOMENTS.index("unknown")
        if not len(codes):
            return np.full(len(trace), unknown)
        return np.where(latest >= 0, codes[place][np.maximum(latest, 0)], unknown)

    def lines(self, stack: int) -> tuple[str, ...]:
        """A stack trace in lines, innermost first."""
        return () if stack < 0 else tuple(described(frame) for frame in self._stacks[stack][:_DEEPEST])
