"""A run as it is judged: facts of all its files, and its workload where launch arguments or a workload file say it."""

from dataclasses import dataclass
from functools import cached_property

from labkit.diagnose.facts import Evidence, Facts, OutOfMemory
from labkit.errors import LabkitError
from labkit.memory.estimate import Estimate, estimate
from labkit.plan import Budget, advise
from labkit.workload import Workload
from labkit.workload.gpu import GIB, GPUS, MIB

_MOST_ADVICE = 4


@dataclass(frozen=True)
class Stated:
    """A workload that the files state."""

    workload: Workload
    evidence: Evidence


class Case:
    """Facts and workload of one run; what an estimate says of it is made where somebody asks."""

    def __init__(self, facts: Facts, stated: Stated | None = None) -> None:
        self.facts = facts
        self.stated = stated
        self.why_no_estimate = ""
        """Why a stated workload has none, once it was asked for."""

    @property
    def first(self) -> OutOfMemory | None:
        """The failure to explain: the first that says how much was asked for, else the first."""
        found = self.facts.out_of_memory
        return next((each for each in found if each.requested is not None), found[0] if found else None)

    @cached_property
    def estimate(self) -> Estimate | None:
        """Of the fullest pipeline stage; None without a workload, or where it has no price."""
        if self.stated is None:
            return None
        try:
            made = estimate(self.stated.workload)
            _ = made.peak_allocated_bytes
        except LabkitError as error:
            self.why_no_estimate = str(error)
            return None
        return made

    @cached_property
    def without_recompute(self) -> Estimate | None:
        """The same with nothing recomputed."""
        if self.stated is None or self.estimate is None:
            return None
        try:
            plain = self.stated.workload.with_recompute(recompute_granularity="selective", recompute_modules=[])
            made = estimate(plain, self.estimate.stage)
            _ = made.peak_allocated_bytes
        except LabkitError:
            return None
        return made

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What `labkit plan` proposes for the memory that PyTorch has, as sentences; empty without a workload."""
        if self.stated is None or self.estimate is None:
            return ()
        try:
            return advise(self.stated.workload, self.budget).sentences[:_MOST_ADVICE]
        except LabkitError:
            return ()

    @property
    def budget(self) -> Budget:
        """What PyTorch may allocate: the GPU's memory less what the message says others have."""
        first = self.first
        if first is not None and first.capacity is not None and (outside := outside_bytes(first)) is not None:
            allowed = min(first.capacity - outside - sum(first.others), first.allowed or first.capacity)
            if allowed > GIB:
                return Budget("what this GPU has for PyTorch", allowed)
        assert self.stated is not None
        gpu = GPUS[self.stated.workload.training.gpu]
        return Budget(gpu.name, gpu.total_memory_bytes)

    @property
    def experts(self) -> bool:
        """Whether the run is known to have experts on several ranks, or to have failed in a layer of them."""
        if self.stated is not None:
            return self.stated.workload.parallelism.ep > 1
        printed = self.facts.printed[-1].values if self.facts.printed else {}
        if "expert_model_parallel_size" in printed:
            return printed["expert_model_parallel_size"] not in ("1", "None") and printed.get("num_experts") != "None"
        return any("moe/" in each.place for each in self.facts.out_of_memory)

    @property
    def stages(self) -> int | None:
        """Pipeline stages; None where nobody says."""
        if self.stated is not None:
            return self.stated.workload.parallelism.pp
        printed = self.facts.printed[-1].values if self.facts.printed else {}
        stated = printed.get("pipeline_model_parallel_size", "")
        return int(stated) if stated.isascii() and stated.isdigit() and len(stated) < 8 else None


def outside_bytes(message: OutOfMemory) -> int | None:
    """What this process holds besides PyTorch's allocator (context, NCCL, libraries); None where it is not said."""
    if message.reserved is None:
        return None
    if message.process is not None:
        return max(0, message.process - message.reserved)
    if message.capacity is None or message.free is None or message.others:
        return None
    return max(0, message.capacity - message.free - message.reserved)


def size(nbytes: int) -> str:
    """Bytes in words: `12.34 GiB`, `512 MiB`, `12.5 MiB`."""
    if nbytes >= GIB:
        return f"{nbytes / GIB:.2f} GiB"
    return f"{round(nbytes / MIB, 2):g} MiB" if nbytes >= MIB else f"{nbytes} bytes"
