"""What tutorial, how-to pages and the memory model show is what happens; links lead somewhere, on GitHub too."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.cli import main
from tests.docs.blocks import DOCS, PAGES, ROOT, agrees, blocks, run

DOCUMENTS = (*sorted(DOCS.rglob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING")))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize("traces", [False, pytest.param(True, marks=pytest.mark.pages)])
def test_a_page_shows_what_its_code_prints(
    page: Path, traces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block, printed in run(page.read_text(), traces=traces):
        if not agrees(block.body, printed):
            assert block.body == printed, f"{page.name}: `python -m tests.docs.blocks` writes what it prints"


def shell_commands() -> Iterator[tuple[str, str]]:
    """Every command that a page shows and no test runs, with the page."""
    for page in PAGES:
        for block in blocks(page.read_text()):
            if block.language == "sh":
                yield from ((page.name, line) for line in block.body.splitlines())


@pytest.mark.parametrize(("page", "command"), list(shell_commands()))
def test_a_command_that_is_not_run_exists(page: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "labkit":
        with pytest.raises(SystemExit) as left:
            main([*words, "--help"])
        assert left.value.code == 0, capsys.readouterr().err
    else:
        assert command == "source .venv/bin/activate"


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", each).lower()).replace(" ", "-") for each in headings
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}, a heading that is not there"
