r"""The lines of a text that may matter, of any size, with the rank that wrote each.

Logs of many ranks are one stream: lines carry a prefix (`[rank3]:` of PyTorch, `[default3]:` of torchrun's `--tee`,
`3: ` of `srun --label`, `[1,3]<stderr>:` of mpirun), or two ranks share a line. A line is cut where another rank
begins, where a carriage return goes back over it, and where a line end was written as `\n` (logs in JSON).
"""

import re
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

_BLOCK = 2**20
_LONGEST = 2**16
"""Bytes of a line; a longer one is read in pieces."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,8}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_])|\x08")
_CUTS = re.compile(r"\r|\n|\\n|(?=\[(?:rank|default|Rank )\d{1,7}\])")
_CUT = re.compile(r"[\r\\]|.\[[rdR]", re.DOTALL)
"""Where there may be a cut."""
_PREFIX = re.compile(
    r"\s*(?:\[rank(?P<rank>\d{1,7})\]:?"
    r"|\[[A-Za-z_]{1,16}(?P<local>\d{1,7})\]:"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]{0,10}Z?\]?:?(?=\s)"
    r"|\[\d{1,7},(?P<mpi>\d{1,7})\]<std(?:err|out)>:?"
    r"|(?P<task>\d{1,7}):(?=\s))"
)

_MOST_PREFIXES = 8


class Line(NamedTuple):
    """A line, or a part of one that one rank wrote."""

    number: int
    """From 1."""
    text: str
    """Without prefixes, colours and line end."""
    rank: int | None
    """As its prefix says: the process's global rank where it is PyTorch's, else the launcher's number."""


class Lines:
    """The lines of a binary stream that contain one of `keys`, and those that somebody wants to `follow`."""

    def __init__(self, stream: IO[bytes], keys: Sequence[str]) -> None:
        self._stream = stream
        self._keys = list(keys)
        self._following = 0

    def follow(self, lines: int) -> None:
        """Also give the next `lines` lines, whatever is in them."""
        self._following = max(self._following, lines)

    def __iter__(self) -> Iterator[Line]:
        number = 1
        for block, ends in self._blocks():
            lines = block.decode("utf-8", errors="replace").split("\n")
            for at in self._wanted(lines):
                yield from _parts(number + at, lines[at])
            number += len(lines) - (not ends)

    def _blocks(self) -> Iterator[tuple[bytes, bool]]:
        """Whole lines, some at a time, without the last one's end; False where there is none: the line goes on."""
        rest = b""
        while more := self._stream.read(_BLOCK):
            cut = more.rfind(b"\n")
            if cut >= 0:
                yield rest + more[:cut], True
                rest = more[cut + 1 :]
            else:
                rest += more
            while len(rest) > _LONGEST:
                yield rest[:_LONGEST], False
                rest = rest[_LONGEST:]
        if rest:
            yield rest, True

    def _wanted(self, lines: Sequence[str]) -> Iterator[int]:
        """Which of them matter: a search for all keys at once."""
        from polars import Series, String

        at = 0
        for hit in [*Series(lines, dtype=String).str.contains_any(self._keys).arg_true(), len(lines)]:
            while at < hit and self._following:
                self._following -= 1
                yield at
                at += 1
            if at <= hit < len(lines):
                self._following = max(0, self._following - 1)
                yield hit
                at = hit + 1


def _parts(number: int, text: str) -> Iterator[Line]:
    """A line cut where ranks and carriage returns cut it, and to what is read at once."""
    if "\x1b" in text or "\x08" in text:
        text = _ESCAPES.sub("", text)
    rank = None
    for part in _CUTS.split(text) if _CUT.search(text) else [text]:
        end, found = _prefixes(part)
        rank = rank if found is None else found
        for start in range(end, len(part), _LONGEST):
            if piece := part[start : start + _LONGEST].rstrip():
                yield Line(number, piece, rank)


def _prefixes(text: str) -> tuple[int, int | None]:
    """Where the text behind its prefixes begins, and the rank they name; PyTorch's own knows best."""
    end = 0
    ranks: dict[str, int] = {}
    for _ in range(_MOST_PREFIXES):
        found = _PREFIX.match(text, end)
        if found is None:
            break
        end = found.end()
        ranks |= {name: int(value) for name, value in found.groupdict().items() if value is not None}
    return end, next((ranks[name] for name in ("rank", "mpi", "task", "local") if name in ranks), None)
