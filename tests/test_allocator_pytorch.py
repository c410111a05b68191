"""The simulation beside PyTorch's own allocator, run over a CUDA that has addresses and no device."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.allocator import Allocator, OutOfMemory
from labkit.workload.caching import AllocatorSettings
from labkit.workload.gpu import GIB, MIB

HERE = Path(__file__).parent / "pytorch_allocator"
DEVICE_BYTES = GIB

SETTINGS = [
    AllocatorSettings(),
    AllocatorSettings(expandable_segments=True),
    AllocatorSettings(
        roundup_power2_divisions="[1:2,4:4,16:8,>:1]", max_split_size_mb=24, max_non_split_rounding_mb=30
    ),
    AllocatorSettings(roundup_power2_divisions=8, garbage_collection_threshold=0.3, per_process_memory_fraction=0.9),
    AllocatorSettings(
        large_segment_size_mb=34,
        max_split_size_mb=50,
        max_non_split_rounding_mb=40,
        garbage_collection_threshold=0.5,
        per_process_memory_fraction=0.8,
    ),
    AllocatorSettings(expandable_segments=True, large_segment_size_mb=34, per_process_memory_fraction=0.7),
]

type Requests = list[tuple[int, int, int]]
"""(name, bytes, stream); a negative name frees."""
type Answers = list[tuple[int, int, int, int]]
"""Behind each: allocated bytes, reserved bytes, retries, times out of memory."""


def requests(draw: random.Random, length: int = 300) -> Requests:
    """Some of all sizes, on one stream or several, more than the device holds at times."""
    drawn: Requests = []
    live: list[int] = []
    largest, streams = draw.choice([4 * MIB, 64 * MIB, 200 * MIB]), draw.choice([[0], [0, 8, 16]])
    frees = draw.uniform(0.3, 0.6)
    for name in range(1, length):
        if live and draw.random() < frees:
            drawn.append((-live.pop(draw.randrange(len(live))), 0, 0))
            continue
        some = draw.randrange(5000), draw.randrange(2 * MIB), draw.randrange(24 * MIB), draw.randrange(1, 40) * MIB
        drawn.append((name, draw.choice([*some, draw.randrange(largest)]), draw.choice(streams)))
        live.append(name)
    return drawn


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CUDA without a device, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "fake_cuda.c"], check=True)
    return library


def of_pytorch(cuda: Path, settings: AllocatorSettings, cases: list[Requests]) -> list[Answers]:
    """What PyTorch's allocator did."""
    environment = {
        **os.environ,
        "LD_PRELOAD": str(cuda),
        "LD_LIBRARY_PATH": str(cuda.parent),
        "FAKE_CUDA_BYTES": str(DEVICE_BYTES),
        "PYTORCH_ALLOC_CONF": "" if settings == AllocatorSettings() else settings.label,
        # Otherwise it asks the driver's management library for a fabric.
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
    }
    played = subprocess.run(
        [sys.executable, HERE / "play.py"],
        input="\n".join(map(json.dumps, cases)),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert played.returncode == 0, played.stderr
    return [[tuple(answer) for answer in json.loads(line)] for line in played.stdout.splitlines()]


def simulated(settings: AllocatorSettings, case: Requests) -> Answers:
    """What the simulation does."""
    allocator, answers, failed = Allocator(settings, device_bytes=DEVICE_BYTES), [], 0
    for name, nbytes, stream in case:
        if name < 0:
            allocator.free(-name)
        else:
            try:
                allocator.allocate(name, nbytes, stream)
            except OutOfMemory:
                failed += 1
        answers.append((allocator.allocated, allocator.reserved, allocator.retries, failed))
    return answers


@pytest.mark.parametrize(
    "settings",
    [*SETTINGS[:3], *(pytest.param(each, marks=pytest.mark.long) for each in SETTINGS[3:])],
    ids=lambda settings: settings.label,
)
def test_every_request_does_what_it_does_in_pytorch(cuda: Path, settings: AllocatorSettings) -> None:
    draw = random.Random(settings.label)  # noqa: S311
    cases = [requests(draw) for _ in range(8)]
    found = of_pytorch(cuda, settings, cases)
    assert found == [simulated(settings, case) for case in cases]
    ends = [answers[-1] for answers in found]
    assert any(retries for _, _, retries, _ in ends), "some case fills the device"
