"""`Study`: a question with its results; running it makes the missing ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import labkit
from labkit.drivers.contract import CellKey
from labkit.errors import InputError
from labkit.study.drivers import KINDS, Started
from labkit.study.matrix import Candidate, CellDriver, Matrix
from labkit.study.results import CandidateResult, CellResult, Results
from labkit.study.runner import Cell, Driver, Event, run_cells
from labkit.study.status import CellStatus, Refusal, StudyStatus, examine
from labkit.study.store import DamagedCellError, Store, Stored, work
from labkit.workload.files import study_file

if TYPE_CHECKING:
    from labkit.drivers.trace.driver import Trace
    from labkit.drivers.trace.server import Limits


class Study:
    """A matched study: one control, candidates that differ from it, one result file per cell.

    >>> study = Study.load("data/studies/moonlight-16b.yaml")  # doctest: +SKIP
    >>> study.run()  # makes the missing results, shows progress in a terminal  # doctest: +SKIP
    >>> study.results().decision  # doctest: +SKIP

    Results lie in `results/NAME` beside the folder `studies` that holds the study file (`data/results/moonlight-16b`
    for `data/studies/moonlight-16b.yaml`), or beside the file itself if its folder has another name. Those of a study
    that ships inside an installed labkit lie in `results/NAME` of the working directory.
    """

    def __init__(self, matrix: Matrix, path: Path, store: Store) -> None:
        self.matrix = matrix
        self.path = path
        self.store = store

    @classmethod
    def load(cls, path: str | Path, store: str | Path | None = None) -> "Study":
        """Read a study file; nothing is run or written.

        Args:
            path: The study file; the name of one in `data/studies` will do.
            store: The folder of its results; by default as the class says.

        Raises:
            InputError: the file describes no study that can run (one sentence: what, where, what would work).
        """
        path = study_file(Path(path))
        matrix = Matrix.load(path)
        return cls(matrix, path, Store(Path(store) if store is not None else _default_store(path, matrix.name)))

    @property
    def name(self) -> str:
        """The study's name, which also names the folder of its results and its report."""
        return self.matrix.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What the store holds when the study is done: driver by driver, and each setting's control first."""
        return tuple(cell for driver in self.matrix.drivers for cell in self._cells(driver))

    def _cells(self, driver: CellDriver) -> Iterator[Cell]:
        kind = KINDS.get(driver)
        here = None if kind is None else kind.versions()
        known = self.store.by_work() if here is None else {}
        versions = tuple(sorted((here or {}).items()))
        for repetition in range(1, 1 + (1 if kind is not None and not kind.varies else self.matrix.repetitions)):
            for candidate in self.matrix.candidates:
                workload = candidate.workload.content_hash
                key = CellKey(workload_hash=workload, driver=driver, versions=versions, repetition=repetition)
                elsewhere = known.get(work(key))  # the newest that a machine with this driver has made
                yield Cell(candidate, elsewhere[0].key if elsewhere else key)

    def run(
        self,
        only: Sequence[str] = (),
        *,
        drivers: Sequence[CellDriver] = (),
        force: bool = False,
        workers: int | None = None,
        limits: "Limits | None" = None,
        share: tuple[int, int] | None = None,
        driver: Driver | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> StudyStatus:
        """Make the missing results; a failed cell is a result, and the next run tries it again.

        Args:
            only: Labels of the candidates (or names of the settings) to run; all by default.
            drivers: Those of the study's drivers to run; by default all that can run here.
            force: Also make again what is there.
            workers: Ranks traced at once; by default 2, or 1 on a single CPU.
            limits: What the trace of one rank may take; by default those of `TraceServer`.
            share: (which, of how many) runs that share the work: each begins elsewhere and waits for no other.
            driver: What measures a workload; by default the study's own.
            on_event: Called with each `labkit.study.runner.Event`; by default progress shows in a terminal.

        Returns:
            The state of the chosen cells afterwards.

        Raises:
            InputError: an unknown label, a driver that the study has not or that cannot run here, fewer than one
                worker, or launch arguments that Megatron refuses.
            WorkError: the store cannot be written.
            KeyboardInterrupt: interrupted; what was finished is stored.
        """
        from labkit.drivers.trace.server import usual_workers

        if workers is None:
            workers = usual_workers()
        if workers < 1:
            raise InputError(f"workers: {workers} cannot run anything; use 1 or more")
        asked = self._asked(drivers, given=driver is not None)
        cells = self._chosen(only, asked)
        missing = cells if force else self._missing(cells)
        for name in asked:
            mine = [cell for cell in missing if cell.key.driver == name]
            if mine and (driver is not None or _runs_here(name)):
                self._make(
                    name,
                    _from(mine, share),
                    workers=workers,
                    limits=limits,
                    driver=driver,
                    on_event=on_event,
                    force=force,
                    leave=share is not None,
                )
        return self._status(cells)

    def missing(self, only: Sequence[str] = (), drivers: Sequence[CellDriver] = ()) -> list[Cell]:
        """What `run` would make, wherever its drivers can run.

        Raises:
            InputError: an unknown label, or a driver that the study has not.
        """
        return self._missing(self._chosen(only, self._asked(drivers, given=True)))

    def _missing(self, cells: Sequence[Cell]) -> list[Cell]:
        states = examine(cells, self.store)
        return [cell for cell, status in zip(cells, states, strict=True) if status.state != "done"]

    def elsewhere(self, status: StudyStatus) -> tuple[CellDriver, ...]:
        """The drivers that cannot run on this machine and have not made all of their cells in `status`."""
        lacking = {cell.driver for cell in status.cells if cell.state != "done"}
        return tuple(name for name in self.matrix.drivers if name in lacking and not _runs_here(name))

    def _asked(self, drivers: Sequence[CellDriver], *, given: bool) -> tuple[CellDriver, ...]:
        """The drivers of the study to run, in its order."""
        for name in drivers:
            if name not in self.matrix.drivers:
                has = ", ".join(self.matrix.drivers)
                raise InputError(f"{self.name}: {name} is none of its drivers ({has}); add it to the study file")
            if not given and not _runs_here(name):
                raise InputError(f"{self.name}: {name} cannot run on this machine; labkit doctor says what is missing")
        return tuple(name for name in self.matrix.drivers if not drivers or name in drivers)

    def _chosen(self, only: Sequence[str], drivers: Sequence[CellDriver]) -> list[Cell]:
        chosen = {candidate.label for label in only for candidate in self.matrix.chosen(label)}
        return [cell for name in drivers for cell in self._cells(name) if not chosen or cell.candidate.label in chosen]

    def _make(
        self,
        name: CellDriver,
        cells: Sequence[Cell],
        *,
        workers: int,
        limits: "Limits | None",
        driver: Driver | None,
        on_event: Callable[[Event], None] | None,
        force: bool,
        leave: bool,
    ) -> None:
        with ExitStack() as stack:
            if on_event is None:
                from labkit.study.progress import show_progress

                on_event = stack.enter_context(show_progress(self.matrix.title, len(cells)))
            if driver is None:
                kind = KINDS[name]
                workers = min(workers, kind.workers or workers)
                started = stack.enter_context(kind.start(workers, limits))
                self._check(cells, started)
                driver = started.driver
            run_cells(
                cells,
                self.store,
                driver,
                workers=min(workers, len(cells)),
                force=force,
                leave=leave,
                on_event=on_event,
                abort=stack.close,
            )

    def _check(self, cells: Sequence[Cell], started: Started) -> None:
        """Before anything is written; what fields say has passed labkit's rules, launch arguments Megatron knows."""
        for cell in cells:
            if cell.candidate.workload.launch is not None:
                try:
                    started.check(cell.candidate.workload)
                except InputError as error:
                    raise InputError(f"{self.path}: {cell.candidate.label}: {error}") from None

    def status(self) -> StudyStatus:
        """The state of every cell; verifies the bytes of each file, writes nothing."""
        return self._status(self.cells)

    def _status(self, cells: Sequence[Cell]) -> StudyStatus:
        return StudyStatus(
            study=self.name,
            title=self.matrix.title,
            store=str(self.store.directory),
            cells=examine(cells, self.store),
            refused=tuple(Refusal(candidate=label, reason=reason) for label, reason in self.matrix.refused),
        )

    def results(self) -> Results:
        """What is known now: estimates made on the spot, stored results, recorded and published figures."""
        from labkit.drivers.recorded import same_work
        from labkit.memory.estimate import estimate

        runs: dict[Candidate, list[CellResult]] = {}
        cells = self.cells
        for cell, status in zip(cells, examine(cells, self.store), strict=True):
            runs.setdefault(cell.candidate, []).append(self._result(cell, status))
        published = self.matrix.published
        known = [
            CandidateResult(
                candidate=candidate,
                estimate=estimate(candidate.workload),
                runs=tuple(made),
                published=None if published is None else published.measurement(candidate.workload),
                recorded=next(
                    (each for each in self.matrix.recorded if not same_work(each.workload, candidate.workload)), None
                ),
            )
            for candidate, made in runs.items()
        ]
        return Results(self.matrix, tuple(known))

    def _result(self, cell: Cell, status: CellStatus) -> CellResult:
        try:
            stored = self.store.read(cell.key)
        except DamagedCellError as damage:
            return CellResult(status.model_copy(update={"state": "damaged", "detail": str(damage)}))
        if stored is None:
            return CellResult(status)
        return CellResult(status, stored.measurement, _traced(stored))

    def __repr__(self) -> str:
        return f"Study({self.name!r}, {self.status().sentence})"

    def __rich__(self) -> StudyStatus:
        return self.status()

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()


def _runs_here(name: CellDriver) -> bool:
    return name in KINDS and KINDS[name].versions() is not None


def _from(cells: Sequence[Cell], share: tuple[int, int] | None) -> Sequence[Cell]:
    """The cells, beginning where the share begins."""
    which, of = share or (0, 1)
    start = len(cells) * which // of
    return [*cells[start:], *cells[:start]]


def _traced(stored: Stored) -> "Trace | None":
    """The trace a cell file holds, as its driver handed it over; None if it did not pass."""
    from labkit.drivers.trace.driver import Trace

    worst = stored.measurement.worst_rank
    if stored.ledger is None or worst is None:
        return None
    return Trace(
        stored.measurement.workload,
        stored.ledger,
        rank=worst.rank,
        peak_reserved_bytes=worst.peak_reserved_bytes,
        measurement=stored.measurement,
    )


def _default_store(path: Path, name: str) -> Path:
    folder = path.resolve().parent
    if folder.is_relative_to(Path(labkit.__file__).parent):
        return Path("results") / name
    home = folder.parent if folder.name == "studies" else folder
    return home / "results" / name
