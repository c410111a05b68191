"""Reasons for errors that have one: data beside the measured figures, not code that knows a case."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from labkit.errors import InputError
from labkit.workload.base import Many, Part
from labkit.workload.files import data_directory, load_mapping
from labkit.workload.workload import first_problem

KNOWN_ERRORS = data_directory() / "published" / "known_errors.yaml"


class Reason(Part):
    """Why some cases are off."""

    cases: Many[str]
    """Their names; `*` stands for any text."""
    reason: str


class Known(Part):
    """A file of reasons."""

    reasons: Many[Reason]

    @classmethod
    def load(cls, path: Path = KNOWN_ERRORS) -> Self:
        """Read it.

        Raises:
            InputError: it cannot be read, or holds something else.
        """
        try:
            return cls.model_validate(load_mapping(path))
        except ValidationError as error:
            raise InputError(f"{path}: {first_problem(cls, error)}") from None

    def of(self, case: str) -> str | None:
        """The reason that the first entry that fits a case gives; None where none does."""
        return next((each.reason for each in self.reasons if _fits(case, each)), None)


def _fits(case: str, reason: Reason) -> bool:
    return any(fnmatchcase(case, pattern) for pattern in reason.cases)
