"""What `labkit check` says: every rule that a workload breaks, or every cell of a study, errors apart from warnings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from labkit.errors import InputError
from labkit.study.matrix import stated_workloads
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.files import is_study, load_mapping, workload_file
from labkit.workload.finding import Finding

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_NAMED_CELLS = 4


class Found(Part):
    """One broken rule (`error`) or idle choice (`warning`), and in which cells."""

    severity: Literal["error", "warning"]
    field: str
    reason: str
    remedy: str
    authority: str
    """Who refuses it, or reads nothing of it."""
    authority_file: str
    """Where that was read; empty where there is no one file."""
    cells: Many[str] = ()
    """Labels of a study's cells; of a workload none."""

    @classmethod
    def of(cls, finding: Finding, cells: Sequence[str] = ()) -> Self:
        """A finding as plain data."""
        return cls(
            severity=finding.severity,
            field=finding.field,
            reason=finding.reason,
            remedy=finding.remedy,
            authority=str(finding.authority),
            authority_file=finding.authority.file,
            cells=tuple(cells),
        )

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        style = "bold red" if self.severity == "error" else "bold yellow"
        yield Text.assemble((self.severity, style), f"  {self.field}")
        by = f"{self.authority} ({self.authority_file})" if self.authority_file else self.authority
        said = "refused by" if self.severity == "error" else "according to"
        lines = [self.reason, f"remedy: {self.remedy}", f"{said}: {by}"]
        if self.cells:
            shown, more = self.cells[:_NAMED_CELLS], len(self.cells) - _NAMED_CELLS
            lines.append(f"in: {', '.join(shown)}{f' and {more} more' if more > 0 else ''}")
        yield from (Text(f"    {line}") for line in lines)


class Checked(Part):
    """One file."""

    path: str
    kind: Literal["workload", "study", "unreadable"]
    problem: str = ""
    """Why it is neither a workload nor a study."""
    cells: int = 0
    """Workloads in it."""
    findings: Many[Found] = ()
    """Errors first."""

    @property
    def fine(self) -> bool:
        """Whether everything in it can run."""
        return self.kind != "unreadable" and not any(found.severity == "error" for found in self.findings)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        what = self.kind if self.kind == "workload" else f"study of {self.cells} cells"
        yield Text(f"{self.path}: {what}, {_counted(self.findings)}")
        yield from self.findings


class Checks(Part):
    """What was found in each file."""

    schema_name: Literal["labkit.check/1"] = "labkit.check/1"
    files: Many[Checked]

    @property
    def fine(self) -> bool:
        """Whether everything in all files can run."""
        return all(checked.fine for checked in self.files)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from (checked for checked in self.files if checked.kind != "unreadable")


def check(paths: Iterable[Path]) -> Checks:
    """Apply the rules to every file, workload or study."""
    return Checks(files=tuple(map(_checked, paths)))


def _checked(path: Path) -> Checked:
    try:
        path = workload_file(path)
        mapping = load_mapping(path)
        if is_study(mapping):
            cells = list(stated_workloads(mapping, path))
            return Checked(path=str(path), kind="study", cells=len(cells), findings=tuple(_of_cells(cells)))
        workload = Workload.described(mapping, path)
    except InputError as error:
        return Checked(path=str(path), kind="unreadable", problem=str(error))
    findings = tuple(map(Found.of, workload.findings))
    return Checked(path=str(path), kind="workload", cells=1, findings=findings)


def _of_cells(cells: Sequence[tuple[str, Workload]]) -> Iterator[Found]:
    """What several cells have in common, once."""
    where: defaultdict[Finding, list[str]] = defaultdict(list)
    for label, workload in cells:
        for finding in dict.fromkeys(workload.findings):
            where[finding].append(label)
    for finding in sorted(where, key=lambda finding: finding.severity):
        yield Found.of(finding, where[finding])


def _counted(findings: Sequence[Found]) -> str:
    errors = sum(found.severity == "error" for found in findings)
    warnings = len(findings) - errors
    words = [
        f"{number} {name}{'s' if number > 1 else ''}"
        for number, name in ((errors, "error"), (warnings, "warning"))
        if number
    ]
    return " and ".join(words) or "nothing to say against it"
