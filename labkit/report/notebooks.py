"""Where the notebooks are, and whether they can be told what somebody wants to tell them."""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import InputError, nearest
from labkit.files import shipped, shipped_directory
from labkit.report.execute import convert
from labkit.report.parameters import MODELS
from labkit.workload.workload import content_hash


def notebook_folder() -> Path:
    """The notebooks that ship with labkit."""
    return shipped_directory("notebooks")


def notebook_source(name: str) -> Path:
    """A notebook that ships with labkit."""
    return notebook_folder() / f"{name}.py"


def find_notebook(source: Path) -> Path:
    """The path of a notebook; of a name that is no file, that of a notebook that ships with labkit.

    Raises:
        InputError: there is no such notebook.
    """
    if source.is_file():
        return source
    known = shipped("notebooks")
    if str(source) in known:
        return known[str(source)]
    raise InputError(f"{str(source)[:80]}: no such notebook{nearest(str(source)[:80], known)}")


def check_parameters(source: Path, values: Mapping[str, Any]) -> None:
    """Refuse what papermill would only log: parameters that the notebook has not, or of a wrong kind.

    Args:
        source: A jupytext percent script; labkit's own, and copies of them that take the same, check their values too.
        values: Names and values for the cell tagged `parameters`.

    Raises:
        InputError: names the parameter.
    """
    known = parameter_names(source)
    for name in values:
        if name not in known:
            raise InputError(f"{source}: no parameter {name!r}{nearest(name, known)}")
    try:
        content_hash(dict(values))
    except (TypeError, ValueError):
        raise InputError(f"{source}: parameters should be plain values: numbers, text, lists, mappings") from None
    model = MODELS.get(source.stem)
    if model is not None and set(known) == set(model.model_fields):
        model.checked(**{**_defaults(source), **values})


def parameter_names(source: Path) -> list[str]:
    """The names that the cell tagged `parameters` assigns.

    Raises:
        InputError: there is no such cell, or it is no Python.
    """
    return [name for name, _ in _assignments(source)]


def _defaults(source: Path) -> dict[str, Any]:
    """The values in the parameters cell that are plain ones."""
    found = {}
    for name, value in _assignments(source):
        try:
            found[name] = ast.literal_eval(value)
        except ValueError:
            continue
    return found


def _assignments(source: Path) -> list[tuple[str, ast.expr]]:
    tagged = [cell for cell in convert(source).cells if "parameters" in cell.metadata.get("tags", ())]
    if not tagged:
        raise InputError(f'{source}: no cell is tagged as its parameters (`# %% tags=["parameters"]`)')
    try:
        body = ast.parse(tagged[0].source).body
    except SyntaxError as error:
        raise InputError(f"{source}: its parameters cell is no Python ({error.msg})") from None
    stated = [(target, node.value) for node in body if isinstance(node, ast.Assign) for target in node.targets]
    stated += [(node.target, node.value) for node in body if isinstance(node, ast.AnnAssign) and node.value]
    return [(target.id, value) for target, value in stated if isinstance(target, ast.Name)]
