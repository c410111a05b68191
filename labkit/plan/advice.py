"""Which recompute choice to try first for a workload, and why: all that can run, priced, ranked by what replay costs.

A choice fits where its peak with the estimate's margin is within the budget. Of those that fit the cheapest replay is
first; where the workload fits as it is, the one that saves most for its cost. Costs are lower bounds of time
(`labkit.memory.replay`), and where the host sets the pace a step takes longer by the number of regions, not by their
work (docs/replay_cost.md): so choices closer to the cheapest than `TIE` of a step are alike, and then the one with the
fewest regions to run again is first.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Self

from labkit.errors import InputError
from labkit.ledger import MATERIAL, WITHOUT_ACTIVATIONS
from labkit.memory.estimate import estimate
from labkit.plan.advised import Advice, Option, Saving
from labkit.plan.price import NEAR, Priced, exactly, priced
from labkit.plan.space import other_settings, recompute_choices
from labkit.ranges import left_open
from labkit.workload import Recompute, Workload
from labkit.workload.gpu import GIB, GPUS

TIE = 0.01
"""Of a step's least time."""
_BACKWARD = 2.0
"""Backward does twice the products of forward: of inputs and of weights."""
_SHOWN_NARROWER, _SHOWN_SETTINGS, _SHOWN_TENSORS = 4, 3, 4
_FRACTIONS = 16


class Budget(NamedTuple):
    """What a rank may allocate."""

    name: str
    bytes: int

    @classmethod
    def read(cls, text: str) -> Self:
        """`80GB`, `74.5 GiB`, a number of bytes, or a GPU's name.

        Raises:
            InputError: it is none of these.
        """
        if text in GPUS:
            return cls(GPUS[text].name, GPUS[text].total_memory_bytes)
        found = _SIZE.fullmatch(text.strip())
        nbytes = round(float(found[1]) * _UNITS[(found[2] or "B").lower()]) if found else 0
        if not _LEAST_BYTES <= nbytes < _MOST_BYTES:
            such = f"80GB, 74.5GiB or {next(iter(GPUS))}"
            raise InputError(f"budget {text[:80]!r} is no amount of memory; use one such as {such}")
        return cls(text.strip(), nbytes)


_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)\s*(B|[KMGT]i?B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"b": 1} | {
    f"{letter}{binary}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for binary, base in (("", 1000), ("i", 1024))
}
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**50
"""Less is a number whose unit was forgotten."""


def advise(workload: Workload, budget: Budget | None = None, *, settings: bool = False) -> Advice:
    """Price every recompute choice of a workload and propose which to try.

    Args:
        workload: As it runs, or as it fails.
        budget: What a rank may allocate; the memory of the workload's GPU by default.
        settings: Also look at other layouts and micro-batches; done anyway where no recompute choice fits.
    """
    gpu = GPUS[workload.training.gpu]
    budget = budget or Budget(gpu.name, gpu.total_memory_bytes)
    # Where nothing is asked for, an empty list is the same.
    empty = (
        ()
        if workload.recompute.recompute_granularity
        else (Recompute(recompute_granularity="selective", recompute_modules=()),)
    )
    possible = [each for each in recompute_choices(workload) if each not in empty]
    choices = list(dict.fromkeys([workload.recompute, *possible]))
    found = _Found(workload, budget, list(priced(workload, choices)))
    others = list(_settings(found)) if settings or not found.fitting else []
    first = found.first()
    return Advice(
        workload=workload,
        workload_hash=workload.content_hash,
        budget_name=budget.name,
        budget_bytes=budget.bytes,
        considered=len(choices),
        control=found.shown(found.control),
        first=None if first is None else found.shown(first),
        labels=None if found.best_list is None else found.shown(found.best_list),
        options=tuple(map(found.option, found.front())),
        settings=tuple(found.option(each, _difference(workload, each.workload)) for each in others),
        savings=() if first is None or first is found.control else tuple(_savings(found.control, first)),
        sentences=(*_sentences(found, first, others), *_unpriced(workload)),
    )


class _Found:
    """All choices, priced."""

    def __init__(self, workload: Workload, budget: Budget, choices: Sequence[Priced]) -> None:
        self.workload = workload
        self.budget = budget
        self.choices = choices
        self._exact: dict[Workload, Priced] = {}
        self.control = choices[0]
        # Running everything again is a forward, and backward is twice as much.
        self.step_seconds = (1 + _BACKWARD) * max(each.replay.seconds for each in choices)
        self.fitting = [each for each in choices if self.fits(each)]

    def fits(self, choice: Priced) -> bool:
        """Whether its peak and margin are within the budget; near it the exact price decides."""
        over = choice.covered_bytes / self.budget.bytes - 1
        return over < 0 if abs(over) > NEAR else self.exact(choice).covered_bytes <= self.budget.bytes

    def exact(self, choice: Priced) -> Priced:
        """The choice at its exact price, where it is looked at more closely."""
        if choice.workload not in self._exact:
            self._exact[choice.workload] = exactly(choice)
        return self._exact[choice.workload]

    def first(self) -> Priced | None:
        """See the module."""
        if not self.fitting:
            return None
        control = self.control
        if not self.fits(control) or control.replay.seconds > self._tie:
            return self.cheapest(self.fitting)
        saving = [each for each in self.front() if control.peak_bytes - each.peak_bytes > MATERIAL * control.peak_bytes]
        if not saving:
            return control
        worth = {
            id(each): (control.peak_bytes - each.peak_bytes) / (each.replay.seconds + self._tie) for each in saving
        }
        return max(saving, key=lambda each: worth[id(each)])

    @cached_property
    def lists(self) -> list[Priced]:
        """Choices that are lists of labels."""
        return [each for each in self.choices if each.workload.recompute.recompute_granularity == "selective"]

    @cached_property
    def best_list(self) -> Priced | None:
        """Of lists of labels the first that fits."""
        fitting = [each for each in self.lists if self.fits(each)]
        return self.cheapest(fitting) if fitting else None

    @property
    def _tie(self) -> float:
        return TIE * self.step_seconds

    def cheapest(self, choices: Sequence[Priced]) -> Priced:
        """Of those whose cost is alike the one with the fewest regions, then the cheapest."""
        least = min(each.replay.seconds for each in choices)
        alike = [each for each in choices if each.replay.seconds <= least + self._tie]
        return min(alike, key=lambda each: (each.regions, each.replay.seconds))

    def front(self) -> list[Priced]:
        """Choices that no cheaper one undercuts, cheapest first; of those alike the narrowest."""
        front: list[Priced] = []
        left = list(self.choices)
        while left:
            best = self.cheapest(left)
            front.append(best)
            left = [each for each in left if each.peak_bytes < best.peak_bytes * (1 - MATERIAL)]
        return front

    def option(self, choice: Priced, setting: str = "") -> Option:
        """A choice as it is listed."""
        return self._option(choice, self.control, fits=self.fits(choice), setting=setting)

    def state(self, choice: Priced) -> str:
        """What a choice holds, in words, at its exact price."""
        exact = self.exact(choice)
        stage = f" of stage {exact.stage}" if exact.workload.parallelism.pp > 1 else ""
        return f"{_gib(exact.peak_bytes)} in {exact.phase}{stage}, {_gib(exact.covered_bytes)} with its margin"

    def shown(self, choice: Priced) -> Option:
        """A choice at its exact price."""
        return self._option(self.exact(choice), self.exact(self.control), fits=self.fits(choice))

    def _option(self, choice: Priced, control: Priced, *, fits: bool, setting: str = "") -> Option:
        return Option(
            recompute=choice.workload.recompute,
            label=choice.label,
            setting=setting,
            stage=choice.stage,
            peak_phase=choice.phase,
            peak_iteration=choice.iteration,
            peak_allocated_bytes=choice.peak_bytes,
            covered_bytes=choice.covered_bytes,
            saved_bytes=control.peak_bytes - choice.peak_bytes,
            fits=fits,
            replay_seconds=choice.replay.seconds,
            replay_flops=choice.replay.flops,
            replay_communicated_bytes=choice.replay.communicated_bytes,
            replay_regions=choice.regions,
        )


def _settings(found: _Found) -> Iterator[Priced]:
    """Other settings in which something fits, each with its cheapest choice that does."""
    few = [each for each in recompute_choices(found.workload) if _is_plain(each)]
    for other in other_settings(found.workload):
        fitting = [
            each
            for each in priced(other, [each for each in few if other.model_copy(update={"recompute": each}).can_run])
            if found.fits(each)
        ]
        if fitting:
            yield found.cheapest(fitting)


def _is_plain(choice: Recompute) -> bool:
    """Lists of at most one label, and full recompute layer by layer."""
    return len(choice.modules) < 2 if choice.recompute_granularity == "selective" else choice.recompute_num_layers == 1


def _difference(workload: Workload, other: Workload) -> str:
    """The sizes in which another setting differs."""
    ours, theirs = workload.model_dump(), other.model_dump()
    return ", ".join(
        f"{name} {value}"
        for part in ("parallelism", "batch")
        for name, value in theirs[part].items()
        if value != ours[part][name]
    )


def _savings(control: Priced, first: Priced) -> Iterator[Saving]:
    """What the first choice does not hold where the control peaks, tensor by tensor of like modules."""
    held = [_held(each, control.iteration, control.phase) for each in (control, first)]
    saved = held[0] - held[1]
    for tensor, nbytes in saved.most_common(_SHOWN_TENSORS):
        if nbytes >= MATERIAL * control.peak_bytes:
            yield Saving(tensor=tensor, bytes=nbytes)


def _held(choice: Priced, iteration: int, phase: str) -> Counter[str]:
    """Bytes by tensor, without layers' numbers, at the largest moment of a phase."""
    ledger = estimate(choice.workload, choice.stage).ledger
    clock = next(peak.clock for peak in ledger.phase_peaks() if (peak.iteration, peak.phase) == (iteration, phase))
    held: Counter[str] = Counter()
    for row in ledger.at(clock).rows:
        module = ".".join(part for part in row.module.split(".") if not part.isdigit())
        held[f"{module.removeprefix('decoder.layers.')} {row.tensor}".strip()] += row.block_bytes
    return held


def _sentences(found: _Found, first: Priced | None, others: Sequence[Priced]) -> Iterator[str]:
    control, budget = found.control, found.budget
    allowed = f"{budget.name} ({_gib(budget.bytes)})"
    if first is None:
        yield from _refusal(found, others)
        return
    if first is control:
        yield f"Run it as it is, {control.label}: {found.state(control)} fits {allowed}, and no choice saves more."
        return
    share = first.replay.seconds / found.step_seconds
    cost = f"its replay takes at least {_ms(first)} a step, {share:.1%} of the least that its layers take"
    if not found.fits(control):
        over = found.exact(control).covered_bytes - budget.bytes
        yield f"As it is, {control.label}, it does not fit {allowed}: {found.state(control)}, {_gib(over)} too much."
        yield f"Try {first.label} first: {found.state(first)}, the cheapest choice that fits; {cost}."
    elif control.replay.seconds > first.replay.seconds + found._tie:
        less = (control.replay.seconds - first.replay.seconds) * 1e3
        state = found.state(first)
        yield f"Try {first.label} first: {state} fits {allowed} with {less:.2f} ms a step less to run again."
    else:
        yield f"As it is, {control.label}, it fits {allowed}: {found.state(control)}."
        saved = _gib(found.exact(control).peak_bytes - found.exact(first).peak_bytes)
        yield f"Try {first.label} first where memory is wanted: it saves {saved}; {cost}."
    if found.exact(first).fragmentation:
        yield found.exact(first).fragmentation
    yield from _narrower(found, first)
    yield from _of_labels(found, first)
    yield from _floor(found, first)


def _unpriced(workload: Workload) -> Iterator[str]:
    """What the peaks leave out, and what they rest on."""
    if opened := list(left_open(workload)):
        fields = ", ".join(dict.fromkeys(each.field for each in opened))
        yield f"The peaks rest on what the workload does not state ({fields}): labkit estimate gives their range."
    yield from (
        str(each) for each in workload.findings if each.severity == "warning" and each.field.startswith("launch.")
    )


def _refusal(found: _Found, others: Sequence[Priced]) -> Iterator[str]:
    """Why nothing fits, and what would."""
    budget = found.budget
    allowed = f"{budget.name} ({_gib(budget.bytes)})"
    least = min(found.choices, key=lambda each: each.covered_bytes)
    yield f"No recompute choice fits {allowed}: the least is {least.label} with {found.state(least)}."
    floor = min(each.floor_bytes for each in found.choices)
    if floor > budget.bytes:
        yield (
            f"Before any activation the optimizer step needs {_gib(floor)}: no label helps; more GPUs, a distributed "
            "optimizer or smaller optimizer dtypes do."
        )
    for each in others[:_SHOWN_SETTINGS]:
        yield f"{_difference(found.workload, each.workload)} fits with {each.label}: {found.state(each)}."
    length = _longest(found, least.workload.recompute)
    if length is not None:
        yield f"Sequences of up to {length} tokens fit with {least.label}."
    if not others and length is None:
        yield f"No other layout of {found.workload.parallelism.world_size} GPUs fits either; use more of them."


def _longest(found: _Found, choice: Recompute) -> int | None:
    """The longest sequence that fits under a choice, in sixteenths of the workload's."""
    batch = found.workload.batch
    if batch.packed is not None:
        return None
    for part in reversed(range(1, _FRACTIONS)):
        if batch.seq_length * part % _FRACTIONS == 0:
            length = batch.seq_length * part // _FRACTIONS
            update = {"recompute": choice, "batch": batch.model_copy(update={"seq_length": length})}
            shorter = found.workload.model_copy(update=update)
            if shorter.can_run and found.fits(next(priced(shorter, [choice]))):
                return length
    return None


def _narrower(found: _Found, first: Priced) -> Iterator[str]:
    """Why what recomputes less does not do: only where the control does not fit."""
    if found.fits(found.control):
        return
    modules = first.workload.recompute.modules
    cheaper = [
        each
        for each in found.choices
        if not found.fits(each) and each is not found.control and each.replay.seconds <= first.replay.seconds
    ]
    inside = [each for each in cheaper if modules and each.workload.recompute.modules < modules]
    nearest = sorted(inside or cheaper, key=lambda each: each.covered_bytes)[:_SHOWN_NARROWER]
    if not inside:
        # Of every kind one: the nearest list of labels, whatever is nearer of the others.
        lists = sorted((each for each in cheaper if each in found.lists), key=lambda each: each.covered_bytes)
        nearest = [*nearest[: _SHOWN_NARROWER - 1], *(each for each in lists[:1] if each not in nearest)]
    for each in nearest:
        over = _gib(found.exact(each).covered_bytes - found.budget.bytes)
        yield f"{each.label} is narrower and holds {found.state(each)}: {over} too much."


def _of_labels(found: _Found, first: Priced) -> Iterator[str]:
    """The narrowest list of labels that fits, where neither the control does nor the first choice is a list."""
    if found.fits(found.control) or first.workload.recompute.modules:
        return
    best = found.best_list
    if best is None:
        least = min(found.lists, key=lambda each: each.covered_bytes)
        yield f"No list of labels fits: the least is {least.label} with {found.state(least)}."
        return
    cost = f"{_ms(best)} of replay a step"
    yield f"Of lists of labels {best.label} is the first that fits: {found.state(best)}, {cost}; no narrower one does."


def _floor(found: _Found, first: Priced) -> Iterator[str]:
    if first.phase in WITHOUT_ACTIVATIONS:
        what = "the optimizer step" if first.phase == "optimizer" else first.phase.replace("_", " ")
        yield f"More labels will not lower the peak: {what} holds it now, where no activations are left."
        return
    lower = [each for each in found.front() if each.peak_bytes < first.peak_bytes * (1 - MATERIAL)]
    if not lower:
        yield "No other choice goes lower."


def _ms(choice: Priced) -> str:
    return f"{choice.replay.seconds * 1e3:.2f} ms"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
