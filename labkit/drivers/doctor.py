"""What this machine can do, and what is missing for the rest: `labkit doctor`. Imports no torch."""

import os
import platform
import shutil
from importlib.util import find_spec
from typing import TYPE_CHECKING

from labkit.drivers.cuda.machine import installed_gpus
from labkit.drivers.trace.versions import SUPPORTED, unsupported_version
from labkit.drivers.versions import installed_version
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GIB

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


class Ability(Part):
    """One thing that labkit does."""

    name: str
    possible: bool
    detail: str
    """With what it does it here; or else what is missing and what would bring it."""


class Checkup(Part):
    """This machine."""

    abilities: Many[Ability]
    machine: str
    versions: dict[str, str]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        yield Text(self.machine)
        table = Table("", "", "", show_header=False, box=None, pad_edge=False)
        for each in self.abilities:
            mark = Text("yes", style="green") if each.possible else Text("no", style="red")
            table.add_row(Text(each.name, style="bold"), mark, Text(each.detail))
        yield table
        yield Text(", ".join(f"{name} {version}" for name, version in self.versions.items()), style="dim")


def checkup() -> Checkup:
    """Look at this machine; nothing is imported, started or written but `nvidia-smi`."""
    gpus = installed_gpus()
    found = f"{len(gpus)} x {gpus[0].name}, {gpus[0].total_bytes / GIB:.1f} GiB" if gpus else "no GPU"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    cpus = len(os.sched_getaffinity(0))
    return Checkup(
        abilities=(
            Ability(name="estimate", possible=True, detail="always"),
            _trace(),
            _measure(),
            _notebooks(),
            _slurm(),
        ),
        machine=f"{platform.node()}: {cpus} CPUs, {memory:.0f} GiB, {found}, Python {platform.python_version()}",
        versions={name: installed_version(name) for name in ("labkit", *SUPPORTED)},
    )


def _trace() -> Ability:
    problem = unsupported_version()
    detail = "with the installed Megatron Core and Transformer Engine, no GPU needed"
    if problem is not None:
        detail = f"{problem}; make env, or install requirements.lock, brings it"
    return Ability(name="trace", possible=problem is None, detail=detail)


def _measure() -> Ability:
    gpus = installed_gpus()
    missing = [name for name in ("torch", "megatron-core") if installed_version(name) == "not installed"]
    if not gpus:
        detail = "no NVIDIA GPU (nvidia-smi finds none, or CUDA_VISIBLE_DEVICES hides it); labkit trace needs none"
    elif missing:
        detail = f"{' and '.join(missing)} not installed; pip install {' '.join(missing)}"
    elif find_spec("transformer_engine_torch") is None:
        detail = (
            f"on {len(gpus)} GPUs, Megatron's own layers alone (kernels.transformer_impl: local); "
            "transformer-engine[pytorch], built for this CUDA, brings the others"
        )
    else:
        detail = f"workloads of {len(gpus)} ranks"
    return Ability(name="measure", possible=bool(gpus) and not missing, detail=detail)


def _notebooks() -> Ability:
    missing = [name for name in ("jupyterlab", "papermill", "altair") if installed_version(name) == "not installed"]
    detail = f"{', '.join(missing)} not installed; make env brings them" if missing else "labkit lab opens JupyterLab"
    return Ability(name="notebooks and reports", possible=not missing, detail=detail)


def _slurm() -> Ability:
    found = shutil.which("sbatch")
    detail = found or "no sbatch on the path; log in to a machine that submits jobs"
    return Ability(name="Slurm", possible=found is not None, detail=detail)
