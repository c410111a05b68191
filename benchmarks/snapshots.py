"""What a large memory snapshot costs: `make snapshots`, or `python -m benchmarks.snapshots --megabytes 200`.

PyTorch's own allocator records a training run over a CUDA that has no device (`tests/pytorch_allocator`) and writes the
file; `labkit diagnose` reads it, then two of them to be compared, each in a process of its own. Said are entries,
seconds (of the clock, and of the processor alone) and the largest memory of the process. It fails beyond 30 s of the
processor or 2 GiB.

Beside them are hostile files of the same size, which must be refused at no greater cost. Needs a C compiler.
"""

import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from benchmarks.running import Parser, at_least_one
from labkit.console import Terminal

ROOT = Path(__file__).resolve().parent.parent
ALLOCATOR = ROOT / "tests" / "pytorch_allocator"
SECONDS, GIB = 30, 2.0
BYTES_PER_STEP, DEVICE_BYTES = 20_560, 80 * 10**9
"""Of the file, for a recorded step of 8 layers."""


class Cost(NamedTuple):
    """Of one diagnosis."""

    what: str
    said: str
    clock_seconds: float
    processor_seconds: float
    memory_gib: float

    @property
    def is_low(self) -> bool:
        """Whether it is within the targets."""
        return self.processor_seconds <= SECONDS and self.memory_gib <= GIB


def record(folder: Path, megabytes: int) -> Path:
    """A snapshot of about that size, written by PyTorch."""
    library, file = folder / "libcuda.so.1", folder / "snapshot.pickle"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, ALLOCATOR / "fake_cuda.c"], check=True)
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_BYTES": str(DEVICE_BYTES),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
    }
    options = json.dumps({"layers": 8, "steps": megabytes * 10**6 // BYTES_PER_STEP})
    subprocess.run([sys.executable, ALLOCATOR / "record.py", file, options], env=environment, check=True)
    return file


def hostile(megabytes: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Files that ask for as much as they can."""
    size = megabytes * 10**6
    keys = b"\x80\x04" + b"".join(b"\x8c\x01%c\x94" % letter for letter in b"abcd")
    entry = {"action": "alloc", "size": 1}
    entries = pickle.dumps({"device_traces": [[dict(entry) for _ in range(3)]]})
    yield "lists and nothing else", lambda: b"\x80\x04" + b"]" * size
    yield "steps and nothing else", lambda: b"\x80\x04" + b"N0" * (size // 2)
    yield "short texts", lambda: b"\x80\x04" + b"\x8c\x02ab" * (size // 4)
    yield "references", lambda: keys + b"]" + (b"(" + b"h\x00" * 1000 + b"e") * (size // 2002)
    yield "dictionaries", lambda: keys + b"(" + b"}(h\x00Nu" * (size // 6)
    yield "the smallest entries", lambda: smallest(entries, size)


def smallest(pickled: bytes, size: int) -> bytes:
    """A trace of entries that are as short as they can be."""
    third = pickled.rindex(b"}\x94(")
    end = pickled.index(b"u", third) + 1
    return pickled[:third] + pickled[third:end] * (size // (end - third)) + pickled[end:]


def diagnosed(what: str, files: Sequence[Path]) -> Cost:
    """What `labkit diagnose` needs for files."""
    command = [sys.executable, "-m", "labkit", "diagnose", *map(str, files), "--json"]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    measured = [sys.executable, "-c", _MEASURE, *command]
    done = subprocess.run(measured, cwd=ROOT, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *lines, memory = done.stderr.strip().splitlines()
    if done.returncode == 0:
        pages = json.loads(done.stdout)["details"]
        said = f"{pages[0]['devices'][0]['entries']:,} entries"
    elif done.returncode == 2 and len(lines) == 1:
        said = lines[0].partition("snapshot: ")[2]
    else:
        raise SystemExit(f"{what}: {done.stderr[-2000:]}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(what, said, time.perf_counter() - start, processor, int(memory) / 2**20)


_MEASURE = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def main(arguments: Sequence[str]) -> int:
    """Measure, and say what was found."""
    parser = Parser(prog="python -m benchmarks.snapshots", description="What a large memory snapshot costs to read.")
    parser.add_argument("--megabytes", type=at_least_one, default=200)
    megabytes = parser.parse_args(arguments).megabytes
    console = Terminal()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        snapshot = record(folder, megabytes)
        size = snapshot.stat().st_size / 10**6
        costs = [diagnosed(f"PyTorch's, {size:.0f} MB", [snapshot])]
        costs.append(diagnosed("two of them compared", [snapshot, snapshot]))
        snapshot.unlink()
        for what, content in hostile(megabytes):
            file = folder / "hostile.pickle"
            file.write_bytes(content())
            costs.append(diagnosed(what, [file]))
    table = Table("file", "seconds", "of the processor", "GiB", "labkit says")
    for cost in costs:
        table.add_row(
            cost.what, f"{cost.clock_seconds:.1f}", f"{cost.processor_seconds:.1f}", f"{cost.memory_gib:.2f}", cost.said
        )
    console.print(table)
    beyond = [cost.what for cost in costs if not cost.is_low and cost is not costs[1]]
    if beyond:
        console.print(f"beyond {SECONDS} s or {GIB:g} GiB: {', '.join(beyond)}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
