"""Priced choices, ranked: which fit a budget, which is cheapest, which no other one undercuts.

Costs are lower bounds of time (`labkit.memory.replay`), and where the host sets the pace a step takes longer by the
number of regions, not by their work (docs/replay_cost.md): so choices closer to the cheapest than `TIE` of a step are
alike, and then the one with the fewest regions to run again is first.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from labkit.ledger import MATERIAL
from labkit.plan.budget import Budget
from labkit.plan.price import NEAR, Priced, exactly
from labkit.workload import Workload

TIE = 0.01
"""Of a step's least time."""


_LOOKS = 4
"""At choices near the budget, the cheapest first; then at as many that fit as they are listed; then at the lowest."""


class _Seen(NamedTuple):
    """A choice that was looked at."""

    priced: Priced
    """At its exact price."""
    held: Counter[str]
    """What it holds in the phase in which the control peaks."""
    reserved_bytes: int
    """What its segments come to where there is room for them."""
    runs: bool
    """The allocator gets along within the budget, if its blocks are within."""


class Ranking:
    """All choices of a workload, priced; the first is the workload as it is."""

    def __init__(self, budget: Budget, choices: Sequence[Priced], step_seconds: float) -> None:
        self.budget = budget
        self.choices = choices
        self.control = choices[0]
        self.step_seconds = step_seconds
        self._seen: dict[Workload, _Seen] = {}

    def exact(self, choice: Priced) -> Priced:
        """The choice at its exact price, where it is looked at more closely."""
        return self._look_at(choice).priced

    def has_seen(self, choice: Priced) -> bool:
        """Its exact price was asked for."""
        return choice.workload in self._seen

    def _look_at(self, choice: Priced) -> "_Seen":
        if choice.workload not in self._seen:
            priced, peaks = exactly(choice)
            # The books themselves would fill the host's memory.
            control = priced if choice is self.control else self.exact(self.control)
            held = peaks.held(control.iteration, control.phase)
            within = priced.covered_bytes <= self.budget.bytes
            runs = not within or peaks.runs_within(self.budget.bytes)
            self._seen[choice.workload] = _Seen(priced, held, peaks.reserved_bytes, runs)
        return self._seen[choice.workload]

    def savings(self, choice: Priced) -> Counter[str]:
        """Bytes by tensor of like modules that a choice with a lower peak does not hold where the control peaks."""
        if self.exact(choice).peak_bytes >= self.exact(self.control).peak_bytes:
            return Counter()
        return self._look_at(self.control).held - self._look_at(choice).held

    def fragmentation(self, choice: Priced) -> str:
        """What the allocator has to do for a choice within the budget (`Written.fragmentation`)."""
        beyond = self._look_at(choice).reserved_bytes > self.budget.bytes
        return exactly(choice).peaks.fragmentation(self.budget.bytes) if beyond else ""

    def is_scattered(self, choice: Priced) -> bool:
        """Its peak and margin are within the budget, and the allocator runs out of memory all the same."""
        seen = self._look_at(choice)
        return seen.priced.covered_bytes <= self.budget.bytes and not seen.runs

    def has_room(self, choice: Priced) -> bool:
        """Its peak and margin are within the budget, fragments aside; near the budget the exact price decides."""
        near = self.has_seen(choice) or self.seems_to_fit(choice) is None
        return (self.exact(choice) if near else choice).covered_bytes <= self.budget.bytes

    def seems_to_fit(self, choice: Priced) -> bool | None:
        """Whether its peak and margin are within the budget; None where they are too near for anything but `fits`."""
        if choice.workload in self._seen:
            return self._fits_exactly(choice)
        over = choice.covered_bytes / self.budget.bytes - 1
        return None if abs(over) <= NEAR else over < 0

    def fits(self, choice: Priced) -> bool:
        """Whether they are, and the allocator gets along; near the budget the exact price decides."""
        seems = self.seems_to_fit(choice)
        return self._fits_exactly(choice) if seems is None else seems

    def _fits_exactly(self, choice: Priced) -> bool:
        seen = self._look_at(choice)
        return seen.priced.covered_bytes <= self.budget.bytes and seen.runs

    @property
    def tie_seconds(self) -> float:
        """Costs that differ by less are alike."""
        return TIE * self.step_seconds

    def cheapest(self, choices: Sequence[Priced]) -> Priced:
        """Of those whose cost is alike the one with the fewest regions, then the cheapest."""
        least = min(each.replay.seconds for each in choices)
        alike = [each for each in choices if each.replay.seconds <= least + self.tie_seconds]
        return min(alike, key=lambda each: (each.regions, each.replay.seconds))

    def cheapest_that_fits(self, choices: Iterable[Priced]) -> Priced | None:
        """The cheapest of those that fit; None if none does."""
        left = [each for each in choices if self.seems_to_fit(each) is not False]
        looks = 0
        while left:
            best = self.cheapest(left)
            if self._fits_exactly(best):
                return best
            looks += 1
            left = [each for each in left if self.seems_to_fit(each) is not False]
            if looks == _LOOKS:
                left = [each for each in left if each.covered_bytes <= self.budget.bytes]
            elif looks == 2 * _LOOKS:
                left = sorted(left, key=lambda each: each.covered_bytes)[:1]
        return None

    @cached_property
    def first(self) -> Priced | None:
        """What to try first: the cheapest that fits, or where the workload fits as it is what saves most for its cost.

        None where nothing fits.
        """
        control = self.control
        if not self.fits(control) or control.replay.seconds > self.tie_seconds:
            return self.cheapest_that_fits(self.choices)
        saving = [each for each in self.front if control.peak_bytes - each.peak_bytes > MATERIAL * control.peak_bytes]
        if not saving:
            return control
        worth = {
            id(each): (control.peak_bytes - each.peak_bytes) / (each.replay.seconds + self.tie_seconds)
            for each in saving
        }
        return max(saving, key=lambda each: worth[id(each)])

    @cached_property
    def lists(self) -> list[Priced]:
        """Choices that are lists of labels."""
        return [each for each in self.choices if each.is_list]

    @cached_property
    def first_list(self) -> Priced | None:
        """Of lists of labels the first that fits."""
        return self.cheapest_that_fits(self.lists)

    @cached_property
    def front(self) -> list[Priced]:
        """Choices that no cheaper one undercuts, cheapest first; of those alike the narrowest."""
        front: list[Priced] = []
        left = list(self.choices)
        while left:
            best = self.cheapest(left)
            front.append(best)
            left = [each for each in left if each.peak_bytes < best.peak_bytes * (1 - MATERIAL)]
        return front
