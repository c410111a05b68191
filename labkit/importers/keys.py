"""A mapping that somebody else wrote, read key by key: of the right type or refused, and nothing overlooked."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from labkit.errors import InputError, nearest
from labkit.workload.workload import shown

_MOST_NAMED = 40
"""Unknown keys that are named one by one."""


class Keys:
    """Typed readings of a mapping. What nobody has read is `left`.

    A key that is null, or missing, is its default; without one it is refused.

    >>> keys = Keys({"num_hidden_layers": 32, "colour": "red"}, "config.json")
    >>> keys.integer("num_hidden_layers"), list(keys.left())
    (32, ['colour'])

    Raises:
        InputError: a value is missing, of another type, or out of bounds, in one sentence.
    """

    def __init__(self, mapping: Mapping[str, Any], source: str, within: str = "") -> None:
        self.mapping = mapping
        self.source = source
        self._within = within
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self.mapping.get(name) is not None

    def plain(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        self._read.add(name)
        value = self.mapping.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**40) -> int:
        """A whole number; `100.0`, as some write it, is one."""
        value = self._needed(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self._wrong(name, "a whole number", value)
        if not least <= value <= most:
            bound = f"at least {least}" if value < least else f"at most {most}"
            raise self._wrong(name, f"a whole number of {bound}", value)
        return value

    def optional_integer(self, name: str, *, least: int = 1, most: int = 2**40) -> int | None:
        """The same, or None where there is none."""
        self._read.add(name)
        return self.integer(name, least=least, most=most) if name in self else None

    def number(self, name: str, default: float | None = None, *, least: float = 0.0, most: float = 1e12) -> float:
        """A finite number."""
        value = self._needed(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, "a number", value)
        if not least <= value <= most:
            raise self._wrong(
                name, f"a number of at {f'least {least:g}' if value < least else f'most {most:g}'}", value
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.plain(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text."""
        value = self._needed(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def choice(self, name: str, valid: Collection[str], default: str | None = None) -> str:
        """One of some texts."""
        value = self.text(name, default)
        if value not in valid:
            raise InputError(f"{self._place(name)}: {shown(value)} is not known here{nearest(value[:80], valid)}")
        return value

    def integers(self, name: str, *, most: int) -> list[int]:
        """A list of whole numbers below `most`; empty where there is none."""
        value = self.plain(name, [])
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each < most for each in value):
            raise self._wrong(name, f"a list of whole numbers below {most}", value)
        return value

    def texts(self, name: str, valid: Collection[str], *, length: int | None = None) -> list[str]:
        """A list of texts, each one of `valid`; as many as are wanted."""
        value = self.plain(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts", value)
        for each in value:
            if each not in valid:
                raise InputError(f"{self._place(name)}: {shown(each)} is not known here{nearest(each[:80], valid)}")
        if length is not None and len(value) != length:
            raise InputError(f"{self._place(name)}: it names {len(value)} layers of {length}")
        return value

    def part(self, name: str) -> "Keys":
        """A mapping within; empty where there is none."""
        value = self.plain(name, {})
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self._wrong(name, "a mapping of keys to values", value)
        return Keys(value, self.source, f"{self._within}{name}.")

    def left(self, known: Collection[str] = ()) -> Iterator[str]:
        """Keys that nobody has read and that are not known to be harmless; nulls say nothing."""
        return (
            name for name, value in self.mapping.items() if value is not None and name not in self._read | set(known)
        )

    def named(self, name: str) -> str:
        """A key and its value, as a note shows them."""
        value = self.mapping.get(name)
        text = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
        return f"{self._within}{name[:80]} {text or shown(value)}"

    def unknown(self, known: Collection[str]) -> list[str]:
        """The keys that are `left`, each as a note."""
        left = list(self.left(known))
        notes = [f"{self.named(name)}: labkit does not know what it decides" for name in left[:_MOST_NAMED]]
        return notes + ([f"{len(left) - _MOST_NAMED} more such keys"] if len(left) > _MOST_NAMED else [])

    def _needed(self, name: str, default: Any) -> Any:
        value = self.plain(name, default)
        if value is None:
            raise InputError(f"{self._place(name)} is missing")
        return value

    def _place(self, name: str) -> str:
        return f"{self.source}: {self._within}{name}"

    def _wrong(self, name: str, expected: str, value: object) -> InputError:
        return InputError(f"{self._place(name)}: should be {expected} (got {shown(value)})")
