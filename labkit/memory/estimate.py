"""`estimate`: what one rank holds, in closed form, explained row by row; no GPU, no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal

from labkit.allocator import Simulated, simulate, simulate_training, simulate_unlimited
from labkit.ledger import Ledger, Peak, rarely_collected
from labkit.memory.book import Book
from labkit.memory.margin import before, margin_over, margin_rows
from labkit.memory.outline import Outline, PhaseLevel, outline
from labkit.memory.replay import Replay, replay
from labkit.memory.state import State
from labkit.memory.steps import run_steps
from labkit.memory.units import chunks, loss_chunk
from labkit.memory.writer import Writer
from labkit.summary import Result, StagePeak, Summary, Written
from labkit.workload import Workload
from labkit.workload.attention_backends import keeps_no_scores
from labkit.workload.gpu import GIB, MIB
from labkit.workload.stages import stage_layers


class Estimate(Result):
    """An estimated ledger of one rank, and what its recompute choice replays."""

    certainty: Literal["estimated"] = "estimated"

    def __init__(self, workload: Workload, stage: int) -> None:
        super().__init__(workload, workload.parallelism.first_rank(stage), self._play)
        self.stage = stage

    @cached_property
    def outline(self) -> Outline:
        """Its levels in tensors, in a millisecond or two; the rest is written row by row when it is asked for."""
        return outline(self.workload, self.stage)

    @property
    def own_peak_bytes(self) -> int:
        """Its peak by formula alone."""
        return self.peak_allocated_bytes

    @rarely_collected()
    def _play(self) -> Written:
        book = _book(self.workload, self.stage)
        simulated = simulate_training(book.events, book.streams, self.workload.training)
        ledger = Ledger(book.rows(self.rank, simulated.block_bytes), book.moments)
        return Written(ledger, simulated.reserved[-1][1], _fragmentation(book, simulated))

    @cached_property
    def summary(self) -> Summary:
        """The result on one page, with the peaks of all pipeline stages where there are several."""
        plain = super().summary
        warnings = (*plain.warnings, *self._cost_of_idle_attention())
        return plain.model_copy(update={"stages": stage_peaks(self.workload), "warnings": warnings})

    def _cost_of_idle_attention(self) -> Iterator[str]:
        """What label `core_attn` changes where the kernel keeps no scores."""
        labels = self.workload.recompute.modules
        if "core_attn" not in labels or not keeps_no_scores(self.workload):
            return
        others = {"recompute_granularity": "selective", "recompute_modules": sorted(labels - {"core_attn"})}
        without = Estimate(self.workload.with_recompute(**others), self.stage)
        more = self.outline.peak_bytes - without.outline.peak_bytes
        change = f"{'adds' if more > 0 else 'takes'} {abs(more) / GIB:.3f} GiB {'to' if more > 0 else 'off'} the peak"
        seconds = self.replay.seconds - without.replay.seconds
        yield (
            f"recompute.recompute_modules: core_attn {change if more else 'leaves the peak as it is'} "
            f"and runs {seconds * 1e3:.2f} ms or more of attention again each step, by the estimate without it"
        )

    @cached_property
    def replay(self) -> Replay:
        """Work that backward repeats each step."""
        return replay(chunks(self.workload, self.stage), self.workload)

    @cached_property
    def ranged(self) -> Summary:
        """The summary with the peak's range over what the workload does not state: several more estimates."""
        from labkit.memory.ranges import ranged

        return ranged(self)

    @cached_property
    def covering(self) -> Ledger:
        """The ledger with its margin rows: a peak of it is one that a run should not exceed."""
        return Ledger((*self.ledger.rows, *margin_rows(self.workload, self.ledger)), self.ledger.moments)

    def margin_bytes(self, peaks: Sequence[Peak]) -> int:
        """What `covering` has above the largest of the phase peaks."""
        return margin_over(self.workload, peaks, before(self.ledger))

    def __rich__(self) -> Summary:
        return self.ranged

    def _repr_html_(self) -> str:
        return self.ranged._repr_html_()


def estimate(workload: Workload, stage: int | None = None) -> Estimate:
    """Estimate what a rank of `workload` holds over two training steps.

    Every layer is played forward and backward in Megatron's order (`labkit.memory.units`), and the allocations
    go through the caching allocator's rules (`labkit.allocator`) to count blocks as a GPU would.

    Args:
        workload: what is run.
        stage: the pipeline stage whose first rank is priced; None: the stage that holds most.

    Known limitations: workspaces inside cuDNN kernels and NCCL buffers are not priced; compiled regions
    (`jit_fuser`) are taken to keep no intermediate.

    >>> from labkit.workload import Workload
    >>> round(estimate(Workload.load("data/workloads/moonlight-16b.yaml")).peak_allocated_bytes / 2**30)
    34
    """
    return Estimate(workload, fullest_stage(workload) if stage is None else stage)


_NEAR = 50
"""Part of what a step allocates."""


class BlockPeaks:
    """What the estimate of a stage's first rank has as its peaks, in allocator blocks; no rows, half the cost."""

    @rarely_collected()
    def __init__(self, workload: Workload, stage: int) -> None:
        self._book = book = _book(workload, stage)
        self._training = workload.training
        simulated = simulate_unlimited(book.events, book.streams, self._training)
        self._block_bytes = simulated.block_bytes
        self.reserved_bytes = simulated.reserved[-1][1]
        """The most that the allocator reserves."""
        levels = book.levels(self._block_bytes)
        self._peaks: dict[tuple[int, str], tuple[int, int]] = {}
        """(bytes, clock) by iteration and phase."""
        for moment, following in zip_longest(book.moments, book.moments[1:]):
            # A stretch begins with what is alive when it begins.
            stretch = range(moment.clock - 1, len(levels) if following is None else following.clock)
            clock = max(stretch, key=levels.__getitem__)
            key = moment.iteration, moment.phase
            self._peaks[key] = max(self._peaks.get(key, (0, 0)), (levels[clock], clock), key=lambda peak: peak[0])
        self.phases = [PhaseLevel(*key, nbytes) for key, (nbytes, _) in self._peaks.items()]
        self.before: dict[tuple[int, str], int] = {}
        """Alive when a phase of an iteration first begins, by both."""
        for moment in book.moments:
            self.before.setdefault((moment.iteration, moment.phase), levels[moment.clock - 1])
        self.before_bytes = self.before[1, "forward"]
        """Alive before the first step."""

    def fragmentation(self, device_bytes: int) -> str:
        """What `labkit.summary.Written` has of a device of this memory."""
        book = self._book
        return _fragmentation(book, simulate_training(book.events, book.streams, self._training, device_bytes))

    def runs_within(self, device_bytes: int) -> bool:
        """Whether the allocator gets along with so much memory, if need be by giving cached blocks back."""
        if self.reserved_bytes <= device_bytes:
            return True
        settings = self._training.allocator.model_copy(update={"per_process_memory_fraction": 1.0})
        found = simulate(self._book.events, self._book.streams, settings, device_bytes=device_bytes)
        return found.out_of_memory is None

    @cached_property
    def segment_bytes(self) -> int:
        """The least memory with which it gets along, to a fiftieth of what a step allocates; never below it."""
        low, high = self.peak.bytes, self.reserved_bytes
        near = max((low - self.before_bytes) // _NEAR, 16 * MIB)
        while high - low > near:
            middle = (low + high) // 2
            low, high = (low, middle) if self.runs_within(middle) else (middle, high)
        return high

    @property
    def peak(self) -> PhaseLevel:
        """The largest, the first of equals."""
        return max(self.phases, key=lambda phase: phase.bytes)

    def held(self, iteration: int, phase: str) -> Counter[str]:
        """Bytes by tensor, like modules of all layers together, at the largest moment of a phase."""
        _, clock = self._peaks[iteration, phase]
        held: Counter[str] = Counter()
        for entry, nbytes in self._book.at(clock, self._block_bytes):
            module = ".".join(part for part in entry.module.split(".") if not part.isdigit())
            held[f"{module.removeprefix('decoder.layers.')} {entry.tensor}".strip()] += nbytes
        return held


def _fragmentation(book: Book, simulated: Simulated) -> str:
    return simulated.fragmentation(lambda event: book.phases[book.events[event][0] - 1])


def _book(workload: Workload, stage: int) -> Book:
    """Two steps of a stage's first rank."""
    model, book = chunks(workload, stage), Book()
    run_steps(workload, stage, model, loss_chunk(workload), Writer(book, State(model, workload, stage)))
    return book


def fullest_stage(workload: Workload) -> int:
    """The pipeline stage whose tensors peak highest; the first of equals."""
    peaks = stage_peaks(workload)
    return max(peaks, key=lambda peak: peak.peak_tensor_bytes).stage if peaks else 0


@lru_cache(maxsize=16)
def stage_peaks(workload: Workload) -> tuple[StagePeak, ...]:
    """The peaks of the pipeline stages; none where there is one stage alone."""
    layout = workload.parallelism
    return tuple(
        StagePeak(
            stage=stage,
            rank=layout.first_rank(stage),
            layers=sum(map(len, stage_layers(workload, stage))),
            peak_tensor_bytes=outline(workload, stage).peak_bytes,
        )
        for stage in range(layout.pp if layout.pp > 1 else 0)
    )
