"""Charts and tables of a calibration, with cells whose names are hostile."""

from typing import Any

import polars as pl
import pytest

from labkit.report.charts import calibration as charts
from labkit.report.data import LONGEST_LABEL
from labkit.report.figure import Figure
from labkit.report.tables import calibration as tables
from labkit.report.theme import SOURCES
from labkit.workbench.calibration import FACETS, FIGURES, H200, Calibration, with_errors
from tests.report.test_charts import VERSIONS, rows, svg, words

GIB = 2**30
HOSTILE = "<img src=x onerror=alert(1)>\u202e\"'" + "w" * 10_000


def figure(case: str, *, estimated: float | None, traced: float | None, **columns: Any) -> dict[str, Any]:
    row = dict.fromkeys(FIGURES) | {"collection": H200, "case": case, "basis": "held out", "models": "dense"}
    row |= {"phase": "forward", "layout": "tensor parallel", "split": "TP 2", "size": "1000 rows and more"}
    row |= {"counted": True, "rows": 2048, "measured_bytes": 10 * GIB, "trace": "ok"}
    for name, error in (("estimated", estimated), ("traced", traced)):
        row[f"{name}_bytes"] = None if error is None else round(10 * GIB * (1 + error))
    row["covering_bytes"] = None if estimated is None else round(10 * GIB * (1.02 + estimated))
    return row | columns


FRAME = with_errors(
    pl.DataFrame(
        [
            figure(HOSTILE, estimated=0.001, traced=-0.002),
            figure("near", estimated=0.0, traced=0.0, models="hybrid", basis="calibrated"),
            figure("far", estimated=-0.35, traced=None, models="hybrid", trace="stale", why="made of other work"),
        ],
        schema=FIGURES,
    )
)
FOUND = Calibration(FRAME, pl.DataFrame())
NOTHING = FRAME.clear()


def drawn(frame: pl.DataFrame) -> list[Figure]:
    named = frame.with_columns(group="models")
    return [
        charts.errors(frame, "cell_errors", "Errors", FACETS[H200]),
        charts.distribution(frame, "cell_distribution", "How near"),
        charts.coverage(named, "coverage", "Covered"),
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_chart_draws_and_names_are_short_text(version: str) -> None:
    for each in drawn(FRAME):
        picture = svg(each, version)
        assert "NaN" not in picture
        assert "undefined" not in picture
        assert "<img" not in picture
        assert "%" in each.caption
        assert max(len(row["candidate"]) for row in rows(each)) == LONGEST_LABEL


def test_a_chart_of_nothing_draws() -> None:
    for each in drawn(NOTHING):
        assert "NaN" not in svg(each)


def test_errors_are_signed_percent_of_the_measured() -> None:
    hostile, near, far = rows(drawn(FRAME)[0])
    assert (hostile["estimated"], hostile["traced"]) == (0.1, -0.2)
    assert (near["estimated"], far["estimated"], far["traced"]) == (0, -35, None)
    assert near["measured_gib"] == 10
    picture = svg(drawn(FRAME)[0])
    assert all(SOURCES[source].colour in picture for source in ("estimated", "traced"))
    assert {"dense", "hybrid", "0", "+0.1"} <= set(words(picture))


def test_coverage_counts_what_the_margin_covers() -> None:
    said = words(svg(drawn(FRAME)[2]))
    assert {"1 of 1", "1 of 2", "covered", "not covered"} <= set(said)


def test_tables_say_the_same_and_escape_names() -> None:
    html = tables.figures(FRAME, "cells").as_raw_html() + tables.worst(FOUND.worst(H200), "worst").as_raw_html()
    assert "<img" not in html
    assert "&lt;img" in html
    assert "-35.00" in html
    assert "stale" in html
    assert "not known" in html
    spread = tables.answers(FOUND.answers).as_raw_html()
    assert "held out" in spread
    assert "1 of 2" in spread
    assert "17.55" in spread  # (0.1 + 35) / 2 %
    assert tables.groups(FOUND.groups, "groups").as_raw_html().count("<tr") > 4
