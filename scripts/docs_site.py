"""What MkDocs makes of this repository beside `docs/` (a hook of `mkdocs.yml`; `make docs`).

Pages that are made, not written: the command line's help, the palette of reports as CSS, and the documents at the root.
Links that leave `docs/` work on GitHub; here they lead to those pages, or become plain text where there is none.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from labkit.cli import app
from labkit.report.theme import FONT, MONOSPACE, PALETTES, Mode, css_variables

ROOT = Path(__file__).parent.parent

WITHOUT_DOCS = {
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "data/published/README.md": "project/published.md",
}
"""Documents of the repository that are not in `docs/`, and their page in the site."""

SCHEMES: dict[Mode, str] = {"light": "default", "dark": "slate"}
"""Material's names."""

_HELP_WIDTH = 88
_COMMAND_LINE = """# Command line

What `--help` says of every command. Exit codes: 0 done, 1 the work failed, 2 the input is wrong and nothing was
written, 130 stopped by Ctrl-C, SIGTERM or SIGHUP."""

_LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s]+)\)")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", flags=re.MULTILINE)
_FENCE = re.compile(r"^( *```.*?^ *```[^\n]*$)", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    files.append(File.generated(config, "assets/palette.css", content=palette()))
    for source, page in WITHOUT_DOCS.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Point links of the repository at pages of the site."""
    homes = {page: source for source, page in WITHOUT_DOCS.items()}
    uri = page.file.src_uri
    source = homes.get(uri, f"docs/{uri}")
    parts = _FENCE.split(markdown)
    return "".join(part if index % 2 else relinked(part, source, uri) for index, part in enumerate(parts))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Show an escaped bar in a table's code as a bar, as GitHub does."""
    return re.sub(r"<td.*?</td>", lambda cell: cell[0].replace("\\|", "|"), html, flags=re.DOTALL)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:  # noqa: ARG001
    """Let names in tables break behind their dots and underscores, so that a long one does not widen its column."""

    def breakable(cell: re.Match[str]) -> str:
        return re.sub(r"<code>[^<]*</code>", lambda code: re.sub(r"(?<=[._])(?=\w)", "<wbr>", code[0]), cell[0])

    return re.sub(r"<td.*?</td>", breakable, output, flags=re.DOTALL)


class Doctests(Extension):
    """Shows the examples in docstrings as code, wherever they stand in the text."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence them."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def relinked(markdown: str, source: str, uri: str) -> str:
    """Markdown of the file `source` of the repository as it stands on the page `uri` of the site."""

    def replaced(match: re.Match[str]) -> str:
        text, link = match[1], match[2]
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link) or not path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if target in WITHOUT_DOCS:
            page = WITHOUT_DOCS[target]
        elif target.startswith("docs/"):
            page = target.removeprefix("docs/")
        elif (ROOT / target).exists():
            return text
        else:
            return match[0]  # MkDocs says that it leads nowhere
        return f"[{text}]({posixpath.relpath(page, posixpath.dirname(uri))}{'#' * bool(anchor)}{anchor})"

    return _LINK.sub(replaced, markdown)


def command_line() -> str:
    """The `--help` of every command, as Markdown."""
    return "\n\n".join([_COMMAND_LINE, *_helps(get_command(app), ())]) + "\n"


def _helps(command: object, path: tuple[str, ...]) -> Iterator[str]:
    """A section for a command and for each below it."""
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="labkit", terminal_width=_HELP_WIDTH).output
    level = "#" * min(len(path) + 2, 3)
    yield f"{level} {' '.join(('labkit', *path))}\n\n```text\n{shown.strip()}\n```"
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            if not below.hidden:
                yield from _helps(below, (*path, name))


def palette() -> str:
    """The colours of reports (`labkit/report/theme.py`) as CSS, for both of Material's schemes."""
    schemes = [f'[data-md-color-scheme="{SCHEMES[mode]}"] {{ {css_variables(mode)} }}' for mode in PALETTES]
    return "\n".join([*schemes, f":root {{ --md-text-font: {FONT}; --md-code-font: {MONOSPACE}; }}", ""])
