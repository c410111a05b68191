"""Who may import whom, as ARCHITECTURE.md draws it, read from every import statement in labkit."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "labkit"

GROUND = {"errors", "files", "workload"}
TABLE = GROUND | {"ledger", "allocator", "comparison", "summary", "ranges", "work"}
MAY_IMPORT = {
    "errors": set(),
    "files": set(),
    "console": set(),
    "workload": GROUND,
    "ledger": TABLE,
    "allocator": TABLE,
    "snapshot": TABLE | {"snapshot"},
    "summary": TABLE,
    "ranges": GROUND | {"summary"},
    "work": GROUND,
    "comparison": GROUND | {"ledger"},
    "memory": TABLE | {"memory"},
    "drivers": TABLE | {"drivers"},
    "importers": TABLE | {"console", "memory", "drivers", "importers"},
    "study": TABLE | {"console", "memory", "drivers", "study"},
    "plan": TABLE | {"memory", "plan"},
    "admission": TABLE | {"memory", "plan", "diagnose", "admission"},
    "check": GROUND | {"study"},
    "starters": TABLE | {"console", "memory", "drivers", "study", "plan", "starters"},
    "calibration": TABLE | {"memory", "drivers", "importers", "calibration"},
    "diagnose": TABLE | {"console", "snapshot", "memory", "drivers", "importers", "plan", "diagnose"},
    "workbench": TABLE
    | {
        "console",
        "snapshot",
        "memory",
        "drivers",
        "importers",
        "study",
        "plan",
        "admission",
        "calibration",
        "check",
        "diagnose",
        "workbench",
    },
    "report": TABLE | {"console", "report"},
    "explore": TABLE | {"memory", "drivers", "study", "plan", "check", "starters", "report", "explore"},
    "cli": TABLE
    | {
        "console",
        "memory",
        "drivers",
        "importers",
        "study",
        "plan",
        "admission",
        "check",
        "starters",
        "diagnose",
        "report",
        "cli",
    },
    "__main__": {"cli"},
    "__init__": TABLE | {"memory", "drivers", "study", "explore"},
}
"""Rooms (a folder or a file of labkit) and the rooms below them."""

HEAVY = {"torch", "megatron", "transformer_engine", "transformer_engine_torch", "triton"}
MAY_IMPORT_HEAVY = tuple(
    f"drivers/{each}"
    for each in ("arguments.py", "build.py", "cell.py", "lora/", "step.py", "watch.py", "trace/", "cuda/")
)

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module a file imports, inside functions and type-checking blocks too."""
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"labkit/{path}:{node.lineno}: write the import from labkit down"
            module = node.module or ""
            yield from (f"{module}.{name.name}" for name in node.names) if module == "labkit" else [module]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_go_down(path: Path) -> None:
    room = path.parts[0].removesuffix(".py")
    below = {module.split(".")[1] for module in imported_modules(path) if module.startswith("labkit.")}
    assert below - {"__version__"} <= MAY_IMPORT[room], f"labkit/{path} imports what is not below it"


@pytest.mark.parametrize("path", FILES, ids=str)
def test_only_the_drivers_that_run_megatron_import_it(path: Path) -> None:
    heavy = {module.split(".")[0] for module in imported_modules(path)} & HEAVY
    assert not heavy or path.as_posix().startswith(MAY_IMPORT_HEAVY)
