"""The advice in sentences: what to try, what it holds and costs, and why nothing narrower does."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from labkit.ledger import MATERIAL, WITHOUT_ACTIVATIONS
from labkit.plan.price import EVERY_LAYER, Priced
from labkit.plan.ranking import Ranking
from labkit.plan.ways import difference, layouts_that_fit, longest_that_fits, optimizers_that_fit, span
from labkit.ranges import left_open
from labkit.workload import Recompute, Workload
from labkit.workload.gpu import gib

_SHOWN_NARROWER, _SHOWN_SETTINGS = 4, 3


class Said(NamedTuple):
    """A sentence."""

    text: str
    proposes: bool = False
    """It names something to try."""


class Words(NamedTuple):
    """Says what a ranking comes to."""

    ranking: Ranking
    others: Sequence[Priced]
    """Other settings in which something fits, nearest first."""

    def sentences(self) -> Iterator[Said]:
        """The advice and its reasons."""
        first = self.ranking.first
        yield from self._refusal() if first is None else self._proposal(first)
        yield from map(Said, _not_priced(self.ranking.control.workload))
        yield from map(Said, self._rests_on(first))

    def why_not_less(self) -> Iterator[str]:
        """Why what recomputes less than the first choice does not do; nothing where the workload fits as it is."""
        first = self.ranking.first
        if first is not None and not self.ranking.fits(self.ranking.control):
            yield from self._narrower(first)

    @property
    def _allowed(self) -> str:
        budget = self.ranking.budget
        return f"{budget.name} ({gib(budget.bytes)})"

    def _state(self, choice: Priced) -> str:
        """What a choice holds, at its exact price."""
        exact = self.ranking.exact(choice)
        stage = f" of stage {exact.stage}" if exact.workload.parallelism.pp > 1 else ""
        return f"{gib(exact.peak_bytes)} in {exact.phase}{stage}, {gib(exact.covered_bytes)} with its margin"

    def _too_much(self, choice: Priced) -> str:
        if self.ranking.is_scattered(choice):
            return "the allocator's segments are too much (training.allocator.expandable_segments: true may help)"
        return f"{gib(self.ranking.exact(choice).covered_bytes - self.ranking.budget.bytes)} too much"

    def _proposal(self, first: Priced) -> Iterator[Said]:
        ranking, control = self.ranking, self.ranking.control
        said = control.workload.recompute.said
        if first is control:
            state = self._state(control)
            no_other = "no choice saves more"
            yield Said(f"Run it as it is, {said}: {state} fits {self._allowed}, and {no_other}.", proposes=True)
            return
        share = first.replay.seconds / ranking.step_seconds
        cost = f"its replay takes at least {_ms(first)} a step, {share:.1%} of the least that a step takes"
        if not ranking.fits(control):
            short = f"{self._state(control)}, {self._too_much(control)}"
            yield Said(f"As it is, {said}, it does not fit {self._allowed}: {short}.")
            cheapest = f"{self._state(first)}, the cheapest choice that fits; {cost}"
            yield Said(f"Try {first.label} first: {cheapest}.", proposes=True)
        elif control.replay.seconds > first.replay.seconds + ranking.tie_seconds:
            less = f"{(control.replay.seconds - first.replay.seconds) * 1e3:.2f} ms a step less to run again"
            text = f"Try {first.label} first: {self._state(first)} fits {self._allowed} with {less}."
            yield Said(text, proposes=True)
        else:
            yield Said(f"As it is, {said}, it fits {self._allowed}: {self._state(control)}.")
            saved = gib(ranking.exact(control).peak_bytes - ranking.exact(first).peak_bytes)
            yield Said(f"Try {first.label} first where memory is wanted: it saves {saved}; {cost}.", proposes=True)
        if fragmentation := ranking.fragmentation(first):
            yield Said(fragmentation)
        yield from self._of_labels(first)
        yield from map(Said, self._floor(first))
        if not ranking.fits(control):
            yield from self._every_layer(first)
            yield from self._as_it_is(control.workload.recompute)

    def _every_layer(self, first: Priced) -> Iterator[Said]:
        """Full recompute layer by layer, where less than that is proposed."""
        every = next((each for each in self.ranking.choices if each.workload.recompute == EVERY_LAYER), None)
        if every is not None and every is not first and self.ranking.fits(every):
            holds = f"{self._state(every)}; {_ms(every)} of replay"
            yield Said(f"Full recompute of every layer, {every.label}, holds {holds}.", proposes=True)

    def _as_it_is(self, choice: Recompute) -> Iterator[Said]:
        """Settings in which the workload fits without another choice."""
        for other in islice(layouts_that_fit(self.ranking, choice), _SHOWN_SETTINGS):
            yield Said(f"As it is it fits with {self._difference(other)}: {self._state(other)}.", proposes=True)
        yield from self._shorter(choice, "as it is")

    def _shorter(self, choice: Recompute, how: str) -> Iterator[Said]:
        fitting = longest_that_fits(self.ranking, choice)
        if fitting is not None:
            fits, runs = fitting
            if runs == fits:
                yield Said(f"{_lengths(fits)} tokens fit {how}.", proposes=True)
                return
            yield Said(f"{_lengths(fits)} tokens fit {how} with expandable segments.", proposes=True)
            if runs is not None:
                yield Said(f"{_lengths(runs)} tokens fit {how} with the allocator as it is set.", proposes=True)

    def _refusal(self) -> Iterator[Said]:
        """Why nothing fits, and what would."""
        ranking = self.ranking
        least = min(ranking.choices, key=lambda each: each.covered_bytes)
        segments = f", and {self._too_much(least)}" if ranking.is_scattered(least) else ""
        state = f"the least is {least.label} with {self._state(least)}{segments}"
        yield Said(f"No recompute choice fits {self._allowed}: {state}.")
        floor = min(each.floor_bytes for each in ranking.choices)
        if floor > ranking.budget.bytes:
            yield Said(f"Before any activation the optimizer step needs {gib(floor)}: no label helps.")
        optimizers = list(islice(optimizers_that_fit(ranking, least.workload.recompute), 1))
        for words, priced in optimizers:
            yield Said(f"With {words} {least.label} fits: {self._state(priced)}.", proposes=True)
        settings = list(islice(filter(ranking.fits, self.others), _SHOWN_SETTINGS))
        for each in settings:
            yield Said(f"{self._difference(each)} fits with {each.label}: {self._state(each)}.", proposes=True)
        shorter = list(self._shorter(least.workload.recompute, f"with {least.label}"))
        yield from shorter
        if not (optimizers or settings or shorter):
            ranks = least.workload.parallelism.world_size
            others = "No other layout of its GPUs fits either" if ranks > 1 else "Nothing else that one GPU can do fits"
            yield Said(f"{others}; use more of them.", proposes=True)

    def _difference(self, other: Priced) -> str:
        return difference(self.ranking.control.workload, other.workload)

    def _narrower(self, first: Priced) -> Iterator[str]:
        ranking = self.ranking
        modules = first.workload.recompute.modules
        cheaper = [
            each
            for each in ranking.choices
            if each is not ranking.control
            and each.replay.seconds <= first.replay.seconds
            and ranking.seems_to_fit(each) is not True
        ]
        inside = [each for each in cheaper if modules and each.workload.recompute.modules < modules]
        nearest = sorted(inside or cheaper, key=lambda each: each.covered_bytes)
        if not inside:
            # Of every kind one: the nearest list of labels, whatever is nearer of the others.
            lists, others = ([each for each in nearest if each.is_list is is_list] for is_list in (True, False))
            nearest = [*others[: _SHOWN_NARROWER - 1], *lists] if len(others) else lists
        for each in nearest[:_SHOWN_NARROWER]:
            if not ranking.fits(each):
                yield f"{each.label} is narrower and holds {self._state(each)}: {self._too_much(each)}."

    def _of_labels(self, first: Priced) -> Iterator[Said]:
        """The narrowest list of labels that fits, where neither the control does nor the first choice is a list."""
        ranking = self.ranking
        if ranking.fits(ranking.control) or first.workload.recompute.modules:
            return
        best = ranking.first_list
        if best is None:
            least = min(ranking.lists, key=lambda each: each.covered_bytes)
            yield Said(f"No list of labels fits: the least is {least.label} with {self._state(least)}.")
            return
        state = f"{self._state(best)}, {_ms(best)} of replay a step"
        text = f"Of lists of labels {best.label} is the first that fits: {state}; no narrower one does."
        yield Said(text, proposes=True)

    def _floor(self, first: Priced) -> Iterator[str]:
        if first.phase in WITHOUT_ACTIVATIONS:
            what = WITHOUT_ACTIVATIONS[first.phase]
            yield f"More labels will not lower the peak: {what} holds it now, where no activations are left."
            return
        if not any(each.peak_bytes < first.peak_bytes * (1 - MATERIAL) for each in self.ranking.choices):
            yield "No other choice goes lower."

    def _rests_on(self, first: Priced | None) -> Iterator[str]:
        """What the workload does not state, and what that may do to the first choice."""
        opened = list(left_open(self.ranking.control.workload))
        if not opened:
            return
        fields = ", ".join(dict.fromkeys(each.field for each in opened))
        choice = first or self.ranking.control
        low, high = span(choice)
        decides = " That decides whether it fits." if low <= self.ranking.budget.bytes < high else ""
        between = f"between {gib(low)} and {gib(high)} with its margin"
        yield f"By what the workload does not state {choice.label} needs {between}: {fields}.{decides}"


def _lengths(workload: Workload) -> str:
    """How long its sequences are."""
    packed = workload.batch.packed
    return f"Sequences of {workload.batch.seq_length}" if packed is None else f"Packs of {packed.rows}"


def _not_priced(workload: Workload) -> Iterator[str]:
    """What the peaks leave out."""
    yield from (
        str(each) for each in workload.findings if each.severity == "warning" and each.field.startswith("launch.")
    )


def _ms(choice: Priced) -> str:
    return f"{choice.replay.seconds * 1e3:.2f} ms"
