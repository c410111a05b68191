"""A commented workload of a model, to be changed: on as few GPUs as an estimate finds to do.

What is said of a field is what the models of a workload say of it. A line that is switched off is in the file only if
the workload with it holds to every rule.
"""

import shlex
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, Self

from labkit.errors import InputError
from labkit.memory.outline import outline
from labkit.memory.units import chunks
from labkit.memory.weights import weights
from labkit.starters.text import MARK, comment, documented, entry, inline
from labkit.workload import RECOMPUTE_MODULES, Batch, Model, Parallelism, Recompute, Routing, Training, Workload
from labkit.workload.base import Part
from labkit.workload.files import model_mapping
from labkit.workload.gpu import GPUS, gib
from labkit.workload.unstated import open_fields

_SEQ_LENGTH = 4096
_PIPELINE, _TENSOR, _EXPERT = (1, 2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128)
_MOST_RANKS = 4096
_USED = 0.9
"""Of a GPU's memory at most, so that there is room for what the user changes."""
_STATE_BYTES = 12
"""Of a parameter at least, over all ranks: itself in fp32 and Adam's two moments."""
_RANK_BYTES = 4
"""Of a parameter at least, on each rank that has it: itself and its gradient in bf16."""
_KERNELS: tuple[dict[str, Any], ...] = (
    {},
    {"bias_activation_fusion": False},
    {"bias_dropout_fusion": False},
    {"bias_activation_fusion": False, "bias_dropout_fusion": False},
)
"""What some models cannot do without."""
_OPTIONS: dict[str, dict[str, Any]] = {
    "parallelism": {
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "cp_comm_type": "a2a",
        "virtual_pipeline_model_parallel_size": 2,
    },
    "batch": {"create_attention_mask_in_dataloader": True},
    "training": {
        "data_parallel": {"grad_reduce_in_fp32": True},
        "optimizer": {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    },
    "routing": {"kind": "allowance"},
}


def workload_starter(model: str, reference: str, path: Path) -> str:
    """The text of a workload file.

    Args:
        model: A name in `data/models`, or the path of a model's file.
        reference: How the file refers to it: that name, or the path from the file's folder.
        path: Where the file is to go; named in what it says to run next.

    Raises:
        InputError: no such model, or no layout is known in which it can run.
    """
    return "\n".join(_Starter(model, reference, path).lines()) + "\n"


def starting_workload(model: str) -> Workload:
    """What that file says: a model in `data/models` on as few GPUs as an estimate finds to do, in tenths of a second.

    Raises:
        InputError: no such model, or no layout is known in which it can run.
    """
    return _Starter(model, model, Path(f"{model}.yaml")).workload


class _Starter:
    """Writes one."""

    def __init__(self, model: str, reference: str, path: Path) -> None:
        self._path, self._reference = path, reference
        self._model = model_mapping(model, "labkit new workload", Path())
        self._gpu = next(iter(GPUS))
        self._mapping, self._peak_bytes = self._smallest()

    @property
    def workload(self) -> Workload:
        """What the file says."""
        return self._read(self._mapping)

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        yield from self._head()
        said = "A name in data/models, the path of a model's file (./mine.yaml), or its fields (docs/workload.md)."
        yield from entry("model", self._reference, said, live=True)
        yield ""
        yield from self._part("parallelism", Parallelism)
        yield ""
        yield from self._part("batch", Batch)
        yield ""
        yield from self._recompute()
        yield ""
        yield from self._part("training", Training)
        yield from self._open()
        yield from self._routing()

    def _head(self) -> Iterator[str]:
        file, ranks = shlex.quote(self._path.name), self._mapping["parallelism"]["world_size"]
        yield from comment(
            f"A workload of {self._model['name']}: what one training step runs, on {ranks} x {GPUS[self._gpu].name}, "
            f"where it has an estimated peak of {gib(self._peak_bytes)}. Valid as it stands; change what you like, then"
        )
        yield "#"
        for command, does in (
            ("check", "names every rule that it breaks"),
            ("estimate", "says what a rank holds"),
            ("plan", "says what to recompute"),
            ("new study", "writes a study of it"),
        ):
            yield from comment(f"- labkit {command} {file}: {does}")
        yield "#"
        yield from comment(
            f'A line that begins with "{MARK.strip()}" is an option: take "{MARK}" away to switch it on. Each is valid '
            "by itself; of those with the same key use one. Field names are Megatron Core's; docs/workload.md has all."
        )
        yield ""

    def _part(self, name: str, part: type[Part]) -> Iterator[str]:
        """A part: what it states, then what it may state."""
        said = documented(part)
        yield f"{name}:"
        stated = self._mapping[name]
        for field, value in stated.items():
            others = f"Or {', '.join(name for name in GPUS if name != value)}." if field == "gpu" else said[field]
            yield from entry(field, value, others, indent="  ", live=True)
        for field, value in _OPTIONS[name].items():
            if field not in stated and self._holds({name: {**stated, field: value}}):
                yield from entry(field, value, said[field], indent="  ")

    def _recompute(self) -> Iterator[str]:
        labels = [label for label in RECOMPUTE_MODULES if self._holds({"recompute": _selective(label)})]
        full = Recompute(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
        yield from comment("What backward runs again instead of keeping; labkit plan says which to try first.")
        yield from comment(f"Labels that save something in this model: {', '.join(labels) or 'none'}.")
        yield from comment(f"Every layer: {inline(full.model_dump(exclude_none=True))}.")
        yield from entry("recompute", self._mapping["recompute"], live=True)

    def _open(self) -> Iterator[str]:
        """What decides the peak and is not stated."""
        fields = [each for each in open_fields(self._read(self._mapping)) if each.field.startswith("training.")]
        stated = self._mapping["training"]
        for each in fields:
            (_, part, name) = each.field.split(".")
            value = each.alternatives[0].fields[each.field]
            held = self._holds({"training": {**stated, part: {**stated.get(part, {}), name: value}}})
            if held and part not in stated and part not in _OPTIONS["training"]:
                said = f"Left open, taken as {each.assumed}: {each.cause}."
                yield from entry(part, {name: value}, said, indent="  ")

    def _routing(self) -> Iterator[str]:
        if "mixture_of_experts" in self._model:
            yield ""
            yield from entry("routing", _OPTIONS["routing"], f"{Routing.__doc__} Left out, it is open.")

    def _smallest(self) -> tuple[dict[str, Any], int]:
        """The workload on the fewest ranks whose estimated peak leaves room, and that peak."""
        most = _USED * GPUS[self._gpu].total_memory_bytes
        kernels = self._kernels()
        ranks = 1
        count = _Count.of(self._read(self._described(_layout(1, 1, 1, None), kernels)).model)
        while ranks * most < _STATE_BYTES * (count.dense + count.expert):
            ranks *= 2
        while ranks <= _MOST_RANKS:
            for layout in self._layouts(ranks):
                mapping = self._described(layout, kernels)
                workload = self._read(mapping)
                if count.state_bytes(workload.parallelism) <= most and not workload.findings:
                    peak = max(outline(workload, stage).peak_bytes for stage in {0, workload.parallelism.pp - 1})
                    if peak <= most:
                        return mapping, peak
            ranks *= 2
        raise InputError(f"{self._reference}: no layout of up to {_MOST_RANKS} ranks is known that holds it")

    def _kernels(self) -> dict[str, Any]:
        one = _layout(1, 1, 1, 1 if "mixture_of_experts" in self._model else None)
        for kernels in _KERNELS:
            if not self._read(self._described(one, kernels)).findings:
                return kernels
        self._read(self._described(one, {})).checked(self._reference)
        return {}

    def _layouts(self, ranks: int) -> Iterator[dict[str, Any]]:
        """Layouts of so many ranks, pipelines last."""
        expert = _EXPERT if "mixture_of_experts" in self._model else (None,)
        for pp, tp, ep in product(_PIPELINE, _TENSOR, expert):
            if ranks % (pp * tp) == 0 and ranks % (pp * (ep or 1)) == 0:
                yield _layout(ranks, pp, tp, ep)

    def _described(self, layout: Mapping[str, Any], kernels: Mapping[str, Any]) -> dict[str, Any]:
        pp = layout.get("pipeline_model_parallel_size", 1)
        dp = layout["world_size"] // (layout["tensor_model_parallel_size"] * pp)
        return {
            "model": self._reference,
            "parallelism": dict(layout),
            "batch": {"seq_length": _SEQ_LENGTH, "micro_batch_size": 1, "global_batch_size": dp * pp},
            "recompute": {"recompute_granularity": "selective", "recompute_modules": []},
            "training": {"gpu": self._gpu} | ({"kernels": dict(kernels)} if kernels else {}),
        }

    def _read(self, mapping: Mapping[str, Any]) -> Workload:
        return Workload.unchecked({**mapping, "model": self._model}, self._reference)

    def _holds(self, changes: Mapping[str, Any]) -> bool:
        """Whether the workload with other parts breaks no rule."""
        try:
            return not self._read({**self._mapping, **changes}).findings
        except InputError:
            return False


class _Count(NamedTuple):
    """Elements of a model's parameters."""

    dense: int
    expert: int
    """Of those that expert-parallel ranks divide."""

    @classmethod
    def of(cls, model: Model) -> Self:
        """As `labkit.memory.parameters.parameter_count` counts them."""
        whole = Workload(
            model=model, parallelism=Parallelism(world_size=1), batch=Batch(seq_length=_SEQ_LENGTH, global_batch_size=1)
        )
        counted = [0, 0]
        for block in (block for chunk in chunks(whole, 0) for block in weights(chunk)):
            for part in block.flat:
                counted[".experts." in part.parameter.name] += part.numel * len(part.numbers) * len(block.repeats)
        return cls(*counted)

    def state_bytes(self, layout: Parallelism) -> float:
        """What a rank holds between steps at least, on the average of the stages."""
        ranks = layout.tp * layout.pp, layout.etp * layout.ep * layout.pp
        copies = max(layout.dp, 1) * layout.cp, max(layout.edp, 1)
        return sum(
            count / divided * (_RANK_BYTES + _STATE_BYTES / times)
            for count, divided, times in zip(self, ranks, copies, strict=True)
        )


def _selective(label: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": [label]}


def _layout(ranks: int, pp: int, tp: int, ep: int | None) -> dict[str, Any]:
    """As a file states it; `ep` is None of a model without experts."""
    layout: dict[str, Any] = {"world_size": ranks, "tensor_model_parallel_size": tp}
    if pp > 1:
        layout["pipeline_model_parallel_size"] = pp
    if ep is not None:
        layout |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    return layout | {"sequence_parallel": tp > 1}
