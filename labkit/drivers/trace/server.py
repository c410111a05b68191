"""A process that holds Megatron Core and Transformer Engine ready, and forks a fresh child for every trace.

Why a process of its own: the imports take seconds and are paid once; what a trace replaces in `torch` and what it
leaves behind (`fake_cuda`) must not reach the user's process; a trace that dies takes nobody with it. Why not
`multiprocessing`: its children import the user's script, which need not guard itself.

Protocol, one JSON object a line. To the worker (`labkit.drivers.trace.worker`): `{"id", "workload", "rank",
"result", "seconds", "memory_bytes"}` with the path the result goes to (null to have the workload looked at alone) and
the limits, or `{"id", "stop"}`. From it: `{"id", "phase": [iteration, name]}` as a trace proceeds, then
`{"id", "done": true}` or `{"id", "error": "what happened"}`, with `mistake` where Megatron refuses what the workload
says, with an `outcome` where it is none of the workload's doing. The worker has a process group of its own and
kills that group when its standard input ends, which happens when the process that started it dies, however it dies.
"""

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from labkit.drivers.contract import RankRecord, Unfinished
from labkit.drivers.process import own_module
from labkit.drivers.trace.versions import unsupported_version
from labkit.errors import InputError, WorkError
from labkit.files import temporary_folder
from labkit.workload import Workload
from labkit.workload.stages import differing_stages

if TYPE_CHECKING:
    from labkit.drivers.trace.driver import Trace

PhaseCallback = Callable[[int, str], None]

_ENDED = "the trace server ended"
_MOST_RANKS = 2**16
"""A minute and a half of `torch.distributed.new_group`."""
_RESTARTS = 1
"""Of a process that was killed: what kills the second one too is no accident."""


def usual_workers() -> int:
    """Children at once where nobody says: 2, or 1 on a single CPU."""
    return min(2, len(os.sched_getaffinity(0)))


class Limits(NamedTuple):
    """What the trace of one rank may take before it is ended."""

    seconds: float = 600.0
    memory_bytes: int = 4 * 2**30
    """Of host memory, resident; the libraries take 0.7 GiB of it."""


class _Waiting(NamedTuple):
    """A request that has not been answered."""

    process: "subprocess.Popen[bytes]"
    answers: "queue.SimpleQueue[dict[str, Any]]"


class TraceServer:
    """Traces workloads in children of one prepared process; start it with `with`.

    `run` and `run_stages` may be called from several threads at once: each rank is traced by a child of its own,
    `workers` of them at a time, within `limits`. A process that was killed fails what it was tracing, and the next
    call starts another, once.

        with TraceServer() as server:
            trace = server.run(workload)
    """

    def __init__(self, workers: int | None = None, limits: Limits | None = None) -> None:
        self._workers = usual_workers() if workers is None else workers
        self._limits = limits or Limits()
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
            [*command, str(self._workers)],
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
            InputError: there is no such rank, there are too many, or Megatron refuses the workload.
            Unfinished: the trace failed, was ended at its limits, or cannot trace that; one sentence says in which
                phase and why.
        """
        return self._run(workload, {rank: ()}, on_phase)

    def run_stages(self, workload: Workload, on_phase: PhaseCallback | None = None) -> "Trace":
        """Trace the first rank of every pipeline stage that can differ: the fullest one's trace, with all records.

        Of a stage's ranks the first is taken: expert-parallel ranks are all traced as the busiest, and other tensor
        ranks hold the same but for batch tensors, which the first has read and the others receive.

        Raises:
            InputError, Unfinished: as `run`, of any rank; the others are ended.
        """
        stages = differing_stages(workload)
        return self._run(workload, {workload.parallelism.first_rank(like[0]): like for like in stages}, on_phase)

    def check(self, workload: Workload) -> None:
        """Have Megatron's parser, validator and configuration look at a workload, in a second.

        Raises:
            InputError: they refuse it.
            WorkError: the server ended.
        """
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._asking(answers) as ask:
            ask(workload, 0, None)
            answer = answers.get()
        if "error" in answer:
            kind = InputError if "mistake" in answer else WorkError
            raise kind(f"{workload.model.name}: {answer['error']}")

    def _run(
        self, workload: Workload, stages: Mapping[int, tuple[int, ...]], on_phase: PhaseCallback | None
    ) -> "Trace":
        """Trace several ranks; `stages` says which pipeline stages each stands for, if not for its own alone."""
        from labkit.drivers.trace.results import load

        _check(workload, stages)
        began = time.monotonic()
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        fullest: Trace | None = None
        records: list[RankRecord] = []
        with temporary_folder("labkit-trace-") as folder, self._asking(answers) as ask:
            phases = dict.fromkeys(stages, "setup")
            asked = {ask(workload, rank, folder / f"{rank}.json"): rank for rank in stages}
            while len(records) < len(stages):
                answer = answers.get()
                rank = asked[answer["id"]]
                where = f" on rank {rank}" if len(stages) > 1 else ""
                if "phase" in answer:
                    iteration, phases[rank] = answer["phase"]
                    if on_phase is not None:
                        on_phase(iteration, phases[rank] + where)
                elif "mistake" in answer:
                    raise InputError(f"{workload.model.name}: {answer['error']}")
                elif "error" in answer:
                    outcome = answer.get("outcome", "failed")
                    ended = "was ended" if outcome in ("timed_out", "out_of_host_memory") else "failed"
                    reason = f"the trace{where} {ended} in {phases[rank]}: {answer['error']}"
                    raise Unfinished(f"{workload.model.name}: {reason}", outcome, phases[rank])
                else:
                    trace = load(workload, folder / f"{rank}.json")
                    (record,) = trace.measurement.ranks
                    records.append(record.model_copy(update={"stages": stages[rank] or record.stages}))
                    if fullest is None or _fullness(trace) > _fullness(fullest):
                        fullest = trace
        assert fullest is not None
        return fullest.among(sorted(records, key=lambda record: record.rank), time.monotonic() - began)

    @contextlib.contextmanager
    def _asking(
        self, answers: "queue.SimpleQueue[dict[str, Any]]"
    ) -> Iterator[Callable[[Workload, int, Path | None], int]]:
        """Requests that share a queue of answers; those that are not over by then are stopped."""
        asked: list[int] = []

        def ask(workload: Workload, rank: int, result: Path | None) -> int:
            asked.append(self._ask(workload, rank, result, answers))
            return asked[-1]

        try:
            yield ask
        finally:
            with self._lock:
                for identity in asked:
                    del self._answers[identity]
                    with contextlib.suppress(OSError, ValueError):  # it has ended, or `close` has
                        self._tell({"id": identity, "stop": True})

    def _tell(self, request: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def _ask(
        self, workload: Workload, rank: int, result: Path | None, answers: "queue.SimpleQueue[dict[str, Any]]"
    ) -> int:
        with self._lock:
            if self._process is not None and not self.alive and not self._closed and self._restarts < _RESTARTS:
                self._restarts += 1
                _end(self._process)
                self.start()
            process = self._process
            if process is None or not self.alive:
                if self._restarts and not self._closed:
                    raise WorkError("the trace server was killed twice; is there memory for it?")
                raise WorkError("the trace server is not running; start it with `with TraceServer() as server`")
            self._last += 1
            identity = self._last
            self._answers[identity] = _Waiting(process, answers)
            request = {"workload": workload.model_dump(mode="json"), "rank": rank, "result": result and str(result)}
            try:
                self._tell({"id": identity, **request, **self._limits._asdict()})
            except (OSError, ValueError):  # a broken pipe, or one that `close` has closed
                answers.put({"id": identity, "error": _ENDED})
        return identity

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
            for identity, waiting in self._answers.items():
                if waiting.process is process:
                    waiting.answers.put({"id": identity, "error": _ENDED})


def _check(workload: Workload, ranks: Iterable[int]) -> None:
    """Refuse at once what a trace cannot do."""
    name, world_size = workload.model.name, workload.parallelism.world_size
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} does not exist; use one from 0 to {world_size - 1}")
    if world_size > _MOST_RANKS:
        reason = f"a trace builds the groups of all ranks, and {world_size} are more than {_MOST_RANKS}"
        raise InputError(f"{name}: {reason}; use labkit estimate")
    refused = unsupported_version() or _unsupported_pass(workload) or _unsupported_layout(workload)
    if refused is not None:
        raise Unfinished(f"{name}: {refused}", "unsupported", "setup")


def _unsupported_layout(workload: Workload) -> str | None:
    """Why the placing of layers cannot be traced, and the remedy; None if it can."""
    if any("m" in stage for stage in workload.parallelism.marked_stages[:-1]):
        reason = (
            "multi-token prediction before the last stage has stages tell each other shapes, which a trace does not do"
        )
        return f"parallelism.pipeline_model_parallel_layout: {reason}; put m beside L"
    return None


def _unsupported_pass(workload: Workload) -> str | None:
    """What `labkit.drivers.lora` does not run, and the remedy; None if that is nothing."""
    lora = workload.training.lora
    if lora is None:
        return None
    refused = {
        "context parallelism": workload.parallelism.cp > 1,
        f"outputs: {lora.outputs}": lora.outputs != "hidden_states",
        "regather: true": lora.regather,
    }
    found = next((what for what, broken in refused.items() if broken), None)
    return found and f"the trace's lora runtime has no {found}; use labkit estimate"


def _fullness(trace: "Trace") -> tuple[int, int]:
    """For comparison: its peak; of equals the first rank."""
    return trace.measurement.ranks[0].peak.peak_allocated_bytes, -trace.rank


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Hang up, which ends the process if it has not ended."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    process.wait()
