"""What was decided, as data and for people."""

from collections.abc import Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from labkit.admission.passes import Pass, Unstated
from labkit.admission.remedies import Remedy, remedies
from labkit.admission.requests import Request
from labkit.admission.split import Batch, Split
from labkit.plan import Budget
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB, gib

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from labkit.admission.oom import Explanation

_SHOWN = 16
_SHOWN_RUNS = 12


class Figures(Part):
    """What a micro-batch holds on the busiest rank."""

    requests: Many[int]
    """Their positions."""
    no_grad: bool
    outputs: str
    recompute: str
    packed_tokens: int
    """Rows that are computed, padding included."""
    logical_tokens: int
    shared_prefix: int
    """Tokens that are computed once for all of them."""
    peak_phase: str
    peak_bytes: int
    """Allocated: never below the estimate of the micro-batch as a plain workload."""
    covered_bytes: int
    """With the estimate's margin."""
    reserved_bytes: int
    """With what is set aside for segments of the allocator that cannot be handed out, too: what has to fit."""
    certainty: Literal["bound", "estimate"]
    """bound: the estimate's figures are these or less; estimate: these are its figures."""
    basis: str
    """Whether peaks of the like were measured."""


class Decided(Part):
    """The documented `--json` object of `labkit admit` (docs/json.md)."""

    schema_name: Literal["labkit.admission/1"] = "labkit.admission/1"
    outcome: Literal["admit", "split", "refuse"]
    budget_name: str
    budget_bytes: int
    requests: int
    micro_batches: Many[Figures]
    least_micro_batches: int
    """No split has fewer, within the budget and by these prices."""
    refused: Many[Figures] = ()
    remedies: Many[Remedy] = ()
    """For the largest that was refused."""
    unstated: Many[Unstated] = ()
    """What the template does not state and the figures rest on."""
    sentences: Many[str]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        style = {"admit": "green", "split": "yellow", "refuse": "red"}[self.outcome]
        yield Text(self.sentences[0], style=style)
        yield from map(Text, self.sentences[1:])
        if self.outcome != "split":
            return
        table = Table()
        for heading in (
            "micro-batch",
            "requests",
            "which",
            "packed",
            "logical",
            "shared",
            "peak GiB",
            "with margin",
            "reserved",
        ):
            table.add_column(heading, justify="right")
        for number, each in enumerate(self.micro_batches[:_SHOWN]):
            sizes = each.packed_tokens, each.logical_tokens, each.shared_prefix
            held = each.peak_bytes, each.covered_bytes, each.reserved_bytes
            table.add_row(
                str(number),
                str(len(each.requests)),
                positions(each.requests),
                *(f"{size:,}" for size in sizes),
                *(f"{size / GIB:.2f}" for size in held),
            )
        yield table
        if len(self.micro_batches) > _SHOWN:
            yield Text(f"and {len(self.micro_batches) - _SHOWN} more")


class Spread(NamedTuple):
    """What came of the requests of one kind of pass."""

    run: Pass
    found: Split


class Refused(NamedTuple):
    """What cannot be divided and does not fit."""

    run: Pass
    batch: Batch


class MicroBatch:
    """Requests that run together."""

    def __init__(self, run: Pass, batch: Batch) -> None:
        self._run, self._batch = run, batch
        self._by_itself = batch.exact or batch.needed > run.limit
        """Its figures are the estimate's own: of a refusal, or of what fits by them alone."""
        self.requests: tuple[int, ...] = tuple(sorted(at for item in batch.items for at in item.positions))
        """Positions in what was asked for."""
        self.shared_prefix = batch.load.shared_prefix
        """Tokens that are computed once for all of them."""
        self.peak_bytes = int(batch.peak) if batch.peak < float("inf") else None
        """Allocated, at most; None: more than is looked up."""
        self.needed_bytes = int(batch.needed) if batch.needed < float("inf") else None
        """With the margin and what is set aside for segments; None: more than is looked up."""

    @cached_property
    def workload(self) -> Workload:
        """It as a plain workload, for `labkit.estimate` and everything else."""
        return self._run.workload(self._batch.load, by_itself=self._by_itself)

    @cached_property
    def figures(self) -> Figures:
        """What it holds, and where that is from."""
        run, batch = self._run, self._batch
        peak, covered, reserved, phase = batch.peak, batch.covered, batch.reserved, batch.phase
        if self._by_itself and not batch.exact:
            peak, covered, reserved, phase = run.exactly(batch.load)
        lora = run.template.training.lora
        return Figures(
            requests=self.requests,
            no_grad=lora is not None and lora.no_grad,
            outputs="loss" if lora is None else lora.outputs,
            recompute=run.template.recompute.label,
            packed_tokens=run.extent(batch.load.sums, batch.load.shared_prefix, by_itself=self._by_itself).rows,
            logical_tokens=sum(batch.load.lengths),
            shared_prefix=batch.load.shared_prefix,
            peak_phase=phase[1],
            peak_bytes=int(peak),
            covered_bytes=int(covered),
            reserved_bytes=int(reserved),
            certainty="estimate" if self._by_itself else "bound",
            basis=run.basis(batch.load),
        )

    def __repr__(self) -> str:
        return f"MicroBatch(requests={self.requests}, peak_bytes={self.peak_bytes})"


class Decision:
    """Admitted, split or refused: `print` it, look at it in a notebook, or take it as data (`to_dict`, `to_json`)."""

    def __init__(
        self, budget: Budget, requests: Sequence[Request], spreads: Sequence[Spread], refused: Sequence[Refused]
    ) -> None:
        self.budget = budget
        self.requests = requests
        self._refused = refused
        self._runs = [each.run for each in spreads]
        found = [] if refused else [MicroBatch(each.run, batch) for each in spreads for batch in each.found.batches]
        self.micro_batches: tuple[MicroBatch, ...] = tuple(found)
        """What to run one after the other; none where something is refused."""
        self.least_micro_batches: int = 0 if refused else sum(each.found.least for each in spreads)
        """No split has fewer, within the budget and by these prices."""
        self.outcome: Literal["admit", "split", "refuse"] = (
            "refuse" if refused else "admit" if len(found) == 1 else "split"
        )

    @property
    def is_fewest(self) -> bool:
        """It is proven that no split has fewer micro-batches."""
        return bool(self.micro_batches) and len(self.micro_batches) == self.least_micro_batches

    @cached_property
    def refused(self) -> tuple[MicroBatch, ...]:
        """What cannot be divided and does not fit, the largest first."""
        found = [MicroBatch(each.run, each.batch) for each in self._refused]
        return tuple(sorted(found, key=lambda each: -each._batch.load.sums.tokens))

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """What would work for the largest that was refused, each priced: a few seconds."""
        if not self.refused:
            return ()
        largest = self.refused[0]
        return tuple(remedies(largest._run, largest._batch))

    @cached_property
    def record(self) -> Decided:
        """All of it as plain data."""
        return Decided(
            outcome=self.outcome,
            budget_name=self.budget.name,
            budget_bytes=self.budget.bytes,
            requests=len(self.requests),
            micro_batches=tuple(each.figures for each in self.micro_batches),
            least_micro_batches=self.least_micro_batches,
            refused=tuple(each.figures for each in self.refused),
            remedies=self.remedies,
            unstated=tuple(dict.fromkeys(each for run in self._runs for each in run.unstated)),
            sentences=tuple(self._sentences()),
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return self.record.model_dump(mode="json")

    def to_json(self) -> str:
        """As a JSON object."""
        return self.record.model_dump_json()

    def explain(self, error: Any, micro_batch: int | None = None) -> "Explanation":
        """What a later out-of-memory error means, by these figures: see `labkit.admission.oom.explain`."""
        from labkit.admission.oom import explain

        return explain(error, self, micro_batch)

    def __str__(self) -> str:
        return "\n".join(self.record.sentences)

    def __repr__(self) -> str:
        return f"Decision({self.outcome}, {len(self.micro_batches)} micro-batches)"

    def __rich__(self) -> Decided:
        return self.record

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{number}</td><td>{len(each.requests)}</td><td>{positions(each.requests)}</td>"
            f"<td>{each.packed_tokens:,}</td><td>{each.logical_tokens:,}</td>"
            f"<td>{each.peak_bytes / GIB:.2f}</td><td>{each.covered_bytes / GIB:.2f}</td>"
            f"<td>{each.reserved_bytes / GIB:.2f}</td></tr>"
            for number, each in enumerate(self.record.micro_batches)
        )
        heads = ("micro-batch", "requests", "which", "packed", "logical", "peak GiB", "with margin", "reserved")
        head = "".join(f"<th>{each}</th>" for each in heads)
        said = "".join(f"<p>{escape(each)}</p>" for each in self.record.sentences)
        return f"<div><b>{self.outcome}</b>{said}{f'<table><tr>{head}</tr>{rows}</table>' if rows else ''}</div>"

    def _sentences(self) -> "list[str]":
        if self.outcome == "refuse":
            return self._refusal()
        figures = [each.figures for each in self.micro_batches]
        fullest = max(figures, key=lambda each: max(each.covered_bytes, each.reserved_bytes))
        requests = _number(len(self.requests), "request")
        if self.outcome == "admit":
            said = [f"Admit {requests} in one micro-batch: {held(fullest, self.budget)}."]
        else:
            packed = [each.packed_tokens for each in figures]
            said = [
                f"Split {requests} into {len(figures)} micro-batches of {min(packed):,} to {max(packed):,} packed "
                f"tokens; the fullest: {held(fullest, self.budget)}.",
                "By these prices no split has fewer."
                if self.is_fewest
                else f"No split has fewer than {self.least_micro_batches}; none below {len(figures)} was found.",
            ]
        notes = (
            note
            for each in self.micro_batches
            for note in (each.figures.basis, *each._run.padding, *each._run.assumptions)
        )
        return [*said, *dict.fromkeys(notes)]

    def _refusal(self) -> "list[str]":
        largest = self.refused[0]
        figures = largest.figures
        items = [largest._batch.items[0]]
        what = f"request {largest.requests[0]}" if items[0].group is None else f"group {items[0].group!r}"
        more = f" (nor do {len(self.refused) - 1} others)" if len(self.refused) > 1 else ""
        said = [f"Refuse: {what} cannot be divided and does not fit{more}: {held(figures, self.budget)}."]
        limit = self.budget.bytes
        if figures.covered_bytes <= limit < figures.reserved_bytes:
            said.append(
                f"Fragmentation: {gib(figures.covered_bytes)} allocated with the margin fit, and the "
                f"{gib(figures.reserved_bytes)} that the allocator has to reserve for them do not: "
                f"{gib(figures.reserved_bytes - figures.covered_bytes)} lie in segments from which nothing that is "
                "asked for can be cut."
            )
        said += [figures.basis, *largest._run.assumptions]
        if self.remedies:
            said.append(f"What would work: {'; '.join(str(each) for each in self.remedies)}.")
        else:
            said.append(
                "No recompute choice, tensor or context-parallel size of these GPUs makes it fit; use more of them."
            )
        return said


def held(figures: Figures, budget: Budget) -> str:
    """The figures that every sentence gives: mode, tokens, predicted peak, usable limit."""
    most = "at most " if figures.certainty == "bound" else ""
    return (
        f"recompute {figures.recompute}{', no-grad' if figures.no_grad else ''}, {figures.packed_tokens:,} packed and "
        f"{figures.logical_tokens:,} logical tokens, predicted peak {most}{gib(figures.peak_bytes)} "
        f"in {figures.peak_phase} ({gib(figures.covered_bytes)} with its margin, "
        f"{gib(figures.reserved_bytes)} reserved), usable {gib(budget.bytes)} ({budget.name})"
    )


def positions(requests: Sequence[int]) -> str:
    """Positions of requests, in short.

    >>> positions((0, 2, 3, 4, 5, 9))
    '0, 2-5, 9'
    """
    runs: list[list[int]] = []
    for each in requests:
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    more = len(shown) - _SHOWN_RUNS
    return ", ".join(shown[:_SHOWN_RUNS]) + (f", and {more} more" if more > 0 else "")


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
