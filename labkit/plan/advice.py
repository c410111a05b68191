"""Which recompute choice to try first for a workload, and why: all that can run, priced and ranked."""

from collections.abc import Iterable, Iterator

from labkit.ledger import MATERIAL, rarely_collected
from labkit.memory.outline import tensor
from labkit.plan.advised import Advice, IdleLabel, LabelPrice, Option, Saving
from labkit.plan.budget import Budget
from labkit.plan.price import Priced, Pricer
from labkit.plan.ranking import Ranking
from labkit.plan.reasons import Words
from labkit.plan.space import is_plain, recompute_choices, why_not
from labkit.plan.ways import difference, settings_that_fit
from labkit.workload import Recompute, Workload
from labkit.workload.recompute import RECOMPUTE_MODULES

_SHOWN_TENSORS = 4
_NO_LABELS = Recompute(recompute_granularity="selective", recompute_modules=())


@rarely_collected()
def advise(workload: Workload, budget: Budget | None = None, *, settings: bool = False) -> Advice:
    """Price every recompute choice of a workload and propose which to try.

    Args:
        workload: As it runs, or as it fails.
        budget: What a rank may allocate; the memory of the workload's GPU by default.
        settings: Also look at all choices in other layouts and micro-batches. At the plain ones anyway where nothing
            fits.
    """
    possible = list(recompute_choices(workload))
    control = workload.recompute
    # Where nothing is asked for, an empty list is the same.
    same = {control} if control.recompute_granularity else {control, _NO_LABELS}
    pricer = Pricer(workload)
    choices = [control, *pricer.worth_pricing(each for each in possible if each not in same)]
    priced = list(pricer.each(choices))
    ranking = Ranking(budget or Budget.of(workload.training.gpu), priced, pricer.step_seconds)
    first, considered = ranking.first, len(priced)
    others: list[Priced] = []
    if settings or first is None:
        plain = None if settings else [each for each in possible if is_plain(each)]
        for other, count in settings_that_fit(ranking, plain):
            others.append(other)
            considered += count
    words = Words(ranking, others)
    said = list(words.sentences())
    options = _Options(ranking)
    return Advice(
        workload=workload,
        workload_hash=workload.content_hash,
        budget_name=ranking.budget.name,
        budget_bytes=ranking.budget.bytes,
        step_seconds=ranking.step_seconds,
        considered=considered,
        control=options.exact(ranking.control),
        first=None if first is None else options.exact(first),
        labels=None if ranking.first_list is None else options.exact(ranking.first_list),
        options=tuple(map(options.listed, sorted(priced, key=lambda each: (each.replay.seconds, each.peak_bytes)))),
        settings=tuple(
            options.listed(each, difference(workload, each.workload))
            for each in others
            if ranking.seems_to_fit(each) is not False
        ),
        alone=tuple(_label_prices(workload, (label for label in RECOMPUTE_MODULES if _alone(label) in possible))),
        idle=tuple(
            IdleLabel(label=label, reason=reason)
            for label in RECOMPUTE_MODULES
            if (reason := why_not(workload, _alone(label)))
        ),
        savings=() if first is None or first is ranking.control else tuple(_savings(ranking, first)),
        sentences=tuple(each.text for each in said),
        remedies=tuple(each.text for each in said if each.proposes),
        why_not_less=tuple(words.why_not_less()),
    )


class _Options:
    """Makes options of priced choices, at their exact prices where they were looked at."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._front = {id(each) for each in ranking.front}

    def exact(self, choice: Priced) -> Option:
        """A choice at its exact price."""
        self._ranking.exact(choice)
        return self.listed(choice)

    def listed(self, choice: Priced, setting: str = "") -> Option:
        """A choice as it is listed."""
        ranking = self._ranking
        is_exact = ranking.has_seen(choice)
        shown, control = (ranking.exact(each) if is_exact else each for each in (choice, ranking.control))
        fits, on_front = ranking.seems_to_fit(choice), id(choice) in self._front
        return self._option(shown, control, setting, fits=fits, on_front=on_front, is_exact=is_exact)

    def _option(
        self, choice: Priced, control: Priced, setting: str = "", *, fits: bool | None, on_front: bool, is_exact: bool
    ) -> Option:
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
            retained_bytes=choice.retained_bytes,
            is_exact=is_exact,
            fits=fits,
            on_front=on_front,
            replay_seconds=choice.replay.seconds,
            replay_share=choice.replay.seconds / self._ranking.step_seconds,
            replay_flops=choice.replay.flops,
            replay_communicated_bytes=choice.replay.communicated_bytes,
            replay_regions=choice.regions,
        )


def _label_prices(workload: Workload, labels: Iterable[str]) -> Iterator[LabelPrice]:
    """What each label saves and costs alone, in tensors to the byte."""
    pricer = Pricer(workload, tensor)
    nothing = pricer.price(_NO_LABELS)
    for label in labels:
        alone = pricer.price(_alone(label))
        yield LabelPrice(
            label=label,
            retained_saved_bytes=nothing.retained_bytes - alone.retained_bytes,
            peak_saved_bytes=nothing.peak_bytes - alone.peak_bytes,
            replay_seconds=alone.replay.seconds,
            replay_regions=alone.regions,
        )


def _alone(label: str) -> Recompute:
    return _NO_LABELS.model_copy(update={"recompute_modules": (label,)})


def _savings(ranking: Ranking, first: Priced) -> Iterator[Saving]:
    least = MATERIAL * ranking.control.peak_bytes
    for name, nbytes in ranking.savings(first).most_common(_SHOWN_TENSORS):
        if nbytes >= least:
            yield Saving(tensor=name, bytes=nbytes)
