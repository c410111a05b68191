"""What readers find in files, before anybody judges it: plain values with the line that says each."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

from labkit.console import printable
from labkit.workload.base import Part

Phase = Literal["", "setup", "forward", "backward", "grad_sync", "optimizer", "evaluation", "saving"]
"""As `labkit.ledger` has them, and two that are no part of a step; empty where the source does not say."""

Before = Literal["", "1.4", "2.1"]
"""Versions of PyTorch; empty where none is known."""

_SEGMENT = 20 * 2**20
"""`kLargeBuffer` of `c10/cuda/CUDACachingAllocator.h`: what a small request takes of the device."""

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
        shown = text[start : start + LONGEST_QUOTE]
        before, after = "... " if start else "", " ..." if len(text) > start + LONGEST_QUOTE else ""
        # Whole words, where there are any.
        shown = (shown.rpartition(" ")[0] if after else shown) or shown
        shown = " ".join(((shown.partition(" ")[2] if before else shown) or shown).split())
        # Millions of them are made of a long log: nothing in it needs to be checked.
        return cls.model_construct(source=source, line=line, text=printable(f"{before}{shown}{after}"))

    @property
    def place(self) -> str:
        """`train.log:123`."""
        return self.source if self.line is None else f"{self.source}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A GPU that could not give what PyTorch's allocator asked for. Bytes; None where the source does not say."""

    evidence: Evidence
    rank: int | None = None
    device: int | None = None
    phase: Phase = ""
    place: str = ""
    """The innermost function of a layer, with its file and line."""
    replays: bool = False
    """Whether backward was running a forward again."""
    recorded: bool = False
    """Whether a memory snapshot has it, which shows what was live."""
    usable: int | None = None
    """Of what PyTorch keeps unallocated, what requests on this stream could have; a snapshot knows."""
    largest: int | None = None
    """Of that, in one piece."""
    expandable: bool = False
    """Whether segments are known to expand."""
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
    before: Before = ""
    """Of which version's predecessors the message is."""

    @property
    def figures(self) -> tuple[object, ...]:
        """What the message itself says: printed twice, it is the same."""
        amounts = (self.requested, self.capacity, self.free, self.process, self.allocated, self.reserved)
        return (self.rank, self.device, *amounts, self.private_pools, self.allowed, self.others)

    @property
    def room(self) -> int:
        """What PyTorch could still have got of the device: what is free, within the limit of the process."""
        free = self.free or 0
        return (
            free if self.allowed is None or self.reserved is None else min(free, max(0, self.allowed - self.reserved))
        )

    @property
    def found_free(self) -> bool:
        """Whether the device had what was asked for, in a segment of its own."""
        return self.requested is not None and self.requested + _SEGMENT <= (self.free or 0)

    @property
    def unallocated(self) -> int | None:
        """Reserved by PyTorch but unallocated."""
        return None if self.reserved is None or self.allocated is None else max(0, self.reserved - self.allocated)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What an allocator counted when a log asked it (`report_memory` of Megatron, NeMo's progress line, a summary)."""

    evidence: Evidence
    rank: int | None = None
    iteration: int | None = None
    """After so many iterations."""
    allocated: int | None = None
    max_allocated: int | None = None
    reserved: int | None = None
    max_reserved: int | None = None

    @property
    def peak(self) -> int:
        """The largest figure that counts tensors' blocks."""
        return max(self.max_allocated or 0, self.allocated or 0)


@dataclass(frozen=True, kw_only=True)
class MemorySummary(MemoryReport):
    """A table of `torch.cuda.memory_summary`. Amounts are rounded down to what it shows."""

    device: int | None = None
    failures: int = 0
    """`CUDA OOMs`."""
    retries: int = 0
    """`cudaMalloc retries`: cached blocks went back to the device, because it had no more."""
    not_releasable: int | None = None
    """`Non-releasable memory`: unallocated parts of blocks whose other parts are in use."""
    requested: int | None = None
    """`Requested memory`: allocated without rounding."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What Megatron says a rank needs (`report_theoretical_memory`)."""

    evidence: Evidence
    weights: int
    """And optimizer state."""
    activations: int


class Iteration(NamedTuple):
    """A line of a step."""

    number: int
    of: int
    milliseconds: float
    tflops: float | None = None
    loss: float | None = None
    skipped: int = 0
    nan: int = 0


FailureKind = Literal[
    "device memory",
    "host memory",
    "killed",
    "collective timeout",
    "collective error",
    "device error",
    "not finite",
    "time limit",
    "disk",
    "crash",
    "rank lost",
    "error",
]
"""device memory: asked for by others than PyTorch's allocator. killed: SIGKILL, by whom is not said. device error: an
illegal access, an assertion, ECC. crash: a signal. rank lost: a launcher says that a rank failed, and no more. error:
any other exception."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A line that says that something failed, other than PyTorch's allocator."""

    kind: FailureKind
    evidence: Evidence
    rank: int | None = None
    phase: Phase = ""


@dataclass(frozen=True)
class Printed:
    """The arguments as Megatron prints them: names of its parsed arguments with the text of their values."""

    evidence: Evidence
    values: Mapping[str, str]


MOST = 1000
"""Of a kind of fact that is kept from a file."""
MOST_ITERATIONS = 50_000
_MOST_RANKS = 2**14


@dataclass
class Rise:
    """What reports of a rank say was allocated behind steps, from the second step on: the first makes state."""

    first: MemoryReport
    last: MemoryReport
    reports: int = 0
    """After the first."""
    higher: int = 0
    """Of these, than the one before."""

    def see(self, report: MemoryReport) -> None:
        """Take in the next report; one of a step that was seen, or of an earlier one, says nothing."""
        if (report.iteration or 0) > (self.last.iteration or 0):
            self.reports += 1
            self.higher += (report.allocated or 0) > (self.last.allocated or 0)
            self.last = report

    @property
    def nbytes(self) -> int:
        """In all."""
        return (self.last.allocated or 0) - (self.first.allocated or 0)


class MemoryReports:
    """Of each rank the first, the last, and those with the largest peaks: a log may have millions."""

    def __init__(self) -> None:
        self._kept: dict[int | None, dict[str, MemoryReport]] = {}
        self.rises: dict[int | None, Rise] = {}
        """By rank."""

    def append(self, report: MemoryReport) -> None:
        """Keep it, if it is one of these, and see whether its rank's memory rises."""
        self._keep(report)
        if report.rank in self._kept and report.allocated and report.iteration and report.iteration > 1:
            self.rises.setdefault(report.rank, Rise(report, report)).see(report)

    def _keep(self, report: MemoryReport) -> None:
        if len(self._kept) >= _MOST_RANKS and report.rank not in self._kept:
            return
        kept = self._kept.setdefault(report.rank, {"first": report})
        kept["last"] = report
        for role, size in (("peak", _peak), ("reserved", _reserved)):
            if role not in kept or size(report) > size(kept[role]):
                kept[role] = report

    def extend(self, others: "MemoryReports") -> None:
        """Keep those of another file; of a rank that is in both the rise with more reports."""
        for report in others:
            self._keep(report)
        for rank, rise in others.rises.items():
            known = self.rises.get(rank)
            if known is None or known.reports < rise.reports:
                self.rises[rank] = rise

    def __iter__(self) -> Iterator[MemoryReport]:
        for kept in self._kept.values():
            yield from dict.fromkeys(kept.values())

    def __bool__(self) -> bool:
        return bool(self._kept)


def _peak(report: MemoryReport) -> int:
    return report.peak


def _reserved(report: MemoryReport) -> int:
    return max(report.max_reserved or 0, report.reserved or 0)


@dataclass
class Facts:
    """What is known about one run. Readers add to it."""

    out_of_memory: list[OutOfMemory] = field(default_factory=list)
    """In the order of the file: the first is the one to explain."""
    memory: MemoryReports = field(default_factory=MemoryReports)
    footprints: list[Footprint] = field(default_factory=list)
    """The last one of each file."""
    iterations: deque[Iteration] = field(default_factory=lambda: deque(maxlen=MOST_ITERATIONS))
    """The last ones."""
    failures: list[Failure] = field(default_factory=list)
    printed: list[Printed] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
    """Elements on a rank, as far as ranks say it."""

    @property
    def empty(self) -> bool:
        """Whether nothing was found."""
        return not any(getattr(self, each.name) for each in fields(self))

    def add(self, other: "Facts") -> None:
        """Take in what another file says about the same run."""
        for each in fields(self):
            getattr(self, each.name).extend(getattr(other, each.name))
