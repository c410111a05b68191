"""A report as a reader has it: a page of its own in a browser."""

from pathlib import Path

from playwright.sync_api import Browser, Page

from labkit.report.theme import Mode


class Opened:
    """A report in a page of its own, with all it said and asked for."""

    def __init__(
        self, browser: Browser, path: Path, width: int = 1440, scheme: Mode = "light", *, drawn: bool = True
    ) -> None:
        self.path = path
        self.width = width
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            accept_downloads=True,
        )
        self.context.set_default_timeout(30_000)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        if drawn:  # a page without charts has no script either
            self.page.wait_for_selector("html[data-charts=drawn]")

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()
        assert self.said == []
        assert [url for url in self.requests if not url.startswith(("data:", "blob:"))] == [self.path.as_uri()]

    def turn(self, scheme: Mode) -> None:
        """Let the reader's system change to light or dark, and wait until every chart has followed."""
        self.page.emulate_media(color_scheme=scheme)
        self.page.wait_for_selector(f"html[data-charts=drawn][data-mode={scheme}]")

    def resize(self, width: int) -> None:
        """Give the window another width, and have every chart drawn anew for it: the reader's scheme changes too."""
        self.width = width
        self.page.set_viewport_size({"width": width, "height": 900})
        self.turn("light" if self.page.locator("html").get_attribute("data-mode") == "dark" else "dark")

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        wider: int = self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        return wider

    def words(self, figure: str) -> list[str]:
        """The texts drawn in a chart."""
        return self.page.locator(f"#{figure} .lk-chart svg text").all_text_contents()

    def tooltip(self) -> str:
        """What the tooltip says, once it is there."""
        tooltip = self.page.locator("#vg-tooltip-element.visible")
        tooltip.wait_for()
        return tooltip.inner_text()
