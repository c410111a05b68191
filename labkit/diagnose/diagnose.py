"""`diagnose`: files of one run, together, as one diagnosis."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labkit.diagnose.beside import beside
from labkit.diagnose.case import Case
from labkit.diagnose.causes import findings
from labkit.diagnose.diagnosis import Diagnosis, FileRead
from labkit.diagnose.facts import Facts
from labkit.diagnose.inputs import read
from labkit.diagnose.launches import resolve
from labkit.diagnose.snapshots import comparison


@dataclass(frozen=True)
class Examined:
    """A diagnosis with the run that it is about."""

    diagnosis: Diagnosis
    case: Case


def diagnose(paths: Sequence[Path | None], *, world_size: int | None = None, gpu: str | None = None) -> Diagnosis:
    """As `examine`, which says what is read and raised; the diagnosis alone."""
    return examine(paths, world_size=world_size, gpu=gpu).diagnosis


def examine(paths: Sequence[Path | None], *, world_size: int | None = None, gpu: str | None = None) -> Examined:
    """Read files of one run, of any kinds, and say what happened; None among them is standard input.

    `world_size` and `gpu` stand before what launch arguments say.

    Raises:
        InputError: a file cannot be read, is nothing that labkit knows, or two say what was run.
    """
    readings = [read(path) for path in paths]
    facts = Facts()
    for reading in readings:
        facts.add(reading.facts)
    stated, notes = resolve(readings, facts, world_size=world_size, gpu=gpu)
    if stated is not None and (ranks := _beyond(facts, stated.workload.parallelism.world_size)):
        world = stated.workload.parallelism.world_size
        notes.append(
            f"{stated.evidence.place} is of {world} {'rank' if world == 1 else 'ranks'}, and the log has rank "
            f"{max(ranks)}: it is another run, which is neither compared nor advised on"
        )
        stated = None
    case = Case(facts, stated)
    own = [finding for reading in readings for finding in reading.findings]
    details = [reading.detail for reading in readings if reading.detail is not None]
    details += [each for each in (comparison(readings), beside(case)) if each is not None]
    found = findings(case, own)
    if case.why_no_estimate:
        notes.append(f"no estimate: {case.why_no_estimate}")
    diagnosis = Diagnosis(
        files=tuple(FileRead(source=each.source, kind=each.kind) for each in readings),
        findings=tuple(found),
        details=tuple(details),
        notes=tuple(notes),
    )
    return Examined(diagnosis, case)


def _beyond(facts: Facts, world_size: int) -> set[int]:
    """Ranks that said something of memory, and that a run of so many has not."""
    said = {each.rank for each in (*facts.memory, *facts.out_of_memory)}
    return {rank for rank in said if rank is not None and rank >= world_size}
