"""A kernel that is this very interpreter, whatever kernels are installed under whatever names."""

import json
import os
import sys
from pathlib import Path

import labkit

KERNEL = "labkit"


def kernel_environment(folder: Path, name: str = KERNEL, shown: str = KERNEL) -> dict[str, str]:
    """Write the kernel's description into `folder` and return an environment in which Jupyter finds it first.

    Args:
        folder: Made if it is not there.
        name: What notebooks ask for.
        shown: What Jupyter calls it; notebooks keep that too, and count as changed under another.
    """
    home = folder / "kernels" / name
    home.mkdir(parents=True)
    description = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": shown,
        "language": "python",
        "metadata": {"supported_encryption": "curve"},
    }
    (home / "kernel.json").write_text(json.dumps(description), encoding="utf-8")
    return {
        **os.environ,
        "JUPYTER_PATH": _prepended(folder, "JUPYTER_PATH"),
        "PYTHONPATH": _prepended(Path(labkit.__file__).resolve().parent.parent, "PYTHONPATH"),  # this very labkit
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # the debugger's start-up warning is no part of a run
    }


def _prepended(path: Path, variable: str) -> str:
    known = os.environ.get(variable)
    return os.pathsep.join([str(path), *([known] if known else [])])
