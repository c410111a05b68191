"""What the notebook `diagnosis` shows of files of one run: frames and sentences of `labkit.diagnose.examine`.

Figures that files say are `recorded`, those of labkit `estimated`. Bytes are integers.
"""

from collections.abc import Iterator
from typing import Final

import polars as pl

from labkit.diagnose.beside import Beside
from labkit.diagnose.case import outside_bytes, size
from labkit.diagnose.diagnose import Examined
from labkit.diagnose.facts import Evidence, OutOfMemory
from labkit.diagnose.snapshot_compare import SnapshotComparison
from labkit.diagnose.snapshot_page import DevicePage, SnapshotPage
from labkit.study.frames import BREAKDOWN

FINDINGS: Final = pl.Schema({"finding": pl.String, "part": pl.String, "text": pl.String})
"""One row for each thing said about a finding: what happened, the line that shows it, how to confirm, what to try."""
FAILURES: Final = pl.Schema(
    {"failure": pl.String, "part": pl.String, "bytes": pl.Int64, "requested_bytes": pl.Int64, "place": pl.String}
)
"""One row for each part (`PARTS`) of a GPU's memory as an out-of-memory message has it."""
RANKS: Final = pl.Schema(
    {
        "rank": pl.Int64,
        "iteration": pl.Int64,
        "allocated_bytes": pl.Int64,
        "max_allocated_bytes": pl.Int64,
        "reserved_bytes": pl.Int64,
        "max_reserved_bytes": pl.Int64,
        "place": pl.String,
    }
)
"""One row for each report of a rank that was kept (`labkit.diagnose.facts.MemoryReports`)."""
STEPS: Final = pl.Schema(
    {"iteration": pl.Int64, "milliseconds": pl.Float64, "tflops": pl.Float64, "loss": pl.Float64, "bad": pl.Boolean}
)
"""One row for each step that a log shows; bad: skipped, or not finite."""
BESIDE: Final = pl.Schema(
    {
        "stage": pl.Int64,
        "moment": pl.String,
        "rank": pl.Int64,
        "recorded_bytes": pl.Int64,
        "estimated_bytes": pl.Int64,
        "verdict": pl.String,
        "place": pl.String,
    }
)
MOMENTS: Final = pl.Schema(
    {
        "device": pl.String,
        "entry": pl.Int64,
        "seconds": pl.Float64,
        "phase": pl.String,
        "allocated_bytes": pl.Int64,
        "reserved_bytes": pl.Int64,
        "awaiting_bytes": pl.Int64,
        "event": pl.String,
    }
)
"""A snapshot's timeline, one row a moment; event: `peak`, `no memory for ...` or null."""
LIVE: Final = pl.Schema(
    {
        "device": pl.String,
        "site": pl.String,
        "caller": pl.String,
        "phase": pl.String,
        "bytes": pl.Int64,
        "count": pl.Int64,
    }
)
"""What was live at a snapshot's peak, by source line, most first."""
COMPARED: Final = pl.Schema(
    {
        "device": pl.Int64,
        "moment": pl.String,
        "site": pl.String,
        "caller": pl.String,
        "phase": pl.String,
        "before_bytes": pl.Int64,
        "after_bytes": pl.Int64,
        "change_bytes": pl.Int64,
        "state": pl.String,
    }
)

PARTS: Final = ("allocated", "reserved, not allocated", "outside PyTorch", "other processes", "free")
"""Of a GPU's memory when a request failed, from the left of its bar."""
_MOST_FAILURES, _MOST_RANKS, _MOST_LINES = 16, 64, 25


def answer(examined: Examined) -> tuple[str, ...]:
    """The cause in a sentence or two, what contributed, and what to try first."""
    first, *others = examined.diagnosis.findings
    said = [f"{first.cause[0].upper()}{first.cause[1:]}: {first.happened}"]
    said += [f"It contributed: {each.happened}" for each in others if each.weight == "contributes"]
    if first.remedies:
        remedy = first.remedies[0]
        said.append(remedy if remedy.startswith("Try ") else f"Try first: {remedy}")
        if examined.case.too_low:
            said.append(
                f"It may not be enough: the failure shows the estimate to be too low by {size(examined.case.too_low)} "
                "at least."
            )
    return tuple(said)


def findings(examined: Examined) -> pl.DataFrame:
    """Everything that was found, columns `FINDINGS`; the cause first, a line that was quoted only named again."""
    rows: list[tuple[str, str, str]] = []
    quoted: set[Evidence] = set()
    for number, finding in enumerate(examined.diagnosis.findings, 1):
        name = f"{number}. {finding.cause} ({finding.weight})"
        rows.append((name, "what happened", finding.happened))
        rows += [(name, "shown by", each.place if each in quoted else str(each)) for each in finding.evidence]
        quoted.update(finding.evidence)
        rows += [(name, "to confirm", sentence) for sentence in finding.confirm]
        rows += [(name, "to try", sentence) for sentence in finding.remedies]
    return pl.DataFrame(rows, schema=FINDINGS, orient="row")


def failures(examined: Examined) -> pl.DataFrame:
    """Where each failing GPU's memory was, columns `FAILURES`; the first failures, parts that are not said left out."""
    rows: list[tuple[str, str, int, int | None, str]] = []
    for number, message in enumerate(examined.case.facts.out_of_memory[:_MOST_FAILURES], 1):
        name = _failure_name(number, message)
        rows += [
            (name, part, size, message.requested, message.evidence.place) for part, size in _parts(message) if size
        ]
    return pl.DataFrame(rows, schema=FAILURES, orient="row")


def _failure_name(number: int, message: OutOfMemory) -> str:
    rank = "" if message.rank is None else f", rank {message.rank}"
    phase = f", {message.phase.replace('_', ' ')}" if message.phase else ""
    return f"failure {number}{rank}{phase}"


def _parts(message: OutOfMemory) -> Iterator[tuple[str, int]]:
    sizes = (
        message.allocated,
        message.unallocated,
        outside_bytes(message),
        sum(message.others),
        message.free,
    )
    yield from ((part, size) for part, size in zip(PARTS, sizes, strict=True) if size is not None)


def ranks(examined: Examined) -> pl.DataFrame:
    """What ranks said of their memory, columns `RANKS`; the fullest ranks where there are many."""
    reports = sorted(examined.case.facts.memory, key=lambda report: -report.peak)
    kept = list(dict.fromkeys(report.rank for report in reports))[:_MOST_RANKS]
    rows = [
        (
            report.rank,
            report.iteration,
            report.allocated,
            report.max_allocated,
            report.reserved,
            report.max_reserved,
            report.evidence.place,
        )
        for report in reports
        if report.rank in kept
    ]
    return pl.DataFrame(rows, schema=RANKS, orient="row").sort("rank", "iteration", nulls_last=True)


def steps(examined: Examined) -> pl.DataFrame:
    """The steps that logs show, columns `STEPS`."""
    rows = [
        (each.number, each.milliseconds, each.tflops, each.loss, bool(each.skipped or each.nan))
        for each in examined.case.facts.iterations
    ]
    return pl.DataFrame(rows, schema=STEPS, orient="row").unique("iteration", keep="last", maintain_order=True)


def beside(examined: Examined) -> pl.DataFrame:
    """labkit's estimate beside what the files say, columns `BESIDE`."""
    rows = [
        (
            stage.stage,
            stage.moment,
            stage.rank,
            stage.logged_bytes,
            stage.estimated_bytes,
            stage.verdict,
            stage.evidence.place,
        )
        for detail in examined.diagnosis.details
        if isinstance(detail, Beside)
        for stage in detail.stages
    ]
    return pl.DataFrame(rows, schema=BESIDE, orient="row")


def holdings(examined: Examined) -> pl.DataFrame:
    """What the estimate has at its peak, columns `labkit.study.frames.BREAKDOWN`; empty without a workload."""
    estimate = examined.case.estimate
    rows = (
        []
        if estimate is None
        else [
            (estimate.workload.recompute.label, "estimated", share.category, share.bytes)
            for share in estimate.summary.breakdown
        ]
    )
    return pl.DataFrame(rows, schema=BREAKDOWN, orient="row")


def moments(examined: Examined) -> pl.DataFrame:
    """The timelines of all snapshots' devices, columns `MOMENTS`."""
    rows: list[tuple[object, ...]] = []
    for name, device in _devices(examined):
        failed = {failure.at.entry: failure for failure in device.failures}
        points = {point.entry: point for point in (*device.timeline, *(each.at for each in device.failures))}
        for entry, point in sorted(points.items()):
            event = f"no memory for {failed[entry].requested_bytes / 2**20:,.1f} MiB" if entry in failed else None
            if event is None and entry == device.peak.entry:
                event = "peak"
            rows.append(
                (
                    name,
                    entry,
                    point.seconds,
                    point.phase.replace("_", " "),
                    point.allocated_bytes,
                    point.reserved_bytes,
                    point.awaiting_bytes,
                    event,
                )
            )
    return pl.DataFrame(rows, schema=MOMENTS, orient="row")


def live(examined: Examined) -> pl.DataFrame:
    """What held each snapshot's peak, columns `LIVE`; what is beyond the first lines is one row, `others`."""
    rows: list[tuple[object, ...]] = []
    for name, device in _devices(examined):
        shown, rest = device.live[:_MOST_LINES], device.live[_MOST_LINES:]
        rows += [(name, each.site, each.caller, each.phase, each.bytes, each.count) for each in shown]
        if rest or device.left_out:
            lines = len(rest) + device.left_out
            nbytes = sum(each.bytes for each in rest) + device.left_out_bytes
            rows.append((name, f"{lines} other lines", "", "", nbytes, None))
    return pl.DataFrame(rows, schema=LIVE, orient="row")


def compared(examined: Examined) -> pl.DataFrame:
    """Which source lines hold more or less in the second of two snapshots, columns `COMPARED`."""
    rows = [
        (
            moment.device,
            moment.moment,
            line.site,
            line.caller,
            line.phase,
            line.before_bytes,
            line.after_bytes,
            line.change,
            line.state,
        )
        for detail in examined.diagnosis.details
        if isinstance(detail, SnapshotComparison)
        for moment in detail.moments
        for line in moment.lines[:_MOST_LINES]
    ]
    return pl.DataFrame(rows, schema=COMPARED, orient="row")


def _devices(examined: Examined) -> Iterator[tuple[str, DevicePage]]:
    pages = [detail for detail in examined.diagnosis.details if isinstance(detail, SnapshotPage)]
    for number, page in enumerate(pages, 1):
        name = f"{number}. {page.source}" if len(pages) > 1 else page.source
        for device in page.devices:
            yield f"{name}, GPU {device.device}", device


def facts(examined: Examined) -> dict[str, str]:
    """What stands in the report's head: the files, what they say was run, its GPU."""
    said = {"Files": "; ".join(f"{each.source} ({each.kind})" for each in examined.diagnosis.files)}
    stated = examined.case.stated
    if stated is not None:
        workload = stated.workload
        layout = workload.parallelism
        said["What was run"] = (
            f"{workload.model.name} on {layout.world_size} ranks, recompute {workload.recompute.label}"
        )
        said["GPU"] = workload.training.gpu
    return said
