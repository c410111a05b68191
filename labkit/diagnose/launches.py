"""What was run, where a text states it: a workload file, launch arguments, or the block of arguments in a log."""

import re
from collections.abc import Sequence
from pathlib import PurePath

from labkit.diagnose.case import Stated
from labkit.diagnose.facts import Evidence, Facts, OutOfMemory
from labkit.diagnose.reading import HEAD, Reading, Source
from labkit.errors import InputError, LabkitError
from labkit.importers.launch import Launch, read_launch
from labkit.importers.megatron import MegatronReader, import_launch
from labkit.workload import Workload
from labkit.workload.files import parse_mapping
from labkit.workload.gpu import GPUS

_PARTS = {"model", "parallelism", "batch"}
"""Of these a workload file has the first, and nobody else all."""
_ARGUMENT = re.compile(
    r"--(?:num-layers|hidden-size|micro-batch-size|tensor-model-parallel-size|use-checkpoint-args)\b"
)
_KEY = re.compile(
    r"^[\s{]{0,8}[\"']?(?:--)?(?:model|num[-_]layers|megatron_args|hidden[-_]size)[\"']?\s?:", re.MULTILINE
)
_MOST_NOTES = 8
_NEAR = 0.015
"""By which what GPUs of one kind say of their memory differs."""


def whole(source: Source) -> str | None:
    """A text that is short enough to state a launch; None for a longer one."""
    if len(source.head) >= HEAD:
        return None
    return source.head.decode("utf-8-sig", errors="replace")


def stated(text: str, name: str, facts: Facts) -> Workload | Launch | None:
    """The workload or launch that a text is, rather than a log."""
    if "Traceback (most" in text or facts.memory or facts.iterations or facts.printed or _counted(facts):
        return None
    if _KEY.search(text):
        return _of_mapping(text, name)
    if not _ARGUMENT.search(text) and not text.startswith("#!"):
        return None
    try:
        return read_launch(text, name)
    except InputError:
        if facts.empty:
            raise
        return None


def _counted(facts: Facts) -> bool:
    """Whether a message says how much; what a script's comment says of memory has no figures."""
    return any(each.requested is not None for each in facts.out_of_memory)


def _of_mapping(text: str, name: str) -> Workload | Launch | None:
    try:
        data = parse_mapping(text, name)
    except InputError:
        return None
    if data.keys() >= _PARTS:
        return Workload.from_mapping(data, name)
    return read_launch(text, name)


def refusal(text: str | None, name: str) -> str:
    """Why a text that says nothing else is no launch either, as the end of a sentence."""
    if text is None:
        return ""
    try:
        read_launch(text, name)
    except InputError as error:
        return f", and as launch arguments {str(error).removeprefix(f'{name}: ')}"
    return ""


def resolve(
    readings: Sequence[Reading], facts: Facts, *, world_size: int | None = None, gpu: str | None = None
) -> tuple[Stated | None, list[str]]:
    """The workload of a run, and what is to be said about how it was found.

    Of a file that states one; else of the arguments that a log prints.

    Raises:
        InputError: two files state one.
    """
    stating = [each for each in readings if each.stated is not None]
    if len(stating) > 1:
        raise InputError(f"{stating[0].source} and {stating[1].source} both say what was run; give one of them")
    notes: list[str] = []
    for source, what, evidence in _stated(stating, facts):
        if isinstance(what, Workload):
            return Stated(what, evidence), notes
        launch = what if world_size is None else what._replace(world_size=world_size)
        try:
            with MegatronReader() as reader:
                name = re.sub(r"[^\w.-]+", "-", PurePath(source).stem)[:200] or "run"
                made = import_launch(
                    launch, reader, source=source, name=name, gpu=gpu or launch.gpu or _gpu(facts.out_of_memory)
                )
        except LabkitError as error:
            if facts.empty and len(readings) == 1:
                raise
            return None, [f"no estimate: {error}"]
        notes += made.notes[:_MOST_NOTES]
        return Stated(made.workload, evidence), notes
    return None, notes


def _stated(stating: Sequence[Reading], facts: Facts) -> "list[tuple[str, Workload | Launch, Evidence]]":
    if stating:
        (reading,) = stating
        assert reading.stated is not None
        return [(reading.source, reading.stated, Evidence(source=reading.source, text=reading.kind))]
    if not facts.printed:
        return []
    last = facts.printed[-1]
    size = last.values.get("world_size", "")
    ranks = int(size) if size.isascii() and size.isdigit() and 0 < len(size) < 8 else None
    # The block does not name the program; a tokenizer of BERT's does.
    program = "pretrain_bert.py" if last.values.get("tokenizer_type", "").startswith("Bert") else ""
    launch = Launch((), world_size=ranks or None, program=program, printed=last.values)
    return [(last.evidence.source, launch, last.evidence)]


def _gpu(messages: Sequence[OutOfMemory]) -> str | None:
    """The GPU of a message's capacity; the first of those that have as much."""
    for message in messages:
        for name, gpu in GPUS.items():
            if message.capacity and abs(message.capacity / gpu.total_memory_bytes - 1) < _NEAR:
                return name
    return None
