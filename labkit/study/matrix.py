"""What a study asks: one control, the candidates matched against it, and what their answers are compared with.

A study file names a base workload; the control and every candidate are partial mappings laid over it, so a study
may vary any field of a workload. A candidate that changes more than the recompute choice is not matched: its
`differs_in` says what else it changes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from labkit.drivers.recorded import Published
from labkit.errors import InputError, nearest
from labkit.study.decision import Limit
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.files import data_directory, load_mapping
from labkit.workload.gpu import GPUS
from labkit.workload.workload import first_problem


class Target(Part):
    """What the peak has to stay below: a GPU's memory or a number of bytes, one of the two."""

    gpu: str | None = None
    peak_allocated_bytes: PositiveInt | None = None


class StudyFile(Part):
    """The keys of a study file, before the workloads behind them are built."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Names the folder of its results and its report."""
    title: str = Field(min_length=1, max_length=500)
    description: str = ""
    base: Any
    """A workload mapping, the path of a workload file (from the study file), or a name in `data/workloads`."""
    control: dict[str, Any]
    candidates: list[dict[str, Any]] = Field(max_length=1000)
    drivers: Many[Literal["trace"]] = ("trace",)
    published: str | None = None
    """Path of a file of published figures (from the study file), or a name in `data/published`."""
    target: Target | None = None


@dataclass(frozen=True)
class Candidate:
    """One row of the study: a workload with the name it has in tables and charts."""

    label: str
    workload: Workload
    is_control: bool
    differs_in: tuple[str, ...]
    """Dotted names of the fields outside `recompute` in which it differs from the control."""


@dataclass(frozen=True)
class Matrix:
    """A study file, read and checked: every workload in it can run."""

    name: str
    title: str
    description: str
    candidates: tuple[Candidate, ...]
    """The control first, then the candidates in the file's order."""
    drivers: tuple[Literal["trace"], ...]
    published: Published | None
    limit: Limit
    """What a peak has to stay below: the stated target, or else the memory of the control's GPU."""

    @property
    def control(self) -> Candidate:
        """The candidate the others are compared with."""
        return self.candidates[0]

    @classmethod
    def load(cls, path: Path) -> "Matrix":
        """Read a study file.

        Raises:
            InputError: the file cannot be read, has unknown, missing or wrong keys, names no candidate or the same
                one twice, or one of its workloads cannot run.
        """
        data = load_mapping(path)
        try:
            stated = StudyFile.model_validate(data)
        except ValidationError as error:
            raise InputError(f"{path}: {first_problem(StudyFile, error)}") from None
        if not stated.candidates:
            raise InputError(f"{path}: candidates is empty; name at least one choice to compare with the control")
        if not stated.drivers:
            raise InputError(f"{path}: drivers is empty; use [trace]")
        if len(set(stated.drivers)) < len(stated.drivers):
            raise InputError(f"{path}: drivers names one twice; use [trace]")
        base = _base(stated.base, path).model_dump(exclude_unset=True)  # what it leaves open stays open
        control = _workload(base, stated.control, f"{path}: control")
        candidates = [Candidate(control.recompute.label, control, is_control=True, differs_in=())]
        seen = {candidates[0].label: "the control"}
        for position, override in enumerate(stated.candidates):
            where = f"candidates[{position}]"
            candidate = _candidate(control, _workload(base, override, f"{path}: {where}"))
            if candidate.label in seen:
                raise InputError(
                    f"{path}: {where} {candidate.label} repeats {seen[candidate.label]}; remove one of them"
                )
            seen[candidate.label] = where
            candidates.append(candidate)
        published = None
        if stated.published is not None:
            published = Published.load(_find(stated.published, path, "published"))
            published.check([candidate.workload for candidate in candidates])  # now, not after the run
        return cls(
            name=stated.name,
            title=stated.title,
            description=stated.description,
            candidates=tuple(candidates),
            drivers=stated.drivers,
            published=published,
            limit=_limit(stated.target, control, path),
        )

    def chosen(self, label: str) -> Candidate:
        """The candidate with a label; brackets, blanks and the order of its modules do not matter.

        Raises:
            InputError: no such candidate.
        """
        for candidate in self.candidates:
            if label == candidate.label or _modules(label) == _modules(candidate.label):
                return candidate
        labels = [candidate.label for candidate in self.candidates]
        raise InputError(f"{self.name}: no candidate {label!r}{nearest(label, labels)}")


def _modules(label: str) -> list[str]:
    return sorted(part.strip() for part in label.strip("[] ").split(","))


def _find(reference: str, study: Path, kind: str) -> Path:
    """The file a study refers to by name (in `data/KIND`) or by path (from the study's folder)."""
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        return study.parent / reference
    known = {path.stem: path for path in (data_directory() / kind).glob("*.yaml")}
    if reference not in known:
        raise InputError(f"{study}: nothing called {reference!r} in data/{kind}{nearest(reference, known)}")
    return known[reference]


def _base(stated: object, study: Path) -> Workload:
    if isinstance(stated, str):
        return Workload.load(_find(stated, study, "workloads"))
    if isinstance(stated, Mapping):
        return Workload.from_mapping(stated, f"{study}: base")
    raise InputError(f"{study}: base is neither a name, a path nor a workload mapping")


def _workload(base: Mapping[str, Any], override: Mapping[str, Any], source: str) -> Workload:
    return Workload.from_mapping(_merged(base, override), source)


def _merged(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """`override` laid over `base`, key by key into nested mappings; lists and plain values replace."""
    merged = dict(base)
    for key, value in override.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merged(below, value)
        else:
            merged[key] = value
    return merged


def _candidate(control: Workload, workload: Workload) -> Candidate:
    ours, theirs = dict(_leaves(workload.model_dump())), dict(_leaves(control.model_dump()))
    fields = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    changed = [name for name in fields if not name.startswith("recompute.")]
    if "model.name" in changed:
        changed = [name for name in changed if name == "model.name" or not name.startswith("model.")]
    also = [f"{name.rpartition('.')[2]}={ours.get(name)}" for name in changed]
    return Candidate(
        ", ".join([workload.recompute.label, *also]), workload, is_control=False, differs_in=tuple(changed)
    )


def _leaves(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _limit(target: Target | None, control: Workload, study: Path) -> Limit:
    if target is not None and (target.gpu is None) == (target.peak_allocated_bytes is None):
        raise InputError(f"{study}: target takes one of gpu and peak_allocated_bytes")
    if target is not None and target.peak_allocated_bytes is not None:
        return Limit("the target", target.peak_allocated_bytes, stated=True)
    name = control.training.gpu if target is None or target.gpu is None else target.gpu
    if name not in GPUS:
        raise InputError(f"{study}: target.gpu: unknown GPU {name!r}{nearest(name, GPUS)}")
    return Limit(GPUS[name].name, GPUS[name].total_memory_bytes, stated=target is not None)
