"""Terminals: what labkit prints there, without the control characters that a name or a file may smuggle in."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


def printable(text: str) -> str:
    r"""`text` with every character that is not for reading written as its escape; blanks and line ends stay.

    >>> printable("\x1b[31mred\x1b[0m")
    '\\x1b[31mred\\x1b[0m'
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode("ascii") for each in text
    )


_WIDE = 1000
"""Columns of a file or a pipe: nothing is cut or folded there."""


class Terminal(Console):
    """A rich console on which no text but rich's own styles can move the cursor, change colours or ring.

    What goes elsewhere than to a terminal is not cut to a width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if not self.is_terminal:
            self.width = _WIDE

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As the console's, with text made printable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
