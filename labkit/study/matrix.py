"""What a study asks: one control, the candidates matched against it, and what their answers are compared with.

A study file names a base workload; the control and every candidate are partial mappings laid over it, so a study
may vary any field of a workload. A candidate that changes more than one choice against its control is not matched:
`Candidate.changes` names them all.

A sweep asks the same in several settings (lengths, layouts, models): one control with its candidates in each. What
the rules reject in some settings is kept with the rule's sentence, not run.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationError

from labkit.drivers.contract import Measurement
from labkit.drivers.recorded import Published, read_recorded, same_work
from labkit.errors import InputError, nearest
from labkit.files import shipped
from labkit.study.decision import Limit
from labkit.study.slurm import Slurm
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.files import load_mapping
from labkit.workload.gpu import GPUS
from labkit.workload.workload import first_problem

CellDriver = Literal["trace", "cuda"]
"""What makes cells (`labkit.study.drivers`)."""


class Target(Part):
    """What the peak has to stay below: a GPU's memory or a number of bytes, one of the two."""

    gpu: str | None = None
    peak_allocated_bytes: PositiveInt | None = None


class StudyFile(Part):
    """The keys of a study file, before the workloads behind them are built."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=64)
    """Names the folder of its results and its report."""
    title: str = Field(min_length=1, max_length=500)
    """Heads its report."""
    description: str = ""
    """Stands under the report's title."""
    base: Any
    """A workload mapping, the path of a workload file (from the study file), or a name in `data/workloads`."""
    control: dict[str, Any]
    """What every candidate is compared with: fields of a workload, laid over the base."""
    candidates: list[dict[str, Any]] = Field(max_length=1000)
    """The choices, each laid over the base; what differs from the control in one choice alone is matched."""
    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = {}
    """Dotted fields (or whole parts) of a workload with their values: a setting for each combination."""
    drivers: Many[CellDriver] = ("trace",)
    """What makes the results: trace needs no GPU, cuda measures on this machine's."""
    repetitions: PositiveInt = Field(default=1, le=1000)
    """Cells of each candidate by a driver whose figures vary; a trace's do not."""
    published: str | None = None
    """Path of a file of published figures (from the study file), or a name in `data/published`."""
    recorded: Many[str] = ()
    """Paths of measurements that `labkit import log` made (from the study file), each of one of its workloads."""
    target: Target | None = None
    """What the peak has to stay below; left out, the memory of the control's GPU."""
    slurm: Slurm = Slurm()
    """What `labkit study submit` asks a cluster for."""


_MOST_CANDIDATES = 20_000
"""Of all settings."""


@dataclass(frozen=True)
class Candidate:
    """One row of the study: a workload with the name it has in tables and charts."""

    label: str
    workload: Workload
    is_control: bool
    changes: tuple[str, ...]
    """The choices in which it differs from its control: `recompute`, and the dotted names of other fields."""
    setting: str = ""
    """Of a sweep, which one it belongs to; its label ends with it."""

    @property
    def differs_in(self) -> tuple[str, ...]:
        """The choices it changes, where they are several and it is therefore not matched; empty where it is."""
        return self.changes if len(self.changes) > 1 else ()


@dataclass(frozen=True)
class Setting:
    """One control with its candidates."""

    name: str
    """Of a sweep, its values; else empty."""
    candidates: tuple[Candidate, ...]
    """The control first, then the candidates in the file's order."""
    limit: Limit
    """What a peak has to stay below: the stated target, or else the memory of the control's GPU."""

    @property
    def control(self) -> Candidate:
        """The candidate the others are compared with."""
        return self.candidates[0]


@dataclass(frozen=True)
class Matrix:
    """A study file, read and checked: every workload in it can run."""

    name: str
    title: str
    description: str
    settings: tuple[Setting, ...]
    """One, or those of a sweep."""
    drivers: tuple[CellDriver, ...] = ("trace",)
    repetitions: int = 1
    published: Published | None = None
    recorded: tuple[Measurement, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    """Of a sweep: label and reason of each combination that the rules reject."""
    slurm: Slurm = field(default_factory=Slurm)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Those of all settings, each setting's control first."""
        return tuple(candidate for setting in self.settings for candidate in setting.candidates)

    @property
    def control(self) -> Candidate:
        """The control of the first setting."""
        return self.settings[0].control

    @classmethod
    def load(cls, path: Path) -> "Matrix":
        """Read a study file.

        Raises:
            InputError: the file cannot be read, has unknown, missing or wrong keys, names no candidate or the same
                one twice, or one of its workloads cannot run (in a sweep: a control in every setting).
        """
        stated = _stated(load_mapping(path), path)
        base = _base(stated.base, path).checked(f"{path}: base").model_dump(exclude_unset=True)  # open fields stay open
        settings, refused = [], []
        for changes in _combinations(stated.sweep):
            reader = _Reader(path, stated, _merged(base, _nested(changes)), _named(changes))
            setting = reader.setting()
            settings += [] if setting is None else [setting]
            refused += reader.refused
        if not settings:
            raise InputError(f"{path}: no setting of the sweep can run, the first because of {refused[0][1]}")
        _check_distinct(settings, path)
        matrix = cls(
            name=stated.name,
            title=stated.title,
            description=stated.description,
            settings=tuple(settings),
            drivers=stated.drivers,
            repetitions=stated.repetitions,
            published=None if stated.published is None else Published.load(_find(stated.published, path, "published")),
            recorded=tuple(read_recorded(path.parent / each) for each in stated.recorded),
            refused=tuple(refused),
            slurm=stated.slurm,
        )
        _check_recorded(matrix, stated.recorded, path)
        if matrix.published is not None:
            # Now, not after the run.
            matrix.published.check([candidate.workload for candidate in matrix.candidates])
        return matrix

    def chosen(self, label: str) -> tuple[Candidate, ...]:
        """The candidates of a label, of all settings if it names none, or of a whole setting.

        Brackets, blanks and the order of a label's modules do not matter.

        Raises:
            InputError: no such candidate.
        """
        wanted = _modules(label)
        found = [
            candidate
            for candidate in self.candidates
            if label in (candidate.label, candidate.setting)
            or wanted in (_modules(candidate.label), _modules(_without_setting(candidate)))
        ]
        if not found:
            names = [candidate.label for candidate in self.candidates]
            raise InputError(f"{self.name}: no candidate {label!r}{nearest(label, names)}")
        return tuple(found)


def stated_workloads(mapping: Mapping[str, Any], path: Path) -> Iterator[tuple[str, Workload]]:
    """Every control and candidate of the study that a file's mapping is, by its label, whether or not it can run.

    Raises:
        InputError: the mapping has unknown, missing or wrong keys.
    """
    stated = _stated(mapping, path)
    base = _base(stated.base, path).model_dump(exclude_unset=True)
    for changes in _combinations(stated.sweep):
        setting = f" at {_named(changes)}" if changes else ""
        control = None
        for override in (stated.control, *stated.candidates):
            source = f"{path}: {'control' if control is None else 'a candidate'}{setting}"
            workload = Workload.unchecked(_merged(_merged(base, _nested(changes)), override), source)
            control = workload if control is None else control
            yield f"{_compared(control, workload)[0]}{setting}", workload


def _stated(mapping: Mapping[str, Any], path: Path) -> StudyFile:
    try:
        stated = StudyFile.model_validate(mapping)
    except ValidationError as error:
        raise InputError(f"{path}: {first_problem(StudyFile, error)}") from None
    if not stated.candidates:
        raise InputError(f"{path}: candidates is empty; name at least one choice to compare with the control")
    if not stated.drivers:
        raise InputError(f"{path}: drivers is empty; use [trace]")
    if len(set(stated.drivers)) < len(stated.drivers):
        raise InputError(f"{path}: drivers names one twice; use [trace]")
    count = len(stated.candidates) + 1
    for values in stated.sweep.values():
        count *= len(values)
    if count > _MOST_CANDIDATES:
        raise InputError(f"{path}: sweep asks for {count} candidates; {_MOST_CANDIDATES} are the most of a study")
    _check_apart(stated.sweep, path)
    return stated


def _check_recorded(matrix: Matrix, names: Sequence[str], path: Path) -> None:
    """Each recorded measurement is of one candidate, and no two of the same.

    Raises:
        InputError: one could not appear beside any estimate, or two would at the same place.
    """
    shown: dict[str, str] = {}
    for name, recorded in zip(names, matrix.recorded, strict=True):
        labels = [each.label for each in matrix.candidates if not same_work(recorded.workload, each.workload)]
        if not labels:
            choice = recorded.workload.recompute.label
            nearest_one = next(
                (each for each in matrix.candidates if each.workload.recompute.label == choice), matrix.control
            )
            where = same_work(recorded.workload, nearest_one.workload)
            raise InputError(
                f"{path}: recorded {name}: it is of no candidate: its {where}, as {nearest_one.label} has it; "
                "labkit import log --write-workload writes what was run, for the study's base"
            )
        for label in labels:
            if label in shown:
                raise InputError(f"{path}: recorded {name} and {shown[label]} are both of {label}; remove one of them")
            shown[label] = name


class _Reader:
    """Reads one setting of a study file."""

    def __init__(self, path: Path, stated: StudyFile, base: Mapping[str, Any], name: str) -> None:
        self._path = path
        self._stated = stated
        self._base = base
        self._name = name
        self.refused: list[tuple[str, str]] = []
        """What the rules reject, where there are other settings."""

    def setting(self) -> Setting | None:
        """The setting; None if its control cannot run, where there are other settings."""
        control = self._workload(self._stated.control, "control")
        if control is None:
            return None
        label = control.recompute.label
        candidates = [Candidate(self._label(label), control, is_control=True, changes=(), setting=self._name)]
        seen = {label: "the control"}
        for position, override in enumerate(self._stated.candidates):
            where = f"candidates[{position}]"
            workload = self._workload(override, where)
            if workload is None:
                continue
            label, changes = _compared(control, workload)
            if label in seen:
                raise InputError(f"{self._path}: {where} {label} repeats {seen[label]}; remove one of them")
            seen[label] = where
            candidates.append(
                Candidate(self._label(label), workload, is_control=False, changes=changes, setting=self._name)
            )
        limit = _limit(self._stated.target, control, self._path)
        return Setting(self._name, tuple(candidates), limit)

    def _label(self, label: str) -> str:
        return f"{label} at {self._name}" if self._name else label

    def _workload(self, override: Mapping[str, Any], where: str) -> Workload | None:
        source = f"{self._path}: {self._label(where)}"
        workload = Workload.unchecked(_merged(self._base, override), source)
        if not self._name:
            return workload.checked(source)
        try:
            return workload.checked(source)
        except InputError as error:
            self.refused.append((self._label(where), str(error).removeprefix(f"{source}: ")))
            return None


def _combinations(sweep: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Each combination of a sweep's values, the last key's fastest; one empty one of no sweep."""
    for values in itertools.product(*sweep.values()):
        yield dict(zip(sweep, values, strict=True))


def _nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`{"batch.seq_length": 8}` as `{"batch": {"seq_length": 8}}`."""
    nested: dict[str, Any] = {}
    for name, value in changes.items():
        change = value
        for part in reversed(name.split(".")):
            change = {part: change}
        nested = _merged(nested, change)
    return nested


def _named(changes: Mapping[str, Any]) -> str:
    """`seq_length=8192, tensor_model_parallel_size=2`: a setting by its values."""
    words = []
    for name, value in changes.items():
        leaves = _leaves({name.rpartition(".")[2]: value}) if isinstance(value, Mapping) else [(name, value)]
        words += [f"{leaf.rpartition('.')[2]}={each}" for leaf, each in leaves]
    return ", ".join(words)


def _check_distinct(settings: Sequence[Setting], path: Path) -> None:
    names: set[str] = set()
    controls: dict[str, str] = {}
    for setting in settings:
        if setting.name in names:
            raise InputError(f"{path}: sweep has {setting.name} twice; remove one of them")
        names.add(setting.name)
        same = controls.setdefault(setting.control.workload.content_hash, setting.name)
        if same != setting.name:
            raise InputError(
                f"{path}: sweep: {same} and {setting.name} have the same control; "
                "leave what varies out of control, and equal values out of the sweep"
            )


def _check_apart(sweep: Mapping[str, Any], path: Path) -> None:
    """A field inside another that is swept too would have two values."""
    for name in sweep:
        within = next((other for other in sweep if name.startswith(f"{other}.")), None)
        if within is not None:
            raise InputError(f"{path}: sweep: {name} is part of {within}, which is swept too; use one of them")


def _without_setting(candidate: Candidate) -> str:
    return candidate.label.removesuffix(f" at {candidate.setting}")


def _modules(label: str) -> list[str]:
    return sorted(part.strip() for part in label.strip("[] ").split(","))


def _find(reference: str, study: Path, kind: str) -> Path:
    """The file a study refers to by name (in `data/KIND`) or by path (from the study's folder)."""
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        return study.parent / reference
    known = shipped(kind)
    if reference not in known:
        raise InputError(f"{study}: nothing called {reference!r} in data/{kind}{nearest(reference, known)}")
    return known[reference]


def _base(stated: object, study: Path) -> Workload:
    """The base, rules unapplied."""
    if isinstance(stated, str):
        path = _find(stated, study, "workloads")
        return Workload.described(load_mapping(path), path)
    if isinstance(stated, Mapping):
        return Workload.unchecked(stated, f"{study}: base")
    raise InputError(f"{study}: base is neither a name, a path nor a workload mapping")


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


def _compared(control: Workload, workload: Workload) -> tuple[str, tuple[str, ...]]:
    """A candidate's label and the choices it changes; its recompute fields are one choice, and so is another model."""
    ours, theirs = dict(_leaves(workload.model_dump())), dict(_leaves(control.model_dump()))
    fields = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    changed = [name for name in fields if not name.startswith("recompute.")]
    if "model.name" in changed:
        changed = [name for name in changed if name == "model.name" or not name.startswith("model.")]
    also = [f"{name.rpartition('.')[2]}={ours.get(name)}" for name in changed]
    recompute = ("recompute",) if workload.recompute.label != control.recompute.label else ()
    return ", ".join([workload.recompute.label, *also]), (*recompute, *changed)


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
