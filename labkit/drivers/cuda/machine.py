"""What this machine has for measuring: GPUs and libraries. Imports no torch; GPUs are asked for by `nvidia-smi`."""

import os
import re
import shutil
import subprocess
from functools import cache
from typing import NamedTuple

from labkit.drivers.versions import installed_version, source_hash

_SOURCES = (
    "workload/behaviour.py",
    "drivers/arguments.py",
    "drivers/build.py",
    "drivers/cell.py",
    "drivers/environment.py",
    "drivers/step.py",
    "drivers/cuda/*.py",
)
_LIBRARIES = ("torch", "megatron-core", "transformer-engine", "fla-core")
_SECONDS = 30
_MEBIBYTES = re.compile("[0-9]{1,9}")


class InstalledGpu(NamedTuple):
    """One GPU of this machine."""

    name: str
    total_bytes: int
    driver: str


@cache
def installed_gpus() -> tuple[InstalledGpu, ...]:
    """The GPUs that a process here may use, in CUDA's order; none where there is no driver.

    `CUDA_VISIBLE_DEVICES` is followed, which `nvidia-smi` does not do.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = _answer(query)
    except (OSError, subprocess.SubprocessError):
        return ()
    found: dict[str, InstalledGpu] = {}
    for line in answer.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == len(query[1].split(",")) and _MEBIBYTES.fullmatch(fields[3]):
            index, uuid, name, mebibytes, driver = fields
            gpu = InstalledGpu(name, int(mebibytes) * 2**20, driver)
            found[index] = found[uuid] = gpu
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(gpu for index, gpu in found.items() if index.isdigit())
    chosen: list[InstalledGpu] = []
    for each in re.split(r"\s*,\s*", visible.strip()):
        # As CUDA reads it: a UUID may be cut short, what follows a name of no GPU is hidden, and one twice hides all.
        of_uuid = [gpu for name, gpu in found.items() if each.startswith("GPU-") and name.startswith(each)]
        if each not in found and len(of_uuid) != 1:
            break
        chosen.append(found[each] if each in found else of_uuid[0])
    return tuple(chosen) if len(set(map(id, chosen))) == len(chosen) else ()


def allocated_nodes() -> list[str]:
    """Names of the nodes of the Slurm job that this process is part of, the first one first; empty outside of any."""
    names, program = os.environ.get("SLURM_JOB_NODELIST"), shutil.which("scontrol")
    if names is None or program is None:
        return []
    try:
        command = [program, "show", "hostnames", names]
        return _answer(command).split()
    except (OSError, subprocess.SubprocessError):
        return []


def _answer(command: list[str]) -> str:
    """What a program of the machine prints, whatever its bytes are.

    Raises:
        OSError: it cannot be started.
        subprocess.SubprocessError: it fails, or takes too long.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_SECONDS,
        check=True,
    ).stdout


@cache
def cuda_versions() -> dict[str, str]:
    """Versions by name, and the GPU; `cuda driver` is a hash of this driver's source."""
    gpus = installed_gpus()
    return {
        "labkit": installed_version("labkit"),
        "cuda driver": source_hash(_SOURCES),
        **{name: installed_version(name) for name in _LIBRARIES},
        "GPU": gpus[0].name if gpus else "none",
        "NVIDIA driver": gpus[0].driver if gpus else "none",
    }
