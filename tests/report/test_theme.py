"""Colours that can be read: WCAG 2.2 AA contrast of all words in light and dark."""

import re

import pytest

from labkit.report.page import asset
from labkit.report.theme import PALETTES, Mode


def luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", PALETTES)
@pytest.mark.parametrize("ground", ["surface", "raised"])
@pytest.mark.parametrize("words", ["ink", "muted", "accent"])
def test_words_stand_out(mode: Mode, ground: str, words: str) -> None:
    palette = PALETTES[mode]._asdict()
    assert contrast(palette[words], palette[ground]) >= 4.5


def test_strings_of_code_stand_out() -> None:
    light, dark = re.findall(r"\.se \{ color: (#\w{6}); \}", asset("report.css"))
    assert contrast(light, PALETTES["light"].raised) >= 4.5
    assert contrast(dark, PALETTES["dark"].raised) >= 4.5


def test_known_contrasts() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
