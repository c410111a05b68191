"""JupyterLab as a user has it: a server of its own on a copy of the notebooks, and a browser that looks at it."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, ConsoleMessage, Page

from labkit.report.theme import Mode

ROOT = Path(__file__).parents[2]
_STARTS_WITHIN = 90.0
"""Seconds."""


class Server:
    """A running server."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """JupyterLab headless on a free port, in `folder`, with labkit's settings and nothing of the user's."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    shutil.copy(ROOT / "jupytext.toml", folder)
    settings = folder / "settings"
    settings.mkdir()
    shutil.copy(ROOT / "scripts" / "jupyterlab_overrides.json", settings / "overrides.json")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex(16)
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    command += [f"--LabApp.app_settings_dir={settings}", "--LabApp.news_url=None"]
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "own")}
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        command, cwd=folder, env={**os.environ, **own, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log
    )
    found = Server(f"http://127.0.0.1:{port}", token)
    try:
        _wait(found, process, folder / "log")
        yield found
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def _wait(found: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + _STARTS_WITHIN
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{found.url}/api/status?token={found.token}", timeout=2) as answer:  # noqa: S310 (its own server)
                json.load(answer)
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()}")


class Lab:
    """A page of it, with all it said and asked for."""

    def __init__(
        self, browser: Browser, found: Server, notebook: str, width: int = 1440, scheme: Mode = "light"
    ) -> None:
        self.server = found
        self.context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=found.url)
        self.context.set_default_timeout(60_000)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("console", self._noted)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
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

    def _asked(self, request: object) -> None:
        url: str = request.url  # type: ignore[attr-defined]
        if not url.startswith((self.server.url, self.server.url.replace("http", "ws"), "data:", "blob:")):
            self.elsewhere.append(url)

    def run_all(self) -> None:
        """Run every cell once the kernel is there; they may still run when this returns."""
        self.page.locator("#jp-main-statusbar", has_text="| Idle").wait_for()
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
