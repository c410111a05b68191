"""Running a study is making the missing files: claim a cell, measure it, store it, whatever happens to the others.

Failed measurements are results too: they are stored with their reason, the other cells still run, and the next run
tries them again. Two runs of one study share the work: a cell that another process is making is left to it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple, Protocol

from labkit.drivers.contract import CellKey, Failure, Measurement, Outcome, Unfinished
from labkit.errors import LabkitError
from labkit.ledger import Ledger
from labkit.study.matrix import Candidate
from labkit.study.store import Claim, DamagedCellError, Store, Stored
from labkit.workload import Workload

_POLL_SECONDS = 0.1
"""How often a worker looks whether a cell that another process is making has been made, and how soon Ctrl-C is seen."""


class Cell(NamedTuple):
    """A candidate measured by one driver: what one file holds."""

    candidate: Candidate
    key: CellKey


class Measured(Protocol):
    """What a driver hands back (`labkit.drivers.trace.driver.Trace`, `labkit.drivers.cuda.driver.Measured`)."""

    @property
    def measurement(self) -> Measurement:
        """The record of the contract."""

    @property
    def ledger(self) -> Ledger | None:
        """What the rank held, row by row; None where it cannot be known."""


class Driver(Protocol):
    """Measures one workload; several calls run at once."""

    def __call__(self, workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        """Measure, telling `on_phase` each (iteration, phase) as it begins."""


class EventKind(StrEnum):
    """What happens to a cell during a run."""

    KEPT = "kept"
    """It was there already, or another process made it meanwhile."""
    DAMAGED = "damaged"
    """Its file cannot be trusted and will be replaced; `detail` names file and reason."""
    STARTED = "started"
    PHASE = "phase"
    """It entered the phase in `detail`."""
    DONE = "done"
    FAILED = "failed"
    """It was measured and did not pass; `detail` says why."""


class Event(NamedTuple):
    """One step of a run, for whoever shows progress."""

    kind: EventKind
    cell: Cell
    detail: str = ""


def run_cells(
    cells: Iterable[Cell],
    store: Store,
    driver: Driver,
    *,
    workers: int,
    force: bool = False,
    on_event: Callable[[Event], None],
    abort: Callable[[], None],
) -> dict[Cell, Stored]:
    """Make the missing cells, `workers` at a time.

    Args:
        cells: What the store shall hold afterwards.
        store: Where results lie.
        driver: Measures one workload; any exception it raises is that cell's failure.
        workers: Cells measured at once.
        force: Also measure cells that are there.
        on_event: Called for each event, one at a time, from the workers' threads.
        abort: Ends the measurements in progress; called when the run is interrupted or the store fails.

    Returns:
        The result of every cell, failures included.

    Raises:
        WorkError: the store cannot be written.
        KeyboardInterrupt: the user interrupted; every cell that was finished is stored.
    """
    store.sweep()
    run = _Run(cells, store, driver, force, on_event)
    with ThreadPoolExecutor(workers, thread_name_prefix="labkit-cell") as pool:
        try:
            running = {pool.submit(run.work) for _ in range(workers)}
            while running:
                # Not without a timeout: a signal that another thread happens to receive would not wake this one.
                ended, running = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
        except BaseException:
            run.stopped.set()
            abort()
            raise
    return run.results


class _Run:
    """What the workers of one run share."""

    def __init__(
        self, cells: Iterable[Cell], store: Store, driver: Driver, force: bool, on_event: Callable[[Event], None]
    ) -> None:
        self.waiting = deque(cells)
        self.store = store
        self.driver = driver
        self.force = force
        self.results: dict[Cell, Stored] = {}
        self.stopped = threading.Event()
        self._listener = on_event
        self._lock = threading.Lock()

    def work(self) -> None:
        """Take cells until none is left.

        Raises:
            WorkError: the store cannot be written.
        """
        while not self.stopped.is_set():
            try:
                cell = self.waiting.popleft()
            except IndexError:
                return
            with self.store.claim(cell.key) as claim:
                if claim is not None:
                    self._make(cell, claim)
                    continue
            self.waiting.append(cell)
            time.sleep(_POLL_SECONDS)

    def _tell(self, kind: EventKind, cell: Cell, detail: str = "") -> None:
        with self._lock:
            self._listener(Event(kind, cell, detail))

    def _make(self, cell: Cell, claim: Claim) -> None:
        kept = None if self.force else self._kept(cell)
        if kept is not None:
            self.results[cell] = kept
            self._tell(EventKind.KEPT, cell)
            return
        self._tell(EventKind.STARTED, cell)
        measurement, ledger = self._measured(cell)
        if self.stopped.is_set() and measurement.outcome != "ok":
            return  # it failed because it was ended
        claim.commit(measurement, ledger)
        self.results[cell] = Stored(cell.key, measurement, ledger)
        failure = measurement.failure
        if failure is None:
            self._tell(EventKind.DONE, cell)
        else:
            self._tell(EventKind.FAILED, cell, failure.message)

    def _kept(self, cell: Cell) -> Stored | None:
        try:
            stored = self.store.read(cell.key)
        except DamagedCellError as damage:
            self._tell(EventKind.DAMAGED, cell, str(damage))
            return None
        return stored if stored is not None and stored.measurement.outcome == "ok" else None

    def _measured(self, cell: Cell) -> tuple[Measurement, Ledger | None]:
        began = time.monotonic()
        reached = "start"

        def on_phase(iteration: int, phase: str) -> None:
            nonlocal reached
            reached = phase
            self._tell(EventKind.PHASE, cell, f"iteration {iteration}: {phase}")

        try:
            measured = self.driver(cell.candidate.workload, on_phase=on_phase)
        except Unfinished as error:
            failure = Failure(phase=error.phase, message=str(error))
            return self._failure(cell, error.outcome, failure, time.monotonic() - began), None
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this cell's outcome and not the run's)
            message = str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"
            failure = Failure(phase=reached, message=message)
            return self._failure(cell, "failed", failure, time.monotonic() - began), None
        passed = measured.measurement.outcome == "ok"
        return measured.measurement, measured.ledger if passed else None

    def _failure(self, cell: Cell, outcome: Outcome, failure: Failure, seconds: float) -> Measurement:
        return Measurement(
            driver=cell.key.driver,
            workload=cell.candidate.workload,
            outcome=outcome,
            failure=failure,
            versions=dict(cell.key.versions),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=seconds,
        )
