"""What decides a trace besides the workload: the versions of everything that takes part."""

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_SOURCES = (
    "allocator.py",
    "ledger.py",
    "workload/behaviour.py",
    "workload/gpu.py",
    "drivers/arguments.py",
    "drivers/build.py",
    "drivers/step.py",
    "drivers/trace/*.py",
)


@cache
def trace_versions() -> dict[str, str]:
    """Versions by name; `trace driver` is a hash of its source, so that a changed driver measures anew."""
    digest = hashlib.sha256()
    for pattern in _SOURCES:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return {
        "labkit": _labkit(),
        "trace driver": digest.hexdigest()[:16],
        **{name: version(name) for name in ("torch", "megatron-core", "transformer-engine", "fla-core")},
    }


def _labkit() -> str:
    try:
        return version("labkit")
    except PackageNotFoundError:
        return "not installed"
