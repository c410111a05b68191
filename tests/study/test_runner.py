"""A run makes what is missing, keeps what is there, and records what fails."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit.drivers.contract import Measurement, Unfinished
from labkit.errors import WorkError
from labkit.study.runner import Cell, Driver, Event, EventKind, run_cells
from labkit.study.status import examine
from labkit.study.store import Store
from labkit.workload import Workload
from tests.study.builder import Measured, cell, instant, small

CELLS = [cell(control=True), cell("moe_act"), cell("layernorm", "moe_act")]


class Recorder:
    """A driver that counts, over another one; and a listener."""

    def __init__(self, driver: Driver = instant) -> None:
        self.driver = driver
        self.measured: list[str] = []
        self.events: list[Event] = []

    def __call__(self, workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        self.measured.append(workload.recompute.label)
        return self.driver(workload, on_phase=on_phase)  # type: ignore[return-value]

    def kinds(self) -> list[tuple[str, str]]:
        return [(event.kind.value, event.cell.candidate.label) for event in self.events]

    def run(
        self,
        store: Store,
        cells: list[Cell] = CELLS,
        *,
        workers: int = 1,
        force: bool = False,
        leave: bool = False,
    ) -> dict[Cell, Measurement]:
        return run_cells(
            cells,
            store,
            self,
            workers=workers,
            force=force,
            leave=leave,
            on_event=self.events.append,
            abort=lambda: None,
        )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def state(cell: Cell, store: Store) -> str:
    return examine([cell], store)[0].state


def test_empty_store_is_filled_and_a_full_one_left_alone(store: Store) -> None:
    first, second = Recorder(), Recorder()
    made = first.run(store)
    assert first.measured == ["[]", "[moe_act]", "[layernorm, moe_act]"]
    assert [state(cell, store) for cell in CELLS] == ["done"] * 3
    before = {path: path.stat().st_mtime_ns for path in store.directory.iterdir()}
    kept = second.run(store)
    assert second.measured == []
    assert second.kinds() == [("kept", "[]"), ("kept", "[moe_act]"), ("kept", "[layernorm, moe_act]")]
    assert {path: path.stat().st_mtime_ns for path in store.directory.iterdir()} == before
    assert made == kept


def test_force_makes_them_again(store: Store) -> None:
    Recorder().run(store)
    again = Recorder()
    again.run(store, force=True)
    assert len(again.measured) == 3


def test_failure_is_recorded_with_its_phase_and_the_rest_still_runs(store: Store) -> None:
    def failing(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        assert on_phase is not None
        on_phase(1, "backward")
        if workload.recompute.label == "[moe_act]":
            raise WorkError("the trace was killed")
        return instant(workload)

    run = Recorder(failing)
    made = run.run(store)
    failed = made[CELLS[1]]
    assert failed.outcome == "failed"
    assert failed.failure is not None
    assert (failed.failure.phase, failed.failure.message) == ("backward", "the trace was killed")
    assert [state(cell, store) for cell in CELLS] == ["done", "failed", "done"]
    assert ("failed", "[moe_act]") in run.kinds()

    retry = Recorder()
    retry.run(store)
    assert retry.measured == ["[moe_act]"]
    assert state(CELLS[1], store) == "done"


def test_an_ended_or_unsupported_measurement_is_recorded_as_what_it_is(store: Store) -> None:
    def limited(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        if workload.recompute.label == "[moe_act]":
            raise Unfinished("it took more than 600 s", "timed_out", "optimizer")
        if workload.recompute.label == "[]":
            raise Unfinished("no shapes for x", "unsupported", "setup")
        return instant(workload)

    Recorder(limited).run(store)
    found = examine(CELLS, store)
    assert [(status.state, status.detail) for status in found] == [
        ("failed", "no shapes for x (in setup)"),
        ("failed", "it took more than 600 s (in optimizer)"),
        ("done", ""),
    ]
    outcomes = [stored.measurement.outcome for cell in CELLS if (stored := store.read(cell.key)) is not None]
    assert outcomes == ["unsupported", "timed_out", "ok"]


def test_unforeseen_exception_of_a_driver_is_a_failure_of_its_cell(store: Store) -> None:
    def broken(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        raise ValueError("no such thing")

    made = Recorder(broken).run(store)
    messages = {measurement.failure.message for measurement in made.values() if measurement.failure}
    assert messages == {"ValueError: no such thing"}


def test_damaged_file_is_named_and_made_again(store: Store) -> None:
    Recorder().run(store)
    path = store.path(CELLS[1].key)
    path.write_bytes(path.read_bytes()[:-100])
    assert state(CELLS[1], store) == "damaged"
    run = Recorder()
    run.run(store)
    assert run.measured == ["[moe_act]"]
    (damage,) = [event for event in run.events if event.kind is EventKind.DAMAGED]
    assert str(path) in damage.detail
    assert state(CELLS[1], store) == "done"


def test_cells_run_side_by_side_on_several_workers(store: Store) -> None:
    meeting = threading.Barrier(2, timeout=10)

    def together(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        meeting.wait()
        return instant(workload)

    made = Recorder(together).run(store, CELLS[:2], workers=2)
    assert {measurement.outcome for measurement in made.values()} == {"ok"}


def test_two_runs_at_once_measure_each_cell_once(store: Store) -> None:
    def slow(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        time.sleep(0.15)
        return instant(workload)

    runs = [Recorder(slow), Recorder(slow)]
    results: list[dict[Cell, Measurement]] = []
    threads = [threading.Thread(target=lambda run=run: results.append(run.run(store))) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(runs[0].measured + runs[1].measured) == sorted(cell.candidate.label for cell in CELLS)
    assert [set(made) for made in results] == [set(CELLS)] * 2


def test_cell_made_by_another_run_meanwhile_is_waited_for(store: Store) -> None:
    run = Recorder()
    with store.claim(CELLS[0].key) as claim:
        assert claim is not None
        assert state(CELLS[0], store) == "running"
        waiting = threading.Thread(target=lambda: run.run(store, CELLS[:1]))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        claim.commit(*instant(CELLS[0].candidate.workload))
    waiting.join(timeout=10)
    assert run.measured == []
    assert run.kinds() == [("kept", "[]")]


def test_store_failure_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file where the folder should be")
    aborted = []
    with pytest.raises(WorkError, match="cannot be written"):
        run_cells(
            CELLS,
            Store(tmp_path / "results"),
            instant,
            workers=2,
            on_event=lambda event: None,
            abort=lambda: aborted.append(1),
        )


def test_stale_result_names_the_version_that_changed(store: Store) -> None:
    Recorder().run(store, CELLS[:1])
    newer = cell(control=True, versions=(("labkit", "0.1.0"), ("megatron-core", "0.20.0")))
    (status,) = examine([newer], store)
    assert (status.state, status.detail) == ("stale", "made by megatron-core 0.19.2")


def test_a_failure_that_another_run_has_just_recorded_is_not_tried_again_by_this_one(store: Store) -> None:
    """Many runs share a study on a cluster: what cannot run is tried once, not by each of them."""

    def failing(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        time.sleep(0.1)
        raise WorkError("no")

    runs = [Recorder(failing), Recorder(failing)]
    threads = [threading.Thread(target=lambda run=run: run.run(store)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(runs[0].measured + runs[1].measured) == sorted(cell.candidate.label for cell in CELLS)
    later = Recorder(failing)
    later.run(store)
    assert len(later.measured) == len(CELLS)


def test_a_run_may_leave_to_others_what_they_are_making(store: Store) -> None:
    run = Recorder()
    with store.claim(CELLS[0].key) as claim:
        assert claim is not None
        made = run.run(store, leave=True)
    assert run.measured == ["[moe_act]", "[layernorm, moe_act]"]
    assert set(made) == set(CELLS[1:])
    assert state(CELLS[0], store) == "missing"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"ranks": ()}, "the driver's record is not whole: measurement: Value error, a measurement that passed says"),
        ({"steady_iterations": None}, "the driver's record is not whole: steady_iterations: Input should be"),
        ({"versions": None}, "the driver's record is not whole: versions: Input should be"),
        ({"workload": small("moe")}, "the driver's record is not this cell's: its measurement is of another workload"),
        ({"driver": "published"}, "the driver's record is not this cell's: its measurement is by another driver"),
        ({"source": "\ud800"}, "the driver's record is not plain data: "),
    ],
)
def test_an_answer_that_breaks_the_contract_fails_its_cell_and_no_reader(
    store: Store, change: dict[str, Any], sentence: str
) -> None:
    def careless(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        made = instant(workload)
        # Not checked by pydantic, as a driver may get away with.
        return made._replace(measurement=made.measurement.model_copy(update=change))

    made = Recorder(careless).run(store, CELLS[:1])
    failure = made[CELLS[0]].failure
    assert failure is not None
    assert failure.message.startswith(sentence)
    assert state(CELLS[0], store) == "failed"
    stored = store.read(CELLS[0].key)
    assert stored is not None
    assert stored.measurement == made[CELLS[0]]


def test_a_driver_that_answers_nothing_or_in_no_alphabet_fails_its_cell(store: Store) -> None:
    def nothing(workload: Workload, on_phase: Callable[[int, str], None] | None = None) -> Measured:
        if workload.recompute.label == "[]":
            return None  # type: ignore[return-value]
        raise OSError("/mnt/\udce9")

    made = Recorder(nothing).run(store, CELLS[:2])
    messages = [measurement.failure.message for measurement in made.values() if measurement.failure]
    assert messages == ["AttributeError: 'NoneType' object has no attribute 'measurement'", "OSError: /mnt/\\udce9"]
