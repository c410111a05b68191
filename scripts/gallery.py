"""Draws the pictures of README.md from kept results: `python scripts/gallery.py` after `make report`, by Chromium."""

import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import vl_convert
from playwright.sync_api import Browser, sync_playwright

from labkit import Study
from labkit.report.charts import study as charts
from labkit.report.document import write_report
from labkit.report.notebooks import notebook_source

ROOT = Path(__file__).parent.parent
STUDY = ROOT / "data" / "studies" / "moonlight-16b.yaml"
LIMIT_BYTES = 150_000


class Picture(NamedTuple):
    """A part of a report: an element, and what follows it up to a height."""

    name: str
    notebook: str
    parameters: dict[str, Any]
    part: str
    height: int


PICTURES = (
    Picture("report", "recompute_study", {"study": str(STUDY), "run": False}, "#section-1", 760),
    Picture("timeline", "recompute_study", {"study": str(STUDY), "run": False}, "#timeline .lk-chart", 540),
    Picture("explorer", "explore", {}, "main > .lk-output", 620),
)


def main() -> None:
    """Write `docs/moonlight-peaks.png` and a PNG for each of `PICTURES`."""
    results = Study.load(STUDY).results()
    spec = {**charts.peaks(results.cells).spec, "width": 640, "background": "white", "padding": 16}
    (ROOT / "docs" / "moonlight-peaks.png").write_bytes(vl_convert.vegalite_to_png(spec, scale=1.5))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for picture in PICTURES:
            report = Path(folder) / f"{picture.notebook}.html"
            if not report.exists():
                write_report(notebook_source(picture.notebook), picture.parameters, report)
            photograph(browser, report, picture)
        browser.close()


def photograph(browser: Browser, report: Path, picture: Picture) -> None:
    """Write `docs/NAME.png`.

    Raises:
        ValueError: it is too large for a README.
    """
    page = browser.new_page(viewport={"width": 1080, "height": picture.height}, color_scheme="light")
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-charts=drawn]")
    page.locator(picture.part).first.evaluate("part => part.scrollIntoView({ behavior: 'instant' })")
    shown = page.screenshot()
    page.close()
    if len(shown) > LIMIT_BYTES:
        raise ValueError(f"{picture.name}: {len(shown)} bytes, {LIMIT_BYTES} at most")
    (ROOT / "docs" / f"{picture.name}.png").write_bytes(shown)


if __name__ == "__main__":
    main()
