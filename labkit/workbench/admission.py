"""What the notebook `admission` shows: requests spread over micro-batches under a budget, by three policies.

The rule of thumb counts tokens; the floor is `labkit.admission` as the template recomputes; full recompute the same
with every layer run again. What the rule made is priced as the floor prices it, so that all figures are of one kind.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from labkit.admission import Admission, Decision, MicroBatch
from labkit.admission.passes import Pass, Sums
from labkit.admission.remedies import Remedy
from labkit.admission.requests import read_requests
from labkit.errors import InputError
from labkit.plan.price import EVERY_LAYER, Pricer
from labkit.workbench.rule_of_thumb import RuleOfThumb, example_requests
from labkit.workload import Recompute, Workload
from labkit.workload.gpu import gib

RULE: Final = "rule of thumb"
FLOOR: Final = "floor"
FULL: Final = "full recompute"

VERDICTS: Final = ("fits", "segments do not fit", "margin does not fit", "peak does not fit")
"""Of a micro-batch that a policy made, by what it needs within the budget."""

POLICIES: Final = pl.Schema(
    {
        "policy": pl.String,
        "recompute": pl.String,
        "outcome": pl.String,
        "micro_batches": pl.Int64,
        "least": pl.Int64,
        "admitted": pl.Int64,
        "refused": pl.Int64,
        "over": pl.Int64,
        "over_peak": pl.Int64,
        "used": pl.Float64,
        "used_least": pl.Float64,
        "used_most": pl.Float64,
        "passes_seconds": pl.Float64,
        "replay_seconds": pl.Float64,
    }
)
"""One row for each policy. least: micro-batches below which no split is; over: micro-batches that need more than the
budget, over_peak: whose peak alone is more; used: what they need of the budget, on average, at least and at most;
seconds of all micro-batches, lower bounds at data-sheet speeds."""
MICRO_BATCHES: Final = pl.Schema(
    {
        "policy": pl.String,
        "number": pl.Int64,
        "requests": pl.Int64,
        "packed_tokens": pl.Int64,
        "logical_tokens": pl.Int64,
        "longest": pl.Int64,
        "peak_bytes": pl.Int64,
        "covered_bytes": pl.Int64,
        "reserved_bytes": pl.Int64,
        "phase": pl.String,
        "certainty": pl.String,
        "verdict": pl.String,
    }
)
"""One row for each micro-batch that a policy made (`labkit.admission.decision.Figures`, `VERDICTS`)."""
LENGTHS: Final = pl.Schema(
    {"bucket": pl.String, "requests": pl.Int64, "policy": pl.String, "outcome": pl.String, "count": pl.Int64}
)
"""One row for each range of lengths, policy and outcome: admitted, admitted over the budget, refused."""
BOUNDARY: Final = pl.Schema(
    {
        "sharing": pl.String,
        "policy": pl.String,
        "length": pl.Int64,
        "sequences": pl.Int64,
        "logical_tokens": pl.Int64,
        "packed_tokens": pl.Int64,
        "needed_bytes": pl.Int64,
        "fits": pl.Boolean,
    }
)
"""One row for each way of sharing (`SHARED`), policy and length: as many sequences of it as are admitted together, and
what they need. logical: a shared prefix counted each time; packed: once."""
LONGEST: Final = pl.Schema({"policy": pl.String, "tokens": pl.Int64, "fits": pl.Boolean})
"""One row for each policy: the longest request that is admitted by itself, and whether it fits."""

REMEDIES: Final = pl.Schema(
    {
        "policy": pl.String,
        "change": pl.String,
        "peak_bytes": pl.Int64,
        "covered_bytes": pl.Int64,
        "reserved_bytes": pl.Int64,
    }
)
"""One row for each change under which the largest that a policy refuses fits, and what it needs then."""

OUTCOMES: Final = ("admitted", "admitted over the budget", "refused")
_BUCKETS: Final = (256, 1024, 4096, 16384, 65536, 262144)
_MOST_TOKENS = 2**26
_SHORTEST = 64
SHARED: Final = {"nothing shared": 0.0, "three quarters shared": 0.75}
"""The part of each sequence that is a prefix of all of them, by name."""


class Made(NamedTuple):
    """A micro-batch of a policy."""

    requests: tuple[int, ...]
    """Positions."""
    batch: MicroBatch


class Planned(NamedTuple):
    """What came of a policy."""

    policy: str
    template: Workload
    made: tuple[Made, ...]
    least: int | None
    refused: tuple[int, ...]
    """Positions of requests."""
    why: tuple[str, ...]
    """Of the refusals, in sentences."""
    remedies: tuple[Remedy, ...] = ()
    """For the largest that was refused."""

    @property
    def outcome(self) -> str:
        """Of all requests together, as a decision has it."""
        return "refuse" if self.refused else "admit" if len(self.made) == 1 else "split"


class Planning:
    """Requests, a budget, and what each policy makes of them."""

    def __init__(
        self,
        template: Workload,
        requests: Path | None,
        budget: str | None,
        *,
        rule_tokens: int | None = None,
        count: int = 43,
        seed: int = 1,
    ) -> None:
        """Of a template (`labkit.admission.Admission`).

        Args:
            template: As it trains; where it recomputes every layer the floor is priced without any.
            requests: A JSON file of them; None: `count` examples drawn with `seed`.
            budget: What a rank may allocate; None: the template's GPU.
            rule_tokens: Tokens that the rule of thumb allows a micro-batch; None: what one point suggests.
            count: Of the examples.
            seed: Of the examples.

        Raises:
            InputError: the template, the budget or the requests are wrong, or nothing fits.
        """
        full = template.recompute.recompute_granularity == "full"
        self.template = template.model_copy(update={"recompute": Recompute()}) if full else template
        self._floor = Admission(self.template, budget)
        self.budget = self._floor.budget
        replaying = template.model_copy(update={"recompute": EVERY_LAYER})
        self.full_refused = next((str(each) for each in replaying.findings if each.severity == "error"), None)
        self._admissions = {FLOOR: self._floor}
        if self.full_refused is None:
            self._admissions[FULL] = Admission(replaying, budget)
        self.rule = RuleOfThumb.of(self.template, self.budget.bytes, rule_tokens)
        self.are_examples = requests is None
        if requests is None:
            prefixes = template.training.runtime == "lora"
            self.requests = example_requests(self._longest(self._floor), count, seed, prefixes=prefixes)
        else:
            self.requests = read_requests(requests)

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """Each policy in turn."""
        return (self._by_rule(), *(self._decided(name, each) for name, each in self._admissions.items()))

    def _by_rule(self) -> Planned:
        """What the rule makes, each of its micro-batches priced as one that cannot be divided."""
        batches, refused = self.rule.spread(self.requests)
        made = []
        for positions in batches:
            asked = [self.requests[at].model_copy(update={"group": "a micro-batch"}) for at in positions]
            decision = self._floor.decide(asked)
            made.append(Made(tuple(positions), (*decision.micro_batches, *decision.refused)[0]))
        why = [
            f"Request {at}: {self.requests[at].length:,} tokens{', and its group' if self.requests[at].group else ''}; "
            f"the rule allows {self.rule.tokens:,}."
            for at in refused
        ]
        return Planned(RULE, self.template, tuple(made), None, tuple(refused), tuple(why))

    def _decided(self, name: str, admission: Admission) -> Planned:
        """What is refused is set aside, and the rest decided on again."""
        decision = admission.decide(self.requests)
        refused = tuple(sorted(at for each in decision.refused for at in each.requests))
        why, remedies = self._refusal(decision, admission)
        left = [at for at in range(len(self.requests)) if at not in refused]
        if refused and left:
            decision = admission.decide([self.requests[at] for at in left])
        made = [Made(tuple(left[at] for at in each.requests), each) for each in decision.micro_batches]
        least = decision.least_micro_batches
        return Planned(name, admission.template, tuple(made), least, refused, why, remedies)

    def _refusal(self, decision: Decision, admission: Admission) -> tuple[tuple[str, ...], tuple[Remedy, ...]]:
        """Why something is refused, without what all prices rest on, and what would work."""
        if not decision.refused:
            return (), ()
        said = decision.record.sentences
        said = said[:-1] if decision.remedies else said
        kept = [each for each in said if each not in admission.run((None, None)).assumptions]
        return tuple(kept), decision.remedies

    @cached_property
    def micro_batches(self) -> pl.DataFrame:
        """What each policy made; columns `MICRO_BATCHES`."""
        rows = []
        for plan in self.planned:
            for number, each in enumerate(plan.made):
                held = each.batch.figures
                sizes = held.packed_tokens, held.logical_tokens, max(self.requests[at].length for at in each.requests)
                figures = held.peak_bytes, held.covered_bytes, held.reserved_bytes, held.peak_phase, held.certainty
                rows.append((plan.policy, number, len(each.requests), *sizes, *figures, self._verdict(each)))
        return pl.DataFrame(rows, schema=MICRO_BATCHES, orient="row")

    def _verdict(self, made: Made) -> str:
        held, limit = made.batch.figures, self.budget.bytes
        needs = held.reserved_bytes, held.covered_bytes, held.peak_bytes
        return VERDICTS[sum(each > limit for each in needs)]

    @cached_property
    def policies(self) -> pl.DataFrame:
        """The policies side by side; columns `POLICIES`."""
        rows = []
        for plan in self.planned:
            own = self.micro_batches.filter(pl.col("policy") == plan.policy)
            used = [nbytes / self.budget.bytes for nbytes in own["reserved_bytes"]]
            shares = (mean(used), min(used), max(used)) if used else (None, None, None)
            over = own.filter(pl.col("verdict") != VERDICTS[0]).height
            over_peak = own.filter(pl.col("verdict") == VERDICTS[-1]).height
            admitted = len(self.requests) - len(plan.refused)
            counts = len(plan.made), plan.least, admitted, len(plan.refused), over, over_peak
            label = plan.template.recompute.label
            rows.append((plan.policy, label, plan.outcome, *counts, *shares, *_seconds(plan)))
        return pl.DataFrame(rows, schema=POLICIES, orient="row")

    @cached_property
    def lengths(self) -> pl.DataFrame:
        """What became of requests, by their length; columns `LENGTHS`."""
        buckets = [_bucket(each.length) for each in self.requests]
        rows = []
        for plan in self.planned:
            outcome = self._outcomes(plan)
            for name in sorted(set(buckets), key=buckets_in_order().index):
                members = [at for at, bucket in enumerate(buckets) if bucket == name]
                for each in OUTCOMES:
                    rows.append((name, len(members), plan.policy, each, sum(outcome[at] == each for at in members)))
        return pl.DataFrame(rows, schema=LENGTHS, orient="row")

    def _outcomes(self, plan: Planned) -> dict[int, str]:
        """By position."""
        found = dict.fromkeys(plan.refused, OUTCOMES[2])
        for made in plan.made:
            found |= dict.fromkeys(made.requests, OUTCOMES[self._verdict(made) != VERDICTS[0]])
        return found

    @cached_property
    def boundary(self) -> pl.DataFrame:
        """How many sequences of a length are admitted together; columns `BOUNDARY`."""
        lengths, rows = self._grid(), list[tuple[Any, ...]]()
        floor = self._floor.run((None, None))
        for sharing, part in SHARED.items():
            if part and not floor.packs_trees:
                continue
            prefixes = [int(length * part) for length in lengths]
            counted = [max(self.rule.tokens // length, 0) for length in lengths]
            rows += _admitted(floor, (sharing, RULE), lengths, prefixes, counted)
            for name, admission in self._admissions.items():
                run = admission.run((None, None))
                counts = _most_together(run, lengths, prefixes)
                rows += _admitted(run, (sharing, name), lengths, prefixes, counts)
        return pl.DataFrame(rows, schema=BOUNDARY, orient="row")

    def _grid(self) -> list[int]:
        """Two lengths to a doubling, up to the longest that any policy admits."""
        top = max([self.rule.tokens, *(self._longest(each) for each in self._admissions.values())])
        first = min(_SHORTEST, self._longest(self._floor))
        doublings = max(int(2 * math.log2(max(top, first) / first)), 0)
        return sorted({round(first * 2 ** (step / 2)) for step in range(doublings + 1)})

    @cached_property
    def longest(self) -> pl.DataFrame:
        """The longest request that each policy admits by itself; columns `LONGEST`."""
        tokens = self.rule.tokens
        run = self._floor.run((None, None))
        rows = [(RULE, tokens, bool(tokens) and _fits(run, tokens, 1, 0))]
        rows += [(name, self._longest(each), True) for name, each in self._admissions.items()]
        return pl.DataFrame(rows, schema=LONGEST, orient="row")

    def _longest(self, admission: Admission) -> int:
        """Tokens of one sequence that fits by its price, in the least padding's steps.

        Raises:
            InputError: none does.
        """
        run = admission.run((None, None))
        unit, low, high = run.least_unit, 0, 1
        while high * unit <= _MOST_TOKENS and _needed(run, high * unit, 1) <= run.limit:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _needed(run, middle * unit, 1) <= run.limit else (low, middle)
        if not low:
            raise InputError(
                f"nothing fits: {admission.template.model.name} needs more than {gib(run.limit)} "
                f"({self.budget.name}) for one token; give a larger budget or another layout"
            )
        return low * unit

    @property
    def facts(self) -> dict[str, str]:
        """What a report's head says of the requests and the budget."""
        origin = "an example, not measured" if self.are_examples else "from a file"
        return {
            "Budget": f"{self.budget.name}, {gib(self.budget.bytes)}",
            "Requests": f"{len(self.requests)}, {origin}",
        }

    @property
    def rule_said(self) -> list[str]:
        """What the rule of thumb is."""
        return [f"The rule of thumb: {self.rule.words}"]

    @property
    def requested(self) -> list[str]:
        """What was asked for, in sentences."""
        lengths = sorted(each.length for each in self.requests)
        prefixes, groups = ({getattr(each, name) for each in self.requests} - {None} for name in ("prefix", "group"))
        shared = _counted(len(prefixes), "shared prefix", "shared prefixes")
        said = [
            f"{_counted(len(lengths), 'request', 'requests')} of {lengths[0]:,} to {lengths[-1]:,} tokens (median "
            f"{lengths[len(lengths) // 2]:,}), {sum(lengths):,} in all; {shared}, "
            f"{_counted(len(groups), 'group', 'groups')} that stay together."
        ]
        if self.are_examples:
            said.append(
                "Nobody sent these: they are an example, drawn from a seed in proportion to the longest request that "
                "the floor admits. Of every 21 ten are short (median a fortieth of it), four medium (an eighth), four "
                "share a prefix of a tenth, one is long (a third to nine tenths), two are a pair that stays together; "
                "the last one is half longer than the longest. Give a file of your own as parameter requests."
            )
        return said

    @property
    def answer(self) -> list[str]:
        """What a reader should take away."""
        rows = {row["policy"]: row for row in self.policies.iter_rows(named=True)}
        rule = rows[RULE]
        alone = f"of {rule['over_peak']} the peak alone is more" if rule["over_peak"] else "no peak alone is more"
        said = [
            f"Of {_counted(rule['micro_batches'], 'micro-batch', 'micro-batches')} that the rule of thumb makes, "
            f"{rule['over'] or 'none'} would need more than {gib(self.budget.bytes)} ({self.budget.name}) with their "
            f"margin and segments; {alone}."
        ]
        for name in self._admissions:
            row = rows[name]
            least = " (proven to be the fewest)" if row["least"] == row["micro_batches"] else ""
            made = _counted(row["micro_batches"], "micro-batch", "micro-batches")
            used = f" and {_used(row)} of it used" if row["micro_batches"] else ""
            said.append(
                f"{name.capitalize()} ({row['recompute']}): {row['admitted']} of {len(self.requests)} requests in "
                f"{made}{least}, none over the budget{used}; {row['refused'] or 'none'} refused."
            )
        said += [*self._cost(rows), self._boundaries(), *self._waste()]
        return [*said, *([f"Full recompute cannot run here: {self.full_refused}"] if self.full_refused else [])]

    def _cost(self, rows: dict[str, dict[str, Any]]) -> Iterator[str]:
        """What running layers again takes."""
        full = rows.get(FULL)
        if full is not None and full["passes_seconds"]:
            yield (
                f"What full recompute runs again takes {full['replay_seconds']:.2f} s or more on top of passes of "
                f"{full['passes_seconds']:.2f} s, at data-sheet speed."
            )

    def _boundaries(self) -> str:
        """The longest requests, in words."""
        said = [
            f"{row['policy']} {row['tokens']:,} tokens{'' if row['fits'] else ', which would not fit'}"
            for row in self.longest.iter_rows(named=True)
        ]
        return f"The longest request that is admitted by itself: {'; '.join(said)}."

    def _waste(self) -> Iterator[str]:
        """Where the rule admits least of what would fit."""
        least = self.boundary.filter(pl.col("policy") == RULE).join(
            self.boundary.filter(pl.col("policy") == FLOOR), on=["sharing", "length"], suffix="_floor"
        )
        if least.is_empty():
            return
        row = least.sort(pl.col("logical_tokens") / pl.col("logical_tokens_floor"), maintain_order=True).row(
            0, named=True
        )
        if row["logical_tokens"] < row["logical_tokens_floor"]:
            yield (
                f"The rule wastes most where requests have {row['length']:,} tokens, {row['sharing']}: it admits "
                f"{row['sequences']} of them together, and {row['sequences_floor']} fit."
            )

    @cached_property
    def remedies(self) -> pl.DataFrame:
        """What would work for the largest that each policy refuses; columns `REMEDIES`."""
        rows = [
            (plan.policy, each.change.rstrip(","), each.peak_bytes, each.covered_bytes, each.reserved_bytes)
            for plan in self.planned
            for each in plan.remedies
        ]
        return pl.DataFrame(rows, schema=REMEDIES, orient="row")

    @property
    def refusals(self) -> list[str]:
        """What each policy refuses, and why."""
        return [f"{plan.policy.capitalize()}: {' '.join(plan.why)}" for plan in self.planned if plan.why]

    @property
    def assumptions(self) -> list[str]:
        """What the prices rest on."""
        run = self._floor.run((None, None))
        return [*run.padding, *run.assumptions]


def buckets_in_order() -> list[str]:
    """Names of ranges of lengths, the shortest first."""
    names = [f"up to {_BUCKETS[0]:,}"]
    names += [f"{low + 1:,} to {high:,}" for low, high in pairwise(_BUCKETS)]
    return [*names, f"above {_BUCKETS[-1]:,}"]


def _bucket(length: int) -> str:
    return buckets_in_order()[bisect_left(_BUCKETS, length)]


def _needed(run: Pass, length: int, count: int, prefix: int = 0) -> int:
    """At most what so many sequences need; more than any budget where a rule refuses them."""
    needed = float(run.prices([_way(run, length, count, prefix)]).needed[0])
    return int(min(needed, 2.0**62))


def _way(run: Pass, length: int, count: int, prefix: int) -> tuple[Sums, int]:
    """Sequences of one length, what they share computed once."""
    shared = prefix if count > 1 else 0
    return run.sums((length,), shared).times(count), shared


def _fits(run: Pass, length: int, count: int, prefix: int) -> bool:
    """By the bounds of the price, and where they are too far apart by the estimate."""
    if _needed(run, length, count, prefix) <= run.limit:
        return True
    sums, shared = _way(run, length, count, prefix)
    if run.grows and float(run.least([run.extent(sums, shared)])[0]) > run.limit:
        return False
    return run.exactly(run.load([length] * count, shared))[2] <= run.limit


def _admitted(
    run: Pass, names: tuple[str, str], lengths: Sequence[int], prefixes: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Rows of `BOUNDARY`, where any are admitted."""
    for length, prefix, count in zip(lengths, prefixes, counts, strict=True):
        if count:
            packed = length * count - (count - 1) * prefix
            needed = _needed(run, length, count, prefix)
            yield (*names, length, count, length * count, packed, needed, _fits(run, length, count, prefix))


def _most_together(run: Pass, lengths: Sequence[int], prefixes: Sequence[int]) -> list[int]:
    """Of each length as many sequences as fit by their price, for all lengths at once."""

    def fit(counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        ways = [_way(run, *each) for each in zip(lengths, counts.tolist(), prefixes, strict=True)]
        found: NDArray[np.bool_] = run.prices(ways).needed <= run.limit
        return found

    low, high = np.zeros(len(lengths), dtype=np.int64), np.ones(len(lengths), dtype=np.int64)
    while (growing := fit(high) & (high * np.array(lengths) <= _MOST_TOKENS)).any():
        low, high = np.where(growing, high, low), np.where(growing, high * 2, high)
    while (open_ := high - low > 1).any():
        middle = (low + high) // 2
        fits = fit(np.maximum(middle, 1)) & open_
        low, high = np.where(fits, middle, low), np.where(open_ & ~fits, middle, high)
    return [int(each) for each in low]


def _seconds(plan: Planned) -> tuple[float, float]:
    """(of forward and backward, of what is replayed), all micro-batches, at data-sheet speeds."""
    passes = replayed = 0.0
    for each in plan.made:
        workload = each.batch.workload
        pricer = Pricer(workload)
        passes += pricer.step_seconds / workload.num_microbatches
        replayed += pricer.price(workload.recompute).replay.seconds / workload.num_microbatches
    return passes, replayed


def _used(row: dict[str, Any]) -> str:
    low, high = row["used_least"], row["used_most"]
    return f"{low:.0%} to {high:.0%}" if high - low > 0.005 else f"{high:.0%}"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
