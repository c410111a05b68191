"""`Imported`: a workload made of what somebody else wrote, and how well it says that."""

from typing import NamedTuple

import yaml

from labkit.console import printable
from labkit.workload import Workload


class Imported(NamedTuple):
    """A workload, and what is known about how well it says what was given."""

    workload: Workload
    not_priced: list[str]
    """One sentence for each statement that decides memory and that only `launch` carries, for a trace."""
    not_expressed: list[str]
    """One sentence for each that the workload does not say at all."""
    assumed: list[str]
    """What was left open and how it was taken."""
    counted: list[str] = []
    """The model's parameters, beside what is published."""

    @property
    def notes(self) -> list[str]:
        """All of them, each in one line."""
        labelled = [f"parameters: {each}" for each in self.counted]
        labelled += [f"assumed: {each}" for each in self.assumed]
        labelled += [f"not priced: {each}" for each in self.not_priced]
        labelled += [f"not expressed: {each}" for each in self.not_expressed]
        return [printable(" ".join(each.split())) for each in labelled]

    @property
    def yaml(self) -> str:
        """The workload as a file, with its notes as comments."""
        return self._file(self.workload.model_dump(mode="json", exclude_unset=True))

    @property
    def model_yaml(self) -> str:
        """The model alone, as a file that `model: FILE.yaml` of a workload names."""
        return self._file(self.workload.model.model_dump(mode="json", exclude_unset=True, exclude={"name"}))

    def _file(self, data: dict[str, object]) -> str:
        body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        return "".join([*(f"# {note}\n" for note in self.notes), body])
