"""Pickles from strangers, read as data: dictionaries whose keys are texts, lists, tuples, texts, numbers, nothing else.

Python's own unpickler, forbidden to import anything, still builds what a file of a few bytes tells it to: a memo of
2**31 places, keys that take forever to hash, lists that fill all memory. This one goes through the opcodes itself, runs
nothing, and has a budget.
"""

import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any, NoReturn

from labkit.snapshot.entries import GET, Entries, SnapshotError, place_of

_BUDGET = 1_200_000_000
"""Bytes that what is read may take, about. A step takes `_STEP` of them whatever it does, so that time is limited too:
30 million steps, ten seconds. The entries of traces go another way and do not count.
"""
_STEP, _OBJECT, _REFERENCE, _ITEM = 40, 100, 20, 60
_ENTRY = 400
"""Of an entry that is read opcode by opcode."""
_MOST_MARKS = 100
"""Begun at one time: a snapshot has a dozen lists, dictionaries and tuples in each other."""
_LONGEST_TEXT = 2**20
_LONGEST_NUMBER = 40
"""Bytes or digits: PyTorch writes numbers of 8 bytes."""
_HIGHEST_PROTOCOL = 5

_REFERENCES = re.compile(b"(?:%b){4,1000}+" % GET, re.DOTALL)
_REFERENCE_TOKEN = re.compile(GET, re.DOTALL)
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}


class Unpickler:
    """One pickle.

    `entries` takes what lists hold of a trace's entries, millions of them, into its table; in their place the lists
    have `Rows`.
    """

    def __init__(self, content: bytes, entries: Entries) -> None:
        self._content = content
        self._entries = entries
        self._at = 0
        self._left = _BUDGET
        self._stack: list[Any] = []
        self._memo: list[Any] = []
        self._marks: list[tuple[int, int, int]] = []
        """Of each mark: how much was on the stack, where its argument begins in the file, how much was in the memo."""
        self._handlers = [self._handler(code) for code in range(256)]

    def load(self) -> Any:
        """What the pickle holds.

        Raises:
            SnapshotError: it is not of plain data; the reason names what it asks for.
        """
        try:
            self._go_through()
            (value,) = self._stack
        except SnapshotError:
            raise
        except (IndexError, ValueError, TypeError, struct.error) as error:
            raise SnapshotError(f"it is damaged or no pickle, at byte {self._at}") from error
        return value

    def _go_through(self) -> None:
        content, handlers = self._content, self._handlers
        while (code := content[self._at]) != ord("."):
            self._at += 1
            self._left -= _STEP
            if self._left < 0:
                self._check_budget()
            handlers[code]()

    def _check_budget(self) -> None:
        if self._left < 0:
            raise SnapshotError("it unfolds into more than a snapshot of its size holds")

    def _handler(self, code: int) -> Callable[[], None]:
        name = _NAMES.get(code)
        if name is None:
            return lambda: self._refuse(f"it is damaged or no pickle, at byte {self._at}")
        known: Callable[[], None] | None = getattr(self, f"_do_{name.lower()}", None)
        return known or (lambda: self._refuse(f"it holds what is no plain data ({name})"))

    @staticmethod
    def _refuse(reason: str) -> NoReturn:
        raise SnapshotError(reason)

    # What is read from the file.

    def _take(self, length: int) -> bytes:
        taken = self._content[self._at : self._at + length]
        if len(taken) != length:
            raise SnapshotError("it ends early")
        self._at += length
        return taken

    def _size(self, length: int) -> int:
        return int.from_bytes(self._take(length), "little")

    def _line(self) -> bytes:
        end = self._content.find(b"\n", self._at, self._at + _LONGEST_TEXT)
        if end < 0:
            raise SnapshotError("it ends early")
        line = self._content[self._at : end]
        self._at = end + 1
        return line

    def _name(self, line: bytes | str) -> str:
        return (line if isinstance(line, str) else line.decode("utf-8", "replace"))[:80]

    # What names something to run, or to import.

    def _do_global(self) -> None:
        self._refuse(f"it names {self._name(self._line())}.{self._name(self._line())}")

    _do_inst = _do_global

    def _do_stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            self._refuse("it names something to run by what is no text")
        self._refuse(f"it names {self._name(module)}.{self._name(name)}")

    def _do_persid(self) -> None:
        self._refuse(f"it names the object {self._name(self._line())} of another program")

    def _do_ext1(self) -> None:
        self._refuse(f"it names extension {self._size(1)}")

    def _do_ext2(self) -> None:
        self._refuse(f"it names extension {self._size(2)}")

    def _do_ext4(self) -> None:
        self._refuse(f"it names extension {self._size(4)}")

    # Texts and numbers.

    def _do_proto(self) -> None:
        protocol = self._size(1)
        if protocol > _HIGHEST_PROTOCOL:
            raise SnapshotError(f"it is of pickle protocol {protocol}; PyTorch writes at most {_HIGHEST_PROTOCOL}")

    def _do_frame(self) -> None:
        self._take(8)

    def _do_none(self) -> None:
        self._stack.append(None)

    def _do_newtrue(self) -> None:
        self._stack.append(True)

    def _do_newfalse(self) -> None:
        self._stack.append(False)

    def _do_binint1(self) -> None:
        self._stack.append(self._size(1))

    def _do_binint2(self) -> None:
        self._stack.append(self._size(2))

    def _do_binint(self) -> None:
        self._stack.append(int.from_bytes(self._take(4), "little", signed=True))

    def _do_long1(self) -> None:
        length = self._size(1)
        if length > _LONGEST_NUMBER:
            raise SnapshotError(f"it has a number of {length} bytes")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def _do_int(self) -> None:
        line = self._line()
        self._stack.append(line == b"01" if line in (b"00", b"01") else self._decimal(line))

    def _do_long(self) -> None:
        self._stack.append(self._decimal(self._line().removesuffix(b"L")))

    def _decimal(self, line: bytes) -> int:
        if len(line) > _LONGEST_NUMBER:
            raise SnapshotError(f"it has a number of {len(line)} digits")
        return int(line)

    def _do_binfloat(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _do_float(self) -> None:
        self._stack.append(float(self._line()))

    def _text(self, length: int) -> None:
        if length > _LONGEST_TEXT:
            raise SnapshotError(f"it has a text of {length} bytes")
        self._left -= 4 * length + _OBJECT
        self._stack.append(self._take(length).decode("utf-8", "replace"))

    def _do_short_binunicode(self) -> None:
        self._text(self._size(1))

    def _do_binunicode(self) -> None:
        self._text(self._size(4))

    def _do_binunicode8(self) -> None:
        self._text(self._size(8))

    def _do_unicode(self) -> None:
        line = self._line()
        self._left -= 4 * len(line) + _OBJECT
        text = line.decode("raw_unicode_escape")
        self._stack.append(text.encode("utf-8", "replace").decode("utf-8"))

    # Containers.

    def _since_mark(self) -> list[Any]:
        mark, _, _ = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        self._left -= _ITEM * len(items)
        return items

    def _do_mark(self) -> None:
        if len(self._marks) >= _MOST_MARKS:
            self._refuse(f"it has more than {_MOST_MARKS} lists, dictionaries or tuples in each other")
        self._marks.append((len(self._stack), self._at, len(self._memo)))
        # The frames of a stack trace, which others have had before.
        if run := _REFERENCES.match(self._content, self._at):
            memo, tokens = self._memo, _REFERENCE_TOKEN.findall(run.group())
            self._stack += [memo[place_of(token)] for token in tokens]
            self._at = run.end()
            self._left -= _REFERENCE * len(tokens)

    def _do_empty_dict(self) -> None:
        end, rows = self._entries.run(self._content, self._at - 1, self._memo)
        if rows is None:
            self._left -= _OBJECT
            self._stack.append({})
        else:
            self._at = end
            self._stack.append(rows)

    def _do_empty_list(self) -> None:
        self._left -= _OBJECT
        self._stack.append([])

    def _do_empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple_of(self, length: int) -> None:
        if len(self._stack) < length:
            raise IndexError
        self._left -= _OBJECT
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _do_tuple1(self) -> None:
        self._tuple_of(1)

    def _do_tuple2(self) -> None:
        self._tuple_of(2)

    def _do_tuple3(self) -> None:
        self._tuple_of(3)

    def _do_tuple(self) -> None:
        self._left -= _OBJECT
        self._stack.append(tuple(self._since_mark()))

    def _do_list(self) -> None:
        self._left -= _OBJECT
        self._stack.append(self._taken(self._since_mark()))

    def _do_dict(self) -> None:
        self._left -= _OBJECT
        items = self._since_mark()
        self._stack.append({})
        self._set(items)

    def _do_append(self) -> None:
        item = self._stack.pop()
        self._list().extend(self._taken([item]))
        self._left -= _ITEM

    def _do_appends(self) -> None:
        _, begin, known = self._marks[-1]
        items = self._since_mark()
        target = self._list()
        if known and self._memo[known - 1] is target and type(items[0]) is dict and "filename" in items[0]:
            self._entries.note_stack(self._content[begin - 3 : self._at], target, self._memo[known:])
        target.extend(self._taken(items))

    def _taken(self, items: list[Any]) -> list[Any]:
        """Those of a list, with entries in the table; ones that the file refers to again cost as new ones do."""
        number = sum(type(item) is dict and "action" in item for item in items)
        if not number:
            return items
        self._left -= _ENTRY * number
        self._check_budget()
        return self._entries.taken(items)

    def _list(self) -> list[Any]:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        return target

    def _do_setitem(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _do_setitems(self) -> None:
        _, begin, _ = self._marks[-1]
        self._set(self._since_mark())
        if "action" in self._stack[-1]:
            self._entries.learn(self._content[begin - 3 : self._at], self._memo)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise SnapshotError(f"it has a dictionary with a key that is no text but of type {type(key).__name__}")
            target[key] = value

    # The stack and the memo.

    def _do_pop(self) -> None:
        if self._marks and self._marks[-1][0] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def _do_pop_mark(self) -> None:
        self._since_mark()

    def _do_dup(self) -> None:
        self._stack.append(self._stack[-1])

    def _do_memoize(self) -> None:
        self._memo.append(self._stack[-1])

    def _put(self, place: int) -> None:
        if place != len(self._memo):
            raise SnapshotError(f"it has {len(self._content)} bytes and names object {place} before its turn")
        self._memo.append(self._stack[-1])

    def _do_put(self) -> None:
        self._put(self._decimal(self._line()))

    def _do_binput(self) -> None:
        self._put(self._size(1))

    def _do_long_binput(self) -> None:
        self._put(self._size(4))

    def _got(self, place: int) -> None:
        if not 0 <= place < len(self._memo):
            raise IndexError
        self._stack.append(self._memo[place])

    def _do_get(self) -> None:
        self._got(self._decimal(self._line()))

    def _do_binget(self) -> None:
        self._got(self._size(1))

    def _do_long_binget(self) -> None:
        self._got(self._size(4))
