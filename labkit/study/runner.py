"""Running a study is making the missing files: claim a cell, measure it, store it, whatever happens to the others.

Failed measurements are results too: they are stored with their reason, the other cells still run, and the next run
tries them again. An answer that is no whole record of its cell is such a failure: what the store holds, readers can
trust. Several runs of one study share the work: a cell that another process is making, or has made since this run
began, is left to it, whatever came of it.
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
from labkit.study.store import Claim, ContractError, DamagedCellError, Store
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
    leave: bool = False,
    on_event: Callable[[Event], None],
    abort: Callable[[], None],
) -> dict[Cell, Measurement]:
    """Make the missing cells, `workers` at a time.

    Args:
        cells: What the store shall hold afterwards.
        store: Where results lie.
        driver: Measures one workload; any exception it raises is that cell's failure.
        workers: Cells measured at once.
        force: Also measure cells that are there.
        leave: Do not wait for cells that other processes are making.
        on_event: Called for each event, one at a time, from the workers' threads.
        abort: Ends the measurements in progress; called when the run is interrupted or the store fails.

    Returns:
        The result of every cell, failures included; without those that were left to others.

    Raises:
        WorkError: the store cannot be written.
        KeyboardInterrupt: the user interrupted; every cell that was finished is stored.
    """
    store.sweep()
    run = _Run(cells, store, driver, force, leave, on_event)
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
    store.sweep()  # others may have been killed meanwhile
    return run.results


class _Run:
    """What the workers of one run share."""

    def __init__(
        self,
        cells: Iterable[Cell],
        store: Store,
        driver: Driver,
        force: bool,
        leave: bool,
        on_event: Callable[[Event], None],
    ) -> None:
        self.waiting = deque(cells)
        self.store = store
        self.driver = driver
        self.force = force
        self.leave = leave
        self.results: dict[Cell, Measurement] = {}
        self._refused: set[Cell] = set()
        self._before = {cell: store.state(cell.key) for cell in self.waiting}
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
            # Twice: whoever asks for a cell's state may hold its lock for a moment.
            if not self.leave or cell not in self._refused:
                self._refused.add(cell)
                self.waiting.append(cell)
                time.sleep(_POLL_SECONDS)

    def _tell(self, kind: EventKind, cell: Cell, detail: str = "") -> None:
        with self._lock:
            self._listener(Event(kind, cell, detail))

    def _make(self, cell: Cell, claim: Claim) -> None:
        kept = self._kept(cell)
        if kept is not None:
            self.results[cell] = kept
            self._tell(EventKind.KEPT, cell)
            return
        self._tell(EventKind.STARTED, cell)
        measurement, ledger = self._measured(cell)
        if self.stopped.is_set() and measurement.outcome != "ok":
            return  # it failed because it was ended
        try:
            claim.commit(measurement, ledger)
        except ContractError as error:
            failure = Failure(phase="record", message=str(error))
            measurement = self._failure(cell, "failed", failure, measurement.wall_seconds)
            claim.commit(measurement, None)
        self.results[cell] = measurement
        if measurement.failure is None:
            self._tell(EventKind.DONE, cell)
        else:
            self._tell(EventKind.FAILED, cell, measurement.failure.message)

    def _kept(self, cell: Cell) -> Measurement | None:
        """The result that need not be made; what came after this run began is none of its work, however it ended."""
        others = self.store.state(cell.key) != self._before[cell]
        if self.force and not others:
            return None
        try:
            header = self.store.header(cell.key)
        except DamagedCellError as damage:
            self._tell(EventKind.DAMAGED, cell, str(damage))
            return None
        if header is None or (header.measurement.outcome != "ok" and not others):
            return None
        return header.measurement

    def _measured(self, cell: Cell) -> tuple[Measurement, Ledger | None]:
        began = time.monotonic()
        reached = "start"

        def on_phase(iteration: int, phase: str) -> None:
            nonlocal reached
            reached = phase
            self._tell(EventKind.PHASE, cell, f"iteration {iteration}: {phase}")

        try:
            measured = self.driver(cell.candidate.workload, on_phase=on_phase)
            made = measured.measurement
            ledger = measured.ledger if made.outcome == "ok" else None
        except Unfinished as error:
            failure, outcome = Failure(phase=error.phase, message=str(error)), error.outcome
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this cell's outcome and not the run's)
            message = str(error) if isinstance(error, LabkitError) else f"{type(error).__name__}: {error}"
            # As UTF-8 can have it: names of files, which errors quote, need not be text.
            message = message.encode(errors="backslashreplace").decode()
            failure, outcome = Failure(phase=reached, message=message), "failed"
        else:
            return made, ledger
        return self._failure(cell, outcome, failure, time.monotonic() - began), None

    def _failure(self, cell: Cell, outcome: Outcome, failure: Failure, seconds: float | None) -> Measurement:
        return Measurement(
            driver=cell.key.driver,
            workload=cell.candidate.workload,
            outcome=outcome,
            failure=failure,
            versions=dict(cell.key.versions),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=seconds,
        )
