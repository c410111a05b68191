"""The record every driver fills: one contract for traces, GPU runs and published figures.

A measurement holds what was run, by what, and what each rank's allocator counted after which phase. A cell passes
only after optimizer initialisation and the steady steps; a failure records the phase it happened in, and its
peaks are never compared with passing ones.
"""

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from labkit.work import WorkRow
from labkit.workload import Workload
from labkit.workload.base import Many, Part

Outcome = Literal["ok", "oom", "failed"]
DriverName = Literal["trace", "published"]


class PhasePeak(Part):
    """Largest allocator figures while one phase of one iteration ran."""

    iteration: NonNegativeInt
    """0 is setup (model, gradient buffers, optimizer); 1 the first step; the last one is steady."""
    phase: str
    peak_allocated_bytes: NonNegativeInt
    """`torch.cuda.max_memory_allocated`: whole allocator blocks."""
    peak_reserved_bytes: NonNegativeInt | None = None
    """`torch.cuda.max_memory_reserved`; None where the source does not say."""


class RankRecord(Part):
    """What one rank held."""

    rank: NonNegativeInt
    phases: Many[PhasePeak] = Field(min_length=1)
    between_steps_bytes: NonNegativeInt | None = None
    """Allocated when the steady iteration begins."""
    retained_bytes: NonNegativeInt | None = None
    """Tensor bytes the steady forward leaves for its backward."""
    work: Many[WorkRow] = ()
    """What the steady step does; empty where only memory was measured."""

    @property
    def peak(self) -> PhasePeak:
        """Its largest phase peak (the first of equals)."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes)


class Failure(Part):
    """Why a measurement did not pass."""

    phase: str
    message: str


class Measurement(Part):
    """One cell's result."""

    schema_version: Literal[1] = 1
    driver: DriverName
    workload: Workload
    outcome: Outcome
    failure: Failure | None = None
    ranks: Many[RankRecord] = ()
    steady_iterations: NonNegativeInt = 0
    step_time_ms: float | None = None
    """Mean time of a step after warm-up; None where nothing ran on a GPU."""
    tflops_per_gpu: float | None = None
    versions: dict[str, str] = {}
    """Of labkit, its driver's source (a hash), torch, megatron-core, transformer-engine, ..."""
    environment: dict[str, str] = {}
    """What else decides memory: allocator settings, simulated device, routing."""
    source: str = ""
    """Where the figures come from, in words."""
    created_at: str = ""
    """ISO 8601, UTC."""
    wall_seconds: float | None = None

    @model_validator(mode="after")
    def _says_why(self) -> Self:
        if (self.outcome == "ok") != (self.failure is None):
            raise ValueError("a measurement that passed has no failure, and one that did not says why")
        if self.outcome == "ok" and not self.ranks:
            raise ValueError("a measurement that passed says what a rank held")
        return self

    @property
    def worst_rank(self) -> RankRecord | None:
        """The rank with the largest peak; None if no rank was recorded."""
        return max(self.ranks, key=lambda rank: rank.peak.peak_allocated_bytes, default=None)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Largest allocated bytes over ranks and phases; None if no rank was recorded."""
        worst = self.worst_rank
        return None if worst is None else worst.peak.peak_allocated_bytes


class CellKey(Part):
    """What a result file is named by: the same work by the same driver of the same versions."""

    workload_hash: str
    driver: DriverName
    versions: tuple[tuple[str, str], ...]
    repetition: PositiveInt = 1
