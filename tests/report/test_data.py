import math
from decimal import Decimal

import polars as pl
import pytest

from labkit.report.data import LONGEST_LABEL, clean, display_labels


def test_short_labels_stay_as_they_are() -> None:
    assert display_labels(["[]", "[moe_act]", "[]"]) == {"[]": "[]", "[moe_act]": "[moe_act]"}


def test_long_labels_are_cut_and_stay_distinct() -> None:
    labels = display_labels(["x" * 10_000, "x" * 9_999, "x" * 9_998 + "\n\ny"])
    assert len(set(labels.values())) == 3
    assert all(len(label) <= LONGEST_LABEL + 4 for label in labels.values())
    assert labels["x" * 9_999].endswith("… (2)")


def test_labels_are_one_line() -> None:
    assert display_labels(["a\n\t b"])["a\n\t b"] == "a b"


def test_clean_keeps_only_the_columns_shown_and_only_finite_numbers() -> None:
    frame = pl.DataFrame(
        {"a": [1.5, math.nan, math.inf], "b": [1, None, 3], "c": ["x", "y", "z"], "d": [[1], [2], [3]]}
    )
    cleaned = clean(frame, ["a", "b", "c"])
    assert cleaned.to_dict(as_series=False) == {"a": [1.5, None, None], "b": [1, None, 3], "c": ["x", "y", "z"]}


def test_clean_turns_decimals_into_numbers() -> None:
    frame = pl.DataFrame({"a": [Decimal("1.25"), None]})
    assert clean(frame, ["a"]).to_dict(as_series=False) == {"a": [1.25, None]}


def test_clean_refuses_what_a_chart_cannot_say() -> None:
    frame = pl.DataFrame({"a": [[1], [2]]})
    with pytest.raises(ValueError, match="column 'a' of type List"):
        clean(frame, ["a"])
