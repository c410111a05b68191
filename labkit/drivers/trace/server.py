"""A process that holds Megatron Core and Transformer Engine ready, and forks a fresh child for every trace.

Why a process of its own: the imports take seconds and are paid once; what a trace replaces in `torch` and what it
leaves behind (`fake_cuda`) must not reach the user's process; a trace that dies takes nobody with it. Why not
`multiprocessing`: its children import the user's script, which need not guard itself.

Protocol, one JSON object a line. To the worker (`labkit.drivers.trace.worker`): `{"id", "workload", "rank",
"result"}` with the path the result goes to. From it: `{"id", "phase": [iteration, name]}` as a trace proceeds, then
`{"id", "done": true}` or `{"id", "error": "what happened"}`. The worker has a process group of its own and kills that
group when its standard input ends, which happens when the process that started it dies, however it dies.
"""

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from labkit.drivers.trace.process import own_module
from labkit.errors import InputError, WorkError
from labkit.files import temporary_folder
from labkit.workload import Workload

if TYPE_CHECKING:
    from labkit.drivers.trace.driver import Trace

PhaseCallback = Callable[[int, str], None]

_ENDED = "the trace server ended"
_MOST_RANKS = 2**16
"""A minute and a half of `torch.distributed.new_group`."""
_RESTARTS = 1
"""Of a process that was killed: what kills the second one too is no accident."""


class _Waiting(NamedTuple):
    """A request that has not been answered."""

    process: "subprocess.Popen[bytes]"
    answers: "queue.SimpleQueue[dict[str, Any]]"


class TraceServer:
    """Traces workloads in children of one prepared process; start it with `with`.

    `run` may be called from several threads at once: each call is a child of its own. A process that was killed fails
    what it was tracing, and the next `run` starts another, once.

        with TraceServer() as server:
            trace = server.run(workload)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[int, _Waiting] = {}
        self._last = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._open = False
        self._restarts = 0
        self._closed = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start the process; it takes requests at once and answers when its imports are done."""
        # Its own group, so that one signal ends it and its children, and so that Ctrl-C in a terminal reaches the
        # user's process alone, which then ends it in order.
        command, environment = own_module("labkit.drivers.trace.worker")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        self._open, self._closed = True, False
        threading.Thread(target=self._read, args=(self._process,), name="labkit trace server", daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._open and self._process is not None and self._process.poll() is None

    def close(self) -> None:
        """End the server and whatever it runs: a `run` in another thread raises `WorkError`."""
        with self._lock:
            self._closed, process = True, self._process
        if process is not None:
            _end(process)

    def run(self, workload: Workload, on_phase: PhaseCallback | None = None, *, rank: int = 0) -> "Trace":
        """Trace `rank` of `workload`, which must be one that can run; `on_phase` gets (iteration, phase) as they begin.

        The ranks of a pipeline stage follow each other: stage s begins with rank s * world_size / pp.

        Raises:
            InputError: there is no such rank, or there are too many.
            WorkError: the trace failed, or it cannot trace that runtime; one sentence says in which phase and why.
        """
        from labkit.drivers.trace.results import load

        world_size = workload.parallelism.world_size
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} does not exist; use one from 0 to {world_size - 1}")
        if world_size > _MOST_RANKS:
            reason = f"a trace builds the groups of all ranks, and {world_size} are more than {_MOST_RANKS}"
            raise InputError(f"{workload.model.name}: {reason}; use labkit estimate")
        if workload.training.runtime != "megatron":
            reason = f"the trace runs Megatron Core's own training, not the {workload.training.runtime} runtime"
            raise WorkError(f"{workload.model.name}: {reason}; use labkit estimate")
        with temporary_folder("labkit-trace-") as folder:
            result = folder / "result.json"
            identity, answers = self._ask(workload, rank, result)
            phase = "setup"
            try:
                while True:
                    answer = answers.get()
                    if "phase" in answer:
                        iteration, phase = answer["phase"]
                        if on_phase is not None:
                            on_phase(iteration, phase)
                    elif "error" in answer:
                        raise WorkError(f"{workload.model.name}: the trace failed in {phase}: {answer['error']}")
                    else:
                        return load(workload, result)
            finally:
                with self._lock:
                    del self._answers[identity]

    def _ask(self, workload: Workload, rank: int, result: Path) -> tuple[int, queue.SimpleQueue[dict[str, Any]]]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._process is not None and not self.alive and not self._closed and self._restarts < _RESTARTS:
                self._restarts += 1
                _end(self._process)
                self.start()
            process = self._process
            if process is None or process.stdin is None or not self.alive:
                if self._restarts and not self._closed:
                    raise WorkError("the trace server was killed twice; is there memory for it?")
                raise WorkError("the trace server is not running; start it with `with TraceServer() as server`")
            self._last += 1
            identity = self._last
            self._answers[identity] = _Waiting(process, answers)
            described = workload.model_dump(mode="json")
            request = {"id": identity, "workload": described, "rank": rank, "result": str(result)}
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except (OSError, ValueError):  # a broken pipe, or one that `close` has closed
                answers.put({"error": _ENDED})
        return identity, answers

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                answer = json.loads(line)
                waiting = self._answers.get(answer["id"])
                if waiting is not None:
                    waiting.answers.put(answer)
        with self._lock:
            if self._process is process:
                self._open = False
            for waiting in self._answers.values():
                if waiting.process is process:
                    waiting.answers.put({"error": _ENDED})


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Hang up, which ends the process if it has not ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
