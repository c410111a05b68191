"""What passes between the driver and its ranks: the request, and each rank's report, files of one folder."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from labkit.drivers.contract import Count, Failure, Outcome, PhasePeak
from labkit.errors import WorkError
from labkit.files import read_regular, write_atomically
from labkit.workload.base import Many, Part
from labkit.workload.workload import first_problem

_MOST_BYTES = 16 * 2**20


class _File(Part):
    """One JSON file, whole or not there."""

    def write(self, path: Path) -> None:
        """Write it for the other side to read."""
        write_atomically(path, self.model_dump_json())

    @classmethod
    def read(cls, path: Path) -> Self:
        """What the other side wrote.

        Raises:
            OSError: there is no such file.
            WorkError: it lacks a field, or has a wrong one.
        """
        try:
            return cls.model_validate_json(read_regular(path, _MOST_BYTES), strict=False)
        except ValidationError as error:
            raise WorkError(f"{path.name}: {first_problem(cls, error)}") from None


class Request(_File):
    """What every rank is asked to do."""

    workload: str
    """As JSON, unchecked: the caller has checked it."""
    warmup: PositiveInt
    """Steps before those that are timed; the first one makes the optimizer's state."""
    steps: PositiveInt
    collective_seconds: PositiveInt
    """The longest that a rank waits for the others."""
    snapshots: str | None = None
    """Folder for each rank's memory snapshot."""

    @staticmethod
    def path(folder: Path) -> Path:
        """Where it lies."""
        return folder / "request.json"


class Fault(Part):
    """How a rank's run ended early."""

    outcome: Outcome
    failure: Failure


class Report(_File):
    """What one rank measured; of a run that ended early, as far as it came."""

    rank: NonNegativeInt
    stage: NonNegativeInt | None
    """None before there is a pipeline."""
    parameters: Count | None
    parameter_bytes: Count | None
    phases: Many[PhasePeak]
    between_steps_bytes: Count | None
    step_seconds: Many[Annotated[float, Field(ge=0, le=1e9)]]
    """Of each step after warm-up."""
    losses: Many[float]
    """Of each step; empty where the head is not."""
    gradient_norms: Many[float]
    flops: Annotated[int, Field(ge=0, le=10**30)] | None
    """Of one step on all ranks, as Megatron-LM counts them; None before there is a model."""
    versions: dict[str, str]
    environment: dict[str, str]
    fault: Fault | None = None

    @staticmethod
    def path(folder: Path, rank: int) -> Path:
        """Where a rank's report lies."""
        return folder / f"rank-{rank}.json"


class Exits(_File):
    """How torchrun's processes ended."""

    codes: dict[int, int]
    """Exit codes of ranks that failed by themselves; negative: the signal."""

    @staticmethod
    def path(folder: Path, node: int) -> Path:
        """Where a node's lie."""
        return folder / f"exits-{node}.json"


def progress_path(folder: Path, rank: int) -> Path:
    """Where a rank notes its iteration and phase, one line."""
    return folder / f"rank-{rank}.phase"
