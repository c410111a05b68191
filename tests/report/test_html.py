"""The report as a file: what is in it, and what never is."""

import base64
import gzip
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.report.bundle import vega_bundle
from labkit.report.heading import Fact, Heading
from labkit.report.html import render
from tests.report import frames, pages

LIMIT_BYTES = 800_000
PAGE = pages.report(frames.cells({"[moe]": ("failed", "backward: RuntimeError: no")}))
HEADING = Heading(title="T")


class Elements(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[str | None, str]] = []
        self._kind: tuple[str | None] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._kind = (dict(attrs).get("type"),) if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._kind = None

    def handle_data(self, data: str) -> None:
        if self._kind:
            self.scripts.append((self._kind[0], data))


def test_the_report_is_small_and_asks_for_nothing() -> None:
    assert len(PAGE.encode()) < LIMIT_BYTES
    elements = Elements(PAGE)
    assert not [tag for tag, _ in elements.tags if tag in {"link", "iframe", "object", "embed", "base", "form"}]
    assert not [attrs for _, attrs in elements.tags if "src" in attrs]
    assert all((attrs.get("href") or "#").startswith("#") for _, attrs in elements.tags)
    assert "@import" not in re.sub(r"<script.*?</script>", "", PAGE, flags=re.DOTALL)


def test_only_the_two_scripts_of_the_report_may_run() -> None:
    elements = Elements(PAGE)
    policy = next(
        attrs["content"] for tag, attrs in elements.tags if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    (library,) = [text for kind, text in elements.scripts if kind == "application/gzip;base64"]
    unpacked = gzip.decompress(base64.b64decode(library)).decode()
    running = [unpacked, *(text for kind, text in elements.scripts if kind is None)]
    assert unpacked == vega_bundle()
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running]
    assert re.search(r"script-src ([^;]*);", policy)[1].split() == [f"'sha256-{digest}'" for digest in hashes]  # type: ignore[index]
    assert len(running) == 2


def test_every_figure_has_its_data_words_and_buttons() -> None:
    figures = re.findall(r'<figure class="lk-figure" id="(\w+)">(.*?)</figure>', PAGE, flags=re.DOTALL)
    assert [name for name, _ in figures] == ["tradeoff", "peaks", "differences", "holdings", "timeline"]
    for _, content in figures:
        assert re.findall(r'data-kind="(\w+)"', content) == ["png", "svg", "csv"]
        assert "GiB" in content.split("<script")[0]


def test_contents_link_to_every_section() -> None:
    links = dict(re.findall(r'<a href="#(section-\d+)">([^<]*)</a>', PAGE))
    assert next(iter(links.values())) == "What to try first"
    assert set(links) == set(re.findall(r'<h2 id="(section-\d+)">', PAGE))


def test_facts_and_failures_are_shown() -> None:
    assert "6 of 6 cells done" in PAGE
    assert "megatron-core 0.19.2" in PAGE
    assert "2026-08-02 10:11 UTC" in PAGE
    assert "[moe] (traced) failed: backward: RuntimeError: no." in PAGE


def test_formulas_need_no_script() -> None:
    assert re.search(r"<math[^>]*>.*?<msup>.*?</math>", PAGE, flags=re.DOTALL)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>"


def test_plain_outputs_are_escaped() -> None:
    cell = new_code_cell(
        f"print({HOSTILE!r})",
        outputs=[
            new_output("stream", name="stdout", text=f"\x1b[31m{HOSTILE}\x1b[0m"),
            new_output("execute_result", data={"text/plain": HOSTILE}),
            new_output("display_data", data={"text/markdown": HOSTILE}),
            new_output("error", ename="E", evalue=HOSTILE, traceback=[f"\x1b[31mE: {HOSTILE}\x1b[0m"]),
        ],
    )
    page = render(
        new_notebook(cells=[new_markdown_cell(HOSTILE), new_markdown_cell(f"## {HOSTILE}"), cell]),
        Heading(title=HOSTILE, description=HOSTILE, facts=(Fact(name=HOSTILE, value=HOSTILE),)),
    )
    assert HOSTILE not in page
    elements = Elements(page)
    assert len([tag for tag, _ in elements.tags if tag == "script"]) == 3
    assert not [tag for tag, _ in elements.tags if tag == "img"]
    assert not [attrs for _, attrs in elements.tags if "onerror" in attrs]
    assert "\x1b" not in page


def test_links_in_markdown_cannot_run_code() -> None:
    page = render(new_notebook(cells=[new_markdown_cell("[x](javascript:alert(1))")]), HEADING)
    assert 'href="javascript' not in page


def test_data_cannot_leave_its_script_element() -> None:
    page = pages.report(frames.cells({"</script><script>alert(1)</script>": ("failed", "</script>")}))
    assert len([tag for tag, _ in Elements(page).tags if tag == "script"]) == 3 + 5


def test_a_failed_notebook_shows_its_error() -> None:
    cell = new_code_cell("1/0", outputs=[new_output("error", ename="ZeroDivisionError", evalue="x", traceback=[])])
    assert "ZeroDivisionError: x" in render(new_notebook(cells=[cell]), HEADING)


def test_unknown_outputs_are_left_out() -> None:
    cell = new_code_cell("x", outputs=[new_output("display_data", data={"application/x-unknown": "zzz-unknown"})])
    assert "zzz-unknown" not in render(new_notebook(cells=[cell]), HEADING)


def test_the_same_notebook_gives_the_same_report() -> None:
    notebook = pages.notebook(frames.cells())
    assert render(notebook, HEADING) == render(notebook, HEADING)


def test_the_bundle_is_kept_and_a_damaged_one_made_again(tmp_path: Path) -> None:
    made = vega_bundle(tmp_path / "labkit")
    (kept,) = (tmp_path / "labkit").iterdir()
    written = kept.stat().st_mtime_ns
    assert vega_bundle(tmp_path / "labkit") == made
    assert kept.stat().st_mtime_ns == written
    kept.write_text(kept.read_text()[:-1])
    assert vega_bundle(tmp_path / "labkit") == made


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "vegaEmbed" in vega_bundle(blocked / "labkit")


def test_no_character_of_a_page_moves_or_hides_others() -> None:
    hostile = "\u202edlihc\u2066\x07\x1b"
    cell = new_code_cell(
        "x", outputs=[new_output("execute_result", data={"text/plain": hostile, "text/html": hostile})]
    )
    page = render(new_notebook(cells=[new_markdown_cell(hostile), cell]), Heading(title=hostile, description=hostile))
    shown = re.sub(r"<(meta|script)\b.*?>", "", page)
    assert not set("\u202e\u2066\x07\x1b") & set(shown.partition("lk-themes")[0])
    assert shown.count(r"\u202edlihc\u2066\x07\x1b") >= 4


def test_the_look_of_tables_is_written_once() -> None:
    (look,) = re.findall(r"<style>\n(:is\(#labkit-table.*?)</style>", PAGE, flags=re.DOTALL)
    assert ".gt_table {" in look
    assert len(re.findall(r'<div id="labkit-', PAGE)) > 1, "of several tables"
    assert "#labkit-decision " not in PAGE
