"""The process behind `TraceServer`: imports once, then one forked child for each request on standard input."""

import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 1500
"""Characters of an error: a line must stay below PIPE_BUF (4096 bytes), or lines of two children could mix."""
_WATCH_SECONDS = 0.1
"""How often children are held against their limits."""


def main(most: int) -> None:
    """Serve until standard input ends, `most` children at a time, then take the whole process group along."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    # Megatron prints; standard output is for answers alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    with _leaving_with_the_owner():
        _prepare()
    _Children(answers, most).serve()


@contextlib.contextmanager
def _leaving_with_the_owner() -> Any:
    """Die as soon as standard input hangs up, though nobody reads it (imports take seconds).

    A thread, gone before the first fork. Not PR_SET_PDEATHSIG: that fires when the *thread* that started us ends.
    """
    done = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(0, 0)  # hang-ups are always reported; data is not asked for
        while not done.is_set():
            if poll.poll(100):
                _leave()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _leave() -> None:
    os.killpg(0, signal.SIGKILL)


def _prepare() -> None:
    """Import what every trace needs; the GPU is only there to be imported under."""
    from labkit.drivers.trace.surface import fake_cuda
    from labkit.workload.gpu import GPUS

    gc.disable()  # a tenth of the imports' time, for no garbage; children collect when they choose to
    with fake_cuda(next(iter(GPUS.values()))):
        import labkit.drivers.cell
        import labkit.drivers.trace.results
        import labkit.drivers.trace.session
        import labkit.drivers.trace.state_names  # noqa: F401
    # Every trace's first operator outside of the stand-ins asks for it: a second that its child need not spend.
    import torch._dynamo  # noqa: F401

    gc.collect()
    gc.freeze()  # children share these pages as long as no collector touches them


@dataclass
class _Child:
    """A trace in progress."""

    pid: int
    request: dict[str, Any]
    deadline: float
    ended: dict[str, str] | None = None
    """Why we ended it, as the answer says it; None while we have not."""

    def excess(self) -> dict[str, str] | None:
        """The limit it is beyond, as the answer says it."""
        if time.monotonic() > self.deadline:
            reason = f"it took more than {self.request['seconds']:g} s"
            return {"outcome": "timed_out", "error": f"{reason}; give it a longer time limit"}
        if _resident_bytes(self.pid) > self.request["memory_bytes"]:
            reason = f"its process needed more than {self.request['memory_bytes'] / 2**30:g} GiB of host memory"
            return {"outcome": "out_of_host_memory", "error": f"{reason}; give it a higher memory limit"}
        return None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)  # it is not buried yet, so the number is still its own


class _Children:
    """Starts children as requests come and places are free, holds them against their limits, buries them."""

    def __init__(self, answers: int, most: int) -> None:
        self._answers = answers
        self._most = most
        self._requests: deque[dict[str, Any]] = deque()
        self._running: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._pending = b""

    def serve(self) -> None:
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(_WATCH_SECONDS if self._running else None):
                if key.fd == 0:
                    self._read()
                else:
                    self._bury(key.fd, key.data)
            for child in self._running.values():
                if child.ended is None:
                    child.ended = child.excess()
                    if child.ended is not None:
                        child.kill()
            while self._requests and len(self._running) < self._most:
                self._start(self._requests.popleft())

    def _read(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            _leave()
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "stop" in request:
                self._stop(request["id"])
            else:
                self._requests.append(request)

    def _stop(self, identity: int) -> None:
        self._requests = deque(request for request in self._requests if request["id"] != identity)
        child = self._running.get(identity)
        if child is not None and child.ended is None:
            child.ended = {"error": "it was stopped"}
            child.kill()

    def _start(self, request: dict[str, Any]) -> None:
        pid = _fork(request, self._answers)
        child = _Child(pid, request, time.monotonic() + request["seconds"])
        self._running[request["id"]] = child
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, child)

    def _bury(self, descriptor: int, child: _Child) -> None:
        """A child that ended with 0 has answered; any other could not."""
        self._selector.unregister(descriptor)
        os.close(descriptor)
        identity = child.request["id"]
        del self._running[identity]
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if code < 0:
            killed = {"error": f"its process was killed ({signal.Signals(-code).name})"}
            _say(self._answers, identity, **(child.ended or killed))
        elif code > 0:
            _say(self._answers, identity, error=f"its process ended with exit code {code}")


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return 0


def _fork(request: dict[str, Any], answers: int) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    # From here on nothing returns to the caller's frames.
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            os.close(0)
            code = _work(request, answers)
    finally:
        os._exit(code)


def _work(request: dict[str, Any], answers: int) -> int:
    from labkit.drivers.contract import Unfinished
    from labkit.drivers.trace.results import dump
    from labkit.drivers.trace.session import check_here, trace_here
    from labkit.errors import InputError, LabkitError
    from labkit.workload import Workload

    identity = request["id"]

    def tell(iteration: int, phase: str) -> None:
        _say(answers, identity, phase=[iteration, phase])

    try:
        workload = Workload.unchecked(request["workload"])
        if request["result"] is None:
            check_here(workload)
        else:
            dump(trace_here(workload, request["rank"], on_phase=tell), Path(request["result"]))
    except InputError as error:
        _say(answers, identity, error=str(error), mistake=True)
    except LabkitError as error:
        outcome = {"outcome": error.outcome} if isinstance(error, Unfinished) else {}
        _say(answers, identity, error=str(error), **outcome)
    except Exception as error:  # noqa: BLE001 (whatever Megatron raises becomes one sentence)
        text = str(error).strip().splitlines()
        # Stand-ins refuse what they have no shapes for, and torch what its meta device cannot do.
        outcome = {"outcome": "unsupported"} if isinstance(error, NotImplementedError) else {}
        said = f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__
        _say(answers, identity, error=said, **outcome)
    else:
        _say(answers, identity, done=True)
    return 0


def _say(answers: int, identity: int, **fields: Any) -> None:
    if "error" in fields:
        fields["error"] = fields["error"][:_LONGEST_MESSAGE]
    os.write(answers, json.dumps({"id": identity, **fields}).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
