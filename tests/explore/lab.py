"""JupyterLab as a user has it: a server of its own on a copy of the notebooks, and a browser that looks at it."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Request

from labkit.report.theme import Mode

ROOT = Path(__file__).parents[2]
_STARTS_WITHIN = 120.0
"""Seconds."""


class Server(NamedTuple):
    """A running server."""

    url: str
    token: str


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """`labkit lab` headless on a free port, with nothing of the user's; it copies the notebooks into `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "labkit", "lab", str(folder), "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    own = ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_WORKSPACES_DIR")
    places = {name: str(folder / ".jupyter" / name.lower()) for name in (*own, "JUPYTERLAB_SETTINGS_DIR")}
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, **places, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        found = Server(f"http://127.0.0.1:{port}", token)
        try:
            _wait(found, process, folder / "log")
            yield found
        finally:
            process.terminate()
            process.wait(60)


def _wait(found: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{found.url}/api/status?token={found.token}", timeout=5):  # noqa: S310
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()}")


class Lab:
    """A notebook in a page of its own, with all that the page said and asked for."""

    def __init__(
        self, browser: Browser, found: Server, notebook: str, width: int = 1440, scheme: Mode = "light"
    ) -> None:
        self.server = found
        viewport = {"width": width, "height": 1000}
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=found.url)
        self.context.set_default_timeout(120_000)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._noted)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._asked)
        workspace = secrets.token_hex(4)
        self.page.goto(f"{found.url}/lab/workspaces/{workspace}/tree/notebooks/{notebook}?token={found.token}&reset")
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()

    def __enter__(self) -> "Lab":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def _noted(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    def _asked(self, request: Request) -> None:
        own = (self.server.url, self.server.url.replace("http", "ws"), "data:", "blob:")
        if not request.url.startswith(own):
            self.elsewhere.append(request.url)

    def run_all(self) -> None:
        """Run every cell once the kernel is there; wait for the last one."""
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        prompts = self.page.locator(".jp-CodeCell .jp-InputPrompt")
        prompts.last.filter(has_text="[").filter(has_not_text="*").filter(has_not_text="[ ]").wait_for()

    @property
    def explorer(self) -> Locator:
        """The explorer in it."""
        return self.page.locator(".lk-explorer")

    def peak(self, expected: int) -> None:
        """Wait until the explorer shows a peak as the ledger has it."""
        self.explorer.locator(f".lk-peak[data-settled=true][data-bytes='{expected}']").wait_for()
