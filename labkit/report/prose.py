"""Sentences, shown alike in JupyterLab and in a report; those of a study are written here from its frames."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Literal

import polars as pl

from labkit.report.data import display_labels, relabelled

_LONGEST_FAILURE = 600
ENDS = {
    "ok": "would not fit",
    "oom": "ran out of memory",
    "cuda_error": "ended in a CUDA error",
    "collective_timeout": "had ranks that waited too long for each other",
    "rank_died": "lost a rank",
    "non_finite": "came to a loss or gradients that are not finite",
    "wrong_world_size": "had the wrong number of ranks",
    "failed": "failed",
    "killed": "was killed",
    "timed_out": "took too long",
    "out_of_host_memory": "needed too much host memory",
    "unsupported": "is not supported",
    "refused": "is refused by a rule",
    "missing": "has no result",
}
"""What came of a cell (`labkit.drivers.contract.Outcome`), as a sentence goes on."""


@dataclass(frozen=True)
class Prose:
    """Plain sentences; as HTML every character of them is text.

    Attributes:
        sentences: one paragraph or item each.
        kind: `lead` and `note` are paragraphs (a lead's first one stands out), `list` is one of items.
    """

    sentences: tuple[str, ...]
    kind: Literal["lead", "note", "list"]

    def _repr_html_(self) -> str:
        if self.kind == "list":
            items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
            return f'<ul class="lk-list">{items}</ul>'
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f'<div class="lk-{self.kind}">{paragraphs}</div>'

    def __repr__(self) -> str:
        return "\n".join(self.sentences)


def lead(sentences: Iterable[str]) -> Prose:
    """What a reader should take away, the first sentence standing out."""
    return Prose(tuple(sentences), "lead")


def note(sentences: Iterable[str]) -> Prose:
    """Paragraphs beside the figures."""
    return Prose(tuple(sentences), "note")


def listed(sentences: Iterable[str], otherwise: str) -> Prose:
    """Items; `otherwise` where there are none."""
    found = tuple(sentences)
    return Prose(found, "list") if found else note((otherwise,))


def left_open(sentences: tuple[str, ...]) -> Prose:
    """What the control does not state, and where that leaves its estimated peak."""
    return listed(sentences, "The control states every field that decides its peak.")


def failures(cells: pl.DataFrame) -> Prose:
    """Which cells have no result for a reason, or one that no GPU of the study would give, and the reason.

    Args:
        cells: a study's `cells` frame: candidate, source, outcome, failure.
    """
    named = relabelled(cells, display_labels(cells["candidate"])).filter(pl.col("failure").is_not_null())
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in named.iter_rows(named=True):
        alike.setdefault((row["source"], row["outcome"], _shortened(row["failure"])), []).append(row["candidate"])
    said = [f"{'; '.join(who)} ({source}) {ENDS[how]}: {why}." for (source, how, why), who in alike.items()]
    return listed(said, "No cell failed.")


def _shortened(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= _LONGEST_FAILURE else line[: _LONGEST_FAILURE - 1] + "…"
