"""`Study`: a question with its results; running it makes the missing ones."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.drivers.contract import CellKey
from labkit.errors import InputError
from labkit.study.matrix import Matrix
from labkit.study.results import CandidateResult, Results
from labkit.study.runner import Cell, Driver, Event, run_cells
from labkit.study.status import StudyStatus, examine
from labkit.study.store import Store, Stored

if TYPE_CHECKING:
    from labkit.drivers.trace.driver import Trace
    from labkit.drivers.trace.server import Limits, TraceServer


class Study:
    """A matched study: one control, candidates that differ from it, one result file per cell.

    >>> study = Study.load("data/studies/moonlight-16b.yaml")  # doctest: +SKIP
    >>> study.run()  # makes the missing results, shows progress in a terminal  # doctest: +SKIP
    >>> study.results().decision  # doctest: +SKIP

    Results lie in `results/NAME` beside the folder `studies` that holds the study file (`data/results/moonlight-16b`
    for `data/studies/moonlight-16b.yaml`), or beside the file itself if its folder has another name.
    """

    def __init__(self, matrix: Matrix, path: Path, store: Store) -> None:
        self.matrix = matrix
        self.path = path
        self.store = store

    @classmethod
    def load(cls, path: str | Path, store: str | Path | None = None) -> "Study":
        """Read a study file; nothing is run or written.

        Args:
            path: The study file.
            store: The folder of its results; by default as the class says.

        Raises:
            InputError: the file describes no study that can run (one sentence: what, where, what would work).
        """
        path = Path(path)
        matrix = Matrix.load(path)
        return cls(matrix, path, Store(Path(store) if store is not None else _default_store(path, matrix.name)))

    @property
    def name(self) -> str:
        """The study's name, which also names the folder of its results and its report."""
        return self.matrix.name

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What the store holds when the study is done, control first."""
        from labkit.drivers.trace.versions import trace_versions

        versions = tuple(sorted(trace_versions().items()))
        return tuple(
            Cell(candidate, CellKey(workload_hash=candidate.workload.content_hash, driver=driver, versions=versions))
            for driver in self.matrix.drivers
            for candidate in self.matrix.candidates
        )

    def run(
        self,
        only: Sequence[str] = (),
        *,
        force: bool = False,
        workers: int | None = None,
        limits: "Limits | None" = None,
        driver: Driver | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> StudyStatus:
        """Make the missing results; a failed cell is a result, and the next run tries it again.

        Args:
            only: Labels of the candidates to run; all by default.
            force: Also make again what is there.
            workers: Ranks traced at once; by default 2, or 1 on a single CPU.
            limits: What the trace of one rank may take; by default those of `TraceServer`.
            driver: What measures a workload; by default a `TraceServer` of this run, over all pipeline stages.
            on_event: Called with each `labkit.study.runner.Event`; by default progress shows in a terminal.

        Returns:
            The state of the chosen cells afterwards.

        Raises:
            InputError: an unknown label, fewer than one worker, or launch arguments that Megatron refuses.
            WorkError: the store cannot be written.
            KeyboardInterrupt: interrupted; what was finished is stored.
        """
        from labkit.drivers.trace.server import TraceServer, usual_workers

        if workers is None:
            workers = usual_workers()
        if workers < 1:
            raise InputError(f"workers: {workers} cannot run anything; use 1 or more")
        chosen = {self.matrix.chosen(label).label for label in only}
        cells = [cell for cell in self.cells if not chosen or cell.candidate.label in chosen]
        missing = [cell for cell in cells if force or examine(cell, self.store)[0].state != "done"]
        if missing:
            with ExitStack() as stack:
                if on_event is None:
                    from labkit.study.progress import show_progress

                    on_event = stack.enter_context(show_progress(self.matrix.title, len(missing)))
                if driver is None:
                    server = stack.enter_context(TraceServer(workers, limits))
                    for cell in missing:
                        if cell.candidate.workload.launch is not None:
                            self._check(cell, server)
                    driver = server.run_stages
                run_cells(
                    missing,
                    self.store,
                    driver,
                    workers=min(workers, len(missing)),
                    force=force,
                    on_event=on_event,
                    abort=stack.close,
                )
        return self._status(cells)

    def _check(self, cell: Cell, server: "TraceServer") -> None:
        """Before anything is written; what fields say has passed labkit's rules, launch arguments Megatron knows."""
        try:
            server.check(cell.candidate.workload)
        except InputError as error:
            raise InputError(f"{self.path}: {cell.candidate.label}: {error}") from None

    def status(self) -> StudyStatus:
        """The state of every cell; reads and verifies each file, writes nothing."""
        return self._status(self.cells)

    def _status(self, cells: Iterable[Cell]) -> StudyStatus:
        return StudyStatus(
            study=self.name,
            title=self.matrix.title,
            store=str(self.store.directory),
            cells=tuple(examine(cell, self.store)[0] for cell in cells),
        )

    def results(self) -> Results:
        """What is known now: estimates made on the spot, traced results from the store, published figures."""
        from labkit.memory.estimate import estimate

        known = []
        for cell in self.cells:
            status, stored = examine(cell, self.store)
            workload, published = cell.candidate.workload, self.matrix.published
            known.append(
                CandidateResult(
                    candidate=cell.candidate,
                    estimate=estimate(workload),
                    status=status,
                    measurement=None if stored is None else stored.measurement,
                    traced=None if stored is None else _traced(stored),
                    published=None if published is None else published.measurement(workload),
                )
            )
        return Results(self.matrix, tuple(known))

    def __repr__(self) -> str:
        return f"Study({self.name!r}, {self.status().sentence})"

    def __rich__(self) -> StudyStatus:
        return self.status()

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()


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
    home = folder.parent if folder.name == "studies" else folder
    return home / "results" / name
