import io

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from labkit.console import Terminal, printable


@given(st.text())
def test_nothing_unreadable_is_left_and_what_is_readable_stays(text: str) -> None:
    assert all(each.isprintable() or each == "\n" for each in printable(text))
    readable = "".join(each for each in text if each.isprintable() or each == "\n")
    assert printable(readable) == readable


def test_readable_text_is_untouched() -> None:
    assert printable("größe 4 × 2 = 8\nnext line") == "größe 4 × 2 = 8\nnext line"


def test_text_in_tables_keeps_richs_styles_and_none_of_its_own() -> None:
    out = io.StringIO()
    table = Table("name")
    table.add_row(Text("\x1b[2Jclear", style="bold"))
    Terminal(file=out, force_terminal=True, width=60, color_system="standard").print(table)
    assert "\\x1b[2J" in out.getvalue()
    assert "\x1b[2J" not in out.getvalue()
    assert "\x1b[1m" in out.getvalue()
