"""Other ways out than a recompute choice: layouts, smaller micro-batches and shorter sequences that fit."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from labkit.plan.price import Priced, Pricer, has_long_regions
from labkit.plan.ranking import Ranking
from labkit.plan.space import other_settings, recompute_choices, resized
from labkit.ranges import left_open
from labkit.workload import Recompute, Workload
from labkit.workload.unstated import with_fields

_FRACTIONS, _SIXTEENTHS = 64, 16


def settings_that_fit(ranking: Ranking, choices: list[Recompute] | None = None) -> Iterator[tuple[Priced, int]]:
    """Other settings in which something seems to fit, nearest first, each with its cheapest choice that does.

    Beside it is how many were priced. `choices`: these alone; all that can run if left out. Regions of several layers
    replay as much as single layers do: they are looked at where nothing else fits.
    """
    for other in other_settings(ranking.control.workload):
        pricer = Pricer(other)
        possible = list(recompute_choices(other)) if choices is None else _runnable(other, choices)
        short, long = ([each for each in possible if has_long_regions(each) is is_long] for is_long in (False, True))
        count = 0
        for part in (short, long):
            priced = list(pricer.each(pricer.worth_pricing(part)))
            count += len(priced)
            fitting = [each for each in priced if each.covered_bytes <= ranking.budget.bytes]
            if fitting:
                yield ranking.cheapest(fitting), count
                break


def _runnable(workload: Workload, choices: list[Recompute]) -> list[Recompute]:
    return [each for each in choices if workload.model_copy(update={"recompute": each}).can_run]


class Shorter(NamedTuple):
    """A workload with shorter sequences."""

    fits: Workload
    """The longest whose peak and margin are within the budget, for which expandable segments have room."""
    runs: Workload | None
    """The longest tried with which the allocator, as it is set, gets along; None: with none that was tried."""


def longest_that_fits(ranking: Ranking, choice: Recompute) -> Shorter | None:
    """The workload with the longest sequences that fit under a choice, in 64ths of its own; None if none do.

    Peaks rise with the length, fragments follow no rule: the former are bisected, and the allocator is tried there and
    at shorter lengths one after the other, a sixteenth shorter each, down to the half; then at those in between.
    """
    cases = (resized(ranking.control.workload, part, _FRACTIONS) for part in range(1, _FRACTIONS))
    runnable = [case for case in cases if case is not None and _runnable(case, [choice])]
    count = bisect_left(runnable, True, key=lambda case: not ranking.has_room(Pricer(case).price(choice)))
    if not count:
        return None
    places = sorted({count * part // _SIXTEENTHS for part in range(_SIXTEENTHS // 2, _SIXTEENTHS + 1)} - {0})
    runs = next((place for place in reversed(places) if _runs(ranking, choice, runnable[place - 1])), None)
    if runs is None:
        return Shorter(runnable[count - 1], None)
    above = next((place for place in places if place > runs), runs)
    finer = (place for place in range(above - 1, runs, -1) if _runs(ranking, choice, runnable[place - 1]))
    return Shorter(runnable[count - 1], runnable[next(finer, runs) - 1])


def _runs(ranking: Ranking, choice: Recompute, case: Workload) -> bool:
    """The allocator gets along where blocks fit."""
    return not ranking.is_scattered(Pricer(case).price(choice))


def optimizers_that_fit(ranking: Ranking, choice: Recompute) -> Iterator[tuple[str, Priced]]:
    """Optimizers that hold less, and fit under a choice: what to set, and the price."""
    for words, fields in _OPTIMIZERS:
        other = with_fields(ranking.control.workload, fields)
        if other is None or other == ranking.control.workload:
            continue
        priced = Pricer(other).price(choice)
        if ranking.fits(priced):
            yield words, priced


_PRECISION: dict[str, object] = {"training.optimizer.use_precision_aware_optimizer": True}
_MOMENTS: dict[str, object] = {
    "training.optimizer.exp_avg_dtype": "bf16",
    "training.optimizer.exp_avg_sq_dtype": "bf16",
}
_OPTIMIZERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("the distributed optimizer", {"training.data_parallel.use_distributed_optimizer": True}),
    ("use_precision_aware_optimizer, its dtypes as they are,", _PRECISION),
    ("use_precision_aware_optimizer with bf16 moments", _PRECISION | _MOMENTS),
    (
        "use_precision_aware_optimizer with bf16 moments and gradients",
        _PRECISION | _MOMENTS | {"training.optimizer.main_grads_dtype": "bf16"},
    ),
)
"""Each holds less than the ones before."""


class Span(NamedTuple):
    """Peaks with their margins by what a workload does not state."""

    low_bytes: int
    high_bytes: int


def span(choice: Priced) -> Span:
    """The least and the most that a choice may need: what moves its peak one way taken together."""
    low = high = choice.covered_bytes
    fields: dict[bool, dict[str, object]] = {False: {}, True: {}}
    for opened in left_open(choice.workload):
        for each in (each for each in opened.choices[1:] if each.plausible):
            for is_higher in (False, True):
                together = with_fields(choice.workload, {**each.fields, **fields[is_higher]})
                if together is None:
                    continue
                covered = Pricer(together).price(choice.workload.recompute).covered_bytes
                if is_higher and covered > high:
                    high, fields[True] = covered, {**each.fields, **fields[True]}
                elif not is_higher and covered < low:
                    low, fields[False] = covered, {**each.fields, **fields[False]}
    return Span(low, high)


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
    theirs = _sizes(other)
    return tuple(name for name, value in _sizes(workload).items() if value != theirs[name])


def difference(workload: Workload, other: Workload) -> str:
    """The same with their values, by the names they go by (`TP 8, MBS 1`)."""
    theirs = _sizes(other)
    return ", ".join(f"{_SHORT.get(name, name)} {theirs[name]}" for name in changed_sizes(workload, other))


_SHORT = {
    "tensor_model_parallel_size": "TP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "pipeline_model_parallel_size": "PP",
    "micro_batch_size": "MBS",
}


def _sizes(workload: Workload) -> dict[str, object]:
    layout, batch = workload.parallelism.model_dump(), workload.batch.model_dump()
    follow = {"sequence_parallel", "world_size"}
    sizes = {name: value for name, value in layout.items() if name not in follow}
    return sizes | {name: batch[name] for name in ("micro_batch_size", "global_batch_size")}
