"""Measured peaks raise estimates of the same work, never lower them, whoever learns them and in whatever order."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from labkit.errors import InputError, WorkError
from labkit.memory.estimate import Estimate, estimate
from labkit.memory.profiles import Observation, Profiles, signature
from labkit.workload import Workload
from tests.study.builder import SMALL

ROOT = Path(__file__).parents[2]


def work(seq_length: int = 128, micro_batch_size: int = 1, **parts: Any) -> Workload:
    batch = {"seq_length": seq_length, "micro_batch_size": micro_batch_size, "global_batch_size": 2 * micro_batch_size}
    return Workload.from_mapping({**SMALL, "batch": batch, **parts})


def observed(workload: Workload, peak: int, source: str = "a test") -> Observation:
    return Observation(workload=workload, peak_allocated_bytes=peak, certainty="measured", source=source)


ESTIMATE = estimate(work())
PEAK = ESTIMATE.peak_allocated_bytes
LENGTHS = st.tuples(st.sampled_from([64, 128, 256]), st.sampled_from([1, 2]))
PEAKS = st.integers(PEAK // 2, 2 * PEAK)
OBSERVATIONS = st.lists(st.tuples(LENGTHS, PEAKS).map(lambda drawn: observed(work(*drawn[0]), drawn[1])), max_size=5)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@settings(max_examples=25, deadline=None)
@given(OBSERVATIONS, st.randoms())
def test_an_estimate_is_the_larger_of_itself_and_what_holds_for_it(found: list[Observation], random: Any) -> None:
    """Never lower, and the order of learning does not matter."""
    shuffled = [*found, *found]
    random.shuffle(shuffled)
    with folder() as one, folder() as other:
        for each in found:
            Profiles(one).learn(each)
        for each in shuffled:
            Profiles(other).learn(each)
        raised, again = (Profiles(directory).raised(ESTIMATE) for directory in (one, other))
        assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    holding = [
        each.peak_allocated_bytes
        for each in found
        if each.workload.batch.seq_length <= 128 and each.workload.batch.micro_batch_size == 1
    ]
    assert raised.peak_allocated_bytes == again.peak_allocated_bytes == max([PEAK, *holding])
    assert raised.peak_reserved_bytes is not None
    assert raised.peak_reserved_bytes >= raised.peak_allocated_bytes


@settings(max_examples=25, deadline=None)
@given(OBSERVATIONS, LENGTHS, LENGTHS)
def test_what_holds_for_short_batches_holds_for_longer_ones(
    found: list[Observation], one: tuple[int, int], other: tuple[int, int]
) -> None:
    with folder() as directory:
        for each in found:
            Profiles(directory).learn(each)
        floors = [Profiles(directory).floor(work(*lengths)) for lengths in (one, other)]
    if one[0] <= other[0] and one[1] <= other[1]:
        peaks = [0 if floor is None else floor.peak_allocated_bytes for floor in floors]
        assert peaks[0] <= peaks[1]


def test_the_raise_is_a_row_of_its_own_and_says_who_measured(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    profiles.learn(observed(work(64), PEAK + 12_345, "somebody, H100"))
    raised = profiles.raised(ESTIMATE)
    (row,) = set(raised.ledger.rows) - set(ESTIMATE.ledger.rows)
    assert (row.bytes, row.certainty, row.lifetime) == (12_345, "measured", "margin")
    summary, before = raised.summary, ESTIMATE.summary
    assert summary.raised == "measured at sequence 64, micro-batch 1: somebody, H100"
    assert {share.category: share.bytes for share in summary.breakdown}["above the estimate"] == 12_345
    assert sum(share.bytes for share in summary.breakdown) == summary.peak_allocated_bytes == PEAK + 12_345
    assert summary.between_steps_bytes == before.between_steps_bytes
    assert summary.retained_bytes == before.retained_bytes
    assert (summary.peak_iteration, summary.peak_phase) == (before.peak_iteration, before.peak_phase)
    assert before.raised is None


@pytest.mark.parametrize(
    "other",
    [
        {"recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}},
        {"parallelism": {"world_size": 2, "expert_model_parallel_size": 1}},
        {"training": {"data_parallel": {"grad_reduce_in_fp32": True}}},
        {"training": {"software": {"transformer_engine": "2.17.0"}}},
        {"training": {"gpu": "h200-141gb"}},
        {"routing": {"kind": "worst"}},
    ],
)
def test_other_work_is_another_signature(other: dict[str, Any], tmp_path: Path) -> None:
    different = work(**other)
    profiles = Profiles(tmp_path)
    profiles.learn(observed(different, 10 * PEAK))
    assert signature(different) != signature(work())
    assert profiles.raised(ESTIMATE) is ESTIMATE


def test_lengths_and_the_models_name_are_no_part_of_the_signature() -> None:
    renamed = {**SMALL["model"], "name": "other"}
    stated: dict[str, Any] = {"training": {"gpu": "h100-80gb", "data_parallel": {"grad_reduce_in_fp32": False}}}
    assert {signature(each) for each in (work(256, 2), work(model=renamed), work(**stated))} == {signature(work())}


def pack(lengths: list[int] | None) -> Workload:
    batch = {"seq_length": sum(lengths or [1024]), "global_batch_size": 1}
    return Workload.from_mapping(
        {
            "model": "qwen3-0.6b",
            "parallelism": {"world_size": 1},
            "batch": batch if lengths is None else {**batch, "packed": {"lengths": lengths}},
            "training": {"runtime": "lora", "lora": {"rank": 1, "optimizer_step": False}},
        }
    )


def test_a_pack_is_held_against_packs_alone_row_by_row_and_sequence_by_sequence() -> None:
    seen = observed(pack([512, 256]), PEAK)
    assert signature(pack([512, 256])) != signature(pack(None))
    assert signature(pack([512, 256, 64])) == signature(pack([512, 256]))
    assert seen.holds_for(pack([512, 256, 64]))
    # As many rows in one sequence, or in more but shorter ones, is not more of everything.
    assert not seen.holds_for(pack([832]))
    assert not seen.holds_for(pack([448, 448]))


def test_survives_restarts(tmp_path: Path) -> None:
    Profiles(tmp_path).learn(observed(work(), 2 * PEAK))
    code = (
        "import sys; from pathlib import Path; from labkit.memory.profiles import Profiles; "
        "from tests.memory.test_profiles import ESTIMATE; "
        "print(Profiles(Path(sys.argv[1])).raised(ESTIMATE).peak_allocated_bytes)"
    )
    again = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, check=True)
    assert int(again.stdout) == 2 * PEAK


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from labkit.memory.profiles import Profiles; "
        "from tests.memory.test_profiles import PEAK, observed, work\n"
        "for step in range(40):\n"
        "    Profiles(Path(sys.argv[1])).learn(observed(work(), PEAK + step * int(sys.argv[2])))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), factor], cwd=ROOT) for factor in ("1", "1", "1000")
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 79  # 40 of the first two together, 39 more of the third
    profiles = Profiles(tmp_path)
    assert profiles.raised(ESTIMATE).peak_allocated_bytes == PEAK + 39_000
    assert profiles.damaged == ()


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def _change(path: Path) -> None:
    path.write_text(path.read_text().replace(f"{3 * PEAK}", f"{4 * PEAK}"))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_truncate, "Invalid JSON"),
        (_change, "its content belongs to another name"),
        (_pipe, "no regular file"),
        (_device, "no regular file"),
        (_directory, "no regular file"),
    ],
)
def test_a_damaged_file_is_named_and_left_out(damage: Callable[[Path], None], reason: str, tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    profiles.learn(observed(work(), 2 * PEAK))
    highest = profiles.learn(observed(work(), 3 * PEAK))
    damage(highest)
    assert profiles.raised(ESTIMATE).peak_allocated_bytes == 2 * PEAK
    (named,) = profiles.damaged
    assert str(highest) in named
    assert reason in named


def test_no_folder_is_the_users_mistake_and_one_that_cannot_be_written_a_failure(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder of profiles"):
        Profiles(tmp_path / "nowhere").raised(ESTIMATE)
    (tmp_path / "file").touch()
    with pytest.raises(WorkError, match="cannot be written"):
        Profiles(tmp_path / "file").learn(observed(work(), PEAK))


def test_an_estimate_above_the_measurement_is_untouched(tmp_path: Path) -> None:
    profiles = Profiles(tmp_path)
    profiles.learn(observed(work(), PEAK))
    untouched: Estimate = profiles.raised(ESTIMATE)
    assert untouched is ESTIMATE


def test_any_number_of_sequences_is_looked_up_at_once(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    Profiles(tmp_path / "p").learn(observed(work(micro_batch_size=2**40), PEAK))
    assert Profiles(tmp_path / "p").floor(work(micro_batch_size=2**40)) is not None
    assert Profiles(tmp_path / "p").floor(work(micro_batch_size=2**39)) is None


def test_a_peak_that_no_machine_counts_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to"):
        observed(work(), 10**30)
