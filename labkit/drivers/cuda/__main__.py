"""A rank's process, started by torchrun: `python -m labkit.drivers.cuda FOLDER`."""

import sys
from pathlib import Path

from labkit.drivers.cuda.leash import leave_with_the_launcher


def start() -> None:
    """Measure on this rank's GPU."""
    leave_with_the_launcher()
    from labkit.drivers.cuda.device import Device
    from labkit.drivers.cuda.rank import main

    main(Path(sys.argv[1]), Device)


if __name__ == "__main__":
    start()
