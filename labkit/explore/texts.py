"""A workload as text to take along: a YAML file, or Python that makes it. Both give an equal workload again."""

import re
from functools import cache
from pprint import pformat
from typing import Any

import yaml

from labkit.files import shipped
from labkit.workload import Model, Workload
from labkit.workload.files import data_directory, model_mapping

_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def as_yaml(workload: Workload) -> str:
    """What `Workload.load` reads."""
    mapping = _mapping(workload)
    text = yaml.safe_dump(mapping, sort_keys=False, allow_unicode=True, width=120)
    # Line ends other than \n that PyYAML writes as they are, and reads back folded or as \n: then as escapes.
    return yaml.safe_dump(mapping, sort_keys=False, width=120) if _LINE_ENDS.search(text) else text


def as_python(workload: Workload) -> str:
    """Statements that leave it in `workload`."""
    mapping = pformat(_mapping(workload), sort_dicts=False, width=110)
    body = "\n".join(f"    {line}" for line in mapping.splitlines())
    return f"from labkit import Workload\n\nworkload = Workload.from_mapping(\n{body}\n)\n"


def _mapping(workload: Workload) -> dict[str, Any]:
    """What it states; a model that ships with labkit by its name."""
    mapping = workload.model_dump(mode="json", exclude_unset=True)
    if workload.model == _shipped().get(workload.model.name):
        mapping["model"] = workload.model.name
    return mapping


@cache
def _shipped() -> dict[str, Model]:
    return {name: Model.model_validate(model_mapping(name, "explorer", data_directory())) for name in shipped("models")}
