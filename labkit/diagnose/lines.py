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
_PREFIX = re.compile(
    r"\s*(?:\[rank(?P<rank>\d{1,7})\]:?"
    r"|\[[A-Za-z_]{1,16}(?P<local>\d{1,7})\]:"
    r"|\[\d{1,7},(?P<mpi>\d{1,7})\]<std(?:err|out)>:?"
    r"|(?P<task>\d{1,7}):(?=\s))"
)


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

    def __init__(self, stream: IO[bytes], keys: Sequence[bytes]) -> None:
        self._stream = stream
        self._keys = keys
        self._following = 0
        self._number = 1

    def follow(self, lines: int) -> None:
        """Also give the next `lines` lines, whatever is in them."""
        self._following = max(self._following, lines)

    def __iter__(self) -> Iterator[Line]:
        for block in self._blocks():
            for raw in self._wanted(block):
                yield from _parts(self._number, raw)

    def _blocks(self) -> Iterator[bytes]:
        """Whole lines, some at a time."""
        rest = b""
        while more := self._stream.read(_BLOCK):
            cut = more.rfind(b"\n") + 1
            if cut:
                yield rest + more[:cut]
                rest = more[cut:]
            else:
                rest += more
            while len(rest) > _LONGEST:
                yield rest[:_LONGEST]
                rest = rest[_LONGEST:]
        if rest:
            yield rest

    def _wanted(self, block: bytes) -> Iterator[bytes]:
        """Its lines that matter, cut to what is read at once; `_number` is that of the line at `at`."""
        at, hits = 0, iter(self._hits(block))
        hit = next(hits, len(block))
        while at < len(block):
            while hit < at:
                hit = next(hits, len(block))
            start = at if self._following else hit
            self._number += block.count(b"\n", at, start)
            at = start
            if at >= len(block):
                return
            end = block.find(b"\n", at)
            end = len(block) if end < 0 else end
            self._following = max(0, self._following - 1)
            for piece in range(at, end, _LONGEST):
                yield block[piece : min(end, piece + _LONGEST)]
            self._number += block.count(b"\n", end, end + 1)
            at = end + 1

    def _hits(self, block: bytes) -> list[int]:
        """Where lines with a key begin."""
        starts = set()
        for key in self._keys:
            found = block.find(key)
            while found >= 0:
                starts.add(block.rfind(b"\n", 0, found) + 1)
                after = block.find(b"\n", found)
                found = block.find(key, after) if after >= 0 else -1
        return sorted(starts)


def _parts(number: int, raw: bytes) -> Iterator[Line]:
    """A line cut where ranks and carriage returns cut it."""
    text = _ESCAPES.sub("", raw.decode("utf-8", errors="replace"))
    rank = None
    for part in _CUTS.split(text):
        end, found = _prefixes(part)
        rank = rank if found is None else found
        if part[end:].strip():
            yield Line(number, part[end:].rstrip(), rank)


def _prefixes(text: str) -> tuple[int, int | None]:
    """Where the text behind its prefixes begins, and the rank they name; PyTorch's own knows best."""
    end = 0
    ranks: dict[str, int] = {}
    while (found := _PREFIX.match(text, end)) and len(ranks) < 8:
        end = found.end()
        ranks |= {name: int(value) for name, value in found.groupdict().items() if value is not None}
    return end, next((ranks[name] for name in ("rank", "mpi", "task", "local") if name in ranks), None)
