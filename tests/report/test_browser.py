"""The report in a real browser: drawn, quiet, readable in light and dark, on a phone and on a desk."""

import csv
import io
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_everything_is_drawn_and_nothing_overflows(browser: Browser, report: Path, width: int, scheme: Mode) -> None:
    with Opened(browser, report, width, scheme) as opened:
        page = opened.page
        assert page.locator(".lk-chart svg").count() == 5
        assert opened.overflow() == 0
        assert "34.103" in opened.words("peaks")
        assert "traced: failed" in opened.words("peaks")
        for box in (page.locator(".lk-chart svg").nth(n).bounding_box() for n in range(5)):
            assert box is not None
            assert 200 < box["width"] <= width
        surface = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert surface == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        table = page.locator("#labkit-decision table").first
        assert table.evaluate("element => getComputedStyle(element).backgroundColor") == surface
        assert page.locator(".lk-chart svg").first.evaluate("e => getComputedStyle(e).backgroundColor") == surface


def test_legends_are_whole_on_a_phone(browser: Browser, report: Path) -> None:
    with Opened(browser, report, 390) as opened:
        assert "11  allocator remainders" in opened.words("holdings")
        frame = opened.page.locator("#holdings .lk-chart svg").bounding_box()
        entry = opened.page.locator("#holdings svg .role-legend text", has_text="allocator remainders").bounding_box()
        assert frame is not None
        assert entry is not None
        assert entry["x"] + entry["width"] <= frame["x"] + frame["width"]
        assert entry["y"] + entry["height"] <= frame["y"] + frame["height"]


@pytest.mark.parametrize("width", [320, 390, 600])
def test_the_peak_of_the_timeline_is_named_within_the_chart(browser: Browser, report: Path, width: int) -> None:
    with Opened(browser, report, width) as opened:
        frame = opened.page.locator("#timeline .lk-chart svg").bounding_box()
        label = opened.page.locator("#timeline svg text", has_text="peak 34.175 GiB").or_(
            opened.page.locator("#timeline svg text", has_text="traced peak of the steady step 34.175 GiB")
        )
        box = label.bounding_box()
        axis = opened.page.locator("#timeline svg .role-axis-label").last.bounding_box()
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


def test_charts_follow_the_reader_into_the_dark(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        schemes: tuple[Mode, ...] = ("dark", "light")
        for scheme in schemes:
            opened.page.emulate_media(color_scheme=scheme)
            ink = vega_config(scheme)["axisY"]["labelColor"]
            opened.page.locator(f"#peaks svg .role-axis-label text[fill='{ink}']").first.wait_for()
        assert opened.page.locator(".lk-chart svg").count() == 5


def test_pointing_at_a_peak_tells_its_exact_value(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        opened.page.locator("#peaks svg .mark-text text", has_text="33.473").hover()
        said = opened.tooltip()
        for part in ("[moe_act]", "published", "33.473", "35,941,000,000"):
            assert part in said


def test_pointing_at_a_segment_names_what_holds_it(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        opened.page.locator("#holdings svg .mark-rect.role-mark path").first.hover()
        said = opened.tooltip()
        assert "held by" in said
        assert "parameters" in said


def test_pointing_into_the_timeline_tells_the_moment(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        chart = opened.page.locator("#timeline svg")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None
        opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.4)
        opened.page.mouse.move(box["x"] + box["width"] * 0.52, box["y"] + box["height"] * 0.4)
        said = opened.tooltip()
        assert "backward" in said
        assert "total (GiB)" in said
        assert "optimizer state" in said
        assert opened.page.locator("#timeline svg .mark-rect.role-mark path[opacity='0.25']").count() == 1


def test_a_legend_entry_singles_its_category_out(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        faded = opened.page.locator("#holdings svg .mark-rect.role-mark path[opacity='0.15']")
        assert faded.count() == 0
        opened.page.locator("#holdings svg .role-legend text", has_text="optimizer state").click()
        faded.first.wait_for()


def test_the_selector_changes_the_candidate(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        assert "traced peak of the steady step 34.175 GiB in optimizer" in opened.words("timeline")
        opened.page.locator("#timeline select").select_option("[moe_act]")
        opened.page.locator("#timeline svg text", has_text="traced peak of the steady step 33.543 GiB").wait_for()


def test_code_is_hidden_until_asked_for_from_the_keyboard(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        code = opened.page.get_by_text("charts.peaks(results.cells)")
        assert not code.is_visible()
        opened.page.locator("#lk-code-button").focus()
        opened.page.keyboard.press("Enter")
        assert code.is_visible()
        opened.page.keyboard.press("Enter")
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
    with Opened(browser, report) as opened:
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


def test_paper_is_black_on_white_whatever_the_screen(browser: Browser, report: Path) -> None:
    with Opened(browser, report, scheme="dark") as opened:
        opened.page.emulate_media(media="print", color_scheme="dark")
        assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert (
            opened.page.locator(".lk-chart svg").first.evaluate("e => getComputedStyle(e).backgroundColor")
            == "rgb(255, 255, 255)"
        )
        for text in ("#peaks svg .role-axis-label text", "#peaks svg [class*=note_values] text"):
            assert opened.page.locator(text).first.evaluate("e => getComputedStyle(e).fill") == "rgb(0, 0, 0)"
        marks = opened.page.locator("#tradeoff svg .mark-symbol.role-mark path")
        ink = vega_config("light")["style"]["marker"]["color"]
        assert ink in [mark.get_attribute("fill") for mark in marks.all()], "white points would be lost on paper"
        assert not opened.page.locator(".lk-exports").first.is_visible()
        assert len(opened.page.pdf()) > 10_000


@pytest.mark.parametrize("width", [390, 1440])
def test_hostile_text_stays_text(browser: Browser, tmp_path: Path, width: int) -> None:
    path = tmp_path / "hostile.html"
    failures = {text: ("failed", f"backward: {text}") for text in HOSTILE}
    path.write_text(pages.report(frames.cells(failures), title=HOSTILE[0], description=HOSTILE[3]), encoding="utf-8")
    with Opened(browser, path, width) as opened:
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
    formula = '=HYPERLINK("http://x")'
    path = tmp_path / "report.html"
    path.write_text(pages.report(frames.cells({formula: ("failed", "+1+1")})), encoding="utf-8")
    with Opened(browser, path) as opened:
        opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
        tools = opened.page.locator(".lk-output:has(#labkit-decision) + .lk-tools")
        tools.get_by_role("button", name="Copy").click()
        tools.get_by_text("Copied.").wait_for()
        lines = opened.page.evaluate("navigator.clipboard.readText()").splitlines()
        with opened.page.expect_download() as download:
            tools.get_by_role("button", name="CSV").click()
        assert download.value.suggested_filename == "decision.csv"
        saved = list(csv.reader(io.StringIO(Path(download.value.path()).read_text())))
    head, control, first, *_ = (line.split("\t") for line in lines)
    assert saved == [line.split("\t") for line in lines]
    assert head[:5] == ["Recompute", "Try", "Fits", "Peak on one rank, GiB: estimated", "Peak on one rank, GiB: traced"]
    assert control[:5] == ["[]", "", "fits", "34.049", "34.175"]
    assert first[7] == "2.0", "a sign would make text of it"
    assert any(line.startswith(f"'{formula}\t") for line in lines)
    assert not any(cell.startswith(("=", "+", "@")) for row in saved for cell in row)


def test_a_table_is_sorted_from_its_heads(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        table = opened.page.locator("#labkit-decision table")
        rows = table.locator("tbody tr td:first-child")
        before = rows.all_text_contents()
        head = table.get_by_role("button", name="traced", exact=True)
        head.focus()
        opened.page.keyboard.press("Enter")
        peaks = [float(text) for text in table.locator("tbody tr td:nth-child(5)").all_text_contents() if text != "–"]
        assert peaks == sorted(peaks)
        assert table.locator("th[aria-sort=ascending]").count() == 1
        assert rows.last.text_content() == "[moe]", "what has no figure comes last"
        opened.page.keyboard.press("Enter")
        opened.page.keyboard.press("Enter")
        assert rows.all_text_contents() == before


def test_a_wide_table_says_that_it_scrolls(browser: Browser, report: Path) -> None:
    with Opened(browser, report, 390) as opened:
        box = opened.page.locator(".lk-output:has(#labkit-decision)")
        hint = opened.page.locator(".lk-output:has(#labkit-decision) + .lk-tools .lk-hint")
        assert hint.is_visible()
        box.focus()
        opened.page.keyboard.press("End")
        box.evaluate("box => (box.scrollLeft = box.scrollWidth)")
        opened.page.wait_for_selector(".lk-output:has(#labkit-decision):not([data-more])")


def test_the_data_of_a_chart_can_be_read_as_a_table(browser: Browser, report: Path) -> None:
    with Opened(browser, report) as opened:
        opened.page.locator("#peaks summary").click()
        cells = opened.page.locator("#peaks .lk-data td").all_text_contents()
        assert "35941000000" in cells
        assert "out of memory" not in cells
        assert "failed" in cells
        drawing = opened.page.locator("#peaks .lk-chart[role=graphics-document]")
        assert (drawing.get_attribute("aria-label") or "").startswith("Peak allocated memory of one rank")
