"""One look for charts, tables and reports: Okabe-Ito colours, system fonts, light and dark.

Colour never stands alone: sources also differ in shape and row, categories also carry the number of their place in
the stack. A chart carries the light look, so that it is legible wherever Jupyter shows it; a report swaps in the
reader's.
"""

from typing import Any, Literal, NamedTuple

Mode = Literal["light", "dark"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MONOSPACE = "ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Palette(NamedTuple):
    """The colours around the data."""

    ink: str
    """Text."""
    muted: str
    """Secondary text and axes."""
    line: str
    """Rules and grids."""
    surface: str
    """What charts and tables lie on."""
    raised: str
    """Code, buttons and table headers."""
    accent: str
    """Links, focus and the row to try first."""


PALETTES: dict[Mode, Palette] = {
    "light": Palette("#1c2128", "#57606a", "#dfe3e8", "#ffffff", "#f5f7f9", "#0072b2"),
    "dark": Palette("#e6e9ed", "#a0a9b4", "#323941", "#14171b", "#1d2228", "#56b4e9"),
}


class Look(NamedTuple):
    """How a source of figures is drawn."""

    colour: str
    shape: str


SOURCES: dict[str, Look] = {
    "estimated": Look("#e69f00", "diamond"),
    "traced": Look("#0072b2", "circle"),
    "measured": Look("#cc79a7", "triangle-up"),
    "recorded": Look("#d55e00", "cross"),
    "published": Look("#009e73", "square"),
}
"""Where a figure comes from, in the order charts and tables show it."""

MEMORY_PARTS = {
    "allocated": "#0072b2",
    "reserved, not allocated": "#56b4e9",
    "outside PyTorch": "#e69f00",
    "other processes": "#d55e00",
    "free": "#d3d8dd",
}
"""Whose a GPU's memory is when a request fails, in the order and by the numbers of their places."""


class Stroke(NamedTuple):
    """How a line is drawn."""

    colour: str
    dash: tuple[int, ...]


SERIES: dict[str, Stroke] = {
    "allocated": Stroke("#0072b2", (1, 0)),
    "reserved": Stroke("#8b929b", (5, 3)),
    "awaiting": Stroke("#d55e00", (1, 3)),
}
"""What an allocator counts: in tensors, taken from the device, freed but perhaps still used by another stream."""

LOOKS = (
    Look("#009e73", "circle"),
    Look("#e69f00", "diamond"),
    Look("#0072b2", "triangle-up"),
    Look("#56b4e9", "triangle-down"),
    Look("#cc79a7", "cross"),
    Look("#d55e00", "square"),
    Look("#5d3a9b", "triangle-right"),
    Look("#8b929b", "triangle-left"),
)
"""How things that are no sources are told apart, in the order a chart names them; more of them begin anew."""

FITTING = {
    "fits": Look("#009e73", "circle"),
    "segments do not fit": Look("#e69f00", "diamond"),
    "margin does not fit": Look("#cc79a7", "triangle-up"),
    "peak does not fit": Look("#d55e00", "square"),
}
"""Whether something is within a budget, and if not from where on."""

DIVERGING = ("#56b4e9", "#f5f7f9", "#e69f00")
"""Below, at and above a middle; black is legible on all of it."""

VERDICTS = {"right": "#009e73", "tight": "#e69f00", "wrong": "#d55e00"}
"""Beside words that say the same: it fits, it fits without a margin, it does not fit or cannot run."""

PUBLISHED_TOTAL = "published total"
"""The one category of a published figure: nobody published what holds it."""

SAFETY_MARGIN = "safety margin"
"""What is set aside above an estimated peak; no part of it."""

_CATEGORY_COLOURS = {
    "parameters": "#0072b2",
    "gradient buffers": "#56b4e9",
    "optimizer state": "#009e73",
    "retained: attention": "#e69f00",
    "retained: mlp": "#f0e442",
    "retained: moe": "#d55e00",
    "retained: other": "#cc79a7",
    "transient": "#8b929b",
    "optimizer step": "#5f6771",
    "workspaces": "#adb4bc",
    "allocator remainders": "#d3d8dd",
    PUBLISHED_TOTAL: "#c3c9d0",
    "above the estimate": "#5d3a9b",
    SAFETY_MARGIN: "#ead9f2",
}

STACK = tuple(_CATEGORY_COLOURS)
"""Everything a bar can be made of, from the bottom up: the categories, and before the rarest what was published."""


def category_number(category: str) -> int:
    """Its number in every legend and bar, the same in all charts."""
    return STACK.index(category) + 1


def category_colour(category: str) -> str:
    """Fill of a category."""
    return _CATEGORY_COLOURS[category]


def text_on(colour: str) -> str:
    """Black or white, whichever is easier to read on `colour` (WCAG 2 relative luminance)."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def vega_config(mode: Mode) -> dict[str, Any]:
    """The Vega-Lite `config` object of one mode.

    Marks name the styles `note` (a label beside a mark), `segment` (a part of a stack) and `guide` (a rule that is
    no data) instead of colours, so that one chart serves both modes.
    """
    palette = PALETTES[mode]
    return {
        "background": palette.surface,
        "font": FONT,
        "view": {"stroke": None},
        "title": {
            "color": palette.ink,
            "fontSize": 14,
            "fontWeight": 600,
            "anchor": "start",
            "frame": "bounds",
            "offset": 14,
        },
        "axis": {
            "labelColor": palette.muted,
            "titleColor": palette.muted,
            "labelFontSize": 11.5,
            "titleFontSize": 11.5,
            "titleFontWeight": "normal",
            "gridColor": palette.line,
            "domainColor": palette.line,
            "tickColor": palette.line,
            "labelLimit": 170,
            "labelOverlap": "greedy",
        },
        "axisY": {"labelColor": palette.ink},
        "legend": {
            "labelColor": palette.ink,
            "titleColor": palette.muted,
            "labelFontSize": 11.5,
            "titleFontSize": 11.5,
            "titleFontWeight": "normal",
            "labelLimit": 200,
            "symbolStrokeWidth": 1.5,
            "titleLimit": 240,
            "columns": 3,
            # On a phone long entries have room to the left of where the plot begins.
            "layout": {"top": {"anchor": {"signal": "width < 200 ? 'end' : 'start'"}}},
        },
        "style": {
            "note": {"color": palette.muted, "fontSize": 11},
            "segment": {"stroke": palette.surface, "strokeWidth": 0.7},
            "guide": {"color": palette.ink, "strokeWidth": 1},
            "marker": {"color": palette.ink},
            "band": {"color": palette.ink, "opacity": 0.06},
            "load": {"color": palette.accent},
        },
    }


def css_variables(mode: Mode) -> str:
    """The palette as CSS custom properties (`--lk-ink: ...;`)."""
    return " ".join(f"--lk-{name}: {value};" for name, value in PALETTES[mode]._asdict().items())
