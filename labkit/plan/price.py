"""What each recompute choice holds and costs, by the estimator's outline: a few milliseconds a choice."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from labkit.ledger import WITHOUT_ACTIVATIONS
from labkit.memory.estimate import estimate
from labkit.memory.layers.sizes import Sizes
from labkit.memory.margin import margin_over
from labkit.memory.meter import Integers
from labkit.memory.outline import Outline, block, outline_of
from labkit.memory.replay import Replay, replay
from labkit.memory.units import Recorder
from labkit.workload import Recompute, Workload


class Priced(NamedTuple):
    """A choice with its peak, of its fullest pipeline stage, and the cost of its replay."""

    workload: Workload
    stage: int
    iteration: int
    phase: str
    peak_bytes: int
    """Allocator blocks."""
    covered_bytes: int
    """With the margin that an estimate sets aside, on the stage that needs most."""
    fragmentation: str
    """What an exact price says of segments that do not fit the GPU where the peak does; else empty."""
    floor_bytes: int
    """The largest peak of the phases that no recompute choice lowers."""
    replay: Replay
    """Of a step, on the stage that replays longest."""
    regions: int
    """Stretches that one micro-batch runs again, on the stage that has most of them."""

    @property
    def label(self) -> str:
        """The recompute choice."""
        return self.workload.recompute.label


def priced(workload: Workload, choices: Iterable[Recompute]) -> Iterator[Priced]:
    """The workload under each choice."""
    recorder = Recorder(workload, Sizes.of(workload))
    for choice in choices:
        case = workload.model_copy(update={"recompute": choice})
        yield _priced(recorder, case)


def _priced(recorder: Recorder, case: Workload) -> Priced:
    stages: list[Outline] = []
    replays: list[Replay] = []
    regions = 0
    for stage in range(case.parallelism.pp):
        model = recorder.chunks(case.recompute, stage)
        stages.append(outline_of(model, case, stage, Integers(block)))
        replays.append(replay(model, case))
        regions = max(regions, sum(len(unit.regions) for chunk in model for unit in chunk.units))
    stage, peak = max(
        ((stage, phase) for stage, found in enumerate(stages) for phase in found.phases),
        key=lambda each: each[1].bytes,
    )
    return Priced(
        workload=case,
        stage=stage,
        iteration=peak.iteration,
        phase=peak.phase,
        peak_bytes=peak.bytes,
        covered_bytes=max(_covered(case, found) for found in stages),
        fragmentation="",
        floor_bytes=max(
            phase.bytes for found in stages for phase in found.phases if phase.phase in WITHOUT_ACTIVATIONS
        ),
        replay=max(replays, key=lambda each: each.seconds),
        regions=regions,
    )


NEAR = 0.03
"""How far a choice's price may be from the exact one: blocks of fresh segments alone, where cached ones are smaller
(up to 1 % in large models) or leave more over (2 % in small ones)."""


def exactly(choice: Priced) -> Priced:
    """A choice at the price of `labkit.memory.estimate`, which plays the allocator: a fraction of a second."""
    results = [estimate(choice.workload, stage) for stage in range(choice.workload.parallelism.pp)]
    result = max(results, key=lambda each: each.peak_allocated_bytes)
    summary = result.summary
    return choice._replace(
        stage=results.index(result),
        iteration=summary.peak_iteration,
        phase=summary.peak_phase,
        peak_bytes=summary.peak_allocated_bytes,
        covered_bytes=max(each.peak_allocated_bytes + each.summary.margin_bytes for each in results),
        fragmentation=summary.fragmentation,
    )


def _covered(case: Workload, outline: Outline) -> int:
    highest: int = max(phase.bytes for phase in outline.phases)
    return highest + margin_over(case, outline.phases, outline.set_up_bytes)
