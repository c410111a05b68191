"""Every notebook as the report it makes: run headless once, then read in a browser on a phone and on a desk."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from playwright.sync_api import Browser, Locator

from labkit import Workload
from labkit.report.document import write_report
from labkit.report.notebooks import notebook_folder, notebook_source
from labkit.report.theme import PALETTES, Mode
from tests.report.browsing import Opened
from tests.workbench import adapters, experts

pytestmark = pytest.mark.browser

LIMIT_BYTES = 1_000_000
NOTEBOOKS = sorted(path.stem for path in notebook_folder().glob("*.py"))
_STUDY = """
name: tiny
title: Tiny study
base: moonlight-16b
control: {recompute: {recompute_modules: []}}
candidates:
  - recompute: {recompute_modules: [moe_act]}
"""


def _unmade_study(folder: Path) -> dict[str, Any]:
    (folder / "tiny.yaml").write_text(_STUDY, encoding="utf-8")
    return {"study": str(folder / "tiny.yaml"), "run": False}


def _few_experts(folder: Path) -> dict[str, Any]:
    counted = folder / "<img src=x onerror=alert(1)>.csv"
    counted.write_text("\n".join(",".join(map(str, each)) for each in experts.COUNTED), encoding="utf-8")
    return {"workload": _written(experts.small(), folder), "histograms": str(counted)}


def _few_requests(folder: Path) -> dict[str, Any]:
    asked = [{"length": length, "group": "<script>alert(1)</script>"} for length in (300, 40_000)]
    (folder / "requests.json").write_text(json.dumps([*[700] * 20, *asked]), encoding="utf-8")
    workload = _written(adapters.small(), folder)
    return {"workload": workload, "requests": str(folder / "requests.json"), "budget": adapters.BUDGET}


def _written(workload: Workload, folder: Path) -> str:
    """The file of a workload whose model has a hostile name."""
    stated = workload.model_dump(mode="json", exclude_unset=True)
    stated["model"]["name"] = "<script>alert(1)</script>\u202e\"'"
    (folder / "workload.yaml").write_text(json.dumps(stated), encoding="utf-8")
    return str(folder / "workload.yaml")


def _few_layers(folder: Path) -> dict[str, Any]:
    return {"workload": _written(Workload.load("gpt-local"), folder)}


def _short_lengths(folder: Path) -> dict[str, Any]:
    return {**_few_layers(folder), "gpus": ["h100-80gb"], "longest": 65536}


CHEAP: dict[str, Callable[[Path], dict[str, Any]]] = {
    "admission": _few_requests,
    "estimate": _few_layers,
    "expert_routing": _few_experts,
    "recompute_study": _unmade_study,
    "scaling": _short_lengths,
}
"""Parameters with which a notebook is quick, given a folder for files; one that is not named here runs as it stands."""


class Report(NamedTuple):
    notebook: str
    path: Path


@pytest.fixture(scope="module", params=NOTEBOOKS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of each notebook in turn."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name)
    parameters = CHEAP.get(name, lambda _: {})(folder)
    return Report(name, write_report(notebook_source(name), parameters, folder / f"{name}.html"))


@pytest.fixture(scope="module")
def opened(browser: Browser, report: Report) -> Iterator[Opened]:
    """On a phone at first; from `test_every_chart_is_drawn_and_nothing_is_too_wide` on, on a desk."""
    with Opened(browser, report.path, 390, "dark") as opened:
        yield opened


def test_it_is_one_small_file_with_its_facts(report: Report) -> None:
    page = report.path.read_text(encoding="utf-8")
    assert len(page.encode()) < LIMIT_BYTES
    assert page.count("<h1>") == 1
    assert re.search(r"<h1>[^<]+</h1>", page)
    facts = re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", page)
    assert {"Report made"} < {name for name, _ in facts}, "a heading says what was run, by what, when"
    assert page.count('class="lk-figure"') + page.count("<table") > 0


def test_the_answer_is_on_the_first_screen(opened: Opened) -> None:
    assert not opened.page.locator(".lk-about").evaluate("about => about.open")
    ends = opened.page.locator("main .lk-lead p").evaluate_all(
        "said => said.map(each => each.getBoundingClientRect().bottom + scrollY)"
    )
    assert not ends or ends[0] < 844


def test_every_chart_is_drawn_and_nothing_is_too_wide(opened: Opened) -> None:
    _is_drawn(opened, "dark")
    opened.turn("light")
    _is_drawn(opened, "light")
    opened.resize(1440)
    _is_drawn(opened, "dark")
    opened.turn("light")
    _is_drawn(opened, "light")


def _is_drawn(opened: Opened, scheme: Mode) -> None:
    assert opened.overflow() == 0
    for chart in opened.page.locator(".lk-chart").all():
        svg = chart.locator("svg.marks")
        box = svg.bounding_box()
        assert box is not None
        assert 200 < box["width"] <= opened.width
        assert svg.evaluate("svg => getComputedStyle(svg).backgroundColor") == _rgb(PALETTES[scheme].surface)
        assert chart.locator("svg.marks .role-mark :is(path, text, line)").count() > 0, "a chart without a mark"


def test_pointing_at_a_chart_tells_its_figures(opened: Opened) -> None:
    charts = opened.page.locator(".lk-chart svg.marks").all()
    assert not charts or any(_tells(opened, chart) for chart in charts)


def test_legends_single_out_what_is_clicked(opened: Opened) -> None:
    for figure in opened.page.locator(".lk-figure").all():
        if '"bind":"legend"' not in (figure.locator("script").text_content() or ""):
            continue
        svg = figure.locator("svg.marks")
        before = svg.inner_html()
        svg.locator(".role-legend-entry text").first.click()
        opened.page.wait_for_function("([svg, before]) => svg.innerHTML !== before", arg=[svg.element_handle(), before])


def test_the_keyboard_reaches_every_table_and_chart(opened: Opened) -> None:
    reached = opened.page.evaluate(
        """() => [...document.querySelectorAll("main :is(table, .lk-figure)")].map((each) => {
            const box = each.closest("[tabindex='0']") ?? each.querySelector("button");
            box?.focus();
            return Boolean(box) && document.activeElement === box;
        })"""
    )
    assert reached
    assert all(reached)


def _tells(opened: Opened, chart: Locator) -> bool:
    """Whether one of a chart's first marks has a tooltip."""
    chart.scroll_into_view_if_needed()
    for mark in chart.locator(".role-mark :is(path, text)").all()[:12]:
        box = mark.bounding_box()
        if box is None:
            continue
        opened.page.mouse.move(box["x"] + box["width"] / 2 - 1, box["y"] + box["height"] / 2)
        opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        if opened.page.locator("#vg-tooltip-element.visible").count():
            return bool(opened.tooltip().strip())
    return False


def _rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[at : at + 2], 16)) for at in (1, 3, 5))})"
