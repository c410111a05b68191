"""An executed notebook as one HTML file that needs nothing else: no network, no server, no fonts.

Everything a notebook may hold as plain data (text, errors, streams, chart specifications) is escaped. Only
`text/html` outputs, which their own makers escape, go in as they are; the content security policy names the two
scripts of the report by their hashes, so nothing else in the file can run. The larger, the charts' library, is packed;
the other unpacks it.
"""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from latex2mathml.converter import convert as mathml
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from labkit.report.bundle import packed, vega_bundle
from labkit.report.figure import VEGALITE
from labkit.report.heading import Heading
from labkit.report.page import asset, page, trusted, visible
from labkit.report.theme import vega_config

ABOUT: Final = "labkit-report"
"""Name of the `meta` element that holds a report's heading as JSON, for `labkit.report.index`."""
GENERATOR: Final = "labkit"
_SHOWN_FACTS: Final = 3
"""So many facts stand before the answer: the model, its layout and its batch, where one workload is asked about."""


def render(notebook: NotebookNode, heading: Heading) -> str:
    """The report of an executed notebook (nbformat 4), its first-level headings left to `heading`."""
    contents: list[tuple[str, str]] = []
    markdown = MarkdownWithMath(renderer=_Markdown(contents))
    # What the notebook says of itself before its first figure is folded away: a report begins with its answer.
    first = notebook.cells[:1]
    opening = first if first and first[0].cell_type == "markdown" and "\n## " not in f"\n{first[0].source}" else []
    introduction = _blocks(opening, markdown, contents)
    blocks = _slim(_blocks(notebook.cells[len(opening) :], markdown, contents))
    script, bundle = asset("report.js"), vega_bundle()
    return page(
        "report.html.j2",
        generator=GENERATOR,
        about_name=ABOUT,
        about=heading.model_dump_json(),
        kind=visible(heading.kind),
        title=visible(heading.title),
        description=visible(heading.description),
        facts=[{"name": visible(fact.name), "value": visible(fact.value)} for fact in heading.facts],
        shown=_SHOWN_FACTS,
        introduction=introduction,
        contents=[(identifier, visible(text)) for identifier, text in contents],
        blocks=blocks,
        themes=_json({"light": vega_config("light"), "dark": vega_config("dark")}),
        bundle=packed(bundle),
        script=trusted(script),
        script_hashes=trusted(f"{_hash(bundle)} {_hash(script)}"),
    )


_TABLE_STYLE = re.compile(r"<style>\n(#labkit-[\w-]+) .*?</style>", re.DOTALL)
_CELL = re.compile(r"\s*(<t[dr]\b(?: style=\"[^\"]*\")?)(?: headers=\"[^\"]*\")?")
"""Of a table's body: indented, and with the names of its heads again, which have their scope."""
_ANY_TABLE = ':is(#labkit-table, [id^="labkit-"])'
"""All of labkit's tables, with the weight of one's identifier."""


def _slim(blocks: list[Markup]) -> list[Markup]:
    """Great Tables writes its whole look (9 kB) into every table: here once for all that are alike.

    It also writes each cell's heads into the cell; those of large tables are as long as their figures.
    """
    looks: dict[str, None] = {}

    def kept(found: re.Match[str]) -> str:
        looks[found[0].replace(found[1], _ANY_TABLE)] = None
        return ""

    slim = [_CELL.sub(r"\1", block) if "gt_table" in block else block for block in blocks]
    bare = [trusted(_TABLE_STYLE.sub(kept, block)) for block in slim]
    return [trusted(style) for style in looks] + bare


class _Markdown(IPythonRenderer):  # type: ignore[misc]
    """Markdown without raw HTML; formulas as MathML; second-level headings listed as the report's contents."""

    def __init__(self, contents: list[tuple[str, str]]) -> None:
        super().__init__(escape=True, allow_harmful_protocols=False, exclude_anchor_links=True)
        self._contents = contents

    def heading(self, text: str, level: int, **attrs: Any) -> str:  # noqa: ARG002 (the base class's signature)
        if level == 1:
            return ""
        if level > 2:
            return f"<h{level}>{text}</h{level}>\n"
        identifier = f"section-{len(self._contents) + 1}"
        self._contents.append((identifier, trusted(text).striptags()))
        return f'<h2 id="{identifier}">{text}</h2>\n'

    def inline_math(self, body: str) -> str:
        return str(mathml(body))

    def block_math(self, body: str) -> str:
        return str(mathml(body, display="block"))


def _blocks(cells: Sequence[NotebookNode], markdown: MarkdownWithMath, contents: list[tuple[str, str]]) -> list[Markup]:
    return [trusted(visible(block)) for cell in cells for block in _cell(cell, markdown, contents)]


def _cell(cell: NotebookNode, markdown: MarkdownWithMath, contents: list[tuple[str, str]]) -> list[Markup]:
    if cell.cell_type == "markdown":
        return [trusted(markdown(cell.source))]
    if cell.cell_type != "code" or not cell.source.strip():
        return []
    code = trusted(Highlight2HTML(pygments_lexer="python")(cell.source))
    blocks = [Markup('<details class="lk-code"><summary>Code</summary>{}</details>').format(code)]
    section = contents[-1][1] if contents else ""
    return blocks + [block for output in cell.outputs if (block := _output(output, markdown, section))]


def _output(output: NotebookNode, markdown: MarkdownWithMath, section: str) -> Markup:
    if output.output_type == "stream":
        return Markup('<pre class="lk-stream">{}</pre>').format(strip_ansi(output.text))
    if output.output_type == "error":
        trace = strip_ansi("\n".join(output.traceback)) or f"{output.ename}: {output.evalue}"
        return Markup('<pre class="lk-error">{}</pre>').format(trace)
    data: Mapping[str, Any] = output.data
    makers: dict[str, Callable[[Any], Markup]] = {
        VEGALITE: _figure,
        "text/html": lambda html: _shown(html, section),
        "text/markdown": lambda text: _shown(markdown(text), section),
        "image/png": _image,
        "text/plain": Markup("<pre>{}</pre>").format,
    }
    return next((make(data[kind]) for kind, make in makers.items() if kind in data), Markup(""))


def _image(png: str) -> Markup:
    return Markup('<div class="lk-output"><img src="data:image/png;base64,{}" alt=""></div>').format(
        "".join(png.split())
    )


_TABLE = Markup(' role="group" aria-label="{}" tabindex="0"')
"""Wide tables scroll in their own box, which the keyboard must be able to reach."""


def _shown(content: str, section: str) -> Markup:
    kind = _TABLE.format(f"Table: {section}" if section else "Table") if "<table" in content else ""
    return Markup('<div class="lk-output"{}>{}</div>').format(kind, trusted(content))


_FIGURE = Markup(
    '<figure class="lk-figure" id="{name}"><div class="lk-chart"></div>'
    '<figcaption><p>{caption}</p><span class="lk-exports">{buttons}</span></figcaption>'
    '<details class="lk-data"><summary>Data</summary></details>'
    '<script type="application/json">{spec}</script></figure>'
)
_BUTTON = Markup('<button type="button" data-kind="{kind}" title="Save the {what} of this chart">{label}</button>')


def _figure(spec: Mapping[str, Any]) -> Markup:
    words = spec["usermeta"]["labkit"]
    buttons = Markup("").join(
        _BUTTON.format(kind=kind, what=what, label=kind.upper())
        for kind, what in (("png", "image"), ("svg", "drawing"), ("csv", "data"))
    )
    # The page has its own Vega-Lite and sets the look of the reader's mode.
    bare = {key: value for key, value in spec.items() if key not in ("$schema", "config")}
    return _FIGURE.format(name=words["name"], caption=words["caption"], buttons=buttons, spec=_json(bare))


def _json(value: object) -> Markup:
    """JSON for a script element: nothing in it can end the element or open another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return trusted(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
