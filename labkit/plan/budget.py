"""`Budget`: what a rank may allocate, as people write it."""

import re
from typing import NamedTuple, Self

from labkit.errors import InputError, nearest
from labkit.workload.gpu import GPUS


class Budget(NamedTuple):
    """What a rank may allocate."""

    name: str
    bytes: int

    @classmethod
    def read(cls, text: str) -> Self:
        """`80GB`, `74.5 GiB`, a number of bytes, or a GPU's name.

        Raises:
            InputError: it is none of these.
        """
        if text in GPUS:
            return cls.of(text)
        found = _SIZE.fullmatch(text.strip())
        nbytes = round(float(found[1]) * _UNITS[(found[2] or "B").lower()]) if found else 0
        if not _LEAST_BYTES <= nbytes < _MOST_BYTES:
            such = f"80GB, 74.5GiB or {next(iter(GPUS))}"
            meant = nearest(text[:80].strip().lower(), GPUS) if text[:1].isalpha() else ""
            meant = meant if "mean" in meant else ""
            raise InputError(f"budget {text[:80]!r} is no amount of memory; use one such as {such}{meant}")
        return cls(text.strip(), nbytes)

    @classmethod
    def of(cls, gpu: str) -> Self:
        """All of a GPU's memory."""
        return cls(GPUS[gpu].name, GPUS[gpu].total_memory_bytes)


_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,9})?)\s*(B|[KMGT]i?B)?", re.IGNORECASE | re.ASCII)
_UNITS = {"b": 1} | {
    f"{letter}{binary}b": base**power
    for power, letter in enumerate("kmgt", 1)
    for binary, base in (("", 1000), ("i", 1024))
}
_LEAST_BYTES, _MOST_BYTES = 2**20, 2**50
"""Less is a number whose unit was forgotten."""
