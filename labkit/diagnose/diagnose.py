"""`diagnose`: files of one run, together, as one diagnosis."""

from collections.abc import Sequence
from pathlib import Path

from labkit.diagnose.diagnosis import Diagnosis, FileRead
from labkit.diagnose.facts import Facts
from labkit.diagnose.inputs import read
from labkit.diagnose.snapshots import comparison


def diagnose(paths: Sequence[Path | None]) -> Diagnosis:
    """Read files of one run, of any kinds, and say what happened; None among them is standard input.

    Raises:
        InputError: a file cannot be read, or is nothing that labkit knows.
    """
    readings = [read(path) for path in paths]
    facts = Facts()
    for reading in readings:
        facts.add(reading.facts)
    details = [each.detail for each in readings if each.detail is not None]
    if (compared := comparison(readings)) is not None:
        details.append(compared)
    return Diagnosis(
        files=tuple(FileRead(source=each.source, kind=each.kind) for each in readings),
        findings=tuple(finding for each in readings for finding in each.findings),
        details=tuple(details),
    )
