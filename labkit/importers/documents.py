"""Files and standard input as text or plain data; nothing in them is executed."""

import json
import sys
from pathlib import Path
from typing import Any

from labkit.errors import InputError
from labkit.files import read_regular
from labkit.workload.files import text_of, unique_pairs

_MAXIMUM_BYTES = 2**20
_LONGEST_INTEGER = 100
"""Digits; more are refused before Python converts them."""


def source_name(path: Path | None) -> str:
    """What messages call a file; None is standard input."""
    return "standard input" if path is None else str(path)


def text_from(path: Path | None, maximum_bytes: int = _MAXIMUM_BYTES) -> str:
    """The text of a file, or of standard input.

    Raises:
        InputError: it cannot be read, is too large, or is no text in UTF-8.
    """
    source = source_name(path)

    def read() -> bytes:
        content = sys.stdin.buffer.read(maximum_bytes + 1) if path is None else read_regular(path, maximum_bytes)
        if len(content) > maximum_bytes:
            raise InputError(f"{source}: larger than {maximum_bytes / 2**20:g} MiB")
        return content

    return text_of(read, source, encoding="utf-8-sig")


def parse_json(text: str, source: str) -> dict[str, Any]:
    """The object that a text in JSON is; `Infinity` and `NaN`, which published configurations have, are read.

    Raises:
        InputError: it is not JSON, has a key twice, an integer of more than 63 bits, or is no object.
    """

    def integer(digits: str) -> int:
        if len(digits) <= _LONGEST_INTEGER and (value := int(digits)).bit_length() <= 63:
            return value
        raise InputError(f"{source}: an integer of more than 63 bits")

    try:
        data = json.loads(text, object_pairs_hook=unique_pairs(source), parse_int=integer)
    except json.JSONDecodeError as error:
        where = f"(line {error.lineno}, column {error.colno})"
        raise InputError(f"{source}: not valid JSON: {error.msg} {where}") from None
    except RecursionError:
        raise InputError(f"{source}: not valid JSON: nested too deeply") from None
    if not isinstance(data, dict):
        raise InputError(f"{source}: expected a JSON object of keys and values")
    return data
