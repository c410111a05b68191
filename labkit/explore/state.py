"""What the explorer has picked: a start and fields that differ from it, as one frozen value; and what comes of it.

The controls are fields of a `Workload` by their dotted paths: what kind of control each is, and what may be chosen, is
read off the model of that field. Whatever a front end sends is checked as a file would be.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from labkit.check import Found
from labkit.errors import InputError, nearest
from labkit.files import shipped
from labkit.starters.workload import starting_workload
from labkit.workload import RECOMPUTE_MODULES, Workload
from labkit.workload.files import data_directory
from labkit.workload.workload import shown

GIVEN = "given"
"""Key of the workload that the explorer was opened on."""
_MOST_FIELDS = 100
_NO_LABELS = ("core_attn",)
"""In force where selective recompute names none (`labkit.workload.recompute.Recompute.modules`)."""


class Control(NamedTuple):
    """One field of a workload that can be picked."""

    path: str
    """Dotted."""
    label: str
    group: str
    doubles: bool = False
    """Its neighbours are twice and half of it, not one more and one less."""
    only: tuple[str, ...] = ()
    """The options that say all by themselves; empty: all that the field may be."""

    @property
    def about(self) -> dict[str, Any]:
        """As plain data: what kind of control, with which options."""
        kind, options, optional = _kind(self.path)
        options = self.only or options
        return {**self._asdict(), "kind": kind, "options": list(options), "optional": optional}


_LAYOUT, _BATCH, _TRAINING = "parallelism", "batch", "training"

CONTROLS = (
    Control(f"{_LAYOUT}.world_size", "GPUs", "layout", doubles=True),
    Control(f"{_LAYOUT}.tensor_model_parallel_size", "TP", "layout", doubles=True),
    Control(f"{_LAYOUT}.context_parallel_size", "CP", "layout", doubles=True),
    Control(f"{_LAYOUT}.pipeline_model_parallel_size", "PP", "layout", doubles=True),
    Control(f"{_LAYOUT}.virtual_pipeline_model_parallel_size", "VPP", "layout"),
    Control(f"{_LAYOUT}.expert_model_parallel_size", "EP", "layout", doubles=True),
    Control(f"{_LAYOUT}.expert_tensor_parallel_size", "ETP", "layout", doubles=True),
    Control(f"{_LAYOUT}.sequence_parallel", "sequence parallel", "layout"),
    Control(f"{_BATCH}.seq_length", "sequence length", "batch", doubles=True),
    Control(f"{_BATCH}.micro_batch_size", "micro-batch", "batch", doubles=True),
    Control(f"{_BATCH}.global_batch_size", "global batch", "batch", doubles=True),
    Control("routing.kind", "expert routing", "batch", only=("balanced", "allowance", "worst")),
    Control(f"{_TRAINING}.gpu", "GPU", "training"),
    Control(f"{_TRAINING}.optimizer.optimizer", "optimizer", "training"),
    Control(f"{_TRAINING}.data_parallel.use_distributed_optimizer", "distributed optimizer", "training"),
    Control(f"{_TRAINING}.optimizer.use_precision_aware_optimizer", "precision-aware optimizer", "training"),
    Control(f"{_TRAINING}.data_parallel.grad_reduce_in_fp32", "reduce gradients in fp32", "training"),
    Control(f"{_TRAINING}.optimizer.main_grads_dtype", "main gradients", "training"),
    Control(f"{_TRAINING}.optimizer.main_params_dtype", "main parameters", "training"),
    Control(f"{_TRAINING}.optimizer.exp_avg_dtype", "first moment", "training"),
    Control(f"{_TRAINING}.optimizer.exp_avg_sq_dtype", "second moment", "training"),
    Control(f"{_TRAINING}.kernels.attention_backend", "attention", "training"),
)
"""In the order in which they are shown, but for recompute's."""
_BY_PATH = {control.path: control for control in CONTROLS}

MODES = ("none", "selective", "full uniform", "full block")
MODE, LABELS, LAYERS, FP8 = "recompute.mode", "recompute.recompute_modules", "recompute.recompute_num_layers", "fp8"
"""Fields that no field of a workload is alone: how recompute is chosen; whether FP8, where the start has it, stays."""
_OWN = (MODE, LABELS, LAYERS, FP8)


class Choice(NamedTuple):
    """What is picked."""

    start: str
    """Key of a start (`Starts`)."""
    fields: tuple[tuple[str, Hashable], ...] = ()
    """By path: what the start has otherwise, or the same."""

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Choice":
        """What a front end has sent: `{"start": KEY, "fields": {PATH: VALUE}}`.

        Raises:
            InputError: that is not its form, or names no control.
        """
        start, fields = message.get("start"), message.get("fields", {})
        if not isinstance(start, str) or not isinstance(fields, Mapping) or len(fields) > _MOST_FIELDS:
            raise InputError("explorer: a choice is a start and its fields")
        for path in fields:
            if path not in _BY_PATH and path not in _OWN:
                raise InputError(f"explorer: no control {shown(path)}{nearest(str(path)[:80], _BY_PATH)}")
        return cls(start, tuple((str(path), _frozen(value)) for path, value in fields.items()))


def _frozen(value: object) -> Hashable:
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, str | int | float | bool | NoneType):
        return value
    raise InputError(f"explorer: {shown(value)} is no value of a control")


class Starts:
    """What can be started from: the workload that was given, those that ship with labkit, and its models."""

    def __init__(self, given: Workload | None = None) -> None:
        self._given = given
        self._names = {kind: list(shipped(kind)) for kind in ("workloads", "models")}

    @property
    def default(self) -> str:
        """Key of what is shown first."""
        return f"workloads/{self._names['workloads'][0]}" if self._given is None else GIVEN

    @property
    def listed(self) -> list[dict[str, Any]]:
        """Groups of keys with their names, as plain data."""
        given = [] if self._given is None else [("given", [(GIVEN, self._given.model.name)])]
        groups = given + [
            (kind, [(f"{kind}/{name}", name) for name in self._names[kind]]) for kind in ("workloads", "models")
        ]
        return [
            {"group": group, "starts": [{"key": key, "name": name} for key, name in entries]}
            for group, entries in groups
        ]

    def workload(self, key: str) -> Workload:
        """The workload that a key stands for.

        Raises:
            InputError: there is none.
        """
        if key == GIVEN and self._given is not None:
            return self._given
        kind, _, name = key.partition("/")
        if name not in self._names.get(kind, ()):
            raise InputError(f"explorer: no start {shown(key)}")
        return _shipped(kind, name)


@cache
def _shipped(kind: str, name: str) -> Workload:
    if kind == "workloads":
        return Workload.load(data_directory() / "workloads" / f"{name}.yaml")
    return starting_workload(name)


class Picked(NamedTuple):
    """What comes of a choice."""

    workload: Workload | None
    """None where a value is of the wrong type."""
    findings: tuple[Found, ...]
    """Errors first."""

    @property
    def can_run(self) -> bool:
        """Whether there is something to price."""
        return self.workload is not None and not any(found.severity == "error" for found in self.findings)


def picked(choice: Choice, starts: Starts) -> Picked:
    """The workload of a choice with the rules it breaks, in the words of `labkit check`.

    Raises:
        InputError: the start does not exist.
    """
    start = starts.workload(choice.start)
    try:
        workload = Workload.unchecked(_mapping(start, dict(choice.fields)), "explorer")
    except InputError as error:
        problem = str(error).removeprefix("explorer: ")
        field, _, reason = problem.partition(": ")
        remedy = "give it another value"
        wrong = Found(
            severity="error", field=field, reason=reason, remedy=remedy, authority="labkit", authority_file=""
        )
        return Picked(None, (wrong,))
    return Picked(workload, tuple(map(Found.of, workload.findings)))


def _mapping(start: Workload, fields: dict[str, Hashable]) -> dict[str, Any]:
    """The start with fields changed; what it leaves open and keeps its value stays open."""
    mapping = start.model_dump(exclude_unset=True)
    now = values(start)
    for path, value in fields.items():
        if path in _BY_PATH and value != now[path]:
            if path == "routing.kind":
                mapping["routing"] = None if value is None else {"kind": value}
                continue
            *sections, last = path.split(".")
            at = mapping
            for section in sections:
                at[section] = at.get(section) or {}
                at = at[section]
            at[last] = value
    recompute = {path: fields.get(path, now[path]) for path in (MODE, LABELS, LAYERS)}
    if recompute != {path: now[path] for path in recompute}:
        mapping["recompute"] = _recompute(recompute)
    if fields.get(FP8, now[FP8]) is False and now[FP8]:
        launch = mapping["launch"]
        launch["arguments"] = [each for each in launch["arguments"] if not each.startswith("--fp8")]
    return mapping


def _recompute(fields: Mapping[str, Hashable]) -> dict[str, Any]:
    """Megatron's four fields, those alone that go with the mode."""
    granularity, _, method = str(fields[MODE]).partition(" ")
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": fields[LAYERS]}
    if granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": fields[LABELS]}
    return {"recompute_granularity": None if granularity == "none" else fields[MODE]}


def values(workload: Workload) -> dict[str, Any]:
    """What the controls show of a workload, by path."""
    found = {control.path: _value(workload, control.path) for control in CONTROLS}
    recompute = workload.recompute
    granularity, method = recompute.recompute_granularity, recompute.recompute_method
    labels = _NO_LABELS if recompute.recompute_modules is None else recompute.recompute_modules
    return {
        **found,
        MODE: f"full {method}" if granularity == "full" else granularity or "none",
        LABELS: tuple(labels) if granularity == "selective" else (),
        LAYERS: recompute.recompute_num_layers or 1,
        FP8: has_fp8(workload),
    }


def has_fp8(workload: Workload) -> bool:
    """Whether its launch asks for FP8."""
    return workload.launch is not None and any(each.startswith("--fp8") for each in workload.launch.arguments)


def _value(workload: Workload, path: str) -> Any:
    value: Any = workload
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _kind(path: str) -> tuple[Literal["flag", "one of", "number"], Sequence[str], bool]:
    """Kind of a field's control, its options, and whether it may be left out, by the field's type."""
    *sections, last = path.split(".")
    part: type[BaseModel] = Workload
    optional = False
    for section in sections:
        part, absent = _without_none(part.model_fields[section].annotation)
        optional |= absent
    annotation, absent = _without_none(part.model_fields[last].annotation)
    optional |= absent
    if annotation is bool:
        return "flag", (), optional
    options = _options(annotation)
    return ("one of", options, optional) if options else ("number", (), optional)


def _options(annotation: Any) -> list[str]:
    """Of literals, one or a union of them."""
    if get_origin(annotation) in (UnionType, Union):
        return [option for each in get_args(annotation) for option in _options(each)]
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _without_none(annotation: Any) -> tuple[Any, bool]:
    options = get_args(annotation) if get_origin(annotation) in (UnionType, Union) else (annotation,)
    left = [option for option in options if option is not NoneType]
    return (left[0] if len(left) == 1 else annotation), len(left) < len(options)


def controls() -> dict[str, Any]:
    """All there is to pick from, as plain data."""
    return {
        "controls": [control.about for control in CONTROLS],
        "modes": list(MODES),
        "labels": list(RECOMPUTE_MODULES),
    }
