"""Other ways out than a recompute choice: layouts, smaller micro-batches and shorter sequences that fit."""

from collections.abc import Iterator

from labkit.plan.price import Priced, Pricer
from labkit.plan.ranking import Ranking
from labkit.plan.space import other_settings, recompute_choices, shorter
from labkit.workload import Recompute, Workload

_FRACTIONS = 16


def settings_that_fit(ranking: Ranking, choices: list[Recompute] | None = None) -> Iterator[tuple[Priced, int]]:
    """Other settings in which something seems to fit, nearest first, each with its cheapest choice that does.

    Beside it is how many were priced. `choices`: these alone; all that can run if left out. Regions of several layers
    replay as much as single layers do: they are looked at where nothing else fits.
    """
    for other in other_settings(ranking.control.workload):
        pricer = Pricer(other)
        possible = list(recompute_choices(other)) if choices is None else _runnable(other, choices)
        long = [each for each in possible if each.recompute_method == "uniform" and each.recompute_num_layers != 1]
        count = 0
        for part in ([each for each in possible if each not in long], long):
            priced = list(pricer.each(pricer.worth_pricing(part)))
            count += len(priced)
            fitting = [each for each in priced if each.covered_bytes <= ranking.budget.bytes]
            if fitting:
                yield ranking.cheapest(fitting), count
                break


def _runnable(workload: Workload, choices: list[Recompute]) -> list[Recompute]:
    return [each for each in choices if workload.model_copy(update={"recompute": each}).can_run]


def longest_that_fits(ranking: Ranking, choice: Recompute) -> Workload | None:
    """The workload with the longest sequences that fit under a choice, in sixteenths of its own; None if none do."""
    for part in reversed(range(1, _FRACTIONS)):
        case = shorter(ranking.control.workload, part, _FRACTIONS)
        if case is not None and _runnable(case, [choice]) and ranking.fits(Pricer(case).price(choice)):
            return case
    return None


def layouts_that_fit(ranking: Ranking, choice: Recompute) -> Iterator[Priced]:
    """Other settings in which a choice fits: of those that change one size alone, the nearest for each."""
    found = set()
    for other in other_settings(ranking.control.workload):
        changed = changed_sizes(ranking.control.workload, other)
        if len(changed) > 1 or changed in found:
            continue
        for possible in _runnable(other, [choice]):
            priced = Pricer(other).price(possible)
            if ranking.fits(priced):
                found.add(changed)
                yield priced


def changed_sizes(workload: Workload, other: Workload) -> tuple[str, ...]:
    """The sizes in which another setting differs, but for what follows from them."""
    return tuple(name for name, value in _sizes(workload).items() if value != _sizes(other)[name])


def difference(workload: Workload, other: Workload) -> str:
    """The same with their values."""
    return ", ".join(f"{name} {_sizes(other)[name]}" for name in changed_sizes(workload, other))


def _sizes(workload: Workload) -> dict[str, object]:
    layout, batch = workload.parallelism.model_dump(), workload.batch.model_dump()
    follow = {"sequence_parallel", "world_size"}
    sizes = {name: value for name, value in layout.items() if name not in follow}
    return sizes | {name: batch[name] for name in ("micro_batch_size", "global_batch_size")}
