"""The report in a real browser: drawn, quiet, readable in light and dark, on a phone and on a desk."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from labkit.report.theme import Mode, vega_config
from tests.report import frames, pages
from tests.report.browsing import Opened

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = [
    "<script>document.title='owned'</script>",
    "\"'><img src=x onerror=document.title='owned'>",
    "\u202edlihc",
    "w" * 10_000,
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(pages.report(frames.cells({"[moe]": ("failed", "backward: RuntimeError: no")})), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def desk(browser: Browser, report: Path) -> Iterator[Opened]:
    """One page for all tests that leave it as it was: opening it takes a second."""
    with Opened(browser, report) as opened:
        yield opened


@pytest.fixture(scope="module")
def phone(browser: Browser, report: Path) -> Iterator[Opened]:
    with Opened(browser, report, 390, "dark") as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_everything_is_drawn_and_nothing_overflows(phone: Opened, desk: Opened, scheme: Mode) -> None:
    for opened in (phone, desk):
        opened.turn(scheme)
        page = opened.page
        assert page.locator(".lk-chart svg").count() == 5
        assert opened.overflow() == 0
        assert "34.103" in opened.words("peaks")
        assert "traced: failed" in opened.words("peaks")
        for box in (page.locator(".lk-chart svg").nth(n).bounding_box() for n in range(5)):
            assert box is not None
            assert 200 < box["width"] <= opened.width
        surface = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert surface == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        table = page.locator("#labkit-decision table").first
        assert table.evaluate("element => getComputedStyle(element).backgroundColor") == surface
        assert page.locator(".lk-chart svg").first.evaluate("e => getComputedStyle(e).backgroundColor") == surface


def test_legends_are_whole_on_a_phone(phone: Opened) -> None:
    assert "11  allocator remainders" in phone.words("holdings")
    frame = phone.page.locator("#holdings .lk-chart svg").bounding_box()
    entry = phone.page.locator("#holdings svg .role-legend text", has_text="allocator remainders").bounding_box()
    assert frame is not None
    assert entry is not None
    assert entry["x"] + entry["width"] <= frame["x"] + frame["width"]
    assert entry["y"] + entry["height"] <= frame["y"] + frame["height"]


@pytest.mark.parametrize("width", [320, 600, 390])
def test_the_peak_of_the_timeline_is_named_within_the_chart(phone: Opened, width: int) -> None:
    phone.resize(width)
    frame = phone.page.locator("#timeline .lk-chart svg").bounding_box()
    label = phone.page.locator("#timeline svg text", has_text="peak 34.175 GiB").or_(
        phone.page.locator("#timeline svg text", has_text="traced peak of the steady step 34.175 GiB")
    )
    box = label.bounding_box()
    axis = phone.page.locator("#timeline svg .role-axis-label").last.bounding_box()
    assert frame is not None
    assert box is not None
    assert axis is not None
    assert axis["x"] + axis["width"] <= box["x"]
    assert box["x"] + box["width"] <= frame["x"] + frame["width"]


def test_a_long_list_of_modules_is_whole_beside_the_chart(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(
        pages.report(frames.cells({"[layernorm, mla_up_proj, mlp, moe_act]": ("ok", None)})), encoding="utf-8"
    )
    with Opened(browser, path, width=390) as opened:
        labels = opened.page.evaluate("Array.from(document.querySelectorAll('.role-axis text'), t => t.textContent)")
        assert "[layernorm, mla_up_proj,mlp, moe_act]" in labels  # two lines
        assert "[mla_up_proj, mlp]" in labels
        assert opened.overflow() == 0


def test_charts_follow_the_reader_into_the_dark(desk: Opened) -> None:
    schemes: tuple[Mode, ...] = ("dark", "light")
    for scheme in schemes:
        desk.page.emulate_media(color_scheme=scheme)
        ink = vega_config(scheme)["axisY"]["labelColor"]
        desk.page.locator(f"#peaks svg .role-axis-label text[fill='{ink}']").first.wait_for()
    assert desk.page.locator(".lk-chart svg").count() == 5


def test_pointing_at_a_peak_tells_its_exact_value(desk: Opened) -> None:
    desk.page.locator("#peaks svg .mark-text text", has_text="33.473").hover()
    said = desk.tooltip()
    for part in ("[moe_act]", "published", "33.473", "35,941,000,000"):
        assert part in said


def test_pointing_at_a_segment_names_what_holds_it(desk: Opened) -> None:
    desk.page.locator("#holdings svg .mark-rect.role-mark path").first.hover()
    said = desk.tooltip()
    assert "held by" in said
    assert "parameters" in said


def test_pointing_into_the_timeline_tells_the_moment(desk: Opened) -> None:
    chart = desk.page.locator("#timeline svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    desk.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
    desk.page.mouse.move(box["x"] + box["width"] * 0.52, box["y"] + box["height"] * 0.4)
    said = desk.tooltip()
    assert "backward" in said
    assert "total (GiB)" in said
    assert "optimizer state" in said
    assert desk.page.locator("#timeline svg .mark-rect.role-mark path[opacity='0.25']").count() == 1


def test_a_legend_entry_singles_its_category_out(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        faded = opened.page.locator("#holdings svg .mark-rect.role-mark path[opacity='0.15']")
        assert faded.count() == 0
        opened.page.locator("#holdings svg .role-legend text", has_text="optimizer state").click()
        faded.first.wait_for()


def test_the_selector_changes_the_candidate(desk: Opened) -> None:
    assert "traced peak of the steady step 34.175 GiB in optimizer" in desk.words("timeline")
    desk.page.locator("#timeline select").select_option("[moe_act]")
    desk.page.locator("#timeline svg text", has_text="traced peak of the steady step 33.543 GiB").wait_for()
    desk.page.locator("#timeline select").select_option("[]")
    desk.page.locator("#timeline svg text", has_text="traced peak of the steady step 34.175 GiB").wait_for()


def test_code_is_hidden_until_asked_for_from_the_keyboard(desk: Opened) -> None:
    code = desk.page.get_by_text("charts.peaks(results.cells)")
    assert not code.is_visible()
    desk.page.locator("#lk-code-button").focus()
    desk.page.keyboard.press("Enter")
    assert code.is_visible()
    desk.page.keyboard.press("Enter")
    assert not code.is_visible()


def test_everything_that_acts_can_be_reached_by_keyboard(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        reached = set()
        for _ in range(60):
            opened.page.keyboard.press("Tab")
            reached.add(
                opened.page.evaluate("document.activeElement.dataset.kind ?? document.activeElement.id ?? ''")
                or opened.page.evaluate("document.activeElement.className || document.activeElement.tagName")
            )
        assert {"lk-skip", "lk-code-button", "png", "svg", "csv", "lk-output", "SELECT"} <= reached


@pytest.mark.parametrize("figure", ["tradeoff", "peaks", "differences", "holdings", "timeline"])
def test_image_and_data_can_be_saved(browser: Browser, report: Path, figure: str) -> None:
    saved: dict[str, bytes] = {}
    with Opened(browser, report) as opened:  # Chromium stops a page at its tenth file
        for kind in ("png", "svg", "csv"):
            with opened.page.expect_download() as download:
                opened.page.locator(f"#{figure} button[data-kind={kind}]").click()
            assert download.value.suggested_filename == f"{figure}.{kind}"
            saved[kind] = Path(download.value.path()).read_bytes()
    assert saved["png"].startswith(b"\x89PNG")
    assert saved["svg"].startswith(b"<svg")
    rows = list(csv.DictReader(io.StringIO(saved["csv"].decode())))
    assert {row["candidate"] for row in rows} > {"[moe_act]", "[mla_up_proj, mlp]"}
    if figure == "timeline":
        assert len(rows) == 6 * 362 + 7 * 181, "the moments of the traces and of the estimates"
        assert float(rows[0]["position"]) == 0
        assert float(rows[0]["parameters_mib"]) == 6200
    if figure == "peaks":
        published = next(row for row in rows if (row["candidate"], row["source"]) == ("[moe_act]", "published"))
        assert published["peak_allocated_bytes"] == "35941000000"


def test_paper_is_black_on_white_whatever_the_screen(desk: Opened) -> None:
    desk.page.emulate_media(media="print", color_scheme="dark")
    assert desk.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert (
        desk.page.locator(".lk-chart svg").first.evaluate("e => getComputedStyle(e).backgroundColor")
        == "rgb(255, 255, 255)"
    )
    for text in ("#peaks svg .role-axis-label text", "#peaks svg [class*=note_values] text"):
        assert desk.page.locator(text).first.evaluate("e => getComputedStyle(e).fill") == "rgb(0, 0, 0)"
    marks = desk.page.locator("#tradeoff svg .mark-symbol.role-mark path")
    ink = vega_config("light")["style"]["marker"]["color"]
    assert ink in [mark.get_attribute("fill") for mark in marks.all()], "white points would be lost on paper"
    assert not desk.page.locator(".lk-exports").first.is_visible()
    assert len(desk.page.pdf()) > 10_000
    desk.page.emulate_media(media="screen")
    desk.turn("light")


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    failures = {text: ("failed", f"backward: {text}") for text in HOSTILE}
    path.write_text(pages.report(frames.cells(failures), title=HOSTILE[0], description=HOSTILE[3]), encoding="utf-8")
    with Opened(browser, path, 390) as opened:
        _is_text(opened)
        opened.resize(1440)
        _is_text(opened)


def _is_text(opened: Opened) -> None:
    assert opened.page.title() == HOSTILE[0]
    assert opened.page.locator("h1").inner_text() == HOSTILE[0]
    assert opened.page.locator("img").count() == 0
    assert opened.page.locator("li", has_text=f"failed: backward: {HOSTILE[0]}.").count() == 1
    assert opened.page.locator(".lk-chart svg").count() == 5
    assert HOSTILE[0] in "".join(opened.words("peaks")) or any(
        word.startswith("<script>") for word in opened.words("peaks")
    )
    opened.page.locator("#peaks svg .mark-text text", has_text="traced: failed").first.hover()
    assert "document.title='owned'" in opened.tooltip()
    assert opened.overflow() == 0


def test_a_table_is_copied_as_plain_numbers_and_saved_as_csv(browser: Browser, tmp_path: Path) -> None:
    formula, wide = '=HYPERLINK("http://x")', "\uff1d1+1;=1"
    path = tmp_path / "report.html"
    path.write_text(
        pages.report(frames.cells({formula: ("failed", "+1+1"), wide: ("failed", "-2;-3")})), encoding="utf-8"
    )
    with Opened(browser, path) as opened:
        opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tools = opened.page.locator(".lk-output:has(#labkit-decision) + .lk-tools")
        tools.get_by_role("button", name="Copy").click()
        tools.get_by_text("Copied.").wait_for()
        lines = opened.page.evaluate("navigator.clipboard.readText()").splitlines()
        with opened.page.expect_download() as download:
            tools.get_by_role("button", name="CSV").click()
        assert download.value.suggested_filename == "decision.csv"
        text = Path(download.value.path()).read_text()
    saved = list(csv.reader(io.StringIO(text)))
    head, control, first, *_ = (line.split("\t") for line in lines)
    assert saved == [line.split("\t") for line in lines]
    assert head[:5] == ["Recompute", "Try", "Fits", "Peak on one rank, GiB: estimated", "Peak on one rank, GiB: traced"]
    assert control[:5] == ["[]", "", "fits", "34.049", "34.175"]
    assert first[7] == "2.0", "a sign would make text of it"
    assert any(line.startswith(f"'{formula}\t") for line in lines)
    assert f'"\'{wide}"' in text, "a spreadsheet that splits at semicolons keeps it whole"
    assert not any(cell.startswith(("=", "+", "@", "\uff1d")) for row in saved for cell in row)


def test_a_table_is_sorted_from_its_heads(desk: Opened) -> None:
    table = desk.page.locator("#labkit-decision table")
    rows = table.locator("tbody tr td:first-child")
    before = rows.all_text_contents()
    head = table.get_by_role("button", name="traced", exact=True)
    head.focus()
    desk.page.keyboard.press("Enter")
    peaks = [float(text) for text in table.locator("tbody tr td:nth-child(5)").all_text_contents() if text != "–"]
    assert peaks == sorted(peaks)
    assert table.locator("th[aria-sort=ascending]").count() == 1
    assert rows.last.text_content() == "[moe]", "what has no figure comes last"
    desk.page.keyboard.press("Enter")
    desk.page.keyboard.press("Enter")
    assert rows.all_text_contents() == before


def test_a_wide_table_says_that_it_scrolls(phone: Opened) -> None:
    box = phone.page.locator(".lk-output:has(#labkit-decision)")
    hint = phone.page.locator(".lk-output:has(#labkit-decision) + .lk-tools .lk-hint")
    assert hint.is_visible()
    box.focus()
    phone.page.keyboard.press("End")
    box.evaluate("box => (box.scrollLeft = box.scrollWidth)")
    phone.page.wait_for_selector(".lk-output:has(#labkit-decision):not([data-more])")


def test_the_data_of_a_chart_can_be_read_as_a_table(desk: Opened) -> None:
    desk.page.locator("#peaks summary").click()
    cells = desk.page.locator("#peaks .lk-data td").all_text_contents()
    assert "35941000000" in cells
    assert "out of memory" not in cells
    assert "failed" in cells
    drawing = desk.page.locator("#peaks .lk-chart[role=graphics-document]")
    assert (drawing.get_attribute("aria-label") or "").startswith("Peak allocated memory of one rank")
