"""What each notebook can be told, checked before it runs: one model per notebook.

Field names are the names in the notebook's parameters cell, with the same defaults. Whatever can be told here is plain
data, as a YAML file has it.
"""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, PositiveInt, ValidationError

from labkit.errors import InputError
from labkit.workload.base import Many, Part
from labkit.workload.files import data_directory
from labkit.workload.workload import first_problem


def input_path(stated: str) -> Path:
    """A file that a notebook reads, wherever it runs: from the working directory, or else from labkit's checkout."""
    path = Path(stated).expanduser()
    shipped = data_directory().parent / path
    return shipped if not path.exists() and shipped.is_file() else path


def _existing(stated: str) -> str:
    if not input_path(stated).is_file():
        raise ValueError("there is no such file")
    return stated


InputFile = Annotated[str, AfterValidator(_existing)]
"""The path of a file that is there; `input_path` finds it (`data/studies/NAME.yaml` from anywhere)."""


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
    gpu: str | None = None
    """The GPU, where no file says it (`h100-80gb`)."""


MODELS: dict[str, type[Parameters]] = {model.notebook: model for model in (Diagnosis, RecomputeStudy)}
"""By the name of the notebook."""
