"""The charts' specifications: what Vega-Lite makes of them, in the version JupyterLab has and in the report's."""

import json
import re
from typing import Any

import polars as pl
import pytest
import vl_convert

from labkit.report.charts import study as charts
from labkit.report.figure import VEGALITE, Figure
from labkit.report.prose import Prose
from labkit.report.theme import SOURCES, STACK, category_colour, category_number, text_on, vega_config
from labkit.study import frames as study_frames
from labkit.summary import CATEGORIES
from tests.report import frames

FAILURES = {"[moe]": ("failed", "backward: RuntimeError: no"), "[core_attn]": ("missing", None)}
# JupyterLab 4.6 bundles Vega-Lite 5; a report bundles 6.4.
VERSIONS = ["5.20", "6.4"]


def bought(frame: pl.DataFrame) -> Figure:
    figure = charts.tradeoff(frame)
    assert isinstance(figure, Figure)
    return figure


def figures(cells: pl.DataFrame) -> list[Figure]:
    return [
        charts.peaks(cells),
        charts.differences(cells),
        charts.holdings(frames.breakdown(cells), cells),
        charts.timeline(*frames.timeline(cells)),
    ]


ALL = [*figures(frames.cells(FAILURES)), bought(frames.tradeoff(frames.cells(FAILURES)))]


def by_name(name: str) -> Figure:
    return next(figure for figure in ALL if figure.name == name)


def svg(figure: Figure, version: str = "6.4") -> str:
    drawn: str = vl_convert.vegalite_to_svg(figure.spec, vl_version=version)
    return drawn


def words(drawn: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawn)


def rows(figure: Figure) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = figure.spec["datasets"][figure.spec["data"]["name"]]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
def test_every_chart_draws(figure: Figure, version: str) -> None:
    drawn = svg(figure, version)
    assert "[moe_act]" in drawn or figure.name == "timeline"
    assert "NaN" not in drawn
    assert "undefined" not in drawn
    assert float(re.search(r'width="([\d.]+)"', drawn)[1]) < 900  # type: ignore[index]


@pytest.mark.parametrize("figure", ALL, ids=lambda figure: figure.name)
def test_a_chart_is_strict_json_with_words_for_who_cannot_see_it(figure: Figure) -> None:
    bundle, _ = figure._repr_mimebundle_()
    spec = json.loads(json.dumps(bundle[VEGALITE], allow_nan=False))
    assert "GiB" in spec["description"]
    assert "estimated" in spec["description"]
    assert "traced" in spec["description"]
    assert spec["usermeta"]["labkit"]["name"] == figure.name
    assert bundle["text/plain"].startswith(spec["description"])


def test_peaks_say_exact_values_and_what_has_none() -> None:
    drawn = words(svg(by_name("peaks")))
    assert "34.103" in drawn  # published control: 36.618e9 bytes
    assert "33.473" in drawn  # published [moe_act]: 35.941e9 bytes
    assert "traced: failed" in drawn
    assert "traced: not run yet" in drawn
    failed = next(row for row in rows(by_name("peaks")) if row["problem"] == "failed")
    assert failed["failure"] == "backward: RuntimeError: no"
    assert failed["peak_gib"] is None


def test_differences_leave_out_the_control_and_say_what_has_no_peak() -> None:
    shown = {(row["candidate"], row["source"]): row["problem"] for row in rows(by_name("differences"))}
    assert ("[]", "traced") not in shown
    assert shown["[core_attn]", "traced"] == "not run yet"
    assert shown["[moe]", "traced"] == "failed"
    assert shown["[moe_act]", "published"] is None
    assert {"traced: failed", "traced: not run yet"} <= set(words(svg(by_name("differences"))))


def test_holdings_say_what_has_no_peak() -> None:
    assert {"traced: failed", "traced: not run yet"} <= set(words(svg(by_name("holdings"))))


def test_published_bytes_are_not_rounded_away() -> None:
    published = next(
        r for r in rows(by_name("differences")) if (r["candidate"], r["source"]) == ("[moe_act]", "published")
    )
    assert published["saved_bytes"] == 677_000_000


def test_a_candidate_that_holds_more_than_the_control_points_the_other_way() -> None:
    cells = frames.cells().with_columns(pl.col("saved_bytes") * -1)
    assert any(word.startswith("−0.6") for word in words(svg(charts.differences(cells))))


def test_holdings_stack_to_the_peak() -> None:
    cells = frames.cells(FAILURES)
    peak = cells.filter(pl.col("candidate") == "[moe_act]", pl.col("source") == "traced")["peak_allocated_bytes"].item()
    parts = [row for row in rows(by_name("holdings")) if (row["candidate"], row["source"]) == ("[moe_act]", "traced")]
    assert sum(part["bytes"] for part in parts) == peak
    assert [part["place"] for part in parts] == sorted(part["place"] for part in parts)
    assert parts[-1]["middle"] == pytest.approx(peak / 2**30 - parts[-1]["gib"] / 2)


def test_timeline_keeps_peak_and_phases() -> None:
    figure = by_name("timeline")
    packed = {row["candidate"]: row["moments"] for row in rows(figure) if row["moments"]}
    assert set(packed) == {"[]", "[mla_up_proj]", "[mla_up_proj, mlp]", "[moe_act]", "[layernorm, moe_act]"}
    moments = packed["[moe_act]"]
    assert {moment[1] for moment in moments} == {"forward", "backward", "grad_sync", "optimizer"}
    assert all(len(moment) == len(figure.lists["moments"]) for moment in moments)
    peak = frames.PUBLISHED["[moe_act]"][0] * 1.0021 / 2**20
    assert max(sum(moment[2:]) for moment in moments) == pytest.approx(peak, abs=1)
    assert "traced peak of the steady step 34.175 GiB in optimizer" in words(svg(figure))
    assert {"forward", "backward", "optimizer"} <= set(words(svg(figure)))


def test_timeline_shows_the_estimate_of_a_candidate_without_a_trace() -> None:
    moments, peaks = frames.timeline(frames.cells())
    untraced = charts.timeline(
        moments.filter(pl.col("source") == "estimated"), peaks.filter(pl.col("source") == "estimated")
    )
    drawn = words(svg(untraced))
    assert {"forward", "backward", "optimizer"} <= set(drawn)
    assert [word for word in drawn if word.startswith("estimated peak of the steady step 34.")]
    assert {"3  optimizer state", "6  retained: moe"} <= set(drawn)


def test_timeline_stretches_the_estimate_onto_the_phases_of_the_trace() -> None:
    moments, peaks = frames.timeline(frames.cells())
    shifted = moments.with_columns(
        pl.when(pl.col("source") == "estimated")
        .then(pl.col("position") ** 2)
        .otherwise(pl.col("position"))
        .alias("position")
    )
    spec = charts.timeline(shifted, peaks).spec
    starts = {
        (row["candidate"], row["phase"]): row["start"]
        for data in spec["datasets"].values()
        for row in data
        if "start" in row
    }
    assert starts["[moe_act]", "backward"] == pytest.approx(120 / 362)
    lines = {row["candidate"]: row["estimate"] for row in spec["datasets"][spec["data"]["name"]]}
    positions = [position for position, _ in lines["[moe_act]"]]
    assert any(position == pytest.approx(120 / 362, abs=1e-4) for position in positions)
    assert positions == sorted(positions)


def test_a_study_that_has_not_run_still_shows_its_estimates() -> None:
    cells = frames.cells(dict.fromkeys(frames.PUBLISHED, ("missing", None))).filter(pl.col("source") != "published")
    peaks, differences, holdings, timeline = (words(svg(figure)) for figure in figures(cells))
    assert "34.049" in peaks
    assert "traced: not run yet" in peaks
    assert "0.666" in differences
    assert "34.05" in holdings
    assert "forward" in timeline
    assert "traced: not run yet" in differences
    assert "traced: not run yet" in holdings
    nothing = charts.tradeoff(frames.tradeoff(cells))
    assert isinstance(nothing, Prose)
    assert nothing.sentences[0].startswith("No choice has both figures yet. Without a place: [] (not run yet)")
    for figure in figures(cells):
        assert "NaN" not in svg(figure), figure.name


def test_hostile_labels_are_text() -> None:
    labels = ("<script>alert(1)</script>", "a\"b'c", "\u202egnp.exe", "datum.x || 1", "x" * 10_000)
    for figure in figures(frames.cells(dict.fromkeys(labels, ("failed", "<img src=x onerror=alert(1)>")))):
        drawn = svg(figure)
        assert "<script" not in drawn
        assert "<img" not in drawn


def test_categories_keep_number_and_colour_in_every_chart() -> None:
    assert set(CATEGORIES) < set(STACK)
    assert len({category_colour(name) for name in STACK}) == len(STACK)
    legends = [{word for word in words(svg(by_name(name))) if "  " in word} for name in ("holdings", "timeline")]
    assert {f"{category_number('parameters')}  parameters", f"{category_number('retained: moe')}  retained: moe"} <= (
        legends[0] & legends[1]
    )


def test_sources_differ_in_shape_as_well_as_colour() -> None:
    assert len({look.shape for look in SOURCES.values()}) == len({look.colour for look in SOURCES.values()}) == 5


def test_text_on_a_colour_is_readable() -> None:
    assert text_on("#ffffff") == "#000000"
    assert text_on("#0072b2") == "#ffffff"
    assert text_on("#f0e442") == "#000000"


def test_light_and_dark_differ_in_colour_only() -> None:
    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        return "colour" if isinstance(value, str) and value.startswith("#") else value

    assert shape(vega_config("light")) == shape(vega_config("dark"))
    assert vega_config("light") != vega_config("dark")


def test_what_nothing_beats_stands_out_and_what_failed_is_named() -> None:
    decided = frames.decision(frames.cells(FAILURES)).with_columns(
        replay_seconds=pl.col("candidate").replace_strict(
            {"[]": 0.0, "[moe_act]": 0.001, "[mla_up_proj]": 0.003, "[mla_up_proj, mlp]": 0.004}, default=0.005
        )
    )
    figure = bought(study_frames.tradeoff(decided))
    standing = {row["candidate"]: (row["role"], row["unbeaten"]) for row in rows(figure)}
    assert standing["[]"] == ("control", True)
    assert standing["[moe_act]"] == ("try first", True)
    assert standing["[layernorm, moe_act]"] == (None, False)
    assert "Without a place: [core_attn] (not run yet), [moe] (failed)." in figure.caption
    drawn = words(svg(figure))
    assert "[moe_act] (try first)" in drawn
    assert "[layernorm, moe_act]" not in drawn, "named when pointed at"


def test_a_sweeps_choices_are_shown_a_setting_at_a_time_and_compete_in_it_alone() -> None:
    one = frames.decision(frames.cells(FAILURES)).with_columns(replay_seconds=pl.lit(0.001))
    both = pl.concat(
        one.with_columns(pl.format("{} at {}", "candidate", pl.lit(name)).alias("candidate"), setting=pl.lit(name))
        for name in ("seq_length 4096", "seq_length 8192")
    )
    figure = bought(study_frames.tradeoff(both))
    (chosen,) = [param for param in figure.spec["params"] if param["name"] == "tradeoff_setting"]
    assert chosen["bind"]["options"] == ["seq_length 4096", "seq_length 8192"]
    best = [row["candidate"] for row in rows(figure) if row["unbeaten"]]
    assert best == ["[mla_up_proj]", "[mla_up_proj]"], "one of each setting, named without it"
    assert "[moe] at seq_length 4096 (failed)" in figure.caption


def test_captions_name_the_sources_that_are_there() -> None:
    estimated = frames.cells().filter(pl.col("source") == "estimated")
    assert "in GiB: estimated. The scale" in charts.peaks(estimated).caption
    assert "in GiB: estimated, traced and published. The scale" in charts.peaks(frames.cells()).caption
