"""Sentences that labkit writes from a study's frames, shown alike in JupyterLab and in a report."""

from dataclasses import dataclass
from html import escape

import polars as pl

from labkit.report.data import display_labels, relabelled

_LONGEST_FAILURE = 600


@dataclass(frozen=True)
class Prose:
    """Plain sentences; as HTML every character of them is text.

    Attributes:
        sentences: one paragraph or item each.
        kind: `lead` (paragraphs, the first stands out) or `list`.
    """

    sentences: tuple[str, ...]
    kind: str

    def _repr_html_(self) -> str:
        if self.kind == "list":
            items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
            return f'<ul class="lk-list">{items}</ul>'
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f'<div class="lk-lead">{paragraphs}</div>'

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def conclusion(sentences: tuple[str, ...]) -> Prose:
    """What to try first and why, as `labkit.study` words it."""
    return Prose(tuple(sentences), "lead")


def caveats(cells: pl.DataFrame) -> Prose:
    """What a reader must know before comparing: failures, missing results, idle labels, candidates not matched.

    Args:
        cells: a study's `cells` frame: candidate, source, outcome, failure, warnings, differs_in.
    """
    said: list[str] = []
    words = {"oom": "ran out of memory", "failed": "failed", "missing": "has no result yet"}
    for row in relabelled(cells, display_labels(cells["candidate"])).iter_rows(named=True):
        name, source = row["candidate"], row["source"]
        if row["outcome"] != "ok":
            reason = f": {_shortened(row['failure'])}" if row["failure"] else ""
            said.append(f"{name} ({source}) {words[row['outcome']]}{reason}.")
        if source == "estimated" and row["warnings"]:
            said.append(f"{name}: {row['warnings']}.")
        if source == "estimated" and row["differs_in"]:
            said.append(f"{name} is not matched: it also differs from the control in {row['differs_in']}.")
    return Prose(
        tuple(said) or ("Every candidate was traced to its end, and each of its labels does something.",), "list"
    )


def _shortened(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST_FAILURE else line[: _LONGEST_FAILURE - 1] + "…"
