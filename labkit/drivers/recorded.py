"""Published figures and figures of logs as measurements: the drivers that run nothing and quote their source."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, PrivateAttr, ValidationError, model_validator

from labkit.drivers.contract import Failure, Measurement, PhasePeak, RankRecord
from labkit.errors import InputError, nearest
from labkit.workload import Recompute, Workload
from labkit.workload.base import Part
from labkit.workload.files import load_mapping
from labkit.workload.workload import first_problem, shown

GB = 10**9
"""What publishers' "GB" are, where their file says so; converted here and nowhere else."""


_Figure = Annotated[float, Field(gt=0, le=1e9)]
"""Larger than any that can be meant."""


class PublishedCell(Part):
    """The outcome of one recompute choice."""

    recompute: Recompute
    outcome: Literal["ok", "oom"] = "ok"
    failed_at: str = ""
    """Where a run that was out of memory ended, in the publisher's words."""
    peak_gb: _Figure | None = None
    """Of a run that passed."""
    peak_first_step_gb: _Figure | None = None
    """After the first step."""
    step_time_ms: _Figure | None = None
    tflops_per_gpu: _Figure | None = None

    @model_validator(mode="after")
    def _says_what_came_of_it(self) -> Self:
        if (self.outcome == "ok") == (self.peak_gb is None) or (self.outcome == "oom") != bool(self.failed_at):
            raise ValueError("a run that passed has peak_gb, one that was out of memory has failed_at instead")
        return self


def read_recorded(path: Path) -> Measurement:
    """A measurement that `labkit import log` made of a log.

    Raises:
        InputError: it cannot be read, is none, or its workload cannot run.
    """
    try:
        recorded = Measurement.model_validate(load_mapping(path))
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(Measurement, error)}") from None
    if recorded.driver != "recorded":
        raise InputError(f"{path}: its driver is {recorded.driver}; labkit import log makes recorded ones")
    recorded.workload.checked(f"{path}: workload")
    return recorded


def same_work(one: Workload, other: Workload) -> str:
    """The first field in which two workloads differ; the model's name does not matter. Empty where there is none."""
    ours, theirs = (each.model_dump(exclude={"model": {"name"}}) for each in (one, other))
    return next(_differing(ours, theirs, ""), "")


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> Iterator[str]:
    for key in ours:
        if isinstance(ours[key], Mapping) and isinstance(theirs.get(key), Mapping):
            yield from _differing(ours[key], theirs[key], f"{where}{key}.")
        elif ours[key] != theirs.get(key):
            yield f"{where}{key} is {shown(ours[key])}, not {shown(theirs.get(key))}"


class Published(Part):
    """A file of published figures (`data/published/*.yaml`)."""

    source: str = Field(min_length=1)
    """Who measured, on what, when."""
    peak_means: str
    peak_iteration: PositiveInt
    """Iteration after which the peak was read."""
    step_time_means: str = ""
    workload: dict[str, Any]
    """What the publisher states of the workload, a partial mapping; figures answer only for workloads that agree."""
    cells: list[PublishedCell]
    _path: Path = PrivateAttr(default=Path("published"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of published figures.

        Raises:
            InputError: it cannot be read, or has unknown, missing or wrong keys.
        """
        try:
            published = cls.model_validate(load_mapping(path))
        except ValidationError as error:
            raise InputError(f"{path}: {first_problem(cls, error)}") from None
        published._path = path
        labels: dict[str, int] = {}
        for position, cell in enumerate(published.cells):
            label = cell.recompute.label
            if label in labels:
                raise InputError(f"{path}: cells.{position} {label} repeats cells.{labels[label]}; remove one of them")
            labels[label] = position
        return published

    def check(self, workloads: Sequence[Workload]) -> None:
        """Refuse a publication whose figures could not appear beside these workloads.

        Raises:
            InputError: it states a field that workloads do not have, it states another workload than all of these, or
                one of its recompute choices could not run.
        """
        agreeing = [each for each in workloads if self._agrees(self.workload, each.model_dump(), "workload")]
        if not agreeing:
            where = next(self._disagreements(self.workload, workloads[0].model_dump(), "workload"), "workload")
            raise InputError(f"{self._path}: its figures are of another workload ({where}); leave out published")
        for position, cell in enumerate(self.cells):
            try:
                agreeing[0].with_recompute(**cell.recompute.model_dump())
            except InputError as error:
                raise InputError(f"{self._path}: cells.{position}: {error}") from None
            for name in cell.recompute.without_granularity:
                raise InputError(f"{self._path}: cells.{position}: {name} does nothing without recompute_granularity")

    def measurement(self, workload: Workload) -> Measurement | None:
        """The published figures of a workload; None if the publication does not cover it.

        It covers a workload that agrees with everything the publisher states and whose recompute choice is in the
        file (in whatever order its modules are listed).

        Raises:
            InputError: the publication states a field that workloads do not have.
        """
        if not self._agrees(self.workload, workload.model_dump(), "workload"):
            return None
        for cell in self.cells:
            if cell.recompute.label == workload.recompute.label:
                source = f"{self.source}; peak: {self.peak_means}; step time: {self.step_time_means}"
                if cell.peak_gb is None:
                    failure = Failure(phase="a step", message=f"CUDA out of memory: {cell.failed_at}")
                    return Measurement(
                        driver="published", workload=workload, outcome=cell.outcome, failure=failure, source=source
                    )
                # `max_memory_allocated` covers every phase up to its reading: the phase names the reading.
                reading = PhasePeak(
                    iteration=self.peak_iteration,
                    phase="after optimizer",
                    peak_allocated_bytes=round(cell.peak_gb * GB),
                )
                return Measurement(
                    driver="published",
                    workload=workload,
                    outcome="ok",
                    ranks=(RankRecord(rank=0, phases=(reading,)),),
                    step_time_ms=cell.step_time_ms,
                    tflops_per_gpu=cell.tflops_per_gpu,
                    source=source,
                )
        return None

    def _agrees(self, stated: Mapping[str, Any], actual: Mapping[str, Any], where: str) -> bool:
        return not list(self._disagreements(stated, actual, where))

    def _disagreements(self, stated: Mapping[str, Any], actual: Mapping[str, Any], where: str) -> Iterator[str]:
        """`workload.batch.seq_length is 4096, not 8192` for each field in which the publication's workload differs."""
        for key, value in stated.items():
            if key not in actual:
                raise InputError(f"{self._path}: unknown key '{where}.{key}'{nearest(key, actual)}")
            ours = actual[key]
            if isinstance(value, Mapping) and isinstance(ours, Mapping):
                yield from self._disagreements(value, ours, f"{where}.{key}")
            elif value != (list(ours) if isinstance(ours, tuple) else ours):
                yield f"{where}.{key} is {shown(value)}, not {shown(ours)}"
