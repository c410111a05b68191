"""The documentation site: builds without a warning, has every command and public name, and works without a network."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from typer.core import TyperGroup
from typer.main import get_command

from labkit.cli import app
from labkit.report.theme import PALETTES, Mode

ROOT = Path(__file__).parents[2]
PUBLIC = ("workload", "study", "plan", "admission", "diagnose", "snapshot")
"""Modules below labkit whose `__all__` is a page."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def commands(group: TyperGroup, path: str = "labkit") -> Iterator[str]:
    """Every command, with those above it."""
    for name, command in group.commands.items():
        yield f"{path} {name}"
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{path} {name}")


def test_the_reference_has_the_help_of_every_command(site: Path) -> None:
    page = unescape(re.sub("<[^>]+>", "", (site / "reference" / "cli.html").read_text()))
    command_line = get_command(app)
    assert isinstance(command_line, TyperGroup)
    for command in commands(command_line):
        assert f"Usage: {command} " in page


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    page = (site / "api" / f"{module}.html").read_text()
    public = importlib.import_module(f"labkit.{module}")
    for name in filter(lambda name: callable(getattr(public, name)), public.__all__):
        assert re.search(rf'id="labkit\.{module}\.(\w+\.)*{name}"', page), name


def test_no_page_asks_another_host_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        asked = re.findall(r'<(?:script|img|iframe|source)\b[^>]*\bsrc="([^"]+)"', text)
        asked += re.findall(r'<link\b(?![^>]*rel="canonical")[^>]*\bhref="([^"]+)"', text)
        assert [url for url in asked if re.match(r"(?:https?:)?//", url)] == [], page


@pytest.fixture(scope="module")
def browser(chromium_path: Path) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def opened(browser: Browser, page: Path, width: int, mode: Mode) -> tuple[Page, list[str]]:
    """A page opened from its file, and what it said and asked of others."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=mode)
    heard: list[str] = []
    tab.on("console", lambda message: heard.append(message.text))
    tab.on("pageerror", lambda error: heard.append(str(error)))
    tab.on("request", lambda request: heard.append(request.url) if not request.url.startswith("file:") else None)
    tab.goto(page.as_uri())
    return tab, heard


@pytest.mark.browser
@pytest.mark.parametrize("mode", PALETTES)
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_are_readable_in_the_colours_of_reports(browser: Browser, site: Path, width: int, mode: Mode) -> None:
    surface = PALETTES[mode].surface
    for name in ("tutorial", "check", "api/workload"):
        tab, heard = opened(browser, site / f"{name}.html", width, mode)
        wider = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider == 0, name
        colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert colour == "rgb({}, {}, {})".format(*bytes.fromhex(surface[1:]))
        assert heard == []
        tab.close()


@pytest.mark.browser
def test_search_works_in_a_page_opened_from_its_file(browser: Browser, site: Path) -> None:
    tab, heard = opened(browser, site / "tutorial.html", 1440, "light")
    tab.locator(".md-search__input").click()
    tab.locator(".md-search-result__meta", has_text="Type to start").wait_for()  # the index is read
    tab.locator(".md-search__input").press_sequentially("fragmentation")
    found = tab.locator(".md-search-result__item a")
    found.first.wait_for()
    assert any("diagnose.html" in (link.get_attribute("href") or "") for link in found.all())
    assert heard == []
    tab.close()
