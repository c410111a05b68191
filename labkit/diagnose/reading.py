"""What a reader of one kind of input takes and gives back."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from labkit.diagnose.diagnosis import Finding
from labkit.diagnose.facts import Facts
from labkit.importers.launch import Launch
from labkit.workload import Workload
from labkit.workload.base import Part

HEAD = 2**16
"""Bytes by which the kind of a file is told."""


@dataclass(frozen=True)
class Source:
    """A file to read, opened; nothing of it has been consumed."""

    name: str
    """As it was given, for messages."""
    head: bytes
    """Its first bytes."""
    stream: IO[bytes]
    path: Path | None
    """None for standard input."""


@dataclass(frozen=True)
class Reading:
    """What a file says."""

    source: str
    kind: str
    """`log`, `memory snapshot`, ... in words."""
    facts: Facts = field(default_factory=Facts)
    findings: tuple[Finding, ...] = ()
    """What the reader itself concludes, beyond what `labkit.diagnose.causes` makes of the facts."""
    stated: Workload | Launch | None = None
    """What was run, where the file says that."""
    detail: Part | None = None
    """A page of its own, shown after the findings (`__rich_console__`) and under `details` in JSON."""
