"""A run killed at any moment, several at once, workers killed, disks full or read-only, clocks that jump.

What is visible is whole, nothing is lost or counted twice, and the next run finishes the rest. The runner and the store
are the real ones; what measures is a small driver whose cells are made by processes of their own (`RUN`), and where the
trace itself is what is killed, the trace. `make faults` runs the long loops.
"""

import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from labkit.drivers.trace.server import Limits, TraceServer
from labkit.study import Study
from labkit.study.runner import Event, EventKind
from labkit.study.status import examine
from labkit.study.store import Store
from tests.study.builder import SMALL, cell

ROOT = Path(__file__).parents[2]
LABELS = [
    (),
    ("core_attn",),
    ("layernorm",),
    ("mla_up_proj",),
    ("mlp",),
    ("moe",),
    ("moe_act",),
    ("layernorm", "moe_act"),
]
CELLS = [cell(*labels) for labels in LABELS]

RUN = """
import random, resource, subprocess, sys, time
from pathlib import Path
from labkit.errors import LabkitError, WorkError
from labkit.study.runner import run_cells
from labkit.study.store import Store
from tests.study.builder import measured
from tests.study.test_faults import CELLS

folder, log, seconds, largest, clock = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
if largest:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
if clock == "jumping":
    time.time = lambda: random.uniform(0, 2**32)

def driver(workload, on_phase=None):
    # A process of its own, as the trace's children and torchrun's ranks are.
    worker = subprocess.run(["sleep", seconds])
    if worker.returncode:
        raise WorkError(f"its process was ended by signal {-worker.returncode}")
    with open(log, "a") as lines:
        lines.write(workload.recompute.label + "\\n")
    return measured(workload, rows=3_000)

try:
    run_cells(CELLS, Store(folder), driver, workers=2, on_event=lambda event: None, abort=lambda: None)
except LabkitError as error:
    sys.exit(str(error))
"""


def command(store: Store, log: Path, seconds: float = 0.05, largest: int = 0, clock: str = "") -> list[str]:
    return [sys.executable, "-c", RUN, str(store.directory), str(log), str(seconds), str(largest), clock]


def start(
    store: Store, log: Path, seconds: float = 0.05, *, largest: int = 0, clock: str = "", prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    arguments = [*prefix, *command(store, log, seconds, largest, clock)]
    return subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def visible(store: Store) -> list[Path]:
    return sorted(store.directory.glob("*.zip"))


def states(store: Store) -> list[str]:
    return [status.state for status in examine(CELLS, store)]


def contents(store: Store) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in visible(store)}


def made(log: Path) -> list[str]:
    """The labels of the cells that a driver has measured to the end, one for each time."""
    return log.read_text().splitlines() if log.exists() else []


def check_finished(store: Store) -> None:
    """Every cell is there, once, whole, with what it holds; and nothing else is."""
    assert states(store) == ["done"] * len(CELLS)
    assert visible(store) == sorted(store.directory.iterdir())
    assert len(list(store.headers())) == len(CELLS)
    for each in CELLS:
        stored = store.read(each.key)
        assert stored is not None
        assert stored.measurement.workload == each.candidate.workload


def finish(store: Store, log: Path) -> None:
    process = start(store, log)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    check_finished(store)


def kill_at_random(process: "subprocess.Popen[str]", store: Store, generator: random.Random) -> None:
    """At some moment after it has begun to work."""
    before, deadline = len(visible(store)), time.monotonic() + 30
    while len(visible(store)) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(generator.random() * 0.12)
    process.kill()
    process.communicate()


def descendants(root: int) -> Iterator[tuple[int, str]]:
    """The processes below one, with their command lines."""
    found: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit():
                found.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                    int(entry.name)
                )
    waiting = [root]
    while waiting:
        for child in found.get(waiting.pop(), ()):
            waiting.append(child)
            with contextlib.suppress(OSError):
                yield child, Path(f"/proc/{child}/cmdline").read_text()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.faults)])
def test_a_killed_runner_loses_its_cells_in_progress_alone(tmp_path: Path, kills: int) -> None:
    generator = random.Random(1)  # noqa: S311 (reproducible moments)
    done = 0
    for study in range(kills):
        store, log, mine = Store(tmp_path / str(study)), tmp_path / f"{study}.log", 0
        while done < kills and len(visible(store)) < len(CELLS):
            whole = contents(store)
            kill_at_random(start(store, log), store, generator)
            done, mine = done + 1, mine + 1
            assert set(states(store)) <= {"done", "missing"}
            assert whole.items() <= contents(store).items()
        finish(store, log)
        # Each kill loses at most the cells in progress: two workers, two cells.
        assert len(made(log)) <= len(CELLS) + 2 * mine
        if done >= kills:
            break


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.faults)])
def test_a_killed_worker_fails_its_cell_with_the_reason_and_the_rest_is_made(tmp_path: Path, kills: int) -> None:
    generator = random.Random(2)  # noqa: S311
    done = 0
    for study in range(2 * kills + 8):  # a run may be over before its worker is found
        store, log = Store(tmp_path / str(study)), tmp_path / f"{study}.log"
        process = start(store, log)
        time.sleep(generator.random())
        kill_a_worker(process, generator)
        _, stderr = process.communicate(timeout=60)
        assert (process.returncode, stderr) == (0, "")
        failed = [status for status in examine(CELLS, store) if status.state != "done"]
        assert [status.detail for status in failed] == ["its process was ended by signal 9 (in start)"] * len(failed)
        assert len(failed) <= 1
        done += len(failed)
        finish(store, log)
        assert sorted(made(log)) == sorted(each.candidate.label for each in CELLS)
        if done >= kills:
            break
    assert done >= kills


def kill_a_worker(process: "subprocess.Popen[str]", generator: random.Random) -> None:
    """As soon as there is one."""
    while process.poll() is None:
        workers = [pid for pid, name in descendants(process.pid) if name.startswith("sleep")]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(generator.choice(workers), signal.SIGKILL)
            return
        time.sleep(0.005)


def test_of_two_runners_the_one_that_survives_finishes(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    victim, other = start(store, log, seconds=0.2), start(store, log, seconds=0.2)
    kill_at_random(victim, store, random.Random(3))  # noqa: S311
    _, stderr = other.communicate(timeout=60)
    assert (other.returncode, stderr) == (0, "")
    check_finished(store)
    assert len(made(log)) <= len(CELLS) + 2


def test_two_processes_share_the_work_and_count_nothing_twice(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(store, log, seconds=0.3), start(store, log, seconds=0.3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(made(log)) == sorted(each.candidate.label for each in CELLS)
    check_finished(store)


def test_clocks_that_jump_change_nothing(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    kill_at_random(start(store, log, clock="jumping"), store, random.Random(4))  # noqa: S311
    whole = contents(store)
    for path, moment in zip(sorted(store.directory.iterdir()), (0, 2**32, 10**9, 2**31), strict=False):
        os.utime(path, (moment, moment))
    process = start(store, log, clock="jumping")
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert whole.items() <= contents(store).items()
    check_finished(store)
    assert len(made(log)) <= len(CELLS) + 2


def test_a_file_that_may_not_grow_is_one_sentence_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    process = start(store, tmp_path / "log", largest=1000)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot be written (File too large); choose another store" in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert list(store.directory.iterdir()) == []


MOUNTED = """
mount -t tmpfs -o size={size} none {store} || exit 77
{run}; echo "first: $?"
ls {store} | sed 's/.*[.]//' | sort | uniq -c | tr -s ' '
mount -o remount,{again} {store}
{run}; echo "second: $?"
ls {store} | sed 's/.*[.]//' | sort | uniq -c | tr -s ' '
"""


def on_a_disk_of_its_own(store: Store, log: Path, size: str, again: str) -> list[str]:
    """What a run says and leaves on a small disk, and then on that disk mounted otherwise."""
    if subprocess.run(["unshare", "--mount", "--map-root-user", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets no process have mounts of its own")
    store.directory.mkdir()
    run, folder = shlex.join(command(store, log)), shlex.quote(str(store.directory))
    script = MOUNTED.format(size=size, again=again, store=folder, run=run)
    shell = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    said = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    if said.returncode == 77:
        pytest.skip("this machine mounts no tmpfs")
    return [line.strip() for line in (said.stdout + said.stderr).splitlines()]


def test_a_full_disk_keeps_what_is_whole_and_a_larger_one_takes_the_rest(store: Store, tmp_path: Path) -> None:
    # A cell file takes about 20 kB.
    said = on_a_disk_of_its_own(store, tmp_path / "log", "64k", "size=8m")
    assert any(line.endswith("cannot be written (No space left on device); choose another store") for line in said)
    assert said[0] == "first: 1"
    assert said[1].endswith(" zip")
    assert said[2:4] == ["second: 0", f"{len(CELLS)} zip"]
    assert len(made(tmp_path / "log")) <= len(CELLS) + 2


def test_a_disk_mounted_for_reading_alone_is_one_sentence_and_harms_nothing(store: Store, tmp_path: Path) -> None:
    said = on_a_disk_of_its_own(store, tmp_path / "log", "64k", "ro")
    assert any(line.endswith("cannot be written (Read-only file system); choose another store") for line in said)
    assert said[2] == "second: 1"
    assert said[1] == said[3]
    assert said[1].endswith(" zip")


def test_store_that_may_not_be_written_is_one_sentence(store: Store, tmp_path: Path) -> None:
    store.directory.mkdir()
    store.directory.chmod(0o555)
    # Root may write everywhere unless it gives that right up.
    prefix = ("setpriv", "--bounding-set=-dac_override") if os.geteuid() == 0 else ()
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this root cannot give up its right to write everywhere")
    process = start(store, tmp_path / "log", prefix=prefix)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.strip().endswith("cannot be written (Permission denied); choose another store")
    assert list(store.directory.iterdir()) == []
    assert made(tmp_path / "log") == []


def test_interrupt_ends_the_cells_in_progress_and_keeps_the_finished(store: Store, tmp_path: Path) -> None:
    process = start(store, tmp_path / "log", seconds=0.3)
    while not visible(store):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert set(states(store)) == {"done", "missing"}
    assert visible(store) == sorted(store.directory.iterdir())


STUDY = {
    "name": "small",
    "title": "Small",
    "base": SMALL,
    "control": {"recompute": {"recompute_modules": []}},
    "candidates": [{"recompute": {"recompute_modules": ["moe_act"]}}, {"recompute": {"recompute_modules": ["moe"]}}],
}


def at_the_first_phase(act: Callable[[], None]) -> Callable[[Event], None]:
    """A listener of a run that does something once, when the first measurement is under way."""
    begun = threading.Event()

    def on_event(event: Event) -> None:
        if event.kind is EventKind.PHASE and not begun.is_set():
            begun.set()
            threading.Thread(target=act).start()

    return on_event


@pytest.mark.faults
def test_the_traces_processes_killed_at_random_moments(tmp_path: Path) -> None:
    """Its server or one of the children that trace, 50 times: a killed one fails what it was tracing."""
    generator = random.Random(5)  # noqa: S311
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    failures = 0
    with TraceServer() as finisher:
        others = {pid for pid, _ in descendants(os.getpid())}
        reference = Study.load(path, tmp_path / "reference")
        assert reference.run(driver=finisher.run_stages).count("done") == 3
        expected = reference.results().cells.select(
            "candidate", "source", "peak_allocated_bytes", "peak_reserved_bytes"
        )
        for attempt in range(50):
            study = Study.load(path, tmp_path / str(attempt))

            def kill() -> None:
                time.sleep(generator.random() * 2)
                victims = [
                    pid for pid, name in descendants(os.getpid()) if "trace.worker" in name and pid not in others
                ]
                if victims:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(generator.choice(victims), signal.SIGKILL)

            status = study.run(on_event=at_the_first_phase(kill))
            ended = [each for each in status.cells if each.state != "done"]
            assert {each.state for each in ended} <= {"failed"}
            assert all("its process was killed" in each.detail or "server ended" in each.detail for each in ended)
            failures += len(ended)
            assert study.run(driver=finisher.run_stages).count("done") == 3
            assert visible(study.store) == sorted(study.store.directory.iterdir())
            assert study.results().cells.select(expected.columns).equals(expected)
    assert failures >= 25


@pytest.mark.faults
def test_a_trace_that_hangs_is_ended_at_its_limit_and_the_rest_is_made(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(STUDY))
    study = Study.load(path)
    hung: list[int] = []

    def hang(event: Event) -> None:
        if event.kind is EventKind.PHASE and not hung:
            traces = [pid for pid, name in descendants(os.getpid()) if "trace.worker" in name]
            hung.append(max(traces))  # the child: its worker came before it
            os.kill(hung[0], signal.SIGSTOP)

    status = study.run(workers=1, limits=Limits(seconds=20), on_event=hang)
    assert [each.state for each in status.cells] == ["failed", "done", "done"]
    assert "was ended in" in status.cells[0].detail
    assert "it took more than 20 s" in status.cells[0].detail
    assert study.results().cells.filter(source="traced")["outcome"].to_list() == ["timed_out", "ok", "ok"]
    assert study.run(workers=1).count("done") == 3
    assert visible(study.store) == sorted(study.store.directory.iterdir())
