"""Charts and tables of admission, from invented frames."""

import json

import polars as pl
import pytest

from labkit.report.charts import admission as charts
from labkit.report.figure import Figure
from labkit.report.tables import admission as tables
from labkit.report.theme import FITTING
from labkit.workbench.admission import BOUNDARY, LENGTHS, MICRO_BATCHES, POLICIES, RULE, VERDICTS
from labkit.workload.gpu import GIB
from tests.report.test_charts import VERSIONS, svg, words

MADE = pl.DataFrame(
    [
        (RULE, 0, 4, 29332, 29330, 13151, 160 * GIB, 164 * GIB, 170 * GIB, "backward", "estimate", "peak does not fit"),
        (RULE, 1, 9, 14616, 14615, 1714, 88 * GIB, 90 * GIB, 95 * GIB, "backward", "bound", "fits"),
        ("floor", 0, 7, 20520, 20520, 2880, 118 * GIB, 120 * GIB, 125 * GIB, "backward", "bound", "fits"),
    ],
    schema=MICRO_BATCHES,
    orient="row",
)
EDGE = pl.DataFrame(
    [
        ("nothing shared", RULE, 64, 458, 29312, 29312, 184 * GIB, False),
        ("nothing shared", RULE, 128, 100, 12800, 12800, 100 * GIB, True),
        ("nothing shared", "floor", 64, 324, 20736, 20736, 139 * GIB, True),
        ("three quarters shared", "floor", 64, 700, 44800, 11248, 139 * GIB, True),
    ],
    schema=BOUNDARY,
    orient="row",
)


@pytest.fixture(scope="module")
def drawn() -> list[Figure]:
    return [charts.micro_batches(MADE, 140 * GIB), charts.boundary(EDGE)]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_chart_draws(drawn: list[Figure], version: str) -> None:
    for figure in drawn:
        picture = svg(figure, version)
        assert "NaN" not in picture
        assert "undefined" not in picture
        json.dumps(figure.spec, allow_nan=False)


def test_what_does_not_fit_is_told_by_shape_and_word(drawn: list[Figure]) -> None:
    said = words(svg(drawn[0]))
    assert {"fits", "peak does not fit", "the budget", RULE, "floor"} <= set(said)
    assert "ringed would not fit" in drawn[1].caption


def test_tables_hold_bare_numbers() -> None:
    page = tables.micro_batches(MADE).as_raw_html()
    assert ">170.00<" in page
    assert "peak does not fit" in page
    many = pl.concat([MADE[1:2].with_columns(number=pl.lit(at, pl.Int64)) for at in range(30)])
    assert "and 6 more" in tables.micro_batches(many).as_raw_html()
    assert "does not fit" in tables.boundary(EDGE).as_raw_html()
    summed = pl.DataFrame(
        [(RULE, "[core_attn]", "refuse", 4, None, 42, 1, 3, 3, 1.1003, 0.68, 1.24, 4.25, 0.139)],
        schema=POLICIES,
        orient="row",
    )
    page = tables.policies(summed).as_raw_html()
    assert ">110.0<" in page
    assert ">0.14<" in page
    rows = [("up to 256", 3, RULE, name, count) for name, count in (("admitted", 2), ("refused", 1))]
    lengths = pl.DataFrame([*rows, ("up to 256", 3, RULE, "admitted over the budget", 0)], schema=LENGTHS, orient="row")
    assert "over the budget" not in tables.lengths(lengths).as_raw_html()  # nobody was


def test_where_all_is_refused_the_chart_still_draws() -> None:
    assert "NaN" not in svg(charts.micro_batches(MADE.clear(), 140 * GIB))


def test_every_verdict_has_a_look() -> None:
    assert tuple(FITTING) == VERDICTS
