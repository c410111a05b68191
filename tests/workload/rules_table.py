"""Every rule of `labkit/workload`, read out of its source: the table in docs/check.md.

`python -m tests.workload.rules_table` writes it there. A rule is a call of `Finding`, `refuse`, `Refusal` or
`divides`; what its words depend on is shown as `…`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from labkit.workload.finding import Authority

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "check.md"
BEGIN, END = "<!-- rules: python -m tests.workload.rules_table -->\n", "<!-- end of rules -->\n"
_OPEN = "…"
_MOST, _DEEPEST = 4, 4
"""Alternatives that are written out, and names behind names that are followed."""


class Rule(NamedTuple):
    """One row."""

    authority: Authority
    field: str
    severity: str
    reason: str


class _Scope:
    """What the names of a function may stand for: each as it was last bound before the line that asks."""

    def __init__(self, module: ast.Module, function: ast.FunctionDef) -> None:
        self._bound: defaultdict[str, dict[int, list[ast.expr]]] = defaultdict(dict)
        for statement in module.body:
            self._assigned(statement, 0)
        for node in ast.walk(function):
            self._assigned(node, getattr(node, "lineno", 0))
            if isinstance(node, ast.For):
                self._looped(node)

    def _values(self, name: ast.Name, line: int) -> list[ast.expr]:
        bound = self._bound.get(name.id, {})
        last = max((at for at in bound if at <= line), default=None)
        return [] if last is None else bound[last]

    def _assigned(self, node: ast.AST, line: int) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value, line)

    def _bind(self, target: ast.expr, value: ast.expr, line: int) -> None:
        if isinstance(target, ast.Name):
            self._bound[target.id].setdefault(line, []).append(value)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, of_it in zip(target.elts, value.elts, strict=True):
                self._bind(each, of_it, line)

    def _looped(self, loop: ast.For) -> None:
        """`for name, ... in (...)` and `for key, value in {...}.items()`, also of a name for either."""
        table, items = loop.iter, False
        if isinstance(table, ast.Call) and isinstance(table.func, ast.Attribute) and table.func.attr == "items":
            table, items = table.func.value, True
        for found in self._values(table, loop.lineno) if isinstance(table, ast.Name) else [table]:
            if isinstance(found, ast.Tuple | ast.List):
                for element in found.elts:
                    self._bind(loop.target, element, loop.lineno)
            elif isinstance(found, ast.Dict):
                for key, value in zip(found.keys, found.values, strict=True):
                    if key is not None and items:
                        self._bind(loop.target, ast.Tuple([key, value]), loop.lineno)

    def texts(self, node: ast.expr, line: int, depth: int = 0) -> list[str]:
        """What an expression may say, one text for each of its alternatives."""
        match node:
            case ast.Constant(value=str() as text):
                return [text]
            case ast.JoinedStr(values=parts):
                found = [""]
                for part in parts:
                    inner = self.texts(part.value if isinstance(part, ast.FormattedValue) else part, line, depth + 1)
                    few = len(inner) == 1 or (depth == 0 and len(inner) * len(found) <= _MOST)
                    found = [text + end for text in found for end in (inner if few else [_OPEN])]
                return found
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, line, depth) + self.texts(other, line, depth)
            case ast.Name() if depth < _DEEPEST:
                found = [text for value in self._values(node, line) for text in self.texts(value, line, depth + 1)]
                return list(dict.fromkeys(found)) or [_OPEN]
        return [_OPEN]

    def authorities(self, node: ast.expr, line: int, depth: int = 0) -> list[Authority]:
        """Which authorities an expression may be."""
        match node:
            case ast.Attribute(value=ast.Name(id="Authority"), attr=name):
                return [Authority[name]]
            case ast.IfExp(body=body, orelse=other):
                return self.authorities(body, line, depth) + self.authorities(other, line, depth)
            case ast.Name(id=name) if depth < _DEEPEST:
                bound = [value for values in self._bound.get(name, {}).values() for value in values]
                return list(dict.fromkeys(each for value in bound for each in self.authorities(value, line, depth + 1)))
        return []


def rules() -> list[Rule]:
    """Every rule, in no order."""
    return [rule for path in sorted((ROOT / "labkit" / "workload").glob("*.py")) for rule in _of_module(path)]


def _of_module(path: Path) -> Iterator[Rule]:
    module = ast.parse(path.read_text())
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and function.name not in {"refuse", "divides"}:
            scope = _Scope(module, function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield from _of_call(node, scope)


def _of_call(call: ast.Call, scope: _Scope) -> Iterator[Rule]:
    severity, line = "error", call.lineno
    by: ast.expr = ast.Attribute(ast.Name("Authority"), "TRANSFORMER_ENGINE")
    reason: ast.expr
    match call.func, call.args:
        case ast.Name(id="Finding"), [severity_, field, reason, _, by]:
            (severity,) = scope.texts(severity_, line)
        case ast.Name(id="refuse"), [_, field, reason, _, by]:
            pass
        case ast.Name(id="Refusal"), [field, reason, _]:
            pass
        case ast.Name(id="divides"), [_, _, field, what, *rest]:
            reason = ast.JoinedStr([ast.Constant(f"{_OPEN} does not divide "), ast.FormattedValue(what, -1)])
            by = rest[0] if rest else ast.Attribute(ast.Name("Authority"), "LAYERS")
        case _:
            return
    authorities, fields = scope.authorities(by, line), scope.texts(field, line)
    assert authorities, ast.unparse(call)
    for authority in authorities:
        for said in scope.texts(reason, line):
            yield Rule(authority, fields[0] if len(fields) == 1 else _common(fields), severity, said)


def _common(texts: list[str]) -> str:
    """`model.…` of several fields of the model."""
    head = texts[0]
    while not all(text.startswith(head) for text in texts):
        head = head[:-1]
    return head[: head.rfind(".") + 1] + _OPEN


def table() -> str:
    """The rules in Markdown, those of an authority together."""
    lines = []
    for authority in Authority:
        of_it = sorted({rule[1:] for rule in rules() if rule.authority is authority})
        if of_it:
            lines += [f"### {authority}", ""]
            lines += [f"`{authority.file}`", ""] if authority.file else []
            lines += ["| field | | rule |", "|---|---|---|"]
            lines += [f"| `{field}` | {severity} | {_cell(reason)} |" for field, severity, reason in of_it]
            lines.append("")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"(--[a-z][a-z0-9-]*[a-z0-9])", r"`\1`", text).replace("|", "\\|")


def page(text: str) -> str:
    """The page with the table of today."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
