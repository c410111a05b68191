"""A run as it is judged: facts of all its files, and its workload where launch arguments or a workload file say it."""

from dataclasses import dataclass
from functools import cached_property

from labkit.diagnose.facts import Evidence, Facts, OutOfMemory
from labkit.errors import LabkitError
from labkit.memory.estimate import Estimate, estimate
from labkit.plan import Advice, Budget, advise
from labkit.workload import Workload
from labkit.workload.gpu import GIB, GPUS, MIB


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
        return self._of_labels(frozenset())

    def without_label(self, label: str) -> Estimate | None:
        """The same without one of its labels."""
        if self.stated is None:
            return None
        return self._of_labels(self.stated.workload.recompute.modules - {label})

    def _of_labels(self, labels: frozenset[str]) -> Estimate | None:
        if self.stated is None or self.estimate is None:
            return None
        try:
            other = self.stated.workload.with_recompute(
                recompute_granularity="selective", recompute_modules=sorted(labels)
            )
            made = estimate(other, self.estimate.stage)
            _ = made.peak_allocated_bytes
        except LabkitError:
            return None
        return made

    def stage_of(self, rank: int | None) -> int:
        """The pipeline stage of a rank: ranks of a stage are consecutive (`parallel_state`, order tp-cp-ep-dp-pp)."""
        assert self.stated is not None
        assert self.estimate is not None
        layout = self.stated.workload.parallelism
        return self.estimate.stage if rank is None else rank // (layout.world_size // layout.pp)

    def estimated(self, stage: int, *, first: bool = False) -> int:
        """The peak of a stage, or that of its first step."""
        assert self.stated is not None
        phases = estimate(self.stated.workload, stage).summary.phases
        return max(phase.peak_allocated_bytes for phase in phases if not first or phase.iteration <= 1)

    @property
    def needed(self) -> int | None:
        """What the failure to explain had and asked for, where it is a step's."""
        first = self.first
        if first is None or first.allocated is None or first.requested is None:
            return None
        return None if first.phase in ("evaluation", "saving") else first.allocated + first.requested

    @cached_property
    def too_low(self) -> int:
        """By how much the estimate is too low at least: the failure needed more."""
        if self.estimate is None or self.needed is None:
            return 0
        return max(0, self.needed - self.estimated(self.stage_of(self.first.rank if self.first else None)))

    @cached_property
    def advice(self) -> Advice | None:
        """What `labkit plan` proposes for the memory that PyTorch has; None without a workload.

        Where the failure shows that the estimate is too low, for so much less.
        """
        if self.stated is None or self.estimate is None:
            return None
        budget = self.budget
        if self.too_low:
            name = f"{budget.name} less the {size(self.too_low)} by which the estimate is too low"
            budget = Budget(name, budget.bytes - self.too_low)
        try:
            return advise(self.stated.workload, budget) if budget.bytes > 0 else None
        except LabkitError:
            return None

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
