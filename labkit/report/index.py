"""A page over the reports of a folder: what each is and says of itself, the newest first."""

import os
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from pydantic import ValidationError

from labkit.errors import InputError, WorkError
from labkit.files import write_atomically
from labkit.report.heading import Heading
from labkit.report.html import ABOUT
from labkit.report.page import page, visible

INDEX: Final = "index.html"
_GENERATOR: Final = "labkit index"
_HEAD_BYTES: Final = 2**19
"""A report says what it is in its first lines; more of a file is not read."""
_LONGEST_VALUE: Final = 240
_NEVER: Final = datetime.min.replace(tzinfo=UTC)
_KEY_FACTS: Final = 8
"""What was run comes first in a heading; the report has the rest."""


def write_index(folder: Path) -> Path:
    """Write `index.html` over the reports that lie in a folder; files that are no reports are left out.

    Raises:
        InputError: there is no such folder, or its `index.html` is not one that this has written.
        WorkError: the index cannot be written.
    """
    output = folder / INDEX
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder")
    if output.exists() and _Head.of(output).names.get("generator") != _GENERATOR:
        raise InputError(f"{output}: was not written by labkit index, and stays as it is")
    found = [(path, _heading(path)) for path in sorted(folder.glob("*.html")) if path.name != INDEX]
    reports = [(path, heading) for path, heading in found if heading is not None]
    reports.sort(key=lambda report: _instant(report[1].made_at), reverse=True)
    count = f"{len(reports)} report{'' if len(reports) == 1 else 's'}, the newest first."
    try:
        write_atomically(
            output,
            page(
                "index.html.j2",
                generator=_GENERATOR,
                title="Reports",
                description=count,
                entries=[_entry(path, heading) for path, heading in reports],
            ),
        )
    except OSError as error:
        raise WorkError(f"{output}: the index cannot be written ({error.strerror or error})") from None
    return output


def _heading(path: Path) -> Heading | None:
    """What a report says of itself; None of a file that is none, or half of one."""
    try:
        return Heading.model_validate_json(_Head.of(path).names.get(ABOUT, ""))
    except ValidationError:
        return None


def _entry(path: Path, heading: Heading) -> dict[str, Any]:
    return {
        "link": "./" + quote(os.fsencode(path.name), safe=""),
        "file": visible(_short(path.name)),
        "title": visible(_short(heading.title) or path.name),
        "description": visible(_short(heading.description)),
        "kind": visible(_short(heading.kind)),
        "made": _moment(heading.made_at),
        "facts": [
            {"name": visible(_short(fact.name)), "value": visible(_short(fact.value))}
            for fact in heading.facts[:_KEY_FACTS]
            if fact.name != "Report made"
        ],
    }


def _short(text: str) -> str:
    line = re.sub(r"\s+", " ", text).strip()
    return line if len(line) <= _LONGEST_VALUE else line[: _LONGEST_VALUE - 1] + "…"


def _instant(made_at: str) -> datetime:
    """When that was, in UTC; where no zone is stated it is that. Of a text that is no time, before all others."""
    try:
        moment = datetime.fromisoformat(made_at)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):  # the latter beyond the calendar's ends
        return _NEVER


def _moment(made_at: str) -> str:
    moment = _instant(made_at)
    return "" if moment == _NEVER else f"{moment:%Y-%m-%d %H:%M} UTC"


class _Head(HTMLParser):
    """The `meta` elements of a page's first bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, str] = {}

    @classmethod
    def of(cls, path: Path) -> "_Head":
        """Of a file; of one that cannot be read, those before that place."""
        head = cls()
        try:
            if path.is_file():  # no pipe is waited for
                with path.open("rb") as file:
                    head.feed(file.read(_HEAD_BYTES).decode("utf-8", errors="replace"))
        except (OSError, AssertionError):  # html.parser asserts that marked sections are of a kind it knows
            pass
        return head

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep a named one's content, the first of a name."""
        found = dict(attrs)
        if tag == "meta" and found.get("name"):
            self.names.setdefault(str(found["name"]), found.get("content") or "")
