"""How to spread what cannot be divided over micro-batches: as few as possible, and those balanced.

Packing bins is a hard problem, and a shared prefix makes it harder. What is found here is found by rules of thumb
(largest first, into the emptiest or the first that has room); how few micro-batches would do at the very least is
proven apart (`_least_count`, `_apart`). Where both are equal, no split has fewer.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from heapq import heapreplace
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np

from labkit.admission.passes import Load, Pass, Prices, Sums, Way
from labkit.admission.requests import Item
from labkit.memory.extent import Extent

_PACE = 64
"""Numbers of micro-batches are tried one by one up to here, and in so many steps from one to its double further on."""
_HALVINGS = 4
_FEW = 64
"""Items, of which every one may be looked at beside every other."""
_COPIES = 128
"""Of an item beside itself, at most, by which its weight is told."""
_NEARLY = 1.05
"""Bins that weigh more than what has room need not be priced; weights are that near."""


class Batch(NamedTuple):
    """Items as one micro-batch, at its price."""

    items: tuple[Item, ...]
    load: Load
    peak: float
    covered: float
    reserved: float
    needed: float
    phase: tuple[int, str]
    exact: bool = False
    """The estimate's own figures, not bounds."""


class Split(NamedTuple):
    """What came of it."""

    batches: list[Batch]
    unfit: list[Batch]
    """Those that do not fit by themselves; `batches` is empty then."""
    least: int
    """No split has fewer micro-batches."""


def split(run: Pass, items: Sequence[Item], prefixes: Mapping[str, int]) -> Split:
    """Spread the items over micro-batches that fit; `prefixes` has the tokens of each prefix."""
    return _Spreading(run, items, prefixes).split()


class _Priced(NamedTuple):
    """The cheapest way to run each of some bins."""

    ways: list[Way]
    chosen: list[int]
    """Their places in `prices`."""
    needed: list[float]
    prices: Prices

    @property
    def worst(self) -> float:
        return max(self.needed)


type Bin = Sequence[int]
"""Numbers of items."""


class _Spreading:
    """Items, by number, and what they weigh."""

    def __init__(self, run: Pass, items: Sequence[Item], prefixes: Mapping[str, int]) -> None:
        self.run, self.items, self.prefixes = run, items, prefixes
        self.sums = [run.sums(item.lengths, 0 if item.prefix is None else prefixes[item.prefix]) for item in items]
        self.weights: list[float] = []
        self.capacity = 0.0
        self.runs: list[list[int]] = []
        """Where each is padded to the longest: sequences of like lengths, as many together as fit."""
        self._known: dict[tuple[int, int], float] = {}
        self.fewest = len(items)
        """Micro-batches of the best split so far."""

    def split(self) -> Split:
        """See the module."""
        run, everything = self.run, range(len(self.items))
        together = self.priced([everything])
        if together.worst <= run.limit:
            return Split([self._batch(everything, together, 0)], [], 1)
        single = self.priced([[each] for each in everything])
        large = [each for each in everything if single.needed[each] > run.limit]
        lonely = [_closer(run, self._batch([each], single, each)) for each in large]
        unfit = [each for each in lonely if each.needed > run.limit]
        if unfit:
            return Split([], unfit, 0)
        rest = [each for each in everything if single.needed[each] <= run.limit]
        least = self._least_count(reserved=not lonely) if run.grows else 1
        self.runs = [] if run.packs else self._runs(rest, run.limit) or []
        if run.grows and not lonely and all(len(item.positions) == 1 for item in self.items):
            # No micro-batch has more sequences beside a longest one than a run has, and runs leave none out.
            least = max(least, len(self.runs))
        self._weigh(least)
        found = self._together(rest, max(least - len(lonely), 1)) if rest else []
        if len(found) + len(lonely) > least and run.grows:
            least = max(least, self._apart(len(found) + len(lonely), reserved=not lonely))
        batches = sorted([*lonely, *found], key=lambda each: min(item.positions[0] for item in each.items))
        return Split(batches, [], least)

    def _weigh(self, least: int) -> None:
        """What items weigh beside each other: a rule of thumb, by which they are spread before they are priced.

        That is a part of what as many of their like as a micro-batch may hold come to.
        """
        run, nothing = self.run, self.run.sums((1,), 0)
        tokens = sum([each.tokens for each in self.sums]) // least
        times = [min(max(tokens // each.tokens, 1), _COPIES) if run.packs else 1 for each in self.sums]
        alike = [each.times(count) for each, count in zip(self.sums, times, strict=True)]
        needed = np.minimum(run.prices([(each, 0) for each in (nothing, *alike)]).needed, 2.0**60).tolist()
        self.weights = [max((each - needed[0]) / count, 1.0) for each, count in zip(needed[1:], times, strict=True)]
        self.capacity = run.limit - needed[0]

    def priced(self, bins: Sequence[Bin]) -> _Priced:
        """Each bin in the way that needs least: whole, or with a prefix that all share once."""
        ways = [self._ways(each) for each in bins]
        prices = self.run.prices([way for each in ways for way in each])
        needed = prices.needed.tolist()
        chosen, at = [], 0
        for each in ways:
            chosen.append(min(range(at, at + len(each)), key=needed.__getitem__))
            at += len(each)
        flat = [way for each in ways for way in each]
        return _Priced([flat[each] for each in chosen], chosen, [needed[each] for each in chosen], prices)

    def _ways(self, members: Bin) -> list[Way]:
        sums: Sums = reduce(add, [self.sums[each] for each in members])
        first = self.items[members[0]].prefix
        shares = first is not None and self.run.packs_trees and sums.sequences > 1
        if not shares or first is None or any(self.items[each].prefix != first for each in members):
            return [(sums, 0)]
        return [(sums, 0), (sums, self.prefixes[first])]

    def _batch(self, members: Bin, priced: _Priced, at: int) -> Batch:
        items = tuple([self.items[each] for each in members])
        sums, shared = priced.ways[at]
        load = Load(tuple([length for item in items for length in item.lengths]), shared, sums)
        peak, covered, reserved, needed, phase_of = priced.prices
        place = priced.chosen[at]
        held, with_margin, set_aside, most = (float(each[place]) for each in (peak, covered, reserved, needed))
        return Batch(items, load, held, with_margin, set_aside, most, phase_of(place))

    def _together(self, rest: Bin, least: int) -> list[Batch]:
        """The best of some ways to spread items that fit alone."""
        best: Sequence[Bin] = [[each] for each in rest]
        priced, self.fewest = self.priced(best), len(best)
        for bins in self._proposals(rest, least):
            if len(bins) > len(best):
                continue
            found = self.priced(bins)
            if found.worst <= self.run.limit and (len(bins), found.worst) < (len(best), priced.worst):
                best, priced, self.fewest = bins, found, len(bins)
            if len(best) == least:
                break
        if 1 < len(rest) <= _FEW and len(best) == len(rest):
            # What is sure, and slow: each into the first that has room at its price.
            bins = self._first_fit(sorted(rest, key=lambda each: -self.weights[each]))
            if len(bins) < len(best):
                best, priced = bins, self.priced(bins)
        return [self._batch(members, priced, at) for at, members in enumerate(best)]

    def _proposals(self, rest: Bin, least: int) -> Iterator[Sequence[Bin]]:
        """Ways to spread items, those that promise most first."""
        families: dict[str, list[int]] = {}
        for each in rest:
            prefix = self.items[each].prefix
            if prefix is not None and self.run.packs_trees:
                families.setdefault(prefix, []).append(each)
        if self.runs:
            yield self._even_runs(rest)
        if families:
            pure = self._in_parts([*families.values()])
            others = [each for each in rest if self.items[each].prefix is None]
            yield from self._with_others(pure, others)
        count = max(least, 2)
        while count < self.fewest:
            for bins in self._spread(rest, count):
                if max(map(self._weight, bins)) <= self.capacity * _NEARLY:
                    yield bins
            count += 1 + count // _PACE

    def _even_runs(self, members: Bin) -> Sequence[Bin]:
        """Sequences of like lengths together, which pads least; and so that the fullest holds less."""
        found, low, high = self.runs, 0.0, float(self.run.limit)
        while len(members) <= _FEW and high - low > high / 8:
            middle = (low + high) / 2
            runs = self._runs(members, middle)
            if runs is None or len(runs) > len(self.runs):
                low = middle
            else:
                found, high = runs, middle
        return found

    def _runs(self, members: Bin, limit: float) -> list[list[int]] | None:
        """From the longest on, each as many as fit; None where one does not."""
        order = sorted(members, key=lambda each: -self.sums[each].longest)
        bins: list[list[int]] = []
        at, taken = 0, 1
        while at < len(order):
            taken = self._run(order, at, taken, limit)
            if not taken:
                return None
            bins.append([*order[at : at + taken]])
            at += taken
        return bins

    def _run(self, order: Bin, at: int, least: int, limit: float) -> int:
        """How many from a place on fit; those before were at least `least`, and longer."""
        longest, fits = self.sums[order[at]].longest, 0
        counts = range(1, least + 2)
        while True:
            there = [count for count in counts if at + count <= len(order)]
            sequences = list(accumulate(self.sums[each].sequences for each in order[at : at + counts[-1]]))
            needed = self._padded([sequences[count - 1] for count in there], longest)
            within = [count for count, each in zip(there, needed, strict=True) if each <= limit]
            fits = max(fits, *within, 0)
            if len(within) < len(counts):
                return fits
            counts = range(counts[-1] + 1, 2 * counts[-1] + 1)

    def _padded(self, counts: Sequence[int], longest: int) -> list[float]:
        """What so many sequences need that are padded to the longest."""
        missing = [each for each in counts if (each, longest) not in self._known]
        if missing:
            needed = self.run.prices([(Sums(each, each * longest, 0, 0, longest), 0) for each in missing]).needed
            self._known |= {(each, longest): float(found) for each, found in zip(missing, needed, strict=True)}
        return [self._known[each, longest] for each in counts]

    def _spread(self, members: Bin, count: int) -> Iterator[Sequence[Bin]]:
        """Over so many bins, nearly even: each into the lightest, or as the least capacity has it that suffices."""
        order = sorted(members, key=lambda each: -self.weights[each])
        bins: list[list[int]] = [[] for _ in range(count)]
        held = [(0.0, number) for number in range(count)]
        for each in order:
            weight, lightest = held[0]
            bins[lightest].append(each)
            heapreplace(held, (weight + self.weights[each], lightest))
        yield [each for each in bins if each]
        low, high, found = max(self.weights[order[0]], self._weight(order) / count), max(held)[0], None
        for _ in range(_HALVINGS):
            capacity = (low + high) / 2
            packed = self._within(order, capacity, count)
            if packed is None:
                low = capacity
            else:
                high, found = capacity, packed
        if found is not None:
            yield found

    def _within(self, order: Bin, capacity: float, count: int) -> list[list[int]] | None:
        """Items in so many bins, or None."""
        bins = _fullest_first([([each], self.weights[each]) for each in order], capacity)
        return bins if len(bins) <= count else None

    def _in_parts(self, families: list[list[int]]) -> list[Bin]:
        """Families by themselves, each in the fewest even parts that fit."""
        done: list[Bin] = []
        parts: list[tuple[list[int], Sequence[Bin]]] = [(members, [members]) for members in families]
        while parts:
            priced = self.priced([each for _, bins in parts for each in bins])
            at = 0
            left: list[tuple[list[int], Sequence[Bin]]] = []
            for members, bins in parts:
                worst = max(priced.needed[at : at + len(bins)])
                at += len(bins)
                if worst <= self.run.limit:
                    done += bins
                else:
                    left.append((members, next(iter(self._spread(members, len(bins) + 1)))))
            parts = left
        return done

    def _with_others(self, pure: Sequence[Bin], others: Bin) -> Iterator[Sequence[Bin]]:
        """Bins of one family each, and the rest: apart, or wherever there is room for whole sequences."""
        yield [*pure, *self._merged([[each] for each in others])]
        yield self._merged([*pure, *([each] for each in others)])

    def _weight(self, members: Bin) -> float:
        return sum([self.weights[each] for each in members])

    def _merged(self, bins: Sequence[Bin]) -> Sequence[Bin]:
        """Bins put together where whole sequences of both have room."""
        weighed = [(each, self._weight(each)) for each in bins]
        return _fullest_first(sorted(weighed, key=lambda each: -each[1]), self.capacity)

    def _first_fit(self, order: Bin) -> list[list[int]]:
        bins: list[list[int]] = []
        for added in order:
            needed = self.priced([[*each, added] for each in bins]).needed if bins else []
            at = next((number for number, each in enumerate(needed) if each <= self.run.limit), None)
            if at is None:
                bins.append([added])
            else:
                bins[at].append(added)
        return bins

    def _least_count(self, *, reserved: bool) -> int:
        """Fewer micro-batches than this hold too much, whatever goes where.

        Where peaks are the largest of linear functions (`labkit.memory.faces`) the fullest micro-batch holds at least
        what the mean of all would; else at least what an equal share of the rows or of the sequences does.
        """
        run, counts = self.run, np.arange(1, len(self.items) + 1)
        lengths = sorted(length for item in self.items for length in item.lengths)
        if not run.packs:
            most = (-(-len(lengths) // counts)).tolist()
            extents = [Extent(lengths[each - 1] * each, 0, 0, 0, 0, lengths[each - 1], each) for each in most]
        else:
            total = sum(lengths)
            rows = total - self._shared_at_most()
            cp = run.template.parallelism.cp
            extents = [
                Extent(
                    rows // each, rows // each // cp, rows // each, len(lengths) // each, total // each, lengths[0], 1
                )
                for each in counts.tolist()
            ]
        feasible = np.flatnonzero(run.least(extents, reserved=reserved) <= run.limit)
        return int(counts[feasible[0]]) if feasible.size else len(self.items)

    def _shared_at_most(self) -> int:
        """Tokens that are not computed where every family is in one micro-batch by itself."""
        members: dict[str, int] = {}
        for item in self.items if self.run.packs_trees else ():
            if item.prefix is not None:
                members[item.prefix] = members.get(item.prefix, 0) + len(item.lengths)
        return sum((count - 1) * self.prefixes[name] for name, count in members.items())

    def _apart(self, most: int, *, reserved: bool) -> int:
        """How many items there are of which no two fit into one micro-batch."""
        order = sorted(range(len(self.items)), key=lambda each: -self.weights[each])
        heaviest = self.weights[order[0]]
        largest = [each for each in order if (self.weights[each] + heaviest) * _NEARLY > self.capacity][
            : min(most + 1, _FEW)
        ]
        pairs = [(one, other) for at, other in enumerate(largest) for one in largest[:at]]
        if not pairs:
            return 1
        ways = [self._ways(pair) for pair in pairs]
        held = iter(
            self.run.least([self.run.extent(*way) for each in ways for way in each], reserved=reserved).tolist()
        )
        apart = {
            pair for pair, each in zip(pairs, ways, strict=True) if min([next(held) for _ in each]) > self.run.limit
        }
        chosen: list[int] = []
        for each in largest:
            if all((other, each) in apart for other in chosen):
                chosen.append(each)
        return max(len(chosen), 1)


def _closer(run: Pass, alone: Batch) -> Batch:
    """What does not fit by its bound at the estimate's own price, unless that cannot fit either."""
    sums, shared = alone.load.sums, alone.load.shared_prefix
    too_many = sums.sequences > run.most_sequences or sums.tokens > run.most_tokens
    if too_many or (run.grows and float(run.least([run.extent(sums, shared)])[0]) > run.limit):
        return alone
    peak, covered, reserved, phase = run.exactly(alone.load)
    return alone._replace(peak=peak, covered=covered, reserved=reserved, needed=reserved, phase=phase, exact=True)


def _fullest_first(weighed: Iterable[tuple[Bin, float]], capacity: float) -> list[list[int]]:
    """What is weighed in as many bins as it takes, each into the fullest that has room."""
    bins: list[list[int]] = []
    rooms: list[tuple[float, int]] = []
    """Of bins, the fullest first, with their numbers."""
    for members, weight in weighed:
        at = bisect_left(rooms, (weight,))
        if at == len(rooms):
            number, room = len(bins), capacity
            bins.append([])
        else:
            room, number = rooms.pop(at)
        bins[number] += members
        insort(rooms, (room - weight, number))
    return bins
