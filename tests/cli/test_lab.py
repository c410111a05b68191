"""`labkit lab`: the notebooks are there, run in this environment, and open as notebooks; the user's own files stay."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_server.services.config import ConfigManager
from playwright.sync_api import sync_playwright

from labkit.cli.lab import bring_notebooks, jupyter_environment, server_arguments
from labkit.files import shipped_directory

ROOT = Path(__file__).parents[2]
SHIPPED = sorted(path.name for path in shipped_directory("notebooks").glob("*.py"))
TOKEN = "f00d"


def test_notebooks_are_copied_where_they_are_not_and_never_over_the_users_own(tmp_path: Path) -> None:
    home = tmp_path / "notebooks"
    home.mkdir()
    (home / "recompute_study.py").write_text("mine")
    assert list(bring_notebooks(home)) == [name for name in SHIPPED if name != "recompute_study.py"]
    assert (home / "recompute_study.py").read_text() == "mine"
    assert list(bring_notebooks(home)) == []
    (home / "recompute_study.py").unlink()
    (home / "recompute_study.py").symlink_to("gone.py")
    assert list(bring_notebooks(home)) == [], "nor through a link"
    assert sorted(path.name for path in home.iterdir()) == SHIPPED


def test_in_a_checkout_nothing_is_copied() -> None:
    assert list(bring_notebooks(ROOT / "notebooks")) == []


def test_jupyter_finds_this_interpreter_and_the_settings_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in jupyter_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    kernel = KernelSpecManager().get_kernel_spec("python3")
    assert kernel.argv[0] == sys.executable
    overrides = ConfigManager(config_dir_name="labconfig").get("default_setting_overrides")
    assert overrides["@jupyterlab/docmanager-extension:plugin"]["defaultViewers"] == {"python": "Jupytext Notebook"}


def test_options_of_jupyter_pass_and_root_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tmp_path / "a b" / "recompute_study.py"
    for user, allowed in ((0, ["--allow-root"]), (1000, [])):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        assert server_arguments(tmp_path, first, ["--no-browser"]) == [
            f"--ServerApp.root_dir={tmp_path}",
            "--LabApp.default_url=/lab/tree/a%20b/recompute_study.py",
            *allowed,
            "--no-browser",
        ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere: there is no such folder"),
        (("",), "an empty name: there is no such folder"),
        ((".", ".."), "..: one folder is enough; give options of jupyter lab as --NAME=VALUE"),
        (("--port", "no"), "--port"),
    ],
)
def test_mistakes_are_one_sentence(labkit: Callable, arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    answer = labkit("lab", *arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_notebooks_would_go_stays(labkit: Callable, tmp_path: Path) -> None:
    (tmp_path / "notebooks").write_text("mine")
    answer = labkit("lab")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "notebooks: is a file, where the notebooks would go; give another folder" in answer.stderr
    assert (tmp_path / "notebooks").read_text() == "mine"


class Lab(NamedTuple):
    """One that runs."""

    folder: Path
    address: str


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab in a folder that was empty, without the settings that `make env` gives a checkout's environment."""
    folder, temporary = tmp_path_factory.mktemp("work") / "a folder", tmp_path_factory.mktemp("temporary")
    folder.mkdir()
    own = ("--no-browser", "--port", "0", f"--IdentityProvider.token={TOKEN}", f"--LabApp.app_settings_dir={temporary}")
    process = subprocess.Popen(
        [sys.executable, "-m", "labkit", "lab", str(folder), *own],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "HOME": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found:
            break
    else:
        pytest.fail("jupyter lab ended before it served")
    _listens(found[0])
    yield Lab(folder, found[0])
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    assert not list(temporary.glob("labkit-lab-*")), "it leaves nothing behind"


def _listens(address: str) -> None:
    """Wait until it does: Jupyter says its address before it binds it."""
    parts, until = urlsplit(address), time.monotonic() + 60
    with socket.socket() as asking:
        while asking.connect_ex((parts.hostname, parts.port)):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_it_serves_the_folder_with_labkits_settings_and_kernel(lab: Lab) -> None:
    def served(path: str) -> Any:
        request = urllib.request.Request(f"{lab.address}{path}", headers={"Authorization": f"token {TOKEN}"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            return json.load(answer)

    assert sorted(path.name for path in (lab.folder / "notebooks").iterdir()) == SHIPPED
    assert sorted(each["name"] for each in served("api/contents/notebooks")["content"]) == SHIPPED
    assert served("api/kernelspecs")["kernelspecs"]["python3"]["spec"]["argv"][0] == sys.executable
    documents = served("lab/api/settings/@jupyterlab/docmanager-extension:plugin")["schema"]["properties"]
    assert documents["defaultViewers"]["default"] == {"python": "Jupytext Notebook"}


@pytest.mark.browser
def test_the_first_notebook_opens_as_one_beside_its_folder(lab: Lab, chromium_path: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(f"{lab.address}?token={TOKEN}")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
        page.wait_for_selector(".jp-DirListing-item[title*='recompute_study.py']", timeout=90_000)
        assert page.url == f"{lab.address}lab/tree/notebooks/recompute_study.py"
        assert page.locator(".jp-Dialog").count() == 0
        browser.close()
