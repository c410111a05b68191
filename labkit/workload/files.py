"""Reading YAML as data, and finding what ships with labkit (`data/`)."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from labkit.errors import InputError, nearest
from labkit.files import read_regular, shipped, shipped_directory

_MAXIMUM_BYTES = 2**20
"""Many times what a routing histogram for every layer takes."""
_MOST_VALUES = 2**20
_LONGEST_INTEGER = 100
"""Characters: 63 bits in binary with underscores; beyond, Python itself may refuse to convert."""
_NOT_DECIMAL = re.compile(r"[-+]?(0[0-9_]+|[0-9_]+(:[0-9]+)+)")
"""What YAML 1.1 reads as octal (`0100`) or in base 60 (`1:30`), and nobody means."""
_NULL = "tag:yaml.org,2002:null"


@cache
def data_directory() -> Path:
    """Models, workloads, studies and published figures that ship with labkit."""
    return shipped_directory("data")


class _UniqueKeyLoader(yaml.CSafeLoader if hasattr(yaml, "CSafeLoader") else yaml.SafeLoader):  # type: ignore[misc]
    """Plain data only; a key given twice is an error, not a silent choice of the last."""


def _mapping(loader: _UniqueKeyLoader, node: yaml.Node) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise yaml.constructor.ConstructorError(None, None, "tagged as a mapping, but it is none", node.start_mark)
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a plain value", key_node.start_mark)
        if isinstance(value_node, yaml.ScalarNode) and not value_node.value and value_node.tag == _NULL:
            problem = f"nothing follows key {key!r:.80}: give it a value, or leave it out"
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r:.80} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


def _integer(loader: _UniqueKeyLoader, node: yaml.ScalarNode) -> int:
    """An integer of at most 63 bits: sizes are, and no sum or table downstream need bear more."""
    if _NOT_DECIMAL.fullmatch(node.value):
        problem = f"{node.value[:80]} is octal or base 60 in YAML; write a decimal number, or quote a text"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    if len(node.value) <= _LONGEST_INTEGER:
        value: int = loader.construct_yaml_int(node)
        if value.bit_length() <= 63:
            return value
    raise yaml.constructor.ConstructorError(None, None, "an integer of more than 63 bits", node.start_mark)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_UniqueKeyLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def load_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        InputError: it cannot be read, is larger than 1 MiB, is not YAML, or holds no mapping with text keys.
    """
    return parse_mapping(text_of(lambda: read_regular(path, _MAXIMUM_BYTES), str(path)), str(path))


def text_of(read: Callable[[], bytes], source: str, *, encoding: str = "utf-8") -> str:
    """What `read` gives, as text; `source` names it in errors.

    Raises:
        InputError: it cannot be read, or is no text.
    """
    try:
        return read().decode(encoding)
    except UnicodeDecodeError:
        raise InputError(f"{source}: not text in UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: no file's name has a null character
        raise InputError(f"{source}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def parse_mapping(text: str, source: str) -> dict[str, Any]:
    """The mapping that a text in YAML or JSON is; `source` names it in errors.

    Raises:
        InputError: it is not YAML, or holds no mapping with text keys.
    """
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a safe loader)
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not valid YAML: {_yaml_problem(error)}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # What PyYAML's constructors let through where a tag does not fit its value: `!!bool abc`, `!!timestamp x`.
        raise InputError(f"{source}: not valid YAML: a value does not fit its tag ({type(error).__name__})") from None
    if data is None:
        raise InputError(f"{source}: empty; expected a mapping of keys to values")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InputError(f"{source}: expected a mapping with text keys at the top")
    if _values(data, {}) >= _MOST_VALUES:
        raise InputError(f"{source}: its aliases stand for more than a million values; write it without them")
    return data


def unique_pairs(source: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """For `json.loads`: objects in which a key given twice is refused."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        unique: dict[str, Any] = {}
        for key, value in found:
            if key in unique:
                raise InputError(f"{source}: key {key[:80]!r} is given twice")
            unique[key] = value
        return unique

    return pairs


def _values(data: object, known: dict[int, int]) -> int:
    """How many values plain data stands for, those behind an alias counted each time; `known` by identity."""
    if not isinstance(data, dict | list | tuple):
        return 1
    if id(data) not in known:
        known[id(data)] = _MOST_VALUES  # what refers to itself never ends
        parts = data.values() if isinstance(data, dict) else data
        known[id(data)] = 1 + sum(_values(each, known) for each in parts)
    return known[id(data)]


def _yaml_problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(problem)


def workload_file(path: Path) -> Path:
    """The path of a workload; of a name that is no file, that of a workload that ships with labkit.

    Raises:
        InputError: a name that is neither.
    """
    shown = str(path)[:80]
    if not _is_path(path) and (data_directory() / "models" / f"{shown}.yaml").is_file():
        raise InputError(f"{shown}: this is a model; `labkit new workload {shown}` writes a workload of it")
    return _file_or_shipped(path, "workload", "workloads")


def study_file(path: Path) -> Path:
    """The path of a study; of a name that is no file, that of a study that ships with labkit.

    Raises:
        InputError: a name that is neither.
    """
    return _file_or_shipped(path, "study", "studies")


def _is_path(path: Path) -> bool:
    return path.exists() or path.suffix in (".yaml", ".yml") or path.name != str(path)


def _file_or_shipped(path: Path, kind: str, folder: str) -> Path:
    if _is_path(path):
        return path
    shown, known = str(path)[:80], shipped(folder)
    if str(path) in known:
        return known[str(path)]
    raise InputError(f"{shown}: there is no such file, and no such {kind} in data/{folder}{nearest(shown, known)}")


def is_study(mapping: Mapping[str, Any]) -> bool:
    """Whether a file's mapping is that of a study (`labkit.study.matrix`)."""
    return "candidates" in mapping or "control" in mapping


def files_of(path: Path) -> list[Path]:
    """The files that a workload, or a study's base, is read from: its own and those it names.

    Raises:
        InputError: it cannot be read.
    """
    path = workload_file(path)
    found, mapping = [path], load_mapping(path)
    for named in (mapping.get("model"), mapping.get("base")):
        if isinstance(named, str) and named.endswith((".yaml", ".yml")) and (path.parent / named).is_file():
            found += files_of(path.parent / named) if named == mapping.get("base") else [path.parent / named]
    return found


def model_mapping(name: str, source: str, folder: Path) -> dict[str, Any]:
    """The mapping of a model that ships with labkit (`data/models/NAME.yaml`), or of a YAML file.

    Args:
        name: The model's name, or a path that ends in `.yaml`, relative to `folder`; the file's stem is then its name.
        source: Who asks, for errors.
        folder: Where relative paths start.

    Raises:
        InputError: no such model.
    """
    if name.endswith((".yaml", ".yml")):
        path = folder / name
        return {"name": path.stem, **load_mapping(path)}
    known = shipped("models")
    if name not in known:
        shown = name[:80]
        raise InputError(
            f"{source}: unknown model {shown!r}{nearest(shown, known)} (or give a .yaml file of its sizes)"
        )
    return {"name": name, **load_mapping(known[name])}
