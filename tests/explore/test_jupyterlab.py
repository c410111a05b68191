"""JupyterLab, driven as a user drives it: notebooks opened and run, the explorer's controls changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import labkit
from labkit import Workload
from labkit.explore.texts import as_yaml
from labkit.files import shipped_directory
from labkit.report.theme import PALETTES
from tests.explore.lab import Lab, Server, server
from tests.small import selective, small

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "<script>document.title='owned'</script>\u202e\"'><img src=x onerror=document.title='owned'>"


STUDY = """
name: small
title: A small study
base: small.yaml
control: {recompute: {recompute_modules: []}}
candidates:
  - recompute: {recompute_modules: [moe_act]}
"""


def peak(workload: Workload) -> int:
    """What the estimate gives."""
    return labkit.estimate(workload).summary.peak_allocated_bytes


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab on notebooks whose parameters make them quick."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "notebooks").mkdir()
    notebooks = shipped_directory("notebooks")
    for name, workload in (("small", small()), ("hostile", small(model__name=HOSTILE))):
        (folder / f"{name}.yaml").write_text(as_yaml(workload), encoding="utf-8")
        source = (notebooks / "explore.py").read_text(encoding="utf-8")
        told = source.replace('workload = "moonlight-16b"', f"workload = {str(folder / f'{name}.yaml')!r}")
        (folder / "notebooks" / f"{name}.py").write_text(told, encoding="utf-8")
    source = (notebooks / "recompute_study.py").read_text(encoding="utf-8")
    (folder / "study.yaml").write_text(STUDY, encoding="utf-8")
    told = source.replace("run = True", "run = False")
    told = told.replace('"data/studies/moonlight-16b.yaml"', repr(str(folder / "study.yaml")))
    (folder / "notebooks" / "study.py").write_text(told, encoding="utf-8")
    with server(folder) as found:
        yield found


@pytest.fixture(scope="module")
def lab(browser: Browser, running: Server) -> Iterator[Lab]:
    """The explorer of the small workload."""
    with Lab(browser, running, "small.py") as opened:
        opened.run_all()
        opened.peak(peak(small()))
        yield opened
        assert opened.errors == []
        assert opened.elsewhere == []


def test_a_changed_control_changes_the_peak_to_the_estimate(lab: Lab) -> None:
    lab.page.get_by_label("sequence length (batch.seq_length)").fill("1024")
    lab.peak(peak(small(batch__seq_length=1024)))
    lab.page.get_by_label("recompute", exact=True).select_option("full uniform")
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    lab.peak(peak(small(batch__seq_length=1024, recompute=full)))
    assert "Recompute: full uniform 1." in lab.explorer.locator(".lk-title").inner_text()
    # The keyboard doubles and halves.
    lab.page.get_by_label("sequence length (batch.seq_length)").press("ArrowDown")
    lab.peak(peak(small(batch__seq_length=512, recompute=full)))
    lab.page.get_by_role("button", name="Back to the start").click()
    lab.peak(peak(small()))
    assert lab.page.get_by_label("sequence length (batch.seq_length)").input_value() == "256"


def test_an_idle_label_is_warned_of_and_the_ledger_says_what_it_costs(lab: Lab) -> None:
    lab.page.get_by_role("checkbox", name="core_attn").check()
    lab.peak(peak(small(recompute=selective("core_attn"))))
    warnings = lab.explorer.locator(".lk-finding[data-severity=warning]")
    lab.page.wait_for_function("document.querySelectorAll('.lk-finding[data-late]').length === 1")
    assert "Remedy: remove core_attn" in warnings.first.inner_text()
    assert "of attention again each step" in warnings.last.inner_text()
    lab.page.get_by_role("checkbox", name="core_attn").uncheck()
    lab.peak(peak(small()))
    assert warnings.count() == 0


def test_what_cannot_run_says_why_and_the_last_picture_is_greyed(lab: Lab) -> None:
    tensor = lab.page.get_by_label("TP (parallelism.tensor_model_parallel_size)")
    tensor.fill("3")
    lab.page.locator(".lk-explorer[data-refused]").wait_for()
    said = lab.explorer.locator(".lk-findings").inner_text()
    assert "3 does not divide num_attention_heads (4)" in said
    assert "Remedy: use one of 1, 2, 4" in said
    assert tensor.get_attribute("aria-invalid") == "true"
    assert lab.explorer.locator(".lk-peak").get_attribute("data-bytes") == str(peak(small()))
    assert lab.explorer.get_by_role("button", name="Copy as YAML").is_disabled()
    tensor.fill("2")
    lab.page.locator(".lk-explorer:not([data-refused])").wait_for()
    assert tensor.get_attribute("aria-invalid") is None


def test_the_timeline_tells_each_moment(lab: Lab) -> None:
    chart = lab.explorer.get_by_role("group", name="Memory through the step")
    chart.focus()
    chart.press("ArrowRight")
    assert "forward, total" in lab.explorer.locator(".lk-tip").inner_text()
    chart.press("ArrowRight")
    chart.blur()
    assert lab.explorer.locator(".lk-tip").is_hidden()
    assert chart.locator("svg path").count() >= 5


def test_it_follows_jupyterlab_into_the_dark(lab: Lab) -> None:
    def background() -> str:
        found: str = lab.explorer.evaluate("element => getComputedStyle(element).backgroundColor")
        return found

    assert background() == "rgb(255, 255, 255)"
    for theme, mode in (("JupyterLab Dark", "dark"), ("JupyterLab Light", "light")):
        lab.page.get_by_role("menuitem", name="Settings", exact=True).click()
        lab.page.locator(".lm-Menu-itemLabel").get_by_text("Theme", exact=True).click()
        lab.page.locator(".lm-Menu-itemLabel").get_by_text(theme, exact=True).click()
        lab.page.locator(f".lk-explorer[data-mode={mode}]").wait_for()
    assert lab.explorer.evaluate("element => element.style.getPropertyValue('--lk-ink')") == PALETTES["light"].ink


def test_the_choice_is_copied(lab: Lab, tmp_path: Path) -> None:
    lab.explorer.get_by_role("button", name="Copy as YAML").click()
    lab.explorer.get_by_text("Copied.").wait_for()
    file = tmp_path / "copied.yaml"
    file.write_text(lab.page.evaluate("navigator.clipboard.readText()"), encoding="utf-8")
    assert Workload.load(file) == small()


def test_a_trace_runs_to_its_end_while_the_kernel_answers(lab: Lab) -> None:
    lab.explorer.get_by_role("button", name="Confirm with a trace").click()
    lab.explorer.locator(".lk-traced[data-state=tracing]").wait_for()
    lab.page.get_by_label("sequence length (batch.seq_length)").fill("128")
    lab.peak(peak(small(batch__seq_length=128)))
    assert lab.explorer.get_by_role("button", name="Cancel").is_visible()
    lab.page.get_by_label("sequence length (batch.seq_length)").fill("256")
    lab.peak(peak(small()))
    lab.explorer.locator(".lk-traced[data-state=done]").wait_for()
    said = lab.explorer.locator(".lk-traced").inner_text()
    assert said.startswith("Traced peak ")
    assert "the estimate, " in said
    assert lab.explorer.locator(".lk-bars .lk-stack").count() == 2


def test_a_hostile_name_is_text(browser: Browser, running: Server) -> None:
    with Lab(browser, running, "hostile.py", width=700, scheme="dark") as opened:
        opened.run_all()
        opened.peak(peak(small(model__name=HOSTILE)))
        assert opened.explorer.locator(".lk-title strong").inner_text().startswith("<script>document.title=")
        assert opened.explorer.locator("img, script").count() == 0
        assert opened.page.title() != "owned"
        wider = opened.explorer.evaluate("element => element.scrollWidth - element.clientWidth")
        assert wider == 0
        assert opened.elsewhere == []


@pytest.mark.long
def test_a_study_s_notebook_draws_its_charts(browser: Browser, running: Server) -> None:
    with Lab(browser, running, "study.py") as opened:
        opened.run_all()
        opened.page.locator(".jp-OutputArea-output svg.marks").first.wait_for()
        assert opened.page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").count() == 0
        assert opened.errors == []
        assert opened.elsewhere == []
