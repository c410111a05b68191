"""The record every driver fills: one contract for traces, GPU runs and published figures.

A measurement holds what was run, by what, and what each rank's allocator counted after which phase. A cell passes
only after optimizer initialisation and the steady steps; a failure records the phase it happened in, and its
peaks are never compared with passing ones.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from labkit.errors import WorkError
from labkit.work import WorkRow
from labkit.workload import Workload
from labkit.workload.base import Many, Part

Outcome = Literal[
    "ok",
    "oom",
    "cuda_error",
    "collective_timeout",
    "rank_died",
    "non_finite",
    "wrong_world_size",
    "failed",
    "killed",
    "timed_out",
    "out_of_host_memory",
    "unsupported",
    "refused",
]
"""ok: it passed. oom: a GPU ran out of memory. cuda_error: CUDA refused or lost something else. collective_timeout:
ranks waited for each other longer than they may. rank_died: one rank's process ended without a word. non_finite: the
loss or the gradients. wrong_world_size: other than as many ranks as the workload has. failed: any other crash or error
of what was run. killed: the run's own processes were ended from outside. timed_out and out_of_host_memory: it was
ended at the limits that a run has. unsupported: the driver has not what it needs. refused: the rules reject it."""
DriverName = Literal["trace", "cuda", "recorded", "published"]
"""recorded: read from the log of a run that others made."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
"""Bytes or elements: what fits a column of a frame."""

_VERSIONS_ON_GPUS = ("labkit", "torch", "megatron-core", "CUDA", "NVIDIA driver")
_ENVIRONMENT_ON_GPUS = ("device", "allocator", "routing")
_PHASES_ON_GPUS = frozenset({"forward", "backward", "optimizer"})


class PhasePeak(Part):
    """Largest allocator figures while one phase of one iteration ran."""

    iteration: NonNegativeInt
    """0 is setup (model, gradient buffers, optimizer); 1 the first step; the last one is steady."""
    phase: str
    peak_allocated_bytes: Count
    """`torch.cuda.max_memory_allocated`: whole allocator blocks."""
    peak_reserved_bytes: Count | None = None
    """`torch.cuda.max_memory_reserved`; None where the source does not say."""


class Failure(Part):
    """Why a measurement did not pass."""

    phase: str
    message: str
    rank: NonNegativeInt | None = None
    """The rank it began with; None where that is not known."""
    requested_bytes: Count | None = None
    """What that rank's allocator was asked for and could not get, as are the next three of a rank out of memory."""
    allocated_bytes: Count | None = None
    reserved_bytes: Count | None = None
    free_bytes: Count | None = None
    """Of the whole GPU, other processes' use taken off."""


class RankRecord(Part):
    """What one rank held."""

    rank: NonNegativeInt
    stages: Many[NonNegativeInt] = ()
    """The pipeline stage the rank is in, and then those that hold the same; empty where the source does not say."""
    parameters: Count | None = None
    """Elements of its model chunks' parameters, frozen ones included."""
    parameter_bytes: Count | None = None
    phases: Many[PhasePeak] = Field(min_length=1)
    between_steps_bytes: Count | None = None
    """Alive when the steady iteration begins: bytes of tensors in a trace, of blocks where an allocator was asked."""
    retained_bytes: Count | None = None
    """Tensor bytes the steady forward leaves for its backward."""
    work: Many[WorkRow] = ()
    """What the steady step does; empty where only memory was measured."""
    out_of_memory: Failure | None = None
    """Where the GPU that a trace simulates first could not give what was asked for, even after cached blocks went back
    to it. The trace goes on as if it had: peaks are those of a GPU with room."""

    @property
    def peak(self) -> PhasePeak:
        """Its largest phase peak (the first of equals)."""
        return max(self.phases, key=lambda phase: phase.peak_allocated_bytes)

    @property
    def first_step_peak_bytes(self) -> int | None:
        """Largest phase peak of setup and the first step, which runs without optimizer state until its end."""
        return max((phase.peak_allocated_bytes for phase in self.phases if phase.iteration <= 1), default=None)

    @property
    def steady_peak_bytes(self) -> int | None:
        """Largest phase peak of the later steps; None where there were none."""
        return max((phase.peak_allocated_bytes for phase in self.phases if phase.iteration > 1), default=None)

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Largest reserved bytes of any phase; None where the source does not say."""
        return max((phase.peak_reserved_bytes for phase in self.phases if phase.peak_reserved_bytes), default=None)


def _is_complete(record: RankRecord) -> bool:
    steady = {phase.phase for phase in record.phases if phase.iteration > 1}
    return steady >= _PHASES_ON_GPUS and all(phase.peak_reserved_bytes is not None for phase in record.phases)


class Unfinished(WorkError):
    """A measurement that came to no result; its text says why."""

    def __init__(self, message: str, outcome: Outcome, phase: str) -> None:
        super().__init__(message)
        self.outcome: Outcome = outcome
        self.phase = phase
        """The phase it was in."""


class NotFiniteError(WorkError):
    """A loss or a gradient is no number."""


class Measurement(Part):
    """One cell's result."""

    schema_version: Literal[1] = 1
    driver: DriverName
    workload: Workload
    outcome: Outcome
    failure: Failure | None = None
    ranks: Many[RankRecord] = ()
    """Of a measurement that did not pass: as far as each rank came, which is evidence and no peak."""
    steady_iterations: NonNegativeInt = 0
    step_time_ms: float | None = None
    """Time of a step after warm-up (median where `step_times_ms` has each); None where nothing ran on a GPU."""
    step_times_ms: Many[float] = ()
    """Of each steady step, the slowest rank's."""
    tflops_per_gpu: float | None = None
    losses: Many[float] = ()
    """Mean loss of each step, the first one included; empty where nothing was computed."""
    gradient_norms: Many[float] = ()
    """Of all gradients of a step, before clipping; empty where nothing was computed."""
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
        lacking = self.lacking if self.outcome == "ok" and self.driver == "cuda" else ()
        if lacking:
            raise ValueError(f"a measurement on GPUs that passed also has {', '.join(lacking)}")
        return self

    @property
    def contract(self) -> dict[str, bool]:
        """What a run on GPUs that passed records, and whether this measurement has it."""
        return {
            "step_time_ms": self.step_time_ms is not None,
            "tflops_per_gpu": self.tflops_per_gpu is not None,
            "step_times_ms": bool(self.step_times_ms),
            "losses": bool(self.losses),
            "gradient_norms": bool(self.gradient_norms),
            "a steady iteration": self.steady_iterations > 0,
            "every rank": [each.rank for each in self.ranks] == list(range(self.workload.parallelism.world_size)),
            "versions.driver": f"{self.driver} driver" in self.versions,
            **{f"versions.{name}": name in self.versions for name in _VERSIONS_ON_GPUS},
            **{f"environment.{name}": name in self.environment for name in _ENVIRONMENT_ON_GPUS},
            "allocated and reserved bytes of each phase of a steady step of each rank": bool(self.ranks)
            and all(map(_is_complete, self.ranks)),
        }

    @property
    def lacking(self) -> tuple[str, ...]:
        """Of `contract`, what this measurement has not."""
        return tuple(name for name, is_stated in self.contract.items() if not is_stated)

    @property
    def worst_rank(self) -> RankRecord | None:
        """The rank with the largest peak; None if it did not pass: how far that came is no peak."""
        if self.outcome != "ok":
            return None
        return max(self.ranks, key=lambda rank: rank.peak.peak_allocated_bytes)

    @property
    def out_of_memory(self) -> Failure | None:
        """Where a traced rank would run out of memory, the fullest one's; None where there is room for all."""
        ranks = sorted(self.ranks, key=lambda rank: -rank.peak.peak_allocated_bytes)
        return next((rank.out_of_memory for rank in ranks if rank.out_of_memory is not None), None)

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Largest allocated bytes over ranks and phases; None if it did not pass."""
        worst = self.worst_rank
        return None if worst is None else worst.peak.peak_allocated_bytes


class CellKey(Part):
    """What a result file is named by: the same work by the same driver of the same versions."""

    workload_hash: str
    driver: DriverName
    versions: tuple[tuple[str, str], ...]
    repetition: PositiveInt = 1
