"""What each recompute choice holds and costs, by the estimator's outline: half a millisecond a choice."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from labkit.ledger import WITHOUT_ACTIVATIONS
from labkit.memory.estimate import BlockPeaks
from labkit.memory.margin import margin_over
from labkit.memory.meter import Integers
from labkit.memory.outline import Outline, block, outline, outline_of
from labkit.memory.replay import Replay, replay, replayed_regions, run_once
from labkit.memory.units import recorder
from labkit.workload import Recompute, Workload
from labkit.workload.stages import fullest_stages, stage_layers, warmup_passes


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
    retained_bytes: int
    """What forward leaves for backward, on the stage that peaks, in blocks too."""
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

    @property
    def is_list(self) -> bool:
        """It is a list of labels."""
        return self.workload.recompute.recompute_granularity == "selective"


class Pricer:
    """Prices recompute choices of a workload; what is recorded of a layer serves them all."""

    def __init__(self, workload: Workload, size: Callable[[int], int] = block) -> None:
        """`size`: what a tensor's bytes count as; `labkit.memory.outline.tensor` for tensors as they are."""
        self.workload = workload
        self._size = size
        self._recorder = recorder(workload)
        self._stages = fullest_stages(workload)

    def worth_pricing(self, choices: Iterable[Recompute]) -> Iterator[Recompute]:
        """The choices without long regions: those that are too long to look at, and those that surely hold too much.

        Uniform recompute replays the same whatever the length of its regions. While one is run again it holds what its
        layers save, and the largest of n regions has at least an n-th of what they all save above their boundaries.
        """
        for choice in choices:
            if not has_long_regions(choice) or self._may_save(choice.recompute_num_layers or 1):
                yield choice

    def _may_save(self, length: int) -> bool:
        """Regions of so many layers may hold less than those of one."""
        few = length * self._operations <= _MOST_OPERATIONS
        return few and all(-(-longest // length) >= fewest for longest, fewest in self._fewest_regions)

    @cached_property
    def _operations(self) -> int:
        """Of the longest layer."""
        chunks = (chunk for stage in self._stages for chunk in self._recorder.chunks(EVERY_LAYER, stage))
        return max(len(unit.tape.ops) for chunk in chunks for run in chunk.runs for unit in run.units)

    @cached_property
    def _fewest_regions(self) -> list[tuple[int, float]]:
        """For each stage the layers of its longest chunk, and into how many regions they must be cut."""
        workload, found = self.workload, []
        for stage in self._stages:
            cases = (workload.model_copy(update={"recompute": each}) for each in (_NONE, EVERY_LAYER))
            saving, cut = (outline(case, stage) for case in cases)
            under_way = min(warmup_passes(workload, stage) + 1, workload.num_microbatches * workload.parallelism.vpp)
            saved = (saving.retained_bytes - cut.retained_bytes) / under_way
            room = max(cut.peak_bytes - saving.between_steps_bytes, 1)
            found.append((max(map(len, stage_layers(workload, stage))), saved / room))
        return found

    def each(self, choices: Iterable[Recompute]) -> Iterator[Priced]:
        """The workload under each choice."""
        return map(self.price, choices)

    def price(self, choice: Recompute) -> Priced:
        """The workload under a choice."""
        case = self.workload.model_copy(update={"recompute": choice})
        outlines: list[Outline] = []
        replays: list[Replay] = []
        regions = 0
        for stage in self._stages:
            model = self._recorder.chunks(choice, stage)
            outlines.append(outline_of(model, case, stage, Integers(self._size)))
            replays.append(replay(model, case))
            regions = max(regions, replayed_regions(model))
        found = [(number, phase) for number, each in enumerate(outlines) for phase in each.phases]
        number, peak = max(found, key=lambda each: each[1].bytes)
        return Priced(
            workload=case,
            stage=self._stages[number],
            iteration=peak.iteration,
            phase=peak.phase,
            peak_bytes=peak.bytes,
            covered_bytes=max(_covered(case, each) for each in outlines),
            retained_bytes=outlines[number].retained_bytes,
            floor_bytes=max(phase.bytes for _, phase in found if phase.phase in WITHOUT_ACTIVATIONS),
            replay=max(replays, key=lambda each: each.seconds),
            regions=regions,
        )

    @cached_property
    def step_seconds(self) -> float:
        """The least that a step's passes take on the stage whose forward takes longest.

        Backward does twice the products of forward, of inputs and of weights; the latter not for frozen weights.
        """
        models = (self._recorder.chunks(Recompute(), stage) for stage in self._stages)
        forward = max(run_once(model, self.workload).seconds for model in models)
        return forward * (3 if self.workload.training.lora is None else 2)


_MOST_OPERATIONS = 20_000
"""Of a region: a hundred usual layers, or two of one that turns a thousand packed sequences one by one."""
_NONE = Recompute()
EVERY_LAYER = Recompute(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

NEAR = 0.03
"""How far a choice's price may be from the exact one: blocks of fresh segments alone, where cached ones are smaller
(up to 1 % in large models) or leave more over (2 % in small ones)."""


def has_long_regions(choice: Recompute) -> bool:
    """Uniform recompute of several layers a region."""
    return choice.recompute_method == "uniform" and choice.recompute_num_layers != 1


class Exact(NamedTuple):
    """A choice at the price of `labkit.memory.estimate`."""

    priced: Priced
    peaks: BlockPeaks
    """Of its fullest stage."""


def exact_peaks(case: Workload) -> dict[int, BlockPeaks]:
    """Play the allocator on each stage that can be the fullest, that one first: a tenth of a second a stage."""
    stages = {stage: BlockPeaks(case, stage) for stage in fullest_stages(case)}
    return dict(sorted(stages.items(), key=lambda item: -item[1].peak.bytes))


def exactly_covered(case: Workload, stages: Mapping[int, BlockPeaks]) -> int:
    """The largest of the peaks with their margins."""
    needed: list[int] = [
        each.peak.bytes + margin_over(case, each.phases, each.before_bytes) for each in stages.values()
    ]
    return max(needed)


def exactly(choice: Priced) -> Exact:
    """A choice at its exact price."""
    case = choice.workload
    stages = exact_peaks(case)
    stage = next(iter(stages))
    peak = stages[stage].peak
    priced = choice._replace(
        stage=stage,
        iteration=peak.iteration,
        phase=peak.phase,
        peak_bytes=peak.bytes,
        covered_bytes=exactly_covered(case, stages),
    )
    return Exact(priced, stages[stage])


def _covered(case: Workload, outline: Outline) -> int:
    return outline.peak_bytes + margin_over(case, outline.phases, outline.set_up_bytes)
