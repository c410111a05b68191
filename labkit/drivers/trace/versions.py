"""What decides a trace besides the workload: the versions of everything that takes part."""

from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from labkit.drivers.versions import installed_version, source_hash
from labkit.workload.behaviour import version_tuple

_SOURCES = (
    "allocator.py",
    "ledger.py",
    "work.py",
    "workload/behaviour.py",
    "workload/gpu.py",
    "drivers/arguments.py",
    "drivers/build.py",
    "drivers/cell.py",
    "drivers/environment.py",
    "drivers/lora/*.py",
    "drivers/step.py",
    "drivers/trace/*.py",
)

SUPPORTED = {"torch": (2, 14), "megatron-core": (0, 19), "transformer-engine": (2, 20), "fla-core": (0, 6)}
"""The minor versions whose Python a trace runs: stand-ins take their places by name and signature there."""


def unsupported_version(installed: Callable[[str], str] = version) -> str | None:
    """Why a trace cannot run on what is installed, with what would do; None where it can."""
    for name, minor in SUPPORTED.items():
        supported = f"{'.'.join(map(str, minor))}.x"
        try:
            found = installed(name)
        except PackageNotFoundError:
            return f"{name} is not installed; a trace needs {supported}"
        if version_tuple(found)[:2] != minor:
            return f"a trace supports {name} {supported}, and {found} is installed"
    return None


@cache
def trace_versions() -> dict[str, str]:
    """Versions by name; `trace driver` is a hash of its source, so that a changed driver measures anew."""
    return {
        "labkit": installed_version("labkit"),
        "trace driver": source_hash(_SOURCES),
        **{name: version(name) for name in ("torch", "megatron-core", "transformer-engine", "fla-core")},
    }
