"""Charts and tables of expert routing, with a histogram whose file has a hostile name."""

import json
from pathlib import Path

import polars as pl
import pytest
import vl_convert
from great_tables import GT

from labkit.report.charts import routing as charts
from labkit.report.data import LONGEST_LABEL
from labkit.report.figure import Figure
from labkit.report.tables import routing as tables
from labkit.workbench.routing import ExpertRouting
from tests.report.test_charts import VERSIONS, rows, svg, words
from tests.workbench.experts import COUNTED, GPUS, small

HOSTILE = "<img src=x onerror=alert(1)>\u202e\"'" + "w" * 150 + ".json"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ExpertRouting:
    path: Path = tmp_path_factory.mktemp("routing") / HOSTILE
    path.write_text(json.dumps({"rows_per_expert": COUNTED}), encoding="utf-8")
    return ExpertRouting(small(), path, 0.5, 1, GPUS)


@pytest.fixture(scope="module")
def drawn(found: ExpertRouting) -> dict[str, Figure]:
    figures = (
        charts.peaks(found.peaks, found.limits),
        charts.loads(found.loads),
        charts.strip(found.strip),
        charts.by_layer(found.by_layer),
        charts.options(found.options),
    )
    return {figure.name: figure for figure in figures}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_chart_draws(drawn: dict[str, Figure], version: str) -> None:
    for name, figure in drawn.items():
        picture = svg(figure, version)
        assert "NaN" not in picture, name
        assert "undefined" not in picture, name
        assert "<img" not in picture, name
        assert "GiB" in figure.caption or "MiB" in figure.caption or "even share" in figure.caption


def test_a_file_s_name_is_text_and_short(drawn: dict[str, Figure]) -> None:
    for name, figure in drawn.items():
        column = "plan" if "plan" in rows(figure)[0] else "histogram"
        named = {row[column] for row in rows(figure)}
        assert any(each.startswith("measured: <img") for each in named), name
        assert all(len(each) <= LONGEST_LABEL for each in named), name


def test_peaks_stand_beside_what_gpus_have(found: ExpertRouting, drawn: dict[str, Figure]) -> None:
    said = words(svg(drawn["routing-peaks"]))
    assert "NVIDIA H200" in said
    worst = found.peaks.filter((found.peaks["ep"] == 4) & (found.peaks["plan"] == "worst"))["peak_bytes"][0]
    assert f"{worst / 2**30:.2f}" in said


def test_a_size_that_cannot_run_is_shown(found: ExpertRouting) -> None:
    priced = found.peaks.filter(pl.col("ep") != 2)
    nothing = dict.fromkeys(priced.columns) | {"ep": 2, "refused": "it breaks a rule"}
    peaks = pl.concat([priced, pl.DataFrame([nothing], schema=priced.schema)])
    assert "cannot run" in words(svg(charts.peaks(peaks, found.limits)))
    assert "it breaks a rule" in tables.fit(peaks).as_raw_html()


def test_tables_hold_bare_numbers_and_escaped_names(found: ExpertRouting) -> None:
    made: dict[str, GT] = {
        "shares": tables.shares(found.shares),
        "rows": tables.rows(found.rows),
        "fit": tables.fit(found.peaks),
        "ranks": tables.ranks(found.ranks),
        "options": tables.options(found.options),
    }
    for name, each in made.items():
        page = each.as_raw_html()
        assert "<img" not in page, name
        assert "&lt;img" in page, name
    assert ">1.600<" in made["shares"].as_raw_html()
    assert "holds most" in made["ranks"].as_raw_html()


def test_the_spec_is_plain_json(drawn: dict[str, Figure]) -> None:
    for figure in drawn.values():
        json.dumps(figure.spec, allow_nan=False)
        vl_convert.vegalite_to_vega(figure.spec, vl_version="5.20")
