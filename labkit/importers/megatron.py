"""`import_megatron`: launch arguments of Megatron-LM, in whatever form, as a `Workload`."""

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from labkit.console import printable
from labkit.drivers.trace.process import own_module
from labkit.errors import InputError, WorkError, nearest
from labkit.files import read_regular
from labkit.importers.fields import Arguments, Fields, fields
from labkit.importers.launch import Launch, known_program, read_launch
from labkit.importers.silent import SILENT
from labkit.workload import Workload
from labkit.workload.files import text_of
from labkit.workload.gpu import GPUS

_MAXIMUM_BYTES = 2**20
_LONGEST_SECONDS = 600.0


class Imported(NamedTuple):
    """A workload, and what is known about how well it says what was launched."""

    workload: Workload
    not_expressed: list[str]
    """One sentence for each argument that decides memory and that the workload does not say."""
    assumed: list[str]
    """What was left open and how it was taken."""

    @property
    def notes(self) -> list[str]:
        """Both, each in one line."""
        labelled = [f"assumed: {each}" for each in self.assumed]
        labelled += [f"not expressed: {each}" for each in self.not_expressed]
        return [printable(" ".join(each.split())) for each in labelled]

    @property
    def yaml(self) -> str:
        """The workload as a file, with its notes as comments."""
        data = self.workload.model_dump(mode="json", exclude_unset=True)
        body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)
        return "".join([*(f"# {note}\n" for note in self.notes), body])


def import_megatron(path: Path | None, *, world_size: int | None = None, gpu: str | None = None) -> Imported:
    """Read a launch script, command line or mapping of arguments; `path` None is standard input.

    `world_size` and `gpu` stand before what the file says.

    Raises:
        InputError: the file cannot be read, says no launch, or Megatron or labkit refuses what it says.
        WorkError: Megatron's parser could not be started.
    """
    source = "standard input" if path is None else str(path)
    if gpu is not None and gpu not in GPUS:
        raise InputError(f"--gpu {gpu[:80]}: no such GPU{nearest(gpu[:80], GPUS)}")
    launch = read_launch(_text(path, source), source)
    known_program(launch.program, source)
    name = "imported" if path is None else re.sub(r"[^\w.-]+", "-", path.stem)[:200] or "imported"
    if world_size is not None:
        launch = launch._replace(world_size=world_size)
    try:
        answer = _asked(launch, gpu)
        found = fields(
            Arguments(answer["values"], answer["given"], answer["options"], answer["config"]),
            name=name,
            gpu=gpu or launch.gpu,
            environment=launch.environment,
        )
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    assumed = [*_world_note(launch, found.mapping), *found.assumed]
    return Imported(_checked(found, source), found.not_expressed, assumed)


def _checked(found: Fields, source: str) -> Workload:
    """The workload; where its rules refuse it, the reason may be what it does not express."""
    try:
        return Workload.from_mapping(found.mapping, source)
    except InputError as error:
        options = ", ".join(each.partition(":")[0] for each in found.not_expressed)
        raise InputError(f"{error} (not expressed: {options})" if options else str(error)) from None


def _text(path: Path | None, source: str) -> str:
    def read() -> bytes:
        content = sys.stdin.buffer.read(_MAXIMUM_BYTES + 1) if path is None else read_regular(path, _MAXIMUM_BYTES)
        if len(content) > _MAXIMUM_BYTES:
            raise InputError(f"{source}: larger than {_MAXIMUM_BYTES / 2**20:g} MiB")
        return content

    return text_of(read, source, encoding="utf-8-sig")


def _world_note(launch: Launch, mapping: Mapping[str, Any]) -> list[str]:
    if launch.world_size is not None:
        return []
    why = f"the launcher's needs {launch.unknown_world}" if launch.unknown_world else "none is stated"
    ranks = mapping["parallelism"]["world_size"]
    return [f"world size: {why}; the smallest that the layout allows, {ranks} (--world-size says another)"]


def _asked(launch: Launch, gpu: str | None) -> dict[str, Any]:
    """Megatron's answer from a process of its own."""
    request = {
        "arguments": list(launch.arguments),
        "environment": dict(launch.environment),
        "world_size": launch.world_size,
        "gpu": gpu or next(iter(GPUS)),
        "silent": SILENT,
    }
    command, environment = own_module("labkit.drivers.trace.megatron_args")
    try:
        process = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_SECONDS,
            check=False,
            env=environment,
        )
        answer: dict[str, Any] = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        raise WorkError(f"Megatron's parser did not answer within {_LONGEST_SECONDS:g} s") from None
    except ValueError:
        raise WorkError(f"Megatron's parser ended with exit code {process.returncode}") from None
    if "error" in answer:
        raise InputError(answer["error"])
    return answer
