"""The entries of allocator traces as columns: a snapshot of 200 MB has millions, which as dictionaries take gigabytes.

PyTorch writes one entry like another: the same fields in the same order. From each kind that was read opcode by opcode
a pattern is learned, which recognises the next ones in one go, wherever they lie one behind another.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def _counted(prefix: bytes, most: int) -> bytes:
    """An opcode that says in one byte how many follow, up to `most`."""
    return rb"%b(?:%b)" % (prefix, b"|".join(b"%b.{%d}" % (re.escape(bytes([n])), n) for n in range(most + 1)))


GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4}|%b)" % _counted(rb"\x8a", 8)
_INLINE_FRAME = rb"\}\x94\((?:%b|%b){0,40}+u" % (GET, _INT)
# Longer ones, which would be searched again for each pattern, are read opcode by opcode.
_FRAMES = rb"\]\x94(?:\((?:%b|%b){0,2000}+e|%ba)" % (GET, _INLINE_FRAME, GET)
_KINDS = {
    "reference": GET,
    "pair": rb"%b%b\x86\x94" % (_INT, _INT),
    "number": _INT,
    "frames": _FRAMES,
    "nothing": rb"\]\x94|[N\x88\x89]",
    "text": _counted(rb"\x8c", 63) + rb"\x94",
}
"""How the values of an entry's fields are written."""
_FIELD = re.compile(
    rb"(?P<key>%b)(?:%b)" % (GET, b"|".join(rb"(?P<%b>%b)" % (kind.encode(), _KINDS[kind]) for kind in _KINDS)),
    re.DOTALL,
)
_COLUMNS = {
    "action": ("action", ("reference",)),
    "addr": ("address", ("number",)),
    "device_free": ("address", ("number",)),
    "size": ("nbytes", ("number",)),
    "stream": ("stream", ("number",)),
    "time_us": ("time", ("number",)),
    "frames": ("frames", ("reference", "frames", "nothing")),
    "pool_id": ("pool", ("pair", "reference", "nothing")),
}
"""Where a field goes, and how it must be written for a pattern to be learned."""
_NAMES = ("action", "address", "nbytes", "stream", "time", "frames", "pool")
_TOKENS = re.compile(GET, re.DOTALL)
_REFERRING = re.compile(rb"\]\x94\(?(?:%b)*+[ae]?" % GET, re.DOTALL)
_WITH_FRAMES = re.compile(_FRAMES, re.DOTALL)
_MOST_PATTERNS, _MOST_ACTIONS, _MOST_POOLS, _MOST_NUMBERS = 24, 100, 1000, 2**18
_MOST_STACK_BYTES = 2**30
"""That stack traces that differ take, about: each, and for each byte the file has of it (a frame may be two)."""
_STACK, _STACK_BYTE = 500, 8
_MOST_ENTRIES = 8_000_000
_LIMIT = 2**63
_SHORT = 2
"""Bytes of the opcode BINGET."""
_WIDTH = 7
"""Columns of the table."""
NO_STACK = -1


class SnapshotError(ValueError):
    """A file is no snapshot, or one of more than plain data; the text says why."""


class Rows(NamedTuple):
    """Rows of the table, which stand in a list for that many entries."""

    start: int
    stop: int


class _Pattern(NamedTuple):
    """One kind of entry."""

    match: Callable[[bytes, int], re.Match[bytes] | None]
    groups: tuple[int, ...]
    """Of the match, in the order of `_NAMES`."""
    memo: list[Any]
    """What an entry adds to the memo, without the frames that lie in it."""
    frames: int
    """Place of the list of frames in `memo`; -1 where an entry refers to one that was there before."""
    pool: int
    """Place of the pool, likewise."""


def place_of(token: bytes) -> int:
    """The place in the memo that an opcode (`GET`) refers to."""
    return token[1] if len(token) == _SHORT else int.from_bytes(token[1:], "little")


def _number(token: bytes) -> int:
    """The whole number that an opcode (`_INT`) writes; 0 where there is none."""
    if not token:
        return 0
    if token[0] == 0x8A:  # LONG1
        return int.from_bytes(token[2:], "little", signed=True)
    return int.from_bytes(token[1:], "little", signed=token[0] == ord("J"))


class _Numbers(dict[bytes, int]):
    """Numbers by the opcodes that write them: sizes and addresses come again and again."""

    def __missing__(self, token: bytes) -> int:
        if len(self) > _MOST_NUMBERS:
            self.clear()
        self[token] = number = _number(token)
        return number


class _Places(dict[bytes, int]):
    """Places of actions or pools by the opcodes that write them; a file may write one in millions of ways."""

    def __setitem__(self, token: bytes, place: int) -> None:
        if len(self) > _MOST_NUMBERS:
            self.clear()
        super().__setitem__(token, place)


class Entries:
    """A table of entries, of all traces of a snapshot; `Rows` say whose they are."""

    def __init__(self) -> None:
        self._table = array("q")
        """Row by row: action (place in `actions`), address (of an `oom`: what the device had free), bytes, stream, time
        (microseconds, 0 where PyTorch wrote none), stack (place in `stacks`, or `NO_STACK`), pool (in `pools`)."""
        self.actions: list[str] = []
        self.stacks: list[list[Any]] = []
        """Lists of frames, as read; equal ones once where they are written alike."""
        self.pools: list[tuple[int, int]] = [(0, 0)]
        self._action_of: dict[str, int] = {}
        self._stack_of: dict[int, int] = {}
        self._pool_of = {(0, 0): 0}
        self._patterns: list[_Pattern] = []
        self._stack_bytes = 0
        # By the bytes that write them; these never change their meaning, since a place in the memo is written once.
        self._known_stacks: dict[bytes, tuple[int, list[Any], list[Any]]] = {}
        self._known_actions = _Places()
        self._known_pools = _Places()
        self._known_numbers = _Numbers()

    def __len__(self) -> int:
        return len(self._table) // _WIDTH

    def columns(self, pieces: Sequence[Rows]) -> list["NDArray[np.int64]"]:
        """The columns of some rows, one piece behind the other."""
        table = np.array(self._table, np.int64, copy=None).reshape(-1, _WIDTH)
        pieces = [Rows(0, 0), *pieces]
        return [np.concatenate([table[start:stop, place] for start, stop in pieces]) for place in range(_WIDTH)]

    def taken(self, items: list[Any]) -> list[Any]:
        """`items` of a list, with the entries among them taken into the table."""
        found: list[Any] = []
        for item in items:
            if type(item) is not dict or "action" not in item:
                found.append(item)
                continue
            row = self._add(item)
            if found and type(found[-1]) is Rows and found[-1].stop == row.start:
                found[-1] = Rows(found[-1].start, row.stop)
            else:
                found.append(row)
        return found

    def _add(self, entry: dict[str, Any]) -> Rows:
        fields = {
            "address": (entry.get("addr", entry.get("device_free", 0)), 0),
            "size": (entry.get("size"), 0),
            "stream": (entry.get("stream", 0), -_LIMIT),
            "time": (entry.get("time_us", 0), 0),
        }
        for name, (value, least) in fields.items():
            if type(value) is not int or not least <= value < _LIMIT:
                raise SnapshotError(f"the {name} of an entry of a trace is no whole number that PyTorch writes")
        action, stack = self._action_place(entry["action"]), self.stack_place(entry.get("frames"))
        numbers = [value for value, _ in fields.values()]
        self._table.extend((action, *numbers, stack, self.pool_place(entry.get("pool_id"))))
        return Rows(len(self) - 1, len(self))

    def _action_place(self, name: Any) -> int:
        if type(name) is not str:
            raise SnapshotError("the action of an entry of a trace is no text")
        place = self._action_of.get(name)
        if place is None:
            place = self._action_of[name] = len(self.actions)
            self.actions.append(name)
            if place > _MOST_ACTIONS:
                raise SnapshotError("its traces have more kinds of actions than PyTorch's allocator")
        return place

    def pool_place(self, pool: Any) -> int:
        """Place in `pools`; what is no pair of numbers is taken for the pool that is not private."""
        if type(pool) is not tuple or [type(each) for each in pool] != [int, int]:
            return 0
        place = self._pool_of.get(pool)
        if place is None:
            place = self._pool_of[pool] = len(self.pools)
            self.pools.append(pool)
            if place > _MOST_POOLS:
                raise SnapshotError(f"it has more than {_MOST_POOLS} memory pools")
        return place

    def stack_place(self, frames: Any) -> int:
        """Place in `stacks` of a list of frames, `NO_STACK` of None.

        Raises:
            SnapshotError: it is no list.
        """
        if frames is None:
            return NO_STACK
        if type(frames) is not list:
            raise SnapshotError("the frames of an allocation are no list")
        place = self._stack_of.get(id(frames))
        if place is None:
            place = self._stack_of[id(frames)] = len(self.stacks)
            self.stacks.append(frames)
        return place

    def note_stack(self, written: bytes, frames: list[Any], inner: list[Any]) -> None:
        """Remember a list of frames by the bytes that write it, with what the memo has of these."""
        if _WITH_FRAMES.fullmatch(written):
            self._know_stack(written, frames, inner)

    def _know_stack(self, written: bytes, frames: list[Any], inner: list[Any]) -> None:
        self._stack_bytes += _STACK + _STACK_BYTE * len(written)
        if self._stack_bytes > _MOST_STACK_BYTES:
            raise SnapshotError(f"its stack traces that differ take more than {_MOST_STACK_BYTES >> 20} MiB")
        self._known_stacks[written] = self.stack_place(frames), frames, inner

    def learn(self, written: bytes, memo: list[Any]) -> None:
        """Learn a pattern from the bytes that write an entry, if they are as PyTorch's are."""
        if len(self._patterns) >= _MOST_PATTERNS or not written.startswith(b"}\x94("):
            return
        pieces, places, at = [rb"\}\x94\("], {"frames": -1, "pool": -1}, 3
        adds: list[Any] = [None]
        named: set[str] = set()
        while found := _FIELD.match(written, at):
            at, kind = found.end(), found.lastgroup or ""
            key = memo[place_of(found["key"])]
            column, kinds = _COLUMNS.get(key, ("", (kind,))) if type(key) is str else ("", (kind,))
            if kind not in kinds or column in named:
                return
            added: list[Any] = [] if kind in ("reference", "number") or len(found[kind]) == 1 else [None]
            if kind == "text":
                added = [found[kind][2:-1].decode("utf-8", "replace")]
            if column in places and added:
                places[column] = len(adds)
            adds += added
            value = _KINDS[kind] if kind not in ("text", "nothing") else re.escape(found[kind])
            pieces.append(re.escape(found["key"]) + (rb"(?P<%b>%b)" % (column.encode(), value) if column else value))
            named |= {column} - {""}
        if at == len(written) - 1 and {"action", "nbytes"} <= named:
            missing = b"".join(rb"(?P<%b>)" % column.encode() for column in sorted(set(_NAMES) - named))
            compiled = re.compile(b"".join(pieces) + b"u" + missing, re.DOTALL)
            groups = tuple(compiled.groupindex[name] for name in _NAMES)
            self._patterns.insert(0, _Pattern(compiled.match, groups, adds, places["frames"], places["pool"]))

    def run(self, content: bytes, at: int, memo: list[Any]) -> tuple[int, Rows | None]:
        """Take the entries from `at` on that look like earlier ones: where they end, and their rows, None if none."""
        patterns, start = self._patterns, len(self)
        table, most = self._table, _MOST_ENTRIES * _WIDTH
        while len(table) <= most:
            for pattern in patterns:
                if found := pattern.match(content, at):
                    break
            else:
                break
            if not self._add_found(found.group(*pattern.groups), pattern, memo):
                break
            at = found.end()
            if pattern is not patterns[0]:
                patterns.remove(pattern)
                patterns.insert(0, pattern)
        if len(self) > _MOST_ENTRIES:
            raise SnapshotError(
                f"it has more than {_MOST_ENTRIES // 10**6} million entries; record fewer (max_entries of "
                "torch.cuda.memory._record_memory_history)"
            )
        return at, Rows(start, len(self)) if len(self) > start else None

    def _add_found(self, values: tuple[bytes, ...], pattern: _Pattern, memo: list[Any]) -> bool:
        """Whether the entry could be taken: one with frames that are new has to be read opcode by opcode."""
        action, address, nbytes, stream, time, frames, pool = values
        inner: list[Any] = []
        stack: list[Any] | None = None
        if frames[:1] == b"]":
            known = self._known_stacks.get(frames)
            if known is None:
                if not _REFERRING.fullmatch(frames):
                    return False
                self._know_stack(frames, [memo[place_of(token)] for token in _TOKENS.findall(frames)], [])
                known = self._known_stacks[frames]
            place, stack, inner = known
        else:
            place = self.stack_place(memo[place_of(frames)]) if frames else NO_STACK
        kind, place_of_pool = self._known_actions.get(action), self._known_pools.get(pool)
        if kind is None or place_of_pool is None:
            kind, place_of_pool = self._found_action(action, memo), self._found_pool(pool, memo)
        numbers = self._known_numbers
        self._table.extend(
            (kind, numbers[address], numbers[nbytes], numbers[stream], _number(time), place, place_of_pool)
        )
        base = len(memo)
        memo += pattern.memo
        if pattern.pool >= 0:
            memo[base + pattern.pool] = self.pools[place_of_pool]
        if pattern.frames >= 0:
            memo[base + pattern.frames] = stack
            memo[base + pattern.frames + 1 : base + pattern.frames + 1] = inner
        return True

    def _found_action(self, token: bytes, memo: list[Any]) -> int:
        place = self._known_actions[token] = self._action_place(memo[place_of(token)])
        return place

    def _found_pool(self, written: bytes, memo: list[Any]) -> int:
        pool = None
        if written[-2:] == b"\x86\x94":
            pool = tuple(map(_number, _INTS.findall(written)))
        elif _TOKENS.fullmatch(written):
            pool = memo[place_of(written)]
        place = self._known_pools[written] = self.pool_place(pool)
        return place


_INTS = re.compile(_INT, re.DOTALL)
