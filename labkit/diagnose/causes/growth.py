"""Memory that steps leave behind, as far as a log says what was allocated after each; a snapshot says by which line."""

from collections.abc import Iterator

from labkit.diagnose.case import Case, size
from labkit.diagnose.diagnosis import Finding

_FEWEST = 4
"""Reports after the first that make a rise."""
_MOSTLY = 0.9
"""Of the reports are higher than the one before."""
_GROWN = 0.01
"""Of what was allocated in the end: less is no leak worth looking for."""


def growth(case: Case) -> Iterator[Finding]:
    """The rank whose memory rose most, where it rose from step to step."""
    rises = [
        rise
        for rise in case.facts.memory.rises.values()
        if rise.reports >= _FEWEST
        and rise.higher >= _MOSTLY * rise.reports
        and rise.nbytes >= _GROWN * (rise.last.allocated or 0)
    ]
    if not rises:
        return
    rise, first = max(rises, key=lambda each: each.nbytes), case.first
    steps = (rise.last.iteration or 0) - (rise.first.iteration or 0)
    who = "" if rise.last.rank is None else f" of rank {rise.last.rank}"
    enough = first is not None and first.requested is not None and first.requested <= rise.nbytes + first.room
    yield Finding(
        cause="growth",
        weight="note" if first is None else "cause" if enough else "contributes",
        happened=f"Every step{who} leaves more behind: {size(rise.first.allocated or 0)} was allocated after iteration "
        f"{rise.first.iteration}, {size(rise.last.allocated or 0)} after iteration {rise.last.iteration}, "
        f"{size(rise.nbytes // steps)} more with each step.",
        evidence=(rise.first.evidence, rise.last.evidence),
        confirm=(
            "Memory snapshots after two steps, compared (labkit diagnose BEFORE AFTER), name the lines that keep it.",
        ),
        remedies=(
            "Look who keeps tensors: losses or outputs kept with their graph (detach or .item() them), lists of "
            "metrics, hooks, caches by shape.",
        ),
    )
