"""What a study knows: for each candidate the estimate, the results of its cells and the published figures."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from labkit.drivers.contract import DriverName, Measurement
from labkit.study.decision import Decision, decide
from labkit.study.matrix import Candidate, Matrix
from labkit.study.status import CellStatus
from labkit.summary import Result

if TYPE_CHECKING:
    import polars as pl

    from labkit.memory.estimate import Estimate
    from labkit.memory.profiles import Observation


@dataclass(frozen=True)
class CellResult:
    """What is known of one cell."""

    status: CellStatus
    measurement: Measurement | None = None
    """Also if it failed; None if there is none to trust."""
    traced: Result | None = None
    """Of a trace that passed, what the fullest rank held."""


@dataclass(frozen=True)
class CandidateResult:
    """Everything known about one candidate."""

    candidate: Candidate
    estimate: "Estimate"
    runs: tuple[CellResult, ...]
    """Its cells: driver by driver, repetition by repetition."""
    published: Measurement | None
    recorded: Measurement | None = None
    """Of a log."""

    @property
    def measurements(self) -> "Iterator[Measurement]":
        """Everything that was measured or traced: its cells', its log's, the published one."""
        made = (*(run.measurement for run in self.runs), self.recorded, self.published)
        yield from (each for each in made if each is not None)

    def by(self, driver: DriverName) -> tuple[CellResult, ...]:
        """The cells of one driver."""
        return tuple(run for run in self.runs if run.status.driver == driver)

    @property
    def traced(self) -> Result | None:
        """The trace, if it passed."""
        return next((run.traced for run in self.runs if run.traced is not None), None)


class Results:
    """The results of a study, and the frames that reports and notebooks read (`labkit.study.frames`)."""

    def __init__(self, matrix: Matrix, candidates: tuple[CandidateResult, ...]) -> None:
        self.matrix = matrix
        self.candidates = candidates

    @cached_property
    def cells(self) -> "pl.DataFrame":
        """One row per candidate and source (`frames.cells`)."""
        from labkit.study import frames

        return frames.cells(self)

    @cached_property
    def breakdown(self) -> "pl.DataFrame":
        """Bytes per category at each peak (`frames.breakdown`)."""
        from labkit.study import frames

        return frames.breakdown(self)

    def timeline(self, moments: int = 400) -> tuple["pl.DataFrame", "pl.DataFrame"]:
        """Bytes per category through the steady step, and each one's peak (`frames.timeline`)."""
        from labkit.study import frames

        return frames.timeline(self, moments)

    @cached_property
    def tradeoff(self) -> "pl.DataFrame":
        """What each choice saves against what its replay costs (`frames.tradeoff`)."""
        from labkit.study import frames

        return frames.tradeoff(self.decision)

    @cached_property
    def ranks(self) -> "pl.DataFrame":
        """What each rank holds that was traced or measured (`frames.ranks`)."""
        from labkit.study import frames

        return frames.ranks(self)

    @cached_property
    def contract(self) -> "pl.DataFrame":
        """How each figure came about (`frames.contract`)."""
        from labkit.study import frames

        return frames.contract(self)

    @cached_property
    def left_open(self) -> tuple[str, ...]:
        """What the control does not state and its estimate therefore leaves open, in sentences."""
        summary = self.candidates[0].estimate.ranged
        return (summary.span, *(f"{each}." for each in summary.ranges)) if summary.ranges else ()

    @property
    def observations(self) -> "Iterator[Observation]":
        """Every peak that was traced, recorded or published, for `labkit.memory.profiles`."""
        from labkit.memory.profiles import Observation

        for result in self.candidates:
            for measurement in result.measurements:
                peak = measurement.peak_allocated_bytes
                if measurement.outcome == "ok" and peak:
                    yield Observation(
                        workload=measurement.workload,
                        peak_allocated_bytes=peak,
                        certainty="traced" if measurement.driver == "trace" else "measured",
                        source=measurement.source[:1000] or measurement.driver,
                    )

    @cached_property
    def decided(self) -> Decision:
        """The ranking and its reasons in plain language: of each setting by itself.

        Of a sweep the sentences are each setting's first, and what holds in all; the frame has every verdict.
        """
        import polars as pl

        settings = self.matrix.settings
        if len(settings) == 1 and not settings[0].name:
            return decide(self.cells, settings[0].limit)
        made = []
        for setting in settings:
            short = pl.col("candidate").str.strip_suffix(f" at {setting.name}")
            made.append(decide(self.cells.filter(setting=setting.name).with_columns(short), setting.limit))
        said = [f"{each.name}: {decision.sentences[0]}" for each, decision in zip(settings, made, strict=True)]
        said += [each for each in made[0].sentences[1:] if all(each in decision.sentences for decision in made)]
        said += [f"{label} is refused: {reason}." for label, reason in self.matrix.refused]
        whole = pl.format("{} at {}", "candidate", "setting")
        return Decision(pl.concat([decision.frame.with_columns(candidate=whole) for decision in made]), tuple(said))

    @property
    def decision(self) -> "pl.DataFrame":
        """One row per candidate: figures side by side, verdict and rank."""
        return self.decided.frame
