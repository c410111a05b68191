"""What people do without an estimate of each micro-batch, tokens times a constant; and requests that nobody sent."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from labkit.admission.passes import kinds_of
from labkit.admission.requests import Item, Request, items_of
from labkit.memory.estimate import estimate
from labkit.workload import Workload
from labkit.workload.gpu import MIB, gib


class RuleOfThumb(NamedTuple):
    """A micro-batch may have so many tokens."""

    tokens: int
    words: str
    """Where that number is from."""

    @classmethod
    def of(cls, template: Workload, budget_bytes: int, stated: int | None) -> "RuleOfThumb":
        """The stated number, or the one that a single point suggests: the template's own batch, in proportion.

        The point's peak less what is held at rest, over its tokens, is the constant; tokens are those of its sequences,
        a shared prefix counted each time, since that is how a data loader counts them.
        """
        if stated is not None:
            return cls(stated, f"a micro-batch has at most {stated:,} tokens, as stated.")
        known = estimate(template)
        peak, rest = known.peak_allocated_bytes, known.outline.between_steps_bytes
        packed, batch = template.batch.packed, template.batch
        tokens = batch.micro_batch_size * batch.seq_length if packed is None else sum(packed.lengths)
        limit = max((budget_bytes - rest) * tokens // (peak - rest), 0)
        return cls(
            limit,
            f"one point is known, the template's own batch: {tokens:,} tokens peak at {gib(peak)}, {gib(rest)} of it "
            f"held at rest. That is {(peak - rest) / tokens / MIB:.2f} MiB a token, so a micro-batch may have "
            f"{limit:,} tokens.",
        )

    def spread(self, requests: Sequence[Request]) -> tuple[list[list[int]], list[int]]:
        """Positions of requests in micro-batches, and of those that are too long; the longest first, first fit.

        As anything would, it keeps groups together and passes of two kinds apart.
        """
        batches: list[list[int]] = []
        refused: list[int] = []
        for positions in kinds_of(requests).values():
            bins: list[tuple[int, list[int]]] = []
            for item in sorted(items_of(requests, positions), key=_tokens, reverse=True):
                if _tokens(item) > self.tokens:
                    refused += item.positions
                    continue
                at = next((at for at, (held, _) in enumerate(bins) if held + _tokens(item) <= self.tokens), None)
                if at is None:
                    bins.append((_tokens(item), list(item.positions)))
                else:
                    held, members = bins[at]
                    bins[at] = held + _tokens(item), [*members, *item.positions]
            batches += [sorted(members) for _, members in bins]
        return batches, sorted(refused)


def _tokens(item: Item) -> int:
    return sum(item.lengths)


def example_requests(longest: int, count: int, seed: int, *, prefixes: bool) -> list[Request]:
    """Requests that nobody sent, in proportion to the longest that is admitted by itself.

    Of every 21 ten are short (log-normal, median a fortieth of `longest`), four of medium length (median an
    eighth), four share a prefix of a tenth (families of four, with a short rest each; alone where `prefixes` are not
    computed once), one is long (a third to nine tenths) and two are a pair that stays together. The last request is
    half longer than the longest.
    """
    draw = random.Random(seed)  # noqa: S311 (no secret)

    def about(median: float, spread: float = 0.6) -> int:
        return max(1, min(round(median * draw.lognormvariate(0, spread)), longest))

    found: list[Request] = []
    for family in range(-(-max(count - 1, 1) // 21)):
        shared = max(longest // 10, 1)
        found += [Request(length=about(longest / 40)) for _ in range(10)]
        found += [Request(length=about(longest / 8)) for _ in range(4)]
        named = {"prefix": f"prompt {family}", "shared_prefix": shared} if prefixes else {}
        found += [Request.model_validate({"length": shared + about(longest / 40), **named}) for _ in range(4)]
        found.append(Request(length=draw.randint(max(longest // 3, 1), max(longest * 9 // 10, 1))))
        found += [Request(length=about(longest / 10), group=f"pair {family}") for _ in range(2)]
    return [*found[: max(count - 1, 0)], Request(length=longest + longest // 2)]
