"""Runs one notebook with papermill, in a process of its own (`python -m labkit.report.worker IN OUT PARAMETERS`).

It stops, and its kernel with it, when its standard input ends: when whoever started it says so, or is gone.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

from labkit.report.kernel import KERNEL


def main(source: str, executed: str, parameters: str) -> int:
    """Execute `source` into `executed`, saved after every cell; 1 if a cell failed."""
    threading.Thread(target=_stop_when_input_ends, daemon=True).start()
    # The kernel listens on a local port that other users of the machine can reach: encrypted where it can be.
    config = Config({"KernelManager": {"transport_encryption": "auto"}})
    try:
        papermill.execute_notebook(
            source,
            executed,
            parameters=yaml.safe_load(Path(parameters).read_text(encoding="utf-8")),
            kernel_name=KERNEL,
            cwd=str(Path.cwd()),
            progress_bar=False,
            config=config,
        )
    except PapermillExecutionError:
        return 1  # the notebook says which cell and why
    return 0


def _stop_when_input_ends() -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock the interpreter wants when it ends
        pass
    os.kill(os.getpid(), signal.SIGINT)  # papermill shuts its kernel down


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
