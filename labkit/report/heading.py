"""What stands above a report; written by a notebook's last cell, which is how its runner knows it got there."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import polars as pl

from labkit.files import write_atomically
from labkit.workload.base import Many, Part

RESULT_VARIABLE = "LABKIT_NOTEBOOK_RESULT"
"""Environment variable with the path `finish` writes to; unset where a person runs the notebook."""


class Fact(Part):
    """One thing a reader wants to know before the figures."""

    name: str
    value: str


class Heading(Part):
    """The title of a report with what was run, by what, when."""

    title: str
    description: str = ""
    facts: Many[Fact] = ()
    """What was run, by what, when."""

    @classmethod
    def of_facts(cls, title: str, description: str, facts: Mapping[str, str]) -> Self:
        """The heading of a report of what `facts` names."""
        named = tuple(Fact(name=name, value=value) for name, value in facts.items())
        return cls(title=title, description=" ".join(description.split()), facts=named)

    @classmethod
    def of_study(cls, title: str, description: str, state: str, contract: pl.DataFrame) -> Self:
        """The heading of a study's report.

        Args:
            title: the study's title.
            description: the study's description.
            state: how many of its cells are done, in words.
            contract: the study's `contract` frame.
        """
        facts = [Fact(name="Cells", value=state)]
        for name, source, column in (
            ("Traced with", "traced", "versions"),
            ("Measured with", "measured", "versions"),
            ("Recorded by", "recorded", "origin"),
            ("Published by", "published", "origin"),
        ):
            rows = contract.filter(pl.col("source") == source)
            values = [value for value in rows[column].unique(maintain_order=True).to_list() if value]
            facts += [Fact(name=name, value="; ".join(values))] if values else []
        dates = [value for value in contract.filter(pl.col("source") != "published")["created_at"] if value]
        facts += [Fact(name="Last cell made", value=_date(max(dates)))] if dates else []
        return cls(title=title, description=" ".join(description.split()), facts=tuple(facts))


def finish(heading: Heading) -> None:
    """Say that the notebook ran to its end; its last cell calls this."""
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        write_atomically(Path(path), heading.model_dump_json())


def _date(moment: str) -> str:
    """`2026-08-01 12:30 UTC` of an ISO 8601 moment in UTC."""
    return f"{moment[:16].replace('T', ' ')} UTC"
