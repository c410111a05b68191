"""What readers find in files, before anybody judges it: plain values with the line that says each."""

from dataclasses import dataclass, field
from typing import Literal

from labkit.console import printable
from labkit.workload.base import Part

Phase = Literal["", "setup", "forward", "backward", "grad_sync", "optimizer"]
"""As `labkit.ledger` has them; empty where the source does not say."""

LONGEST_QUOTE = 400
"""Characters of a line that are shown."""


class Evidence(Part):
    """A line that says something."""

    source: str
    """The file's name as it was given."""
    line: int | None = None
    """From 1; None where the file has no lines."""
    text: str

    @classmethod
    def quote(cls, source: str, line: int | None, text: str, at: int = 0) -> "Evidence":
        """A line as it can be shown: printable, in one piece, cut to the part from character `at`."""
        start = max(0, at - 40) if at > LONGEST_QUOTE - 100 else 0
        shown = " ".join(text[start : start + LONGEST_QUOTE].split())
        before, after = "... " if start else "", " ..." if len(text) > start + LONGEST_QUOTE else ""
        return cls(source=source, line=line, text=printable(f"{before}{shown}{after}"))

    def __str__(self) -> str:
        return f"{self.source}{'' if self.line is None else f':{self.line}'}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A GPU that could not give what PyTorch's allocator asked for. Bytes; None where the source does not say."""

    evidence: Evidence
    rank: int | None = None
    device: int | None = None
    phase: Phase = ""
    iteration: int | None = None
    requested: int | None = None
    capacity: int | None = None
    """Of the GPU."""
    free: int | None = None
    """Of the GPU, at that moment."""
    process: int | None = None
    """In use by this process, what is not PyTorch's included."""
    others: tuple[int, ...] = ()
    """In use by each other process."""
    allowed: int | None = None
    """Of a process limited by `set_per_process_memory_fraction`."""
    allocated: int | None = None
    """By PyTorch."""
    private_pools: int | None = None
    """Of `allocated`, in private pools: CUDA graphs."""
    reserved: int | None = None
    """By PyTorch, in all: `allocated` and what it keeps unallocated."""

    @property
    def unallocated(self) -> int | None:
        """Reserved by PyTorch but unallocated."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved - self.allocated)


@dataclass
class Facts:
    """What is known about one run. Readers add to it; lists are bounded by those who fill them."""

    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """In the order of the file: the first is the one to explain."""

    def add(self, other: "Facts") -> None:
        """Take in what another file says about the same run."""
        self.out_of_memory += other.out_of_memory
