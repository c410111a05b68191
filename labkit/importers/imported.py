"""`Imported`: a workload made of what somebody else wrote, and how well it says that."""

from typing import NamedTuple

import yaml

from labkit.console import printable
from labkit.errors import InputError
from labkit.importers.fields import Fields
from labkit.workload import Workload
from labkit.workload.attention_backends import attention_backend


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


def checked(found: Fields, source: str) -> Workload:
    """The workload; where its rules refuse it, the reason may be what it does not express.

    Raises:
        InputError: it cannot run.
    """
    try:
        return Workload.from_mapping(found.mapping, source)
    except InputError as error:
        options = ", ".join(each.partition(":")[0] for each in (*found.not_priced, *found.not_expressed))
        raise InputError(f"{error} (not expressed: {options})" if options else str(error)) from None


def backend_note(workload: Workload, field: str) -> list[str]:
    """What `auto` comes to, where there is something to choose."""
    kernels = workload.training.kernels
    if kernels.attention_backend != "auto" or kernels.local:
        return []
    chosen = attention_backend(workload)
    return [f"{field} auto: {chosen}, as Transformer Engine chooses with flash-attention installed"]
