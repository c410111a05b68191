"""Cells as jobs: of this machine's processes, and of a real Slurm of one node where Debian's packages are installed."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from labkit.errors import InputError
from labkit.study import Study
from labkit.study.slurm import Slurm, submit

ROOT = Path(__file__).parents[2]
LORA: dict[str, Any] = yaml.safe_load((ROOT / "data/workloads/qwen3.8-27b-lora.yaml").read_text())
UNSUPPORTED = {**LORA, "training": {**LORA["training"], "lora": {"rank": 8, "regather": True}}}
"""What the trace refuses at once: a job has a result without seconds of tracing."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A study of three cells."""
    modules = (["core_attn", "layernorm"], ["core_attn", "mlp"])
    study = {
        "name": "jobs",
        "title": "Jobs",
        "base": UNSUPPORTED,
        "control": {},
        "candidates": [{"recompute": {"recompute_modules": list(labels)}} for labels in modules],
        "slurm": {"jobs": 2, "time": 5},
    }
    path = tmp_path / "jobs.yaml"
    path.write_text(yaml.safe_dump(study))
    return path


def submitted(path: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "labkit", "study", "submit", str(path), "--wait", "--json", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def check_made(path: Path, said: subprocess.CompletedProcess[str], jobs: int) -> None:
    """Each cell has its result, made by as many jobs."""
    assert said.stderr == ""
    assert said.returncode == 1  # no cell has passed
    states = json.loads(said.stdout)["cells"]
    assert [cell["state"] for cell in states] == ["failed"] * 3
    assert all("regather: true; use labkit estimate" in cell["detail"] for cell in states)
    store = Study.load(path).store.directory
    assert len(list(store.glob("*.zip"))) == 3
    assert list(store.glob("*.part")) == []
    assert len(list((store / "slurm").glob("*_submitted.pkl"))) == jobs
    assert (store / "slurm").stat().st_mode & 0o077 == 0


def test_jobs_of_this_machine_share_a_study(path: Path) -> None:
    check_made(path, submitted(path, "--local"), jobs=2)


def test_resources_are_those_of_the_study_file() -> None:
    stated = Slurm(partition="gpu", time=30, nodes=2, gpus_per_node=8, mem_gb=64, jobs=7)
    assert stated.parameters() == {"partition": "gpu", "time": 30, "nodes": 2, "gpus_per_node": 8, "mem": "64GB"}


def test_a_study_file_writes_no_line_into_the_batch_script(path: Path) -> None:
    hostile = yaml.safe_load(path.read_text()) | {"slurm": {"partition": "all\n#SBATCH --wrap=id"}}
    path.write_text(yaml.safe_dump(hostile))
    with pytest.raises(InputError, match=r"slurm\.partition: string should match"):
        Study.load(path)


def test_without_slurm_it_says_what_would_work(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(path.parent))
    with pytest.raises(InputError, match=r"no Slurm on this machine .* use --local, or labkit study run"):
        submit(Study.load(path))
    assert not Study.load(path).store.directory.exists()


CONFIGURATION = """
ClusterName=labkit
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
"""Of a Slurm with one node, as root, that neither starts with the machine nor outlives the test."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A Slurm of this machine alone; the environment in which its commands find it."""
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("needs root and Debian's slurm-wlm")
    folder = tmp_path / "cluster"
    folder.mkdir()
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    configuration.write_text(
        CONFIGURATION.format(
            host=os.uname().nodename, folder=folder, port=26817, node_port=26818, cpus=len(os.sched_getaffinity(0))
        )
    )
    environment = {"SLURM_CONF": str(configuration)}
    munge = ["--force", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid"]
    munge += [f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"]
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    daemons = [
        subprocess.Popen([*command], env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (["munged", "--foreground", *munge], ["slurmctld", "-D"], ["slurmd", "-D"])
    ]
    try:
        deadline = time.monotonic() + 60
        while (
            "idle"
            not in subprocess.run(
                ["sinfo", "--noheader"], env=os.environ | environment, capture_output=True, text=True, check=False
            ).stdout
        ):
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()
            time.sleep(0.3)
        yield environment
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def test_a_real_slurm_makes_the_cells_as_an_array(path: Path, slurm: dict[str, str]) -> None:
    check_made(path, submitted(path, **slurm), jobs=2)


def test_what_slurm_refuses_is_one_sentence(path: Path, slurm: dict[str, str]) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"slurm": {"partition": "nowhere"}}))
    said = submitted(path, **slurm)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.endswith("jobs.yaml: slurm: sbatch refuses it: invalid partition specified: nowhere\n")
    assert len(said.stderr.splitlines()) == 1


@pytest.mark.faults
def test_a_job_that_slurm_ends_is_one_sentence(path: Path, slurm: dict[str, str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | slurm
    command = [sys.executable, "-m", "labkit", "study", "submit", str(path), "--wait"]
    waiting = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    cancel = ["scancel", "--name=labkit-jobs", "--verbose"]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        said = subprocess.run(cancel, env=environment, capture_output=True, text=True, check=False)
        if "Terminating" in said.stderr:
            break
        time.sleep(0.1)
    _, stderr = waiting.communicate(timeout=120)
    assert waiting.returncode == 1
    assert "was ended from outside; its output is " in stderr
