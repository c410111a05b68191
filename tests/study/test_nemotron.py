"""NVIDIA's study of Nemotron 3 Nano: which choices ran out of memory, and the peaks of those that did not."""

import pytest

from labkit.drivers.recorded import GB, Published, PublishedCell
from labkit.memory.estimate import estimate
from labkit.study.matrix import Matrix
from labkit.summary import Summary
from labkit.workload import Routing, Workload
from labkit.workload.files import data_directory

STUDY = Matrix.load(data_directory() / "studies" / "nemotron-3-nano.yaml")
PUBLISHED = Published.load(data_directory() / "published" / "nemotron-3-nano.yaml")
CAPACITY = 80 * GB


def cell(workload: Workload) -> PublishedCell:
    return next(each for each in PUBLISHED.cells if each.recompute.label == workload.recompute.label)


def priced(workload: Workload, routing: Routing | None = None) -> Summary:
    return estimate(workload if routing is None else workload.model_copy(update={"routing": routing})).summary


WORKLOADS = [pytest.param(each.workload, id=each.label) for each in STUDY.candidates]


def test_every_choice_has_its_published_outcome() -> None:
    assert [STUDY.published is not None and cell(each.workload).outcome for each in STUDY.candidates] == [
        *["oom"] * 4,
        *["ok"] * 2,
    ]
    measured = PUBLISHED.measurement(STUDY.control.workload)
    assert measured is not None
    assert measured.failure is not None
    assert measured.failure.message.startswith("CUDA out of memory: iteration 2, MoE router")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_what_exceeds_80_gb_ran_out_of_memory(workload: Workload) -> None:
    summary = priced(workload)
    assert (summary.peak_allocated_bytes > CAPACITY) == (cell(workload).outcome == "oom")
    if cell(workload).outcome == "oom":
        # With the optimizer's state, that is from the second step on, forward alone is too much.
        assert any(each.phase == "forward" and each.peak_allocated_bytes > CAPACITY for each in summary.phases)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_published_peaks_are_met_within_a_little_more_than_a_percent(workload: Workload) -> None:
    """With balanced routing; peaks after the first step are of the rank that logs."""
    summary, found = priced(workload, Routing()), cell(workload)
    if found.peak_gb is not None:
        assert summary.peak_allocated_bytes == pytest.approx(found.peak_gb * GB, rel=0.013)
    if found.peak_first_step_gb is not None:
        first = max(each.peak_allocated_bytes for each in summary.phases if each.iteration == 1)
        assert first == pytest.approx(found.peak_first_step_gb * GB, rel=0.007)
