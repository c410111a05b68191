"""How a training run was launched: Megatron's arguments, environment and world, from text in one of three forms.

A shell script or command line, a mapping of arguments, or a mapping with `megatron_args` and what surrounds them
(`env_vars`, `n_gpus`, `gpu`), as Megatron-LM's own functional tests have them. Text only: nothing is executed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from labkit.errors import InputError
from labkit.importers.shell import Command, commands, expanded, gaps
from labkit.workload.files import parse_mapping

_MAPPING = re.compile(r"\s*(?:#[^\n]*\n\s*)*(?:\{|-{0,2}[A-Za-z][\w.-]*\s*:(?:\s|$))")
"""A JSON object, or YAML that begins with a key."""
_CI_LIST = re.compile(r"\[([A-Za-z_][^\[\]]*)\]")
"""Several values, as the recipes of Megatron-LM's functional tests write them: `[attn mlp]`."""
_NUMBER = re.compile(r"[1-9][0-9]{0,6}")
_SBATCH = re.compile(r"^#SBATCH[ \t]+([^#\n]*)", re.MULTILINE)
_DEEPEST = 5
_MOST_WORDS = 2**14
"""Aliases let a few lines of YAML stand for more than memory holds."""
_PER_NODE = ("--nproc_per_node", "--nproc-per-node")
_NODES = ("--nnodes",)
_ROW = {"megatron_args", "env_vars", "n_gpus", "gpu"}
_PRETRAINING = re.compile(r"(pretrain|train|run)_\w*\.py|\w*(pretrain|train|finetune)\w*\.py")


class Launch(NamedTuple):
    """What is known about a run. Text that could not be worked out is a gap (`labkit.importers.shell.gap`)."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    world_size: int | None = None
    unknown_world: str = ""
    """Why the launcher's own figure is not known, where it states one."""
    torchrun: bool = False
    """It starts the ranks of a node: Slurm's tasks are nodes."""
    program: str = ""
    gpu: str = ""
    printed: Mapping[str, str] = {}
    """Arguments by name as a log prints them, beside those of a command line."""


def read_launch(text: str, source: str) -> Launch:
    """The launch that a text describes.

    Raises:
        InputError: it is neither a mapping nor a script with exactly one launch, in one sentence.
    """
    if "\0" in text:
        raise InputError(f"{source}: it is no text")
    if source.endswith((".yaml", ".yml", ".json", ".jsonl")) or _MAPPING.match(text):
        return _from_mapping(_one_document(text, source), source)
    found = list(_launches(commands(text, source), source))
    slurm = [word for line in _SBATCH.findall(text) for word in line.split()]
    found = [(line, _ranks_of_slurm(launch, slurm, source)) for line, launch in found]
    if len(found) > 1:
        found = [each for each in found if _PRETRAINING.fullmatch(PurePosixPath(each[1].program).name)] or found
    if not found:
        raise InputError(f"{source}: it launches no Python program with arguments that begin with --")
    if len({(each.arguments, each.world_size) for _, each in found}) > 1:
        lines = ", ".join(str(line) for line, _ in found[:6])
        raise InputError(f"{source}: lines {lines} each launch a program; leave one of them in the file")
    return found[0][1]


def _one_document(text: str, source: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and all(line.startswith("{") and line.rstrip().endswith("}") for line in lines):
        raise InputError(f"{source}: it has {len(lines)} rows; give one of them")
    return parse_mapping(text, source)


def _from_mapping(data: Mapping[str, Any], source: str) -> Launch:
    row = data if "megatron_args" in data else {"megatron_args": data}
    arguments, environment = row["megatron_args"], row.get("env_vars") or {}
    world_size, gpu = row.get("n_gpus"), row.get("gpu") or ""
    for name, part in (("megatron_args", arguments), ("env_vars", environment)):
        if not isinstance(part, dict):
            raise InputError(f"{source}: {name}: should be a mapping of names to values")
    if world_size is not None and (type(world_size) is not int or not 0 < world_size <= 2**20):
        raise InputError(f"{source}: n_gpus: should be a number of GPUs")
    if not isinstance(gpu, str):
        raise InputError(f"{source}: gpu: should be a name")
    variables = {str(name): _text(value, f"{source}: {name}") for name, value in environment.items()}
    words = (word for name, value in arguments.items() for word in _words(name, value, source, variables))
    listed = tuple(islice(words, _MOST_WORDS + 1))
    if len(listed) > _MOST_WORDS:
        raise InputError(f"{source}: more than {_MOST_WORDS} words of arguments")
    return Launch(
        arguments=listed,
        environment=variables,
        world_size=world_size,
        program=_program_of(row.get("family")),
        gpu=gpu,
    )


def _program_of(family: Any) -> str:
    """Megatron-LM's program for a family of its functional tests."""
    return f"pretrain_{family}.py" if family in ("bert", "t5") else ""


def _words(name: object, value: Any, source: str, variables: Mapping[str, str]) -> Iterator[str]:
    """An entry as on the command line."""
    where = f"{source}: {name}"
    option = "--" + str(name).removeprefix("--")
    if value is None or value is False:
        return
    yield option
    if value is True:
        return
    if isinstance(value, str) and (several := _CI_LIST.fullmatch(value.strip())):
        value = several.group(1).replace(",", " ").split()
    for each in value if isinstance(value, list) else [value]:
        text = _text(each, where)
        yield expanded(text, source, variables) if "$" in text else text


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool | str | int | float) and "\0" not in str(value):
        return str(value)
    raise InputError(f"{where}: should be a plain value or a list of them")


def _launches(found: Sequence[Command], source: str, depth: int = 0) -> Iterator[tuple[int, Launch]]:
    """Every launch among commands, with its line; `bash -c` and `eval` have their own text read."""
    if depth > _DEEPEST:
        raise InputError(f"{source}: shells within shells, more than {_DEEPEST} deep")
    for command in found:
        inner = _inner_script(command.words)
        if inner is not None:
            for _, each in _launches(commands(inner, source, command.environment), source, depth + 1):
                yield command.line, _ranks_of_slurm(each, command.words, source)
        elif (launch := _launch(command, source)) is not None:
            yield command.line, launch


def _inner_script(words: Sequence[str]) -> str | None:
    """The text that a command gives to a shell."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for at, word in enumerate(words[:-2]):
        if PurePosixPath(word).name in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", words[at + 1]):
            return words[at + 2]
    return None


def _launch(command: Command, source: str) -> Launch | None:
    words = list(command.words)
    at = _program_at(words)
    if at is None:
        return None
    before, arguments = words[:at], words[at + 1 :]
    if not any(word.startswith("--") for word in arguments) and not any(map(gaps, arguments)):
        return None
    program = PurePosixPath(words[at]).name if at >= 0 else ""
    torchrun = any(PurePosixPath(word).name == "torchrun" or word.startswith("torch.distributed") for word in before)
    world_size, unknown = _world(before, command.environment, source, torchrun=torchrun)
    launch = Launch(tuple(arguments), command.environment, world_size, unknown, torchrun, program)
    return _ranks_of_slurm(launch, before, source)


def _program_at(words: Sequence[str]) -> int | None:
    """Where the program stands; -1 where the words are arguments alone, None where they launch nothing."""
    if words[0].startswith("--"):
        return -1
    for at, word in enumerate(words):
        if word.endswith(".py"):
            return at
        if at and words[at - 1] == "-m" and not word.startswith("torch.distributed"):
            return at
    return None


def _world(
    before: Sequence[str], environment: Mapping[str, str], source: str, *, torchrun: bool
) -> tuple[int | None, str]:
    """Ranks as the launcher's options or WORLD_SIZE state them, and why they are not known if they cannot be read."""
    stated = [_option(before, names) for names in (_PER_NODE, _NODES)]
    if not torchrun and not any(stated):
        stated = [environment.get("WORLD_SIZE"), "1"]
        if stated[0] is None:
            return None, ""
    ranks = 1
    for text in stated:
        if text is None:
            continue  # torchrun's default is 1
        if not _NUMBER.fullmatch(text):
            return None, _unknown(text, source)
        ranks *= int(text)
    return ranks, ""


def _unknown(text: str, source: str) -> str:
    """What would have to be known to read a launcher's figure.

    Raises:
        InputError: it is a number, and none of ranks.
    """
    if re.fullmatch(r"[-+]?[0-9]+", text):
        raise InputError(f"{source}: the launcher starts {text[:80]} ranks or nodes; it should be from 1 to {2**20}")
    return gaps(text)[0] if gaps(text) else f"a machine that says what {text[:80]!r} means"


def _ranks_of_slurm(launch: Launch, words: Sequence[str], source: str) -> Launch:
    """The launch with Slurm's tasks as its ranks, where nothing nearer to the program says how many there are."""
    if launch.world_size is not None or launch.unknown_world or launch.torchrun:
        return launch
    tasks, nodes = _option(words, ("--ntasks", "-n")), _option(words, ("--nodes", "-N")) or "1"
    if tasks is None and (each := _option(words, ("--ntasks-per-node", "--tasks-per-node"))) is not None:
        tasks = str(int(each) * int(nodes)) if _NUMBER.fullmatch(each) and _NUMBER.fullmatch(nodes) else each + nodes
    if tasks is None:
        return launch
    if not _NUMBER.fullmatch(tasks):
        return launch._replace(unknown_world=_unknown(tasks, source))
    return launch._replace(world_size=int(tasks))


def _option(words: Sequence[str], names: Sequence[str]) -> str | None:
    """The value of the last of these options."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (words[at + 1] if at + 1 < len(words) else "")
    return found


def known_program(program: str, source: str) -> None:
    """Refuse the programs of Megatron-LM that train something else than a decoder.

    Raises:
        InputError: labkit has no such model.
    """
    known = {"pretrain_gpt.py", "pretrain_hybrid.py", "pretrain_mamba.py"}
    other = {"pretrain_bert.py", "pretrain_t5.py", "pretrain_vlm.py", "pretrain_ict.py", "train_rl.py"}
    other |= {"pretrain_vision_classify.py", "pretrain_vision_dino.py", "pretrain_vision_inpaint.py"}
    if program in other:
        raise InputError(
            f"{source}: {program} trains a model that labkit does not have; it has those of {', '.join(sorted(known))}"
        )
