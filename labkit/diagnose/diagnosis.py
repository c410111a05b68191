"""What `labkit diagnose` says, as data and for people."""

from typing import TYPE_CHECKING, Literal

from pydantic import SerializeAsAny

from labkit.diagnose.facts import Evidence
from labkit.workload.base import Many, Part

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

Cause = Literal[
    "fragmentation",
    "capacity",
    "optimizer capacity",
    "inactive label",
    "fused attention",
    "moved bottleneck",
    "expert imbalance",
    "private pools",
    "growth",
    "outside PyTorch",
    "host memory",
    "not memory",
    "no failure",
]
"""The rows of docs/diagnose.md's table."""


class Finding(Part):
    """One thing that happened."""

    cause: Cause
    weight: Literal["cause", "contributes", "note"]
    """cause: it ended the run. contributes: without it there may have been room. note: worth knowing."""
    happened: str
    """One or two sentences with figures."""
    evidence: Many[Evidence] = ()
    confirm: Many[str] = ()
    """How to make sure, each a sentence."""
    remedies: Many[str] = ()
    """What to try, the cheapest first."""


class FileRead(Part):
    """A file that was read."""

    source: str
    kind: str


class Diagnosis(Part):
    """Why it died, as far as the files say."""

    schema_name: Literal["labkit.diagnosis/1"] = "labkit.diagnosis/1"
    files: Many[FileRead]
    findings: Many[Finding]
    """The cause first."""
    details: Many[SerializeAsAny[Part]] = ()
    """What a reader has to show beyond findings, file by file, and the estimate beside the log."""
    notes: Many[str] = ()
    """How launch arguments were taken, and what of them the estimate leaves out."""

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.padding import Padding
        from rich.text import Text

        yield Text(", ".join(f"{each.source}: {each.kind}" for each in self.files), style="dim")
        shown: set[Evidence] = set()
        for finding in self.findings:
            mark = {"cause": "bold red", "contributes": "bold yellow", "note": "bold"}[finding.weight]
            yield Text.assemble((finding.cause, mark), f"  {finding.happened}")
            for evidence in finding.evidence:
                quoted = evidence.place if evidence in shown else str(evidence)
                yield Padding(Text(quoted, style="dim"), (0, 0, 0, 2), expand=False)
            shown.update(finding.evidence)
            for title, sentences in (("confirm", finding.confirm), ("try", finding.remedies)):
                for sentence in sentences:
                    yield Padding(Text.assemble((f"{title}: ", "bold"), sentence), (0, 0, 0, 2), expand=False)
        yield from (Text(f"note: {note}", style="yellow") for note in self.notes)
        yield from self.details  # type: ignore[misc]  # each has __rich_console__
