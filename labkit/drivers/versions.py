"""What took part in a measurement: versions of distributions, and a hash of labkit's own code. Imports no torch."""

import hashlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def installed_version(name: str) -> str:
    """Of a distribution, or `not installed`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def source_hash(patterns: Iterable[str]) -> str:
    """Of labkit's files that match, in the order of the patterns: a changed driver measures anew."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
