"""A run killed at any moment, two at once, a full disk: what is visible is whole, the next run finishes the rest."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from labkit.study.status import examine
from labkit.study.store import Store
from tests.study.builder import cell

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
import resource, sys, time
from pathlib import Path
from labkit.errors import LabkitError
from labkit.study.runner import run_cells
from labkit.study.store import Store
from tests.study.builder import measured
from tests.study.test_faults import CELLS

folder, log, seconds, largest = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
if largest:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

def driver(workload, on_phase=None):
    time.sleep(seconds)
    with open(log, "a") as lines:
        lines.write(workload.recompute.label + "\\n")
    return measured(workload, rows=3_000)

try:
    run_cells(CELLS, Store(folder), driver, workers=2, on_event=lambda event: None, abort=lambda: None)
except LabkitError as error:
    sys.exit(str(error))
"""


def start(
    store: Store, log: Path, seconds: float = 0.05, largest: int = 0, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-c", RUN, str(store.directory), str(log), str(seconds), str(largest)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def visible(store: Store) -> list[Path]:
    return sorted(store.directory.glob("*.zip"))


def states(store: Store) -> list[str]:
    return [status.state for status in examine(CELLS, store)]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "results")


def test_killed_at_random_moments_nothing_half_is_visible_and_the_rest_is_made(store: Store, tmp_path: Path) -> None:
    generator = random.Random(1)  # noqa: S311 (reproducible moments)
    log = tmp_path / "log"
    kills = 0
    while len(visible(store)) < len(CELLS) and kills < 40:
        process = start(store, log)
        deadline = time.monotonic() + 30
        before = len(visible(store))
        while len(visible(store)) == before and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(generator.random() * 0.12)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += 1
        assert set(states(store)) <= {"done", "missing"}
    process = start(store, log)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert states(store) == ["done"] * len(CELLS)
    assert visible(store) == sorted(store.directory.iterdir())
    # Each kill loses at most the cells in progress: two workers, two cells.
    assert len(log.read_text().splitlines()) <= len(CELLS) + 2 * kills


def test_two_processes_share_the_work_and_count_nothing_twice(store: Store, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(store, log, seconds=0.3), start(store, log, seconds=0.3)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(log.read_text().splitlines()) == sorted(cell.candidate.label for cell in CELLS)
    assert states(store) == ["done"] * len(CELLS)
    assert visible(store) == sorted(store.directory.iterdir())


def test_full_disk_is_one_sentence_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    process = start(store, tmp_path / "log", largest=1000)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot be written (File too large); choose another store" in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert list(store.directory.iterdir()) == []


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
    assert not (tmp_path / "log").exists()


def test_interrupt_ends_the_cells_in_progress_and_keeps_the_finished(store: Store, tmp_path: Path) -> None:
    process = start(store, tmp_path / "log", seconds=0.3)
    while not visible(store):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in stderr
    assert set(states(store)) == {"done", "missing"}
    assert visible(store) == sorted(store.directory.iterdir())


def test_disk_that_filled_up_later_does_not_harm_what_was_there(store: Store, tmp_path: Path) -> None:
    process = start(store, tmp_path / "log")
    while not visible(store):
        time.sleep(0.002)
    process.kill()
    process.communicate()
    whole = {path: path.read_bytes() for path in visible(store)}
    process = start(store, tmp_path / "log", largest=1000)
    process.communicate(timeout=60)
    assert {path: path.read_bytes() for path in visible(store)} == whole
