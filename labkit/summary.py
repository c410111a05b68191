"""What a result says in one page: the same object for an estimate and a trace, in JSON, in a shell, in Jupyter."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from pydantic import NonNegativeInt

from labkit.ledger import Ledger, Peak
from labkit.work import PhaseWork, WorkRow, by_phase, total
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB, GPUS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

CATEGORIES = (
    "parameters",
    "gradient buffers",
    "optimizer state",
    "retained: attention",
    "retained: mlp",
    "retained: moe",
    "retained: other",
    "transient",
    "optimizer step",
    "workspaces",
    "allocator remainders",
    "above the estimate",
)
"""What holds memory, in stacking order. `allocator remainders` are blocks larger than the tensor they hold; `above the
estimate` is what a measured peak has more (`labkit.memory.profiles`)."""

_NEARLY_FULL = 0.95
"""Of the GPU's memory: from here on the verdict says what else needs some."""
PROFILE = "profile"
"""Kind of the row that raises an estimate to a measured peak; its tensor says who measured it."""

_STATE = {
    "parameters": "parameters",
    "gradients": "gradient buffers",
    "optimizer": "optimizer state",
}


class _Held(Protocol):
    """What decides a category: `labkit.ledger.Row`, or as much of it as there is without rows."""

    @property
    def phase(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def lifetime(self) -> str: ...


def category(row: _Held) -> str:
    """The entry of `CATEGORIES` a row's bytes count to (its remainder counts to `allocator remainders`)."""
    if row.lifetime == "workspace":
        return "workspaces"
    if row.kind == PROFILE:
        return "above the estimate"
    if row.lifetime == "state" and row.kind in _STATE:
        return _STATE[row.kind]
    if row.lifetime in ("retained", "state"):
        return f"retained: {row.kind}" if row.kind in ("attention", "mlp", "moe") else "retained: other"
    return "optimizer step" if row.phase == "optimizer" else "transient"


def breakdown(rows: Ledger) -> dict[str, int]:
    """Bytes per category, in the order of `CATEGORIES`; their sum is the rows' block bytes."""
    held: Counter[str] = Counter()
    for row in rows.rows:
        held[category(row)] += row.bytes
        held["allocator remainders"] += row.block_bytes - row.bytes
    return {name: held[name] for name in CATEGORIES if held[name]}


class PhaseSummary(Part):
    """The peak of one phase of one iteration."""

    iteration: NonNegativeInt
    phase: str
    peak_allocated_bytes: NonNegativeInt
    """Allocator blocks, what `torch.cuda.max_memory_allocated` counts."""
    peak_tensor_bytes: NonNegativeInt
    """The same phase's largest sum of tensors (rounded to 512 bytes)."""


class Share(Part):
    """Bytes one category holds at the peak."""

    category: str
    bytes: NonNegativeInt


class Case(Part):
    """The peak with one value of a field that the workload leaves open."""

    value: str
    peak_allocated_bytes: NonNegativeInt


class Range(Part):
    """How far the peak may lie from the one given, and why: a field that the workload leaves open."""

    field: str
    """Dotted path of the field that would settle it."""
    cause: str
    low_bytes: NonNegativeInt
    high_bytes: NonNegativeInt
    cases: Many[Case]

    @classmethod
    def over(cls, field: str, cause: str, cases: Iterable[Case]) -> Self:
        """The range that the cases span."""
        listed = tuple(cases)
        peaks = [case.peak_allocated_bytes for case in listed]
        return cls(field=field, cause=cause, low_bytes=min(peaks), high_bytes=max(peaks), cases=listed)

    @property
    def peaks(self) -> str:
        """The peak with each value, in GiB: `false 41.696, true 46.426`."""
        return ", ".join(f"{case.value} {case.peak_allocated_bytes / GIB:.3f}" for case in self.cases)

    def __str__(self) -> str:
        return f"{self.field} is not stated, and {self.cause}: peak {self.peaks} GiB"


class PeakRange(Part):
    """Where the peak lies when every open field has its plausible values."""

    low_bytes: NonNegativeInt
    high_bytes: NonNegativeInt
    causes: Many[str]
    """The open fields that move it."""


class StagePeak(Part):
    """The peak of a pipeline stage's ranks."""

    stage: NonNegativeInt
    rank: NonNegativeInt
    """The first of them."""
    layers: NonNegativeInt
    peak_tensor_bytes: NonNegativeInt


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: `0, 2-5`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, span)) for span in found)


class RankSummary(Part):
    """What a traced rank holds."""

    rank: NonNegativeInt
    stages: Many[NonNegativeInt]
    """The pipeline stage it is the first rank of, or in, and then those that hold the same."""
    parameters: NonNegativeInt | None
    """Elements of the rank's parameters."""
    parameter_bytes: NonNegativeInt | None
    between_steps_bytes: NonNegativeInt | None
    first_step_peak_bytes: NonNegativeInt | None
    """Of setup and the first step."""
    steady_peak_bytes: NonNegativeInt | None
    """Of the later steps."""
    peak_allocated_bytes: NonNegativeInt
    """The larger of the two."""
    peak_reserved_bytes: NonNegativeInt | None
    peak_iteration: NonNegativeInt
    peak_phase: str


class Summary(Part):
    """The documented `--json` object of `labkit estimate` and `labkit trace` (see docs/json.md)."""

    schema_name: Literal["labkit.summary/1"] = "labkit.summary/1"
    certainty: Literal["estimated", "traced"]
    workload: Workload
    workload_hash: str
    rank: NonNegativeInt
    peak_allocated_bytes: NonNegativeInt
    peak_reserved_bytes: NonNegativeInt | None
    """Simulated segments of the caching allocator; None where no allocator was simulated."""
    fragmentation: str = ""
    """Where the peak fits and the segments do not: what the allocator has to do, in a sentence."""
    peak_iteration: NonNegativeInt
    peak_phase: str
    phases: Many[PhaseSummary]
    between_steps_bytes: NonNegativeInt
    """Tensor bytes alive when the steady iteration begins."""
    retained_bytes: NonNegativeInt
    """Tensor bytes the steady forward leaves for its backward."""
    breakdown: Many[Share]
    """What holds the peak; sums to `peak_allocated_bytes`."""
    gpu: str
    gpu_memory_bytes: NonNegativeInt
    margin_bytes: NonNegativeInt = 0
    """What an estimate sets aside above the peak (`labkit.memory.margin`); not part of it."""
    fits: bool
    """The peak is below the GPU's memory. The CUDA context, NCCL and fragmentation come on top."""
    stages: Many[StagePeak] = ()
    """Every pipeline stage, where there are several and they are estimated."""
    ranks: Many[RankSummary] = ()
    """Every rank that was traced; `rank` is the one with the largest peak."""
    versions: dict[str, str] = {}
    """Of what a trace ran."""
    warnings: Many[str]
    """Choices in the workload that do nothing; where a trace goes on and a real run would end."""
    work: Many[PhaseWork] = ()
    """What the steady step does, phase by phase, where it was traced."""
    raised: str | None = None
    """The observed peak that the estimate was raised to, and who measured it; None where it was not."""
    peak_range: PeakRange | None = None
    """Over all plausible values of what the workload leaves open; None where it leaves nothing open that matters."""
    ranges: Many[Range] = ()
    """What the peak rests on that the workload does not state."""
    assumed: Many[str] = ()
    """`FIELD value` of what it does not state and whose other values were not tried (a trace without ranges)."""

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        yield Text.assemble(
            (f"{self.workload.model.name}", "bold"), f"  recompute {self.workload.recompute.label}  {self.place}"
        )
        yield Text(self.verdict, style="green" if self.fits else "red")
        if self.raised is not None:
            yield Text(f"Raised to a peak {self.raised}.")
        if self.peak_range is not None:
            yield Text(self.span, style="yellow")
        table = Table(title=f"What holds the peak ({self.certainty}, GiB)", title_justify="left")
        table.add_column("category")
        table.add_column("GiB", justify="right")
        table.add_column("share", justify="right")
        for share in self.breakdown:
            table.add_row(share.category, f"{share.bytes / GIB:.3f}", f"{share.bytes / self.peak_allocated_bytes:.1%}")
        yield table
        phases = Table(title="Peak of each phase (GiB)", title_justify="left")
        phases.add_column("iteration", justify="right")
        phases.add_column("phase")
        phases.add_column("allocated", justify="right")
        phases.add_column("tensors", justify="right")
        for phase in self.phases:
            phases.add_row(
                str(phase.iteration),
                phase.phase,
                f"{phase.peak_allocated_bytes / GIB:.3f}",
                f"{phase.peak_tensor_bytes / GIB:.3f}",
            )
        yield phases
        if self.work:
            yield self._work_table()
        if self.stages:
            yield self._stages_table()
        if self.ranks:
            yield self._ranks_table()
        if self.ranges:
            yield self._ranges_table()
        if self.assumed:
            yield Text(f"{self.assumption} (--ranges traces what else they may be).", style="yellow")
        for warning in self.warnings:
            yield Text(f"warning: {warning}", style="yellow")
        if self.versions:
            yield Text(", ".join(f"{name} {version}" for name, version in self.versions.items()), style="dim")

    def _ranges_table(self) -> "Table":
        from rich.table import Table

        ranges = Table(title="What the workload does not state (peak, GiB)", title_justify="left")
        for heading in ("field", "peak with each value", "why it is open"):
            ranges.add_column(heading, overflow="fold")
        for open_field in self.ranges:
            ranges.add_row(open_field.field, open_field.peaks, open_field.cause)
        return ranges

    def _ranks_table(self) -> "Table":
        from rich.table import Table

        table = Table(title="Peak of each traced rank (GiB)", title_justify="left")
        for heading in ("stage", "rank", "parameters (M)", "between", "step 1", "later", "reserved"):
            table.add_column(heading, justify="right")
        for each in self.ranks:
            sizes = (each.between_steps_bytes, each.first_step_peak_bytes, each.steady_peak_bytes)
            table.add_row(
                spans(each.stages),
                str(each.rank),
                "-" if each.parameters is None else f"{each.parameters / 10**6:,.1f}",
                *("-" if size is None else f"{size / GIB:.3f}" for size in (*sizes, each.peak_reserved_bytes)),
                style="bold" if each.rank == self.rank and len(self.ranks) > 1 else "",
            )
        return table

    def _stages_table(self) -> "Table":
        from rich.table import Table

        stages = Table(title="Peak of each stage (tensors, GiB)", title_justify="left")
        for heading in ("stage", "first rank", "layers", "tensors"):
            stages.add_column(heading, justify="right")
        for each in self.stages:
            peak = f"{each.peak_tensor_bytes / GIB:.3f}"
            stages.add_row(str(each.stage), str(each.rank), str(each.layers), peak)
        return stages

    def _work_table(self) -> "Table":
        from rich.table import Table

        table = Table(title="Work of the steady step (ms: lower bound at data-sheet speeds)", title_justify="left")
        table.add_column("phase")
        for heading in ("launches", "TFLOP", "GB moved", "GB sent", "ms"):
            table.add_column(heading, justify="right")
        for part in (*self.work, None):
            name, work = ("step", total(self.work)) if part is None else (part.phase, part)
            if part is not None and part.replayed:
                name = f"replay ({work.checkpoints} checkpoints)"
            table.add_row(
                name,
                str(work.launches),
                f"{work.flops / 1e12:.3f}",
                f"{work.hbm_bytes / 1e9:.3f}",
                f"{work.communicated_bytes / 1e9:.3f}",
                f"{work.seconds * 1e3:.2f}",
            )
        return table

    @property
    def place(self) -> str:
        """Which rank it is of, and of a pipeline which stage, beside the one that holds most where that is another."""
        layout = self.workload.parallelism
        if layout.pp == 1:
            return f"rank {self.rank}"
        stage = self.rank // layout.first_rank(1)
        fullest = max(self.stages, key=lambda each: each.peak_tensor_bytes, default=None)
        if fullest is not None and fullest.stage != stage:
            most = f" (stage {fullest.stage}, rank {fullest.rank}, holds most)"
        else:
            most = ", which holds most" if fullest is not None or len(self.ranks) > 1 else ""
        return f"rank {self.rank}  pipeline stage {stage} of 0 to {layout.pp - 1}{most}"

    @property
    def verdict(self) -> str:
        """One sentence: the peak, where it is, and whether it fits the GPU."""
        relation = "fits" if self.fits else "does not fit"
        reserved = self.peak_reserved_bytes
        aside = tight = ""
        if self.fits and reserved is not None and reserved >= self.gpu_memory_bytes:
            aside = " but for fragmentation"
            tight = f" Tight: the allocator would hold {reserved / GIB:.2f} GiB unless it gives cached blocks back."
            tight += f" {self.fragmentation}".rstrip()
        covered = self.peak_allocated_bytes + self.margin_bytes
        beyond = ", more than there is" if self.fits and covered >= self.gpu_memory_bytes else ""
        margin = (
            f" With a margin of {self.margin_bytes / GIB:.2f} GiB it is {covered / GIB:.2f} GiB{beyond}."
            if self.margin_bytes
            else ""
        )
        full = max(covered, reserved or 0) >= _NEARLY_FULL * self.gpu_memory_bytes
        besides = " CUDA's context and NCCL's buffers come on top." if self.fits and full else ""
        return (
            f"Peak {self.peak_allocated_bytes / GIB:.3f} GiB ({self.certainty}) in {self.peak_phase} of iteration "
            f"{self.peak_iteration}; {relation} {self.gpu} ({self.gpu_memory_bytes / GIB:.2f} GiB)"
            f"{aside}.{margin}{tight}{besides}"
        )

    @property
    def assumption(self) -> str:
        """What was taken for fields that the workload does not state; or empty."""
        return f"Not stated, and taken as: {', '.join(self.assumed)}" if self.assumed else ""

    @property
    def span(self) -> str:
        """One sentence: between which peaks the open fields leave it, and whether that decides if it fits; or empty."""
        if self.peak_range is None:
            return ""
        low, high = self.peak_range.low_bytes, self.peak_range.high_bytes
        decides = (low < self.gpu_memory_bytes) != (high < self.gpu_memory_bytes)
        return (
            f"Between {low / GIB:.3f} and {high / GIB:.3f} GiB by what the workload does not state: "
            f"{', '.join(self.peak_range.causes)}.{' That decides whether it fits.' if decides else ''}"
        )

    def __str__(self) -> str:
        held = "\n".join(f"  {share.category:<22}{share.bytes / GIB:>8.3f} GiB" for share in self.breakdown)
        return f"{self.workload.model.name}, recompute {self.workload.recompute.label}: {self.verdict}\n{held}"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{escape(share.category)}</td><td>{share.bytes / GIB:.3f}</td>"
            f"<td>{share.bytes / self.peak_allocated_bytes:.1%}</td></tr>"
            for share in self.breakdown
        )
        raised = f"Raised to a peak {self.raised}." if self.raised else ""
        warnings = "".join(f"<p>Range: {escape(str(each))}</p>" for each in self.ranges)
        warnings += (
            f"<p>{escape(self.assumption)} (<code>.ranged</code> traces the others).</p>" if self.assumed else ""
        )
        warnings += "".join(f"<p>Warning: {escape(warning)}</p>" for warning in self.warnings)
        return (
            f"<div class='labkit-summary'><p><strong>{escape(self.workload.model.name)}</strong>, recompute "
            f"{escape(self.workload.recompute.label)}, {self.place}. "
            f"{' '.join(map(escape, filter(None, (self.verdict, raised, self.span))))}</p>"
            f"<table><caption>What holds the peak ({self.certainty})</caption><thead><tr>"
            f"<th scope='col' style='text-align:left'>category</th><th scope='col'>GiB</th><th scope='col'>share</th>"
            f"</tr></thead><tbody>{rows}</tbody></table>{warnings}</div>"
        )


class Written(NamedTuple):
    """What a rank holds, row by row."""

    ledger: Ledger
    peak_reserved_bytes: int | None
    """Segments of the caching allocator; None where no allocator was simulated."""
    fragmentation: str = ""
    """What the allocator has to do within the GPU's memory, in a sentence; empty where its segments fit."""


class Result:
    """A workload with the ledger that says what its rank holds. Base of `Estimate` and `Trace`."""

    certainty: Literal["estimated", "traced"]

    def __init__(self, workload: Workload, rank: int, write: Callable[[], Written]) -> None:
        """`write` is called when the ledger is first asked for."""
        self.workload = workload
        self.rank = rank
        self._write = write

    @cached_property
    def _written(self) -> Written:
        return self._write()

    @property
    def ledger(self) -> Ledger:
        """What the rank holds."""
        return self._written.ledger

    @property
    def peak_reserved_bytes(self) -> int | None:
        """See `Written`."""
        return self._written.peak_reserved_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """Largest sum of live allocator blocks."""
        return self.summary.peak_allocated_bytes

    @property
    def retained_bytes(self) -> int:
        """Tensor bytes the steady forward leaves for its backward."""
        return self.summary.retained_bytes

    @property
    def work(self) -> tuple[WorkRow, ...]:
        """What the steady step does, module by module; empty where nobody counted."""
        return ()

    @property
    def works(self) -> tuple[tuple[WorkRow, ...], ...]:
        """The same of every rank that was followed."""
        return (self.work,)

    def margin_bytes(self, peaks: Sequence[Peak]) -> int:  # noqa: ARG002
        """What is set aside above the largest of the phase peaks: nothing where it was seen."""
        return 0

    @cached_property
    def summary(self) -> Summary:
        """The result on one page."""
        tensors = self.ledger.phase_peaks(blocks=False)
        blocks = self.ledger.phase_peaks()
        peak = max(blocks, key=lambda peak: peak.bytes)
        gpu = GPUS[self.workload.training.gpu]
        warnings = [str(finding) for finding in self.workload.findings if finding.severity == "warning"]
        return Summary(
            certainty=self.certainty,
            workload=self.workload,
            workload_hash=self.workload.content_hash,
            rank=self.rank,
            peak_allocated_bytes=peak.bytes,
            peak_reserved_bytes=self.peak_reserved_bytes,
            fragmentation=self._written.fragmentation if peak.bytes < gpu.total_memory_bytes else "",
            peak_iteration=peak.iteration,
            peak_phase=peak.phase,
            phases=tuple(
                PhaseSummary(
                    iteration=block.iteration,
                    phase=block.phase,
                    peak_allocated_bytes=block.bytes,
                    peak_tensor_bytes=tensor.bytes,
                )
                for block, tensor in zip(blocks, tensors, strict=True)
            ),
            between_steps_bytes=self.ledger.between_steps().total(),
            retained_bytes=self.ledger.retained().total(),
            breakdown=tuple(
                Share(category=name, bytes=nbytes) for name, nbytes in breakdown(self.ledger.at(peak.clock)).items()
            ),
            margin_bytes=self.margin_bytes(blocks),
            gpu=gpu.name,
            gpu_memory_bytes=gpu.total_memory_bytes,
            fits=peak.bytes < gpu.total_memory_bytes,
            warnings=tuple(warnings),
            work=by_phase(self.work),
            raised=next((row.tensor for row in self.ledger.rows if row.kind == PROFILE), None),
        )

    def __repr__(self) -> str:
        return str(self.summary)

    def __rich__(self) -> Summary:
        return self.summary

    def _repr_html_(self) -> str:
        return self.summary._repr_html_()
