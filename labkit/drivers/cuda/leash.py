"""Ranks end with the torchrun that started them, however it ends. Imports no torch: a rank comes here first."""

import ctypes
import os
import signal

LAUNCHER = "LABKIT_LAUNCHER"
"""The variable that has the number of torchrun's process."""
_PR_SET_PDEATHSIG = 1


def leave_with_the_launcher() -> None:
    """Die when torchrun does, or now if it is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[LAUNCHER]):
        os.kill(os.getpid(), signal.SIGKILL)
