"""An executed notebook as one HTML file that needs nothing else: no network, no server, no fonts.

Everything a notebook may hold as plain data (text, errors, streams, chart specifications) is escaped. Only
`text/html` outputs, which their own makers escape, go in as they are; the content security policy names the two
scripts of the report by their hashes, so nothing else in the file can run.
"""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from latex2mathml.converter import convert as mathml
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode

from labkit.report.bundle import vega_bundle
from labkit.report.figure import VEGALITE
from labkit.report.heading import Heading
from labkit.report.theme import FONT, MONOSPACE, css_variables, vega_config


def render(notebook: NotebookNode, heading: Heading) -> str:
    """The report of an executed notebook (nbformat 4), its first-level headings left to `heading`."""
    contents: list[tuple[str, str]] = []
    markdown = MarkdownWithMath(renderer=_Markdown(contents))
    blocks = [block for cell in notebook.cells for block in _cell(cell, markdown)]
    script, bundle = _asset("report.js"), vega_bundle()
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(
        _asset("report.html.j2")
    )
    return page.render(
        title=heading.title,
        description=heading.description,
        facts=heading.facts,
        contents=contents,
        blocks=blocks,
        light=_trusted(css_variables("light")),
        dark=_trusted(css_variables("dark")),
        font=_trusted(FONT),
        monospace=_trusted(MONOSPACE),
        css=_trusted(_asset("report.css")),
        themes=_json({"light": vega_config("light"), "dark": vega_config("dark")}),
        bundle=_trusted(bundle),
        script=_trusted(script),
        script_hashes=_trusted(f"{_hash(bundle)} {_hash(script)}"),
    )


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
        self._contents.append((identifier, _trusted(text).striptags()))
        return f'<h2 id="{identifier}">{text}</h2>\n'

    def inline_math(self, body: str) -> str:
        return str(mathml(body))

    def block_math(self, body: str) -> str:
        return str(mathml(body, display="block"))


def _cell(cell: NotebookNode, markdown: MarkdownWithMath) -> list[Markup]:
    if cell.cell_type == "markdown":
        return [_trusted(markdown(cell.source))]
    if cell.cell_type != "code" or not cell.source.strip():
        return []
    code = _trusted(Highlight2HTML(pygments_lexer="python")(cell.source))
    blocks = [Markup('<details class="lk-code"><summary>Code</summary>{}</details>').format(code)]
    return blocks + [block for output in cell.outputs if (block := _output(output, markdown))]


def _output(output: NotebookNode, markdown: MarkdownWithMath) -> Markup:
    if output.output_type == "stream":
        return Markup('<pre class="lk-stream">{}</pre>').format(strip_ansi(output.text))
    if output.output_type == "error":
        trace = strip_ansi("\n".join(output.traceback)) or f"{output.ename}: {output.evalue}"
        return Markup('<pre class="lk-error">{}</pre>').format(trace)
    data: Mapping[str, Any] = output.data
    makers: dict[str, Callable[[Any], Markup]] = {
        VEGALITE: _figure,
        "text/html": _shown,
        "text/markdown": lambda text: _shown(markdown(text)),
        "image/png": _image,
        "text/plain": Markup("<pre>{}</pre>").format,
    }
    return next((make(data[kind]) for kind, make in makers.items() if kind in data), Markup(""))


def _image(png: str) -> Markup:
    return Markup('<div class="lk-output"><img src="data:image/png;base64,{}" alt=""></div>').format(
        "".join(png.split())
    )


def _shown(content: str) -> Markup:
    # Wide tables scroll in their own box, which the keyboard must be able to reach.
    kind = ' role="group" aria-label="Table" tabindex="0"' if "<table" in content else ""
    return Markup('<div class="lk-output"{}>{}</div>').format(_trusted(kind), _trusted(content))


_FIGURE = Markup(
    '<figure class="lk-figure" id="{name}"><div class="lk-chart"></div>'
    '<figcaption><p>{caption}</p><span class="lk-exports">{buttons}</span></figcaption>'
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
    return _trusted(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _trusted(text: str) -> Markup:
    """Text that is HTML already: labkit's own files, what a renderer has escaped, or a notebook's HTML output."""
    return Markup(text)  # noqa: S704 (the one place where text becomes HTML unescaped)


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (files("labkit.report") / "assets" / name).read_text(encoding="utf-8")
