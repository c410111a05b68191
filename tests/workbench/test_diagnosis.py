"""What the diagnosis notebook shows: frames say what the files and the estimate say, and hostile text stays text."""

from pathlib import Path

import polars as pl
import pytest

from labkit.diagnose import Examined, examine
from labkit.report.charts import diagnosis as charts
from labkit.report.figure import Figure
from labkit.report.prose import Prose
from labkit.report.tables import diagnosis as tables
from labkit.workbench import diagnosis as view
from labkit.workload.gpu import GIB

EXAMPLES = Path(__file__).parents[2] / "data" / "examples"
HOSTILE = "<script>document.title='owned'</script>\"'&"


@pytest.fixture(scope="module")
def died() -> Examined:
    return examine([EXAMPLES / "moonlight-oom.log"])


@pytest.fixture(scope="module")
def recorded() -> Examined:
    return examine([EXAMPLES / "step.pickle", EXAMPLES / "step.pickle"])


def test_the_answer_is_the_cause_and_the_first_remedy(died: Examined) -> None:
    first, *_, last, caveat = view.answer(died)
    assert first.startswith("Capacity: Rank 3 asked for 1.27 GiB in forward of iteration 13, at megatron/core/")
    assert last.startswith("Try [moe_act] first: ")
    assert caveat == "It may not be enough: the failure shows the estimate to be too low by 3.75 GiB at least."


def test_every_finding_and_remedy_is_there(died: Examined) -> None:
    frame = view.findings(died)
    assert frame.schema == view.FINDINGS
    told = frame.group_by("finding", maintain_order=True).agg(pl.len())
    assert len(told) == len(died.diagnosis.findings)
    remedies = [sentence for finding in died.diagnosis.findings for sentence in finding.remedies]
    assert frame.filter(pl.col("part") == "to try")["text"].to_list() == remedies
    quoted = frame.filter(pl.col("part") == "shown by")["text"].to_list()
    assert sum("Tried to allocate" in text for text in quoted) == 1, "a line is quoted once"


def test_the_parts_of_a_failing_gpu_are_its_whole(died: Examined) -> None:
    frame = view.failures(died)
    assert frame.schema == view.FAILURES
    sizes = dict(frame.select("part", "bytes").iter_rows())
    assert sizes["allocated"] == round(75.81 * GIB)
    assert sum(sizes.values()) == pytest.approx(79.10 * GIB, rel=1e-4)
    assert frame["requested_bytes"].unique().to_list() == [round(1.27 * GIB)]


def test_ranks_steps_and_the_estimate_beside_them(died: Examined) -> None:
    ranks = view.ranks(died)
    assert ranks.schema == view.RANKS
    assert ranks["rank"].to_list() == list(range(8))
    steps = view.steps(died)
    assert steps.schema == view.STEPS
    assert steps["iteration"].to_list() == list(range(1, 13))
    beside = view.beside(died)
    assert beside.schema == view.BESIDE
    assert beside["moment"].to_list() == ["all steps", "failure"]
    assert died.case.estimate is not None
    assert beside["estimated_bytes"].to_list() == [died.case.estimate.peak_allocated_bytes] * 2
    assert view.holdings(died)["bytes"].sum() == died.case.estimate.peak_allocated_bytes


def test_a_snapshot_shows_its_peak_and_its_failure(recorded: Examined) -> None:
    moments = view.moments(recorded)
    assert moments.schema == view.MOMENTS
    peak = moments.filter(pl.col("event") == "peak")["allocated_bytes"].to_list()
    assert peak == [moments["allocated_bytes"].max()] * len(peak)
    assert moments["event"].str.starts_with("no memory for").sum() > 0
    live = view.live(recorded)
    assert live.schema == view.LIVE
    assert set(live.group_by("device").agg(pl.col("bytes").sum())["bytes"]) == {peak[0]}
    assert view.compared(recorded).schema == view.COMPARED


def test_what_is_not_there_is_said(recorded: Examined) -> None:
    assert isinstance(charts.steps(view.steps(recorded)), Prose)
    assert isinstance(charts.holdings(view.holdings(recorded)), Prose)
    assert isinstance(tables.beside(view.beside(recorded)), Prose)
    assert isinstance(tables.ranks(view.ranks(recorded)), Prose)


def test_charts_are_drawn_of_both(died: Examined, recorded: Examined) -> None:
    for figure in (
        charts.failures(view.failures(died)),
        charts.holdings(view.holdings(died)),
        charts.steps(view.steps(died)),
        charts.snapshot(view.moments(recorded)),
    ):
        assert isinstance(figure, Figure)
        assert figure.spec["description"] == figure.caption


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    log = tmp_path / "<b>name.log"
    message = (
        f"[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. {HOSTILE} GPU 0 has a total"
    )
    log.write_text(f"{message} capacity of 79.10 GiB of which 0.50 GiB is free. {HOSTILE}\n{'x' * 10_000}\n")
    examined = examine([log])
    shown = tables.findings(view.findings(examined)).as_raw_html()
    assert "&lt;b&gt;name.log" in shown
    assert "<script>" not in shown
    assert "<b>name" not in shown
