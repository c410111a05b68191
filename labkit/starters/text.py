"""Pieces of commented YAML: comments, plain data in a line, and what models say of their own fields."""

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise

import yaml

from labkit.console import printable
from labkit.workload.base import Part

MARK = "#: "
"""Before a line that may be switched on by taking this away."""
_WIDTH = 100


def comment(text: str, indent: str = "") -> list[str]:
    """A text as lines of comment, whatever is in it."""
    lines = textwrap.wrap(printable(" ".join(text.split())), _WIDTH - len(indent), break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines]


def inline(value: object) -> str:
    """Plain data as YAML in one line."""
    flow = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=False)
    return flow.removesuffix("...\n").rstrip("\n")


def entry(key: str, value: object, said: str = "", *, indent: str = "", live: bool = False) -> list[str]:
    """A key and its value in one line, switched off unless `live`, below what is said of it."""
    return [*comment(said, indent), f"{indent}{'' if live else MARK}{key}: {inline(value)}"]


@cache
def documented(part: type[Part]) -> dict[str, str]:
    """What a model says of each of its fields, from the docstring below it; empty where there is none."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    assert isinstance(definition, ast.ClassDef)
    said = dict.fromkeys(part.model_fields, "")
    for field, below in pairwise(definition.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
            said[field.target.id] = " ".join(inspect.cleandoc(text).split())
    return said
