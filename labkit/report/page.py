"""The frame of every page that labkit writes: one head, one policy, one look."""

from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from labkit.report.theme import FONT, MONOSPACE, css_variables

_HIDDEN = {*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_SHOWN = (_HIDDEN | set(range(0xD800, 0xE000))) - {ord(each) for each in "\t\n\r"}
_ESCAPES = {code: chr(code).encode("unicode_escape").decode("ascii") for code in _SHOWN}


def visible(text: str) -> str:
    r"""The text with what would move or hide other text (control characters, reordering marks) as its escapes.

    >>> visible("\u202edlihc")
    '\\\\u202edlihc'
    """
    return text.translate(_ESCAPES)


def page(template: str, **values: Any) -> str:
    """A page of `assets/TEMPLATE`, which extends `page.html.j2`; text among the values is escaped."""
    environment = Environment(
        loader=PackageLoader("labkit.report", "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template(template).render(
        light=trusted(css_variables("light")),
        dark=trusted(css_variables("dark")),
        font=trusted(FONT),
        monospace=trusted(MONOSPACE),
        css=trusted(asset("report.css")),
        **values,
    )


def trusted(text: str) -> Markup:
    """Text that is HTML already: labkit's own files, what a renderer has escaped, or a notebook's HTML output."""
    return Markup(text)  # noqa: S704 (the one place where text becomes HTML unescaped)


def asset(name: str) -> str:
    """A file of `labkit/report/assets`."""
    return (files("labkit.report") / "assets" / name).read_text(encoding="utf-8")
