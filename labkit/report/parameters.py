"""What each notebook can be told, checked before it runs: one model per notebook.

Field names are the names in the notebook's parameters cell, with the same defaults. Whatever can be told here is plain
data, as a YAML file has it.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, ValidationError

from labkit.errors import InputError, nearest
from labkit.workload.base import Many, Part
from labkit.workload.files import data_directory, workload_file
from labkit.workload.gpu import GPUS
from labkit.workload.workload import Workload, first_problem


def input_path(stated: str) -> Path:
    """A file that a notebook reads, wherever it runs: from the working directory, or else from labkit's checkout."""
    try:
        path = Path(stated).expanduser()
        shipped = data_directory().parent / path
        return shipped if not path.exists() and shipped.is_file() else path
    except (OSError, RuntimeError, ValueError):  # too long, of a user who is not there, with a null character
        raise InputError(f"{stated[:80]!r} can be no file's name") from None


def _existing(stated: str) -> str:
    if not input_path(stated).is_file():
        raise ValueError("there is no such file")
    return stated


InputFile = Annotated[str, AfterValidator(_existing)]
"""The path of a file that is there; `input_path` finds it (`data/studies/NAME.yaml` from anywhere)."""


def _runnable(stated: str) -> str:
    Workload.load(workload_path(stated))
    return stated


def workload_path(stated: str) -> Path:
    """The file of a workload that a notebook is told: a path (`input_path`), or the name of one that ships."""
    return workload_file(input_path(stated))


WorkloadFile = Annotated[str, AfterValidator(_runnable)]
"""The path of a workload that can run, or the name of one in `data/workloads`; `workload_path` finds it."""


def _gpu(name: str) -> str:
    if name not in GPUS:
        raise ValueError(f"no such GPU{nearest(name[:80], GPUS)}")
    return name


GpuName = Annotated[str, AfterValidator(_gpu)]
"""One of `labkit.workload.gpu.GPUS`."""


class Parameters(Part):
    """What one notebook can be told."""

    notebook: ClassVar[str]
    """The notebook's name: `notebooks/NAME.py`."""

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """The parameters, if they are right.

        Raises:
            InputError: an unknown or missing name, a wrong type, or no such file.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"{cls.notebook} parameters: {first_problem(cls, error)}") from None


class RecomputeStudy(Parameters):
    """Parameters of `notebooks/recompute_study.py`."""

    notebook: ClassVar[str] = "recompute_study"

    study: InputFile
    """A study file."""
    run: bool = True
    """Make the results that are missing; else the report shows them as missing."""
    workers: PositiveInt | None = None
    """Cells made at once; None for as many as the machine bears."""


class Diagnosis(Parameters):
    """Parameters of `notebooks/diagnosis.py`."""

    notebook: ClassVar[str] = "diagnosis"

    files: Annotated[Many[InputFile], Field(min_length=1)]
    """Files of one run, in any mix: logs, out-of-memory messages, memory snapshots, launch arguments, a workload."""
    world_size: PositiveInt | None = None
    """Ranks, where launch arguments do not say them."""
    gpu: GpuName | None = None
    """The GPU, where no file says it (`h100-80gb`)."""


_BOTH_HOPPERS = ("h100-80gb", "h200-141gb")


class Estimate(Parameters):
    """Parameters of `notebooks/estimate.py`."""

    notebook: ClassVar[str] = "estimate"

    workload: WorkloadFile = "moonlight-16b"
    """A workload file, or the name of one that ships with labkit."""
    stage: NonNegativeInt | None = None
    """The pipeline stage to look at; None: the one that holds most."""
    gpus: Annotated[Many[GpuName], Field(min_length=1)] = _BOTH_HOPPERS
    """Whose memory to hold the peak against."""


class ExpertRouting(Parameters):
    """Parameters of `notebooks/expert_routing.py`."""

    notebook: ClassVar[str] = "expert_routing"

    workload: WorkloadFile = "moonlight-16b"
    """A workload file, or the name of one that ships with labkit."""
    histograms: InputFile | None = None
    """Rows of each expert in each MoE layer, as somebody counted them (YAML, JSON or CSV); None: examples."""
    concentrated: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Of all rows, what the busiest rank gets where routing is concentrated."""
    seed: NonNegativeInt = 1
    """Of the examples."""
    gpus: Annotated[Many[GpuName], Field(min_length=1)] = _BOTH_HOPPERS
    """Whose memory to fit into."""


class Admission(Parameters):
    """Parameters of `notebooks/admission.py`."""

    notebook: ClassVar[str] = "admission"

    workload: WorkloadFile = "qwen3.8-27b-lora"
    """The template: a workload file, or the name of one that ships; of its batch the way it packs counts."""
    requests: InputFile | None = None
    """A JSON file of requests, as `labkit admit` takes it; None: examples."""
    budget: str | None = None
    """What a rank may allocate (`80GB`, `74.5GiB`, a GPU's name); None: the workload's GPU."""
    rule_tokens: Annotated[int, Field(gt=0, le=2**40)] | None = None
    """Tokens that the rule of thumb allows a micro-batch; None: what the workload's own batch suggests."""
    count: Annotated[int, Field(gt=0, le=2048)] = 43
    """Of the examples."""
    seed: NonNegativeInt = 1
    """Of the examples."""


class Explore(Parameters):
    """Parameters of `notebooks/explore.py`."""

    notebook: ClassVar[str] = "explore"

    workload: WorkloadFile = "moonlight-16b"
    """A workload file, or the name of one that ships with labkit."""


class Calibration(Parameters):
    """Parameters of `notebooks/calibration.py`."""

    notebook: ClassVar[str] = "calibration"

    cells: InputFile | None = None
    """A file of cells that you measured, with the columns of `data/published/h200_lora_peaks.csv`."""


class Scaling(Parameters):
    """Parameters of `notebooks/scaling.py`."""

    notebook: ClassVar[str] = "scaling"

    workload: WorkloadFile = "moonlight-16b"
    """A workload file, or the name of one that ships with labkit: what is varied, one size at a time."""
    gpus: Annotated[Many[GpuName], Field(min_length=1)] = _BOTH_HOPPERS
    """Whose memory to fit into."""
    longest: PositiveInt = 2**20
    """Tokens of a sequence beyond which nothing is looked for."""


MODELS: dict[str, type[Parameters]] = {
    model.notebook: model
    for model in (
        Admission,
        Calibration,
        Diagnosis,
        Estimate,
        Explore,
        ExpertRouting,
        RecomputeStudy,
        Scaling,
    )
}
"""By the name of the notebook."""
