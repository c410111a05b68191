"""The process behind `TraceServer`: imports once, then one forked child for each request on standard input."""

import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import threading
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_LONGEST_MESSAGE = 1500
"""Characters of an error: a line must stay below PIPE_BUF (4096 bytes), or lines of two children could mix."""


def main() -> None:
    """Serve until standard input ends, then take the whole process group along."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    # Megatron prints; standard output is for answers alone.
    answers = os.dup(1)
    os.dup2(2, 1)
    with _leaving_with_the_owner():
        _prepare()
    _serve(answers)


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
        import labkit.drivers.trace.results
        import labkit.drivers.trace.session  # noqa: F401
    gc.collect()
    gc.freeze()  # children share these pages as long as no collector touches them


def _serve(answers: int) -> None:
    waiting, pending = selectors.DefaultSelector(), b""
    waiting.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fd == 0:
                data = os.read(0, 1 << 16)
                if not data:
                    _leave()
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    child = _start(request, answers)
                    waiting.register(os.pidfd_open(child), selectors.EVENT_READ, (child, request["id"]))
            else:
                waiting.unregister(key.fd)
                os.close(key.fd)
                child, identity = key.data
                _bury(child, identity, answers)


def _start(request: dict[str, Any], answers: int) -> int:
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


def _bury(child: int, identity: int, answers: int) -> None:
    """A child that ended with 0 has answered; any other could not."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code < 0:
        _say(answers, identity, error=f"its process was killed ({signal.Signals(-code).name})")
    elif code > 0:
        _say(answers, identity, error=f"its process ended with exit code {code}")


def _work(request: dict[str, Any], answers: int) -> int:
    from labkit.drivers.trace.results import dump
    from labkit.drivers.trace.session import trace_here
    from labkit.errors import LabkitError
    from labkit.workload import Workload

    identity = request["id"]
    try:
        trace = trace_here(
            Workload.unchecked(request["workload"]),
            request["rank"],
            on_phase=lambda iteration, phase: _say(answers, identity, phase=[iteration, phase]),
        )
        dump(trace, Path(request["result"]))
    except LabkitError as error:
        _say(answers, identity, error=str(error))
    except Exception as error:  # noqa: BLE001 (whatever Megatron raises becomes one sentence)
        text = str(error).strip().splitlines()
        _say(answers, identity, error=f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__)
    else:
        _say(answers, identity, done=True)
    return 0


def _say(answers: int, identity: int, **fields: Any) -> None:
    if "error" in fields:
        fields["error"] = fields["error"][:_LONGEST_MESSAGE]
    os.write(answers, json.dumps({"id": identity, **fields}).encode() + b"\n")


if __name__ == "__main__":
    main()
