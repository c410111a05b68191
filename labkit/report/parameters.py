"""What each notebook can be told, checked before it runs: one model per notebook."""

from pathlib import Path
from typing import Any, Self

from pydantic import PositiveInt, ValidationError

from labkit.errors import InputError
from labkit.workload.base import Part
from labkit.workload.files import data_directory
from labkit.workload.workload import first_problem


class RecomputeStudy(Part):
    """Parameters of `notebooks/recompute_study.py`; field names are the names in its parameters cell."""

    study: str
    """Path of a study file: from the working directory, or else from labkit's checkout (`data/studies/NAME.yaml`)."""
    run: bool = True
    """Make the results that are missing; else the report shows them as missing."""
    workers: PositiveInt | None = None
    """Cells made at once; None for as many as the machine bears."""

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """The parameters, if they are right.

        Raises:
            InputError: an unknown or missing name, a wrong type, or no such study file.
        """
        try:
            parameters = cls.model_validate(values)
        except ValidationError as error:
            raise InputError(f"recompute_study parameters: {first_problem(cls, error)}") from None
        if not parameters.study_path.is_file():
            raise InputError(f"recompute_study parameters: study: no file {parameters.study!r}")
        return parameters

    @property
    def study_path(self) -> Path:
        """The study file, wherever the notebook runs."""
        stated = Path(self.study).expanduser()
        shipped = data_directory().parent / stated
        return shipped if not stated.exists() and shipped.is_file() else stated


MODELS = {"recompute_study": RecomputeStudy}
"""By the name of the notebook."""
