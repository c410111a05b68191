import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit import Workload
from labkit.drivers.contract import Unfinished
from labkit.drivers.trace.driver import Trace, trace
from labkit.drivers.trace.server import Limits, TraceServer
from labkit.drivers.trace.versions import SUPPORTED, trace_versions, unsupported_version
from labkit.errors import InputError, WorkError
from tests.drivers.test_pipeline import pipeline
from tests.small import small

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(trace_server: TraceServer) -> TraceServer:
    """The one that traces each time it is asked."""
    return trace_server


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def wait_until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def worker(server: TraceServer) -> int:
    assert server._process is not None
    return server._process.pid


def moonlight() -> Workload:
    return Workload.load(ROOT / "data/workloads/moonlight-16b.yaml")


def test_several_runs_at_once_are_bit_identical_and_report_their_phases(server: TraceServer) -> None:
    workload = small()
    results: dict[int, Trace] = {}
    phases: dict[int, list[tuple[int, str]]] = {}

    def run(name: int) -> None:
        phases[name] = []
        results[name] = server.run(workload, on_phase=lambda iteration, phase: phases[name].append((iteration, phase)))

    threads = [threading.Thread(target=run, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = results[0]
    for name in (1, 2):
        assert results[name].ledger.rows == first.ledger.rows
        assert results[name].ledger.moments == first.ledger.moments
        assert results[name].summary == first.summary
        assert phases[name] == phases[0]
    step = ["forward", "backward", "grad_sync", "optimizer"]
    assert phases[0] == [(0, "setup"), *((1, phase) for phase in step), *((2, phase) for phase in step)]


def test_a_killed_child_is_a_sentence_and_the_server_goes_on(server: TraceServer) -> None:
    def kill(iteration: int, phase: str) -> None:
        if (iteration, phase) == (1, "backward"):
            for child in children(worker(server)):
                os.kill(child, signal.SIGKILL)

    with pytest.raises(WorkError) as error:
        server.run(moonlight(), on_phase=kill)
    assert str(error.value) == "moonlight-16b-a3b: the trace failed in backward: its process was killed (SIGKILL)"
    assert server.run(small()).peak_allocated_bytes > 0


def test_a_killed_server_fails_what_it_traced_and_is_started_again_once() -> None:
    with TraceServer() as mine:

        def kill(iteration: int, phase: str) -> None:
            os.kill(worker(mine), signal.SIGKILL)

        with pytest.raises(WorkError, match=r"^small: the trace failed in setup: the trace server ended$"):
            mine.run(small(), on_phase=kill)
        assert mine.run(small()).peak_allocated_bytes > 0
        with pytest.raises(WorkError, match="the trace server ended"):
            mine.run(small(), on_phase=kill)
        with pytest.raises(WorkError, match="the trace server was killed twice"):
            mine.run(small())
    with pytest.raises(WorkError, match="not running"):
        mine.run(small())


def test_what_megatron_refuses_is_one_sentence(server: TraceServer) -> None:
    # A label no rule of labkit's catches, slipped past its validation: Megatron's own answer is what the user reads.
    workload = small()
    choice = workload.recompute.model_copy(update={"recompute_modules": ("attention",)})
    broken = workload.model_copy(update={"recompute": choice})
    with pytest.raises(InputError, match=r"^small: workload: .*attention") as error:
        server.run(broken)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def mine() -> Iterator[TraceServer]:
    """A server with one place."""
    with TraceServer(workers=1) as running:
        yield running


def test_a_hang_and_a_glutton_are_ended_at_their_limits_and_the_server_goes_on(
    mine: TraceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(iteration: int, phase: str) -> None:
        if (iteration, phase) == (1, "forward"):
            for child in children(worker(mine)):
                os.kill(child, signal.SIGSTOP)

    assert mine.run(small()).peak_allocated_bytes > 0  # its imports are done
    with monkeypatch.context() as limited:
        limited.setattr(mine, "_limits", Limits(seconds=10))
        with pytest.raises(Unfinished) as error:
            mine.run(small(), on_phase=hang)
        said = "small: the trace was ended in forward: it took more than 10 s; give it a longer time limit"
        assert (str(error.value), error.value.outcome, error.value.phase) == (said, "timed_out", "forward")
        limited.setattr(mine, "_limits", Limits(memory_bytes=2**28))
        with pytest.raises(Unfinished, match=r"needed more than 0\.25 GiB of host memory; give it a higher") as error:
            mine.run(small())
        assert error.value.outcome == "out_of_host_memory"
    assert mine.run(small()).peak_allocated_bytes > 0


def test_what_an_interrupted_caller_asked_for_is_stopped_and_places_are_free_again(mine: TraceServer) -> None:
    at_once: set[int] = set()

    def interrupt(iteration: int, phase: str) -> None:
        at_once.add(len(children(worker(mine))))
        if phase.startswith("backward"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mine.run_stages(pipeline(2), on_phase=interrupt)
    assert at_once == {1}
    wait_until(lambda: not children(worker(mine)), 5)
    assert mine.run(small()).peak_allocated_bytes > 0


def test_other_versions_are_refused_with_those_that_are_supported() -> None:
    assert unsupported_version() is None
    assert SUPPORTED.keys() <= trace_versions().keys()

    def installed(name: str) -> str:
        return "0.18.1" if name == "megatron-core" else trace_versions()[name]

    assert unsupported_version(installed) == "a trace supports megatron-core 0.19.x, and 0.18.1 is installed"


_UNTOUCHED = """
import sys
import torch
sys.modules["transformer_engine"] = None  # without its compiled half Megatron Core does not get past importing it
import megatron.core.parallel_state
import megatron.core.transformer.transformer_layer
from labkit import trace
from tests.small import small

def everything():
    names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "megatron")]
    modules = [sys.modules[name] for name in names]
    owners = [*modules, *(value for module in modules for value in vars(module).values() if isinstance(value, type))]
    return {(id(owner), name): value for owner in owners for name, value in list(vars(owner).items())}

before, modules = everything(), set(sys.modules)
assert trace(small()).peak_allocated_bytes > 0
after = everything()
assert before.keys() <= after.keys()
assert [name for (_, name), value in before.items() if after[_, name] is not value] == []
assert not torch.cuda.is_available() and not torch.distributed.is_initialized()
assert not {name for name in set(sys.modules) - modules if name.startswith(("torch", "megatron", "transformer_engine"))}
"""


@pytest.mark.long
def test_a_trace_leaves_the_torch_and_megatron_of_its_process_as_they_were() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _UNTOUCHED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_closing_ends_what_runs() -> None:
    errors: list[WorkError] = []
    started = threading.Event()
    with TraceServer() as mine:

        def run() -> None:
            try:
                mine.run(moonlight(), on_phase=lambda iteration, phase: started.set())
            except WorkError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(60)
        family = [worker(mine), *children(worker(mine))]
        assert len(family) == 2
    thread.join(10)
    assert [str(error) for error in errors] == ["moonlight-16b-a3b: the trace failed in setup: the trace server ended"]
    wait_until(lambda: not any(map(running, family)), 5)
    with pytest.raises(WorkError, match="not running"):
        mine.run(small())


_OWNER = """
import sys
from labkit import Workload
from labkit.drivers.trace.server import TraceServer
with TraceServer() as server:
    print(server._process.pid, flush=True)
    if sys.argv[1] == "idle":
        sys.stdin.read()
    server.run(Workload.load("data/workloads/moonlight-16b.yaml"), on_phase=lambda *phase: print(*phase, flush=True))
"""


@pytest.mark.parametrize("moment", [pytest.param("while importing", marks=pytest.mark.long), "while tracing"])
def test_nothing_survives_an_owner_that_is_killed(moment: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, "idle" if moment == "while importing" else "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert owner.stdout is not None
    family = [int(owner.stdout.readline())]
    if moment == "while tracing":
        assert owner.stdout.readline() == "0 setup\n"
        family += children(family[0])
        assert len(family) == 2
    owner.kill()
    owner.wait()
    wait_until(lambda: not any(map(running, family)), 5)
    owner.stdout.close()
    assert owner.stdin is not None
    owner.stdin.close()


def test_one_call_without_a_server_of_ones_own_imports_no_torch(server: TraceServer) -> None:
    result = trace(small())
    assert result.ledger.rows == server.run(small()).ledger.rows
    script = "import sys, labkit.drivers.trace.driver, labkit.drivers.trace.versions as v; v.trace_versions(); "
    script += "assert not {'torch', 'megatron', 'polars'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_a_world_whose_groups_take_hours_is_refused_at_once() -> None:
    workload = small(parallelism={"world_size": 2**17}, batch__global_batch_size=2**17)
    with pytest.raises(InputError, match="131072 are more than 65536; use labkit estimate"):
        TraceServer().run(workload)
