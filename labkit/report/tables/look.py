"""One look for all tables.

Cells hold bare numbers with a plain minus sign and their unit in the column's head, so that a table pasted into a
spreadsheet arrives as numbers (a report's Copy and CSV leave out the commas of thousands). Column heads say where a
figure comes from.
"""

from collections.abc import Callable
from typing import Any, Final

import polars as pl
from great_tables import GT, style

from labkit.report.theme import FONT, PALETTES

NONE: Final = "–"
"""A cell without a value."""


def number[T: (int, float)](text: Callable[[T], str]) -> Callable[[T | None], str]:
    """A column's formatter: `text` of its values, a dash where there is none."""
    return lambda value: NONE if value is None else text(value)


def counted(value: float) -> str:
    """A whole number, its thousands apart."""
    return f"{value:,.0f}"


def signed(value: float, decimals: int) -> str:
    """The value with its sign, unless it rounds to zero."""
    rounded = round(value, decimals)
    return f"{rounded:+.{decimals}f}" if rounded else f"{0:.{decimals}f}"


def wrapped(ems: int) -> Any:
    """Of cells whose text may break anywhere, in a column of at least so many ems."""
    return style.css(f"min-width: {ems}em; white-space: normal; overflow-wrap: anywhere")


def table(frame: pl.DataFrame, name: str, groupname_col: str | None = None) -> GT:
    """A calm table in the light look (a report's style sheet lays the reader's over it), with a stable id.

    Rows that are equal in `groupname_col` stand below that value.
    """
    palette = PALETTES["light"]
    return (
        GT(frame, id=f"labkit-{name}", groupname_col=groupname_col)
        .opt_table_font(font=[name.strip(" '") for name in FONT.split(",")])
        .tab_options(
            table_font_color=palette.ink,
            table_background_color=palette.surface,
            table_font_size="13px",
            table_border_top_style="hidden",
            table_border_bottom_color=palette.line,
            table_body_hlines_color=palette.line,
            table_body_border_bottom_color=palette.line,
            column_labels_border_top_style="hidden",
            column_labels_border_bottom_color=palette.line,
            data_row_padding="6px",
            table_margin_left="0px",
        )
    )
