"""The page over a folder of reports: what is listed, in which order, and that nothing in it can do harm."""

import os
import re
from pathlib import Path

import pytest
from nbformat.v4 import new_markdown_cell, new_notebook
from playwright.sync_api import Browser

from labkit.cli import main
from labkit.errors import InputError
from labkit.report.heading import Heading
from labkit.report.html import render
from labkit.report.index import write_index
from tests.report.browsing import Opened

NOTEBOOK = new_notebook(cells=[new_markdown_cell("## What")])
HOSTILE = "</a><script>document.title='owned'</script>\u202e\x00" + "w" * 10_000


def write(folder: Path, name: str, title: str, made_at: str) -> None:
    heading = Heading.of_facts(title, "What it says.", {"Model": "tiny", "Report made": made_at})
    report = render(NOTEBOOK, heading.model_copy(update={"made_at": made_at, "kind": "recompute study"}))
    (folder / name).write_text(report, encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three reports, one of them hostile, and much that is none."""
    folder = tmp_path_factory.mktemp("figures")
    write(folder, "old.html", "The old one", "2026-01-01T08:00:00+00:00")
    write(folder, "new.html", "The new one", "2026-02-28T22:30:00-10:00")
    write(folder, "java'script:\"a b.html", HOSTILE, "2026-03-01T12:00:00+14:00")
    whole = (folder / "new.html").read_bytes()
    (folder / "half.html").write_bytes(whole[:250])
    (folder / "empty.html").write_bytes(b"")
    (folder / "marked.html").write_text("<!doctype html><![foo[")
    (folder / "binary.html").write_bytes(bytes(range(256)) * 100)
    (folder / "other.html").write_text("<title>Somebody's page</title>")
    (folder / "liar.html").write_text('<meta name="labkit-report" content=\'{"title": 3}\'>')
    (folder / "folder.html").mkdir()
    (folder / "gone.html").symlink_to(folder / "nowhere")
    os.mkfifo(folder / "pipe.html")
    return folder


def test_reports_are_listed_newest_first_and_nothing_else_is(folder: Path) -> None:
    page = write_index(folder).read_text(encoding="utf-8")
    links = re.findall(r'<h2><a href="([^"]*)">', page)
    assert links == ["./new.html", "./java%27script%3A%22a%20b.html", "./old.html"]
    assert "3 reports, the newest first." in page
    assert "recompute study · made 2026-03-01 08:30 UTC · new.html" in page
    assert "<dt>Model</dt><dd>tiny</dd>" in page
    assert "Report made" not in page
    assert "Somebody" not in page


def test_a_hostile_title_is_short_text(folder: Path) -> None:
    page = write_index(folder).read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;document.title=" in page
    assert "\u202e" not in page
    assert "\\u202e\\x00" in page
    assert "w" * 500 not in page


def test_it_is_made_again_over_itself_and_over_nothing_else(folder: Path, tmp_path: Path) -> None:
    assert write_index(folder).read_bytes() == write_index(folder).read_bytes()
    (tmp_path / "index.html").write_text("<title>mine</title>")
    with pytest.raises(InputError, match=r"index.html: was not written by labkit index"):
        write_index(tmp_path)
    assert (tmp_path / "index.html").read_text() == "<title>mine</title>"
    with pytest.raises(InputError, match="is no folder"):
        write_index(tmp_path / "nowhere")


def test_the_command_says_where_it_is_and_refuses_in_one_sentence(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place, code, said in ((folder, 0, f"{folder / 'index.html'}"), (tmp_path / "no", 2, "is no folder")):
        with pytest.raises(SystemExit) as ended:
            main(["index", str(place)])
        assert ended.value.code == code
        output = capsys.readouterr()
        assert said in output.out + output.err


def test_without_a_folder_it_is_of_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "figures").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["index"])
    assert (ended.value.code, capsys.readouterr().out) == (0, "figures/index.html\n")


def test_a_folder_without_reports_says_so(tmp_path: Path) -> None:
    assert "No report is in this folder." in write_index(tmp_path).read_text(encoding="utf-8")


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_it_reads_on_a_phone_and_on_a_desk(browser: Browser, folder: Path, width: int, scheme: str) -> None:
    index = write_index(folder)
    with Opened(browser, index, width, "dark" if scheme == "dark" else "light", drawn=False) as opened:
        assert opened.overflow() == 0
        assert opened.page.title() == "Reports"
        surface = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert surface == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        for link in opened.page.locator("main a").all():
            target = Path(link.evaluate("a => decodeURIComponent(new URL(a.href).pathname)"))
            assert target.is_file()
