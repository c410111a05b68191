"""Cells on a cluster: a study's missing results as a Slurm array, through submitit.

Each job of the array is one run that shares the study with the others (`Study.run` with `share`): it begins at another
place, takes what nobody has, and leaves when nothing is left. A job that Slurm ends loses the cells in progress alone;
submitting again makes the rest. The cluster's file system must carry `flock` (`labkit.study.store`).

A job's function runs once, on its first node: a driver that needs all nodes starts its ranks there with `srun`.
"""

import contextlib
import io
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from labkit.errors import InputError, WorkError
from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from labkit.drivers.trace.server import Limits
    from labkit.study.matrix import CellDriver
    from labkit.study.study import Study

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:&|*@/-]+$", max_length=200)]
"""As it may stand in a batch script."""


_POLL_SECONDS = 1.0
_LAG_SECONDS = 5.0
"""A shared file system may show a file this much later on another machine."""


class Slurm(Part):
    """What a study file says of its jobs, in Slurm's words; what is left out is the cluster's own choice."""

    partition: _Name | None = None
    account: _Name | None = None
    qos: _Name | None = None
    """Quality of service."""
    constraint: _Name | None = None
    """Features of nodes, as `sbatch --constraint` takes them."""
    time: PositiveInt = 60
    """Minutes that a job may take; what it has not made by then, the next submission makes."""
    nodes: PositiveInt = 1
    """Of each job."""
    gpus_per_node: NonNegativeInt = 0
    """None for traces."""
    cpus_per_task: PositiveInt | None = None
    mem_gb: PositiveInt | None = None
    """Host memory of a node."""
    jobs: PositiveInt = Field(default=1, le=10_000)
    """Of the array, at most: no more than there are cells to make."""

    def parameters(self) -> dict[str, Any]:
        """As `submitit.SlurmExecutor` takes them."""
        stated = self.model_dump(exclude={"jobs", "mem_gb", "gpus_per_node"}, exclude_none=True)
        stated |= {"mem": f"{self.mem_gb}GB"} if self.mem_gb else {}
        stated |= {"gpus_per_node": self.gpus_per_node} if self.gpus_per_node else {}
        return stated


class Submitted(Part):
    """The `--json` object of `labkit study submit`."""

    schema_name: Literal["labkit.submitted/1"] = "labkit.submitted/1"
    study: str
    cells: NonNegativeInt
    """Results that were missing."""
    jobs: Many[str]
    """Their names in Slurm; empty where nothing was missing."""
    logs: str
    """The folder of what they print."""

    def __rich__(self) -> str:
        if not self.jobs:
            return f"{self.study}: every result is there"
        jobs = f"{len(self.jobs)} job{'s' if len(self.jobs) > 1 else ''} ({self.jobs[0]} ...)"
        return f"{self.study}: {self.cells} cells to make in {jobs}; labkit study status shows how far they are"


def submit(
    study: "Study",
    only: Sequence[str] = (),
    *,
    drivers: Sequence["CellDriver"] = (),
    jobs: int | None = None,
    workers: int | None = None,
    limits: "Limits | None" = None,
    local: bool = False,
    wait: bool = False,
) -> Submitted:
    """Hand a study's missing results to Slurm, as one array.

    Args:
        study: What is asked.
        only: As in `Study.run`, as are `drivers`, `workers` and `limits`.
        drivers: See `only`.
        jobs: Of the array; by default as the study file says.
        workers: See `only`.
        limits: See `only`.
        local: Processes of this machine in Slurm's place.
        wait: Come back when all jobs have ended.

    Raises:
        InputError: there is no Slurm here, it refuses the resources, or `Study.run` would refuse.
        WorkError: a job died (with `wait`); what it had finished is stored.
    """
    import submitit

    missing = study.missing(only, drivers)
    logs = study.store.directory / "slurm"
    count = min(jobs or study.matrix.slurm.jobs, len(missing))
    if not missing:
        return Submitted(study=study.name, cells=0, jobs=(), logs=str(logs))
    if not local and shutil.which("sbatch") is None:
        raise InputError(f"{study.name}: no Slurm on this machine (no sbatch); use --local, or labkit study run")
    _make_private(logs)
    shares = [
        {
            "study": str(study.path.resolve()),
            "store": str(study.store.directory.resolve()),
            "only": list(only),
            "drivers": list(drivers),
            "workers": workers,
            "limits": limits,
            "share": (which, count),
        }
        for which in range(count)
    ]
    if local:
        started = submitit.LocalExecutor(logs).map_array(work, shares)
    else:
        executor = submitit.SlurmExecutor(logs, python=shlex.quote(sys.executable))
        executor.update_parameters(
            job_name=f"labkit-{study.name}", use_srun=False, array_parallelism=count, **study.matrix.slurm.parameters()
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # where submitit says the same
                started = executor.map_array(work, shares)
        except submitit.core.utils.FailedJobError as error:
            reason = str(error).strip().splitlines()[0].removeprefix("sbatch: error: ")
            raise InputError(f"{study.path}: slurm: sbatch refuses it: {reason}") from None
    if wait:
        for job in started:
            _await(job, _is_running if local else _is_queued)
    return Submitted(
        study=study.name, cells=len(missing), jobs=tuple(str(job.job_id) for job in started), logs=str(logs)
    )


def _make_private(folder: Path) -> None:
    """What jobs are told lies there as pickles: nobody else may write them."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise WorkError(f"{folder}: cannot be made ({error.strerror}); choose another store") from None


def _await(job: Any, goes_on: Callable[[Any], bool]) -> None:
    """Wait for a job. That it left a result says enough: cells say the rest, and a pickle is not read without need."""
    while not job.paths.result_pickle.exists():
        if not goes_on(job):
            time.sleep(_LAG_SECONDS)
            if not job.paths.result_pickle.exists():
                raise WorkError(f"job {job.job_id} was ended from outside; its output is {job.paths.stderr}")
        time.sleep(_POLL_SECONDS)


def _is_running(job: Any) -> bool:
    return not job.done()


def _is_queued(job: Any) -> bool:
    """As `squeue` has it: not every cluster keeps accounts for `sacct`, which submitit asks."""
    queue = subprocess.run(
        ["squeue", "--noheader", f"--jobs={job.job_id}"], capture_output=True, text=True, check=False
    )
    return bool(queue.stdout.strip()) or (queue.returncode != 0 and "Invalid job id" not in queue.stderr)


def work(share: dict[str, Any]) -> str:
    """One job: run its share of a study; returns where the study stands then."""
    from labkit.study.study import Study

    study = Study.load(Path(share["study"]), Path(share["store"]))
    return study.run(
        share["only"],
        drivers=share["drivers"],
        workers=share["workers"],
        limits=share["limits"],
        share=share["share"],
    ).sentence
