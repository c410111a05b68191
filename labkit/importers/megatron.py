"""`import_megatron`: launch arguments of Megatron-LM, in whatever form, as a `Workload`."""

import json
import re
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from labkit.drivers.process import own_module
from labkit.errors import InputError, WorkError, nearest
from labkit.importers.documents import source_name, text_from
from labkit.importers.fields import Arguments, fields, known_gpu
from labkit.importers.imported import Imported, backend_note, checked
from labkit.importers.launch import Launch, known_program, read_launch
from labkit.importers.silent import SILENT, decides_no_memory, is_conditional
from labkit.workload import Workload
from labkit.workload.gpu import GPUS

_LONGEST_SECONDS = 600.0


class MegatronReader:
    """Megatron's own reading of arguments, in a process that answers any number of questions; use it as a context.

    Raises:
        WorkError: the process could not be started, died, or took too long.
    """

    def __enter__(self) -> Self:
        command, environment = own_module("labkit.drivers.trace.megatron_args")
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        self._process.communicate()

    @staticmethod
    def request(launch: Launch, gpu: str) -> dict[str, Any]:
        """What `labkit.drivers.trace.megatron_args` is asked."""
        return {
            "arguments": list(launch.arguments),
            "printed": {name: text for name, text in launch.printed.items() if _matters(name)},
            "environment": dict(launch.environment),
            "world_size": launch.world_size,
            "gpu": gpu,
            "silent": SILENT,
        }

    def ask(self, launch: Launch, gpu: str) -> Arguments:
        """What Megatron makes of a launch on one of labkit's GPUs.

        Raises:
            InputError: Megatron refuses it.
            WorkError: as the class says.
        """
        request = self.request(launch, gpu)
        sent, read = self._process.stdin, self._process.stdout
        assert sent is not None
        assert read is not None
        watchdog = threading.Timer(_LONGEST_SECONDS, self._process.kill)
        watchdog.start()
        try:
            with self._lock:
                sent.write(json.dumps(request).encode() + b"\n")
                sent.flush()
                answer: dict[str, Any] = json.loads(read.readline())
        except (OSError, ValueError):
            code = self._process.wait()
            raise WorkError(f"Megatron's parser ended with exit code {code} or took {_LONGEST_SECONDS:g} s") from None
        finally:
            watchdog.cancel()
        if "error" in answer:
            raise InputError(answer["error"])
        return Arguments(**answer)


def _matters(name: str) -> bool:
    """Whether a printed argument decides memory, is read where another one does, or says whose the vocabulary is."""
    return name == "tokenizer_type" or is_conditional(name) or not decides_no_memory(name)


def import_megatron(path: Path | None, *, world_size: int | None = None, gpu: str | None = None) -> Imported:
    """Read a launch script, command line or mapping of arguments; `path` None is standard input.

    `world_size` and `gpu` stand before what the file says.

    Raises:
        InputError: the file cannot be read, says no launch, or Megatron or labkit refuses what it says.
        WorkError: Megatron's parser could not be started.
    """
    source = source_name(path)
    if gpu is not None and gpu not in GPUS:
        raise InputError(f"--gpu {gpu[:80]}: no such GPU{nearest(gpu[:80], GPUS)}")
    name = "imported" if path is None else re.sub(r"[^\w.-]+", "-", path.stem)[:200] or "imported"
    with MegatronReader() as reader:
        return import_text(text_from(path), reader, source=source, name=name, world_size=world_size, gpu=gpu)


def import_text(
    text: str, reader: MegatronReader, *, source: str, name: str, world_size: int | None = None, gpu: str | None = None
) -> Imported:
    """The same for the text of a file; `name` is the model's, `source` stands in messages.

    Raises:
        InputError, WorkError: as `import_megatron`.
    """
    launch = read_launch(text, source)
    if world_size is not None:
        launch = launch._replace(world_size=world_size)
    return import_launch(launch, reader, source=source, name=name, gpu=gpu)


def import_launch(
    launch: Launch, reader: MegatronReader, *, source: str, name: str, gpu: str | None = None
) -> Imported:
    """The same for a launch.

    Raises:
        InputError, WorkError: as `import_megatron`.
    """
    known_program(launch.program, source)
    try:
        stated = gpu or launch.gpu
        read = reader.ask(launch, known_gpu(stated) or next(iter(GPUS)))
        found = fields(read, name=name, gpu=stated, environment=launch.environment)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    workload = checked(found, source)
    assumed = [*_world_note(launch, found.mapping), *_gpu_note(workload, stated), *found.assumed]
    assumed += backend_note(workload, "--attention-backend")
    return Imported(workload, found.not_priced, found.not_expressed, assumed)


def _gpu_note(workload: Workload, stated: str) -> list[str]:
    return [] if stated else [f"GPU: none is stated; {workload.training.gpu} (--gpu says another)"]


def _world_note(launch: Launch, mapping: Mapping[str, Any]) -> list[str]:
    if launch.world_size is not None:
        return []
    why = f"the launcher's needs {launch.unknown_world}" if launch.unknown_world else "none is stated"
    ranks = mapping["parallelism"]["world_size"]
    return [f"world size: {why}; the smallest that the layout allows, {ranks} (--world-size says another)"]
