"""A commented study of a workload, to be changed: its candidates are what `labkit plan` proposes for it.

What is said of a key is what `StudyFile` and `Slurm` say of theirs. A line that is switched off is in the file only if
the study with it holds to every rule.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.drivers.recorded import Published
from labkit.errors import InputError
from labkit.plan import Advice, advise
from labkit.plan.advised import Option, file_name
from labkit.starters.text import MARK, comment, documented, entry, inline
from labkit.study.matrix import StudyFile, stated_workloads
from labkit.study.slurm import Slurm
from labkit.workload import Recompute, Workload
from labkit.workload.files import data_directory
from labkit.workload.gpu import GPUS, gib

_SLURM_EXAMPLES: dict[str, Any] = {
    "partition": "gpu",
    "account": "mine",
    "qos": "normal",
    "constraint": "h100",
    "nodes": 1,
    "gpus_per_node": 8,
    "cpus_per_task": 16,
    "mem_gb": 64,
    "jobs": 4,
}
_LEAST_LENGTH = 128
_MOST_TENSOR_PARALLEL = 8


def starter_name(reference: str, kind: str) -> str:
    """Name of a starter, and of its file without the ending, of what it is about: a name or a path."""
    return f"{file_name(Path(reference).name.removesuffix('.yaml').removesuffix('.yml'))}-{kind}"


def study_starter(workload: Workload, base: str, path: Path) -> str:
    """The text of a study file.

    Args:
        workload: What it is about.
        base: How the file refers to it: a path from the file's folder, or a name in `data/workloads`.
        path: Where the file is to go; named in what it says to run next.
    """
    return "\n".join(_Starter(workload, base, path).lines()) + "\n"


class _Starter:
    """Writes one."""

    def __init__(self, workload: Workload, base: str, path: Path) -> None:
        self._workload, self._path = workload, path
        self._advice = advise(workload)
        self._known = frozenset(workload.findings)
        self._said = documented(StudyFile)
        proposed = self._advice.study()
        chosen = [Recompute.model_validate(each["recompute"]) for each in proposed["candidates"]]
        self._chosen = list(map(self._overlay, chosen))
        taken = {workload.recompute.label, *(each.label for each in chosen)}
        self._further = [each for each in _plain_choices(self._advice) if each.label not in taken]
        self._study: dict[str, Any] = {
            "name": starter_name(base, "study"),
            "title": f"Recompute choices for {workload.model.name}",
            "base": base,
            "control": self._overlay(workload.recompute),
            "candidates": self._chosen,
        }

    def _overlay(self, choice: Recompute) -> dict[str, Any]:
        """A choice as it is laid over the base: what it says, and what of the base's it takes back."""
        before = self._workload.recompute.model_dump(mode="json", exclude_none=True)
        stated = choice.model_dump(mode="json")
        fields = {name: value for name, value in stated.items() if value is not None or name in before}
        return {"recompute": fields or {"recompute_granularity": None}}

    def lines(self) -> Iterator[str]:
        """The file, line by line."""
        yield from self._head()
        for name in ("name", "title"):
            yield from entry(name, self._study[name], self._said[name], live=True)
        yield from entry("description", "What is asked, in a sentence.", self._said["description"])
        yield ""
        yield from entry("base", self._study["base"], self._said["base"], live=True)
        yield ""
        yield from self._control_and_candidates()
        yield ""
        yield from self._sweeps()
        yield ""
        yield from self._drivers()
        yield ""
        yield from self._figures_beside()
        yield ""
        yield from self._slurm()

    def _head(self) -> Iterator[str]:
        file = shlex.quote(self._path.name)
        yield from comment(
            f"A study of {self._workload.model.name}: which recompute choice? One control, and candidates that differ "
            "from it in one choice alone. Valid as it stands; change what you like, then"
        )
        yield "#"
        for command, does in (
            ("check", "names every rule that it breaks"),
            ("study run", "makes the results: traces, which need no GPU; safe to kill and run again"),
            ("report", "does the same and writes one HTML file into figures/"),
        ):
            yield from comment(f"- labkit {command} {file}: {does}")
        yield "#"
        yield from comment(
            f'A line that begins with "{MARK.strip()}" is an option: take "{MARK}" away to switch it on. Each is valid '
            "by itself; of those with the same key use one."
        )
        yield ""

    def _control_and_candidates(self) -> Iterator[str]:
        control = self._advice.control
        yield from comment(self._said["control"])
        yield from comment(f"Here the workload as it is: an estimated peak of {gib(control.peak_allocated_bytes)}.")
        yield "control:"
        yield f"  recompute: {inline(self._study['control']['recompute'])}"
        yield ""
        yield from comment(self._said["candidates"])
        first = self._advice.first
        tried = "" if first is None or first.label == control.label else f"; it would try {first.label} first"
        yield from comment(
            f"labkit plan priced {self._advice.considered} choices for this model and layout and proposes these"
            f"{tried}. Peaks are estimates (~: within 1 or 2 %, so that smaller differences tell nothing until "
            "they are traced), replay the least that running again takes."
        )
        yield "candidates:"
        options = {option.recompute: option for option in self._advice.options}
        options |= {each.recompute: each for each in (self._advice.first, self._advice.labels) if each is not None}
        for each in self._chosen:
            yield from self._candidate(options, each, "")
        for option in self._further:
            overlay = self._overlay(option.recompute)
            if self._holds({"candidates": [*self._chosen, overlay]}):
                yield from self._candidate({option.recompute: option}, overlay, MARK)
        yield from self._other_candidates()

    def _candidate(self, options: Mapping[Recompute, Option], overlay: Mapping[str, Any], mark: str) -> Iterator[str]:
        option = next(option for option in options.values() if self._overlay(option.recompute) == overlay)
        yield from comment(f"{option.label}: {_priced(option)}", "  ")
        yield f"  {mark}- recompute: {inline(overlay['recompute'])}"

    def _other_candidates(self) -> Iterator[str]:
        """A candidate that differs in another field."""
        kernels = self._workload.training.kernels
        fused = kernels.cross_entropy_loss_fusion
        change = {"training": {"kernels": {"cross_entropy_loss_fusion": not fused}}, **self._study["control"]}
        if self._holds({"candidates": [*self._chosen, change]}):
            yield from comment("Not only recompute: any one field of the workload.", "  ")
            yield f"  {MARK}- {inline(change)}"

    def _sweeps(self) -> Iterator[str]:
        yield from comment(self._said["sweep"])
        yield from comment("What the rules refuse in some settings is named, not run.")
        for key, values in _settings(self._workload):
            held = [value for value in values if self._holds({"sweep": {key: [value]}})]
            if len(held) > 1:
                yield f"{MARK}sweep: {inline({key: held})}"

    def _drivers(self) -> Iterator[str]:
        yield from entry("drivers", ["trace"], self._said["drivers"], live=True)
        yield from entry("repetitions", 3, self._said["repetitions"])

    def _figures_beside(self) -> Iterator[str]:
        yield from comment(f"{self._said['published']} (published: FILE.yaml)")
        yield from (f"{MARK}published: {inline(name)}" for name in self._published())
        yield from comment(f"{self._said['recorded']} (recorded: [FILE.yaml])")
        yield from comment(self._said["target"])
        gpu = next(name for name in GPUS if name != self._workload.training.gpu)
        yield f"{MARK}target: {inline({'gpu': gpu})}"
        yield f"{MARK}target: {inline({'peak_allocated_bytes': 9 * self._advice.budget_bytes // 10})}"

    def _slurm(self) -> Iterator[str]:
        said = documented(Slurm)
        yield from comment(f"{self._said['slurm']} What is left out is the cluster's own choice.")
        yield "slurm:"
        for name, field in Slurm.model_fields.items():
            live = name not in _SLURM_EXAMPLES
            value = field.default if live else _SLURM_EXAMPLES[name]
            yield from entry(name, value, said[name], indent="  ", live=live)

    def _published(self) -> Iterator[str]:
        """Names of shipped publications whose figures are of the study."""
        workloads = list(self._workloads({}))
        for path in sorted((data_directory() / "published").glob("*.yaml")):
            try:
                Published.load(path).check(workloads)
            except InputError:
                continue
            yield path.stem

    def _workloads(self, changes: Mapping[str, Any]) -> Iterator[Workload]:
        """Those of the study with other keys."""
        base = self._workload.model_dump(exclude_unset=True)
        for _, each in stated_workloads({**self._study, "base": base, **changes}, self._path):
            yield each

    def _holds(self, changes: Mapping[str, Any]) -> bool:
        """Whether the study with other keys breaks no rule that the workload does not break."""
        try:
            return all(self._known.issuperset(each.findings) for each in self._workloads(changes))
        except InputError:
            return False


def _plain_choices(advice: Advice) -> Iterator[Option]:
    """Each label alone, and full recompute layer by layer."""
    labels = {each.label for each in advice.alone}
    for option in advice.options:
        choice = option.recompute
        full = choice.recompute_granularity == "full" and choice.recompute_method == "uniform"
        if (full and choice.recompute_num_layers == 1) or (len(choice.modules) == 1 and choice.modules <= labels):
            yield option


def _priced(option: Option) -> str:
    about = "" if option.is_exact else "~"
    saved = gib(abs(option.saved_bytes))
    against = "as" if saved == gib(0) else f"{saved} {'less' if option.saved_bytes > 0 else 'more'} than"
    replay = f"replay {option.replay_seconds * 1e3:.2f} ms a step (+{option.replay_share:.1%})"
    return f"peak {about}{gib(option.peak_allocated_bytes)}, {against} the control; {replay}"


def _settings(workload: Workload) -> Sequence[tuple[str, list[Any]]]:
    """Fields that a sweep may go through, with values around the workload's own."""
    batch, layout = workload.batch, workload.parallelism
    lengths = [max(batch.seq_length // 2, _LEAST_LENGTH), batch.seq_length, 2 * batch.seq_length]
    sizes = [batch.micro_batch_size * factor for factor in (1, 2, 4)]
    tensor = [2**power for power in range(_MOST_TENSOR_PARALLEL.bit_length())]
    splits = layout.sequence_parallel or workload.model.mixture_of_experts is not None
    return (
        ("batch.seq_length", sorted(set(lengths))),
        ("batch.micro_batch_size", sizes),
        (
            "parallelism",
            [{"tensor_model_parallel_size": each, "sequence_parallel": splits and each > 1} for each in tensor],
        ),
    )
