"""What a shell script would run, read as text: words after expansion, command by command. Nothing is executed.

Only what is certain is worked out: variables assigned on the way through the script, arrays, defaults and sums. What
the script leaves to the machine it runs on (an unset variable, a command's output, an assignment inside an `if`)
becomes a gap in the text that says why (`gap`). A gap does no harm until somebody needs the text.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from labkit.errors import InputError

_LONGEST = 2**20
"""Characters of a value, words of a command: a few lines that double a variable stand for more than memory holds."""
_MOST_EXPANDED = 2**25
_DEEPEST = 40
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_OPERATORS = (
    "&&",
    "||",
    ";;",
    "&>>",
    "&>",
    "<<<",
    "<<-",
    "<<",
    ">>",
    ">&",
    "<&",
    ">|",
    ";",
    "&",
    "|",
    "(",
    ")",
    ">",
    "<",
)
_REDIRECTIONS = {"&>>", "&>", "<<<", ">>", ">&", "<&", ">|", ">", "<"}
_OPENING = {"if": "fi", "for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "{": "}"}
_INNER = {"then", "do", "else", "elif", "!", "time"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_GAP = re.compile("\0([^\0]*)\0")


def gap(reason: str) -> str:
    """A stretch of text that is not known; `reason` reads well after "it needs"."""
    return f"\0{reason}\0"


def gaps(text: str) -> list[str]:
    """Why parts of a text are not known; none: all of it is."""
    return _GAP.findall(text)


class Command(NamedTuple):
    """A simple command: its words, and the variables that it finds in its environment."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    line: int


class _Piece(NamedTuple):
    """Part of a word: text as it stands, `${expression}`, or a command's output."""

    kind: str
    text: str
    quoted: bool


class _Word(NamedTuple):
    pieces: tuple[_Piece, ...]
    array: "tuple[_Word, ...] | None" = None
    """The elements, where the word is `NAME=( ... )`."""

    @property
    def plain(self) -> str | None:
        """The word, if it is nothing but unquoted text: keywords are."""
        simple = len(self.pieces) == 1 and self.pieces[0].kind == "text" and not self.pieces[0].quoted
        return self.pieces[0].text if simple else None


class _Token(NamedTuple):
    word: _Word | None
    operator: str
    line: int


def commands(text: str, source: str, variables: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script in order, those of both branches of an `if` included.

    Raises:
        InputError: it is no text a shell reads (an open quote), or stands for too much.
    """
    shell = _Shell(source, variables or {})
    shell.run(_Lexer(text, source).tokens())
    return shell.commands


def expanded(text: str, source: str, variables: Mapping[str, str]) -> str:
    """A text as within double quotes."""
    return _Shell(source, variables).quoted(text)


class _Lexer:
    """Words and operators of a script (POSIX 2.3, with bash's arrays)."""

    def __init__(self, text: str, source: str, depth: int = 0) -> None:
        self.text, self.source, self.depth = text, source, depth
        self.at = 0
        self.line, self._counted = 1, 0
        if depth > _DEEPEST:
            raise InputError(f"{source}: nested deeper than {_DEEPEST} levels")

    def tokens(self) -> Iterator[_Token]:
        """All tokens; a line's end is the operator `;`."""
        heredocs: list[str] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\n":
                yield self._token(";")
                self.at += 1
                for delimiter in heredocs:
                    self._skip_heredoc(delimiter)
                heredocs.clear()
            elif here in " \t\r" or self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.at += 1 if here != "\\" else self.text.index("\n", self.at) - self.at + 1
            elif here == "#":
                self.at = self._end_of_line()
            elif symbol := self._operator():
                self.at += len(symbol)
                if symbol in ("<<", "<<-"):
                    heredocs.append(self._delimiter())
                elif symbol in _REDIRECTIONS:
                    self._skip_target()
                else:
                    yield self._token(symbol)
            else:
                line = self._line()
                word = self._word()
                if not self._is_descriptor(word):
                    yield _Token(word, "", line)
        yield self._token(";")

    def pieces(self) -> tuple[_Piece, ...]:
        """The whole text as within double quotes."""
        found: list[_Piece] = []
        self._inside_quotes(found, None)
        return tuple(found)

    def _token(self, symbol: str) -> _Token:
        return _Token(None, symbol, self._line())

    def _line(self) -> int:
        self.line += self.text.count("\n", self._counted, self.at)
        self._counted = max(self._counted, self.at)
        return self.line

    def _operator(self) -> str:
        if self.text[self.at] in "<>" and self.text.startswith("(", self.at + 1):
            return ""  # <(command): a file's name
        return next((symbol for symbol in _OPERATORS if self.text.startswith(symbol, self.at)), "")

    def _end_of_line(self) -> int:
        end = self.text.find("\n", self.at)
        return len(self.text) if end < 0 else end

    def _is_descriptor(self, word: _Word) -> bool:
        """Whether the word is the number of a file in `2>&1`."""
        return (word.plain or "").isdigit() and self.at < len(self.text) and self.text[self.at] in "<>"

    def _skip_target(self) -> None:
        self._skip_blanks()
        if self.at < len(self.text) and self.text[self.at] not in "\n;&|":
            self._word()

    def _skip_blanks(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def _delimiter(self) -> str:
        self._skip_blanks()
        if self.at >= len(self.text) or self.text[self.at] == "\n":
            return ""
        return "".join(piece.text for piece in self._word().pieces)

    def _skip_heredoc(self, delimiter: str) -> None:
        while self.at < len(self.text):
            end = self._end_of_line()
            found = self.text[self.at : end].strip("\t\r") == delimiter
            self.at = min(end + 1, len(self.text))
            if found:
                return

    def _word(self) -> _Word:
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "(" and self._begins_array(pieces):
                self.at += 1
                return _Word(tuple(pieces), self._array())
            if here in " \t\r\n;&|()" or (here in "<>" and not self.text.startswith("(", self.at + 1)):
                break
            self._piece(pieces)
        return _Word(tuple(pieces))

    @staticmethod
    def _begins_array(pieces: list[_Piece]) -> bool:
        return len(pieces) == 1 and not pieces[0].quoted and bool(_ASSIGNMENT.fullmatch(pieces[0].text))

    def _array(self) -> tuple[_Word, ...]:
        words: list[_Word] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == ")":
                self.at += 1
                return tuple(words)
            if here in " \t\r\n":
                self.at += 1
            elif self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self.at = self._end_of_line() + 1
            elif here == "#":
                self.at = self._end_of_line()
            elif here in ";&|(<>":
                raise InputError(f"{self.source}: line {self._line()}: {here!r} inside an array")
            else:
                words.append(self._word())
        raise self._open("(")

    def _open(self, what: str) -> InputError:
        return InputError(f"{self.source}: {what} is never closed")

    def _piece(self, pieces: list[_Piece]) -> None:
        here = self.text[self.at]
        if here == "\0":
            self._gap(pieces)
        elif here == "\\":
            self._escape(pieces)
        elif here == "'":
            end = self.text.find("'", self.at + 1)
            if end < 0:
                raise self._open("a ' quote")
            pieces.append(_Piece("text", self.text[self.at + 1 : end], quoted=True))
            self.at = end + 1
        elif here == '"':
            self.at += 1
            pieces.append(_Piece("text", "", quoted=True))
            self._inside_quotes(pieces, '"')
        elif here in "$`":
            self._dollar(pieces, quoted=False)
        elif here in "<>":
            self.at += 1
            pieces.append(_Piece("command", self._bracketed("(", ")"), quoted=True))
        else:
            end = self.at
            while end < len(self.text) and self.text[end] not in "\0 \t\r\n;&|()<>\\'\"$`":
                end += 1
            pieces.append(_Piece("text", self.text[self.at : end], quoted=False))
            self.at = end

    def _gap(self, pieces: list[_Piece]) -> None:
        """A gap of a script whose text this is (`bash -c "$text"`)."""
        end = (self.text.find("\0", self.at + 1) + 1) or len(self.text)
        pieces.append(_Piece("text", self.text[self.at : end], quoted=True))
        self.at = end

    def _escape(self, pieces: list[_Piece]) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following not in ("\n", ""):
            pieces.append(_Piece("text", following, quoted=True))
        self.at += 2

    def _inside_quotes(self, pieces: list[_Piece], closing: str | None) -> None:
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == closing:
                self.at += 1
                return
            if here == "\0":
                self._gap(pieces)
            elif here == "\\" and self.text[self.at + 1 : self.at + 2] in ("$", "`", '"', "\\", "\n"):
                self._escape(pieces)
            elif here in "$`":
                self._dollar(pieces, quoted=True)
            else:
                end = self.at + 1
                while end < len(self.text) and self.text[end] not in '\0"\\$`':
                    end += 1
                pieces.append(_Piece("text", self.text[self.at : end], quoted=True))
                self.at = end
        if closing is not None:
            raise self._open(f"a {closing} quote")

    def _dollar(self, pieces: list[_Piece], *, quoted: bool) -> None:
        """An expansion: of a variable, a command's output or a sum."""
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            if end < 0:
                raise self._open("a ` quote")
            pieces.append(_Piece("command", self.text[self.at + 1 : end], quoted))
            self.at = end + 1
            return
        self.at += 1
        name = _NAME.match(self.text, self.at)
        if name:
            self.at = name.end()
            pieces.append(_Piece("variable", name.group(), quoted))
        elif self.text.startswith("((", self.at):
            inner = self._bracketed("(", ")")
            summed = inner.startswith("(") and inner.endswith(")")
            pieces.append(_Piece("sum" if summed else "command", inner[1:-1] if summed else inner, quoted))
        elif self.text.startswith("(", self.at):
            pieces.append(_Piece("command", self._bracketed("(", ")"), quoted))
        elif self.text.startswith("{", self.at):
            pieces.append(_Piece("variable", self._bracketed("{", "}"), quoted))
        elif self.text[self.at : self.at + 1] in tuple("0123456789@*#?$!-"):
            pieces.append(_Piece("variable", self.text[self.at], quoted))
            self.at += 1
        else:
            pieces.append(_Piece("text", "$", quoted))

    def _bracketed(self, opening: str, closing: str) -> str:
        """What stands between brackets, nested ones and quotes passed over."""
        start, depth, quote = self.at + 1, 0, ""
        while self.at < len(self.text):
            here = self.text[self.at]
            if here == "\\":
                self.at += 1
            elif quote:
                quote = "" if here == quote else quote
            elif here in "'\"":
                quote = here
            elif here in (opening, closing):
                depth += 1 if here == opening else -1
                if not depth:
                    self.at += 1
                    return self.text[start : self.at - 1]
            self.at += 1
        raise self._open(opening)


class _Shell:
    """Variables as the script sets them, from top to bottom."""

    def __init__(self, source: str, variables: Mapping[str, str], depth: int = 0) -> None:
        self.source, self.depth = source, depth
        self.values: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        """Every variable as an array; a plain one is an array of one."""
        self.exported: set[str] = set(variables)
        self.commands: list[Command] = []
        self.budget = [_MOST_EXPANDED]
        """Characters that expansions may still produce; shared with shells inside."""

    def run(self, tokens: Iterator[_Token]) -> None:
        """Go through a script once, into every branch."""
        open_blocks: list[str] = []
        words: list[_Word] = []
        line, chained = 1, False
        for token in tokens:
            if token.word is not None:
                keyword = token.word.plain or ""
                if not words and keyword in _OPENING:
                    open_blocks.append(_OPENING[keyword])
                    words = [] if keyword == "{" else [token.word]
                elif not words and open_blocks and keyword == open_blocks[-1]:
                    open_blocks.pop()
                elif words and keyword == "{" and words[0].plain == "function":
                    open_blocks.append("}")
                    words = []
                elif words or keyword not in _INNER:
                    line = token.line if not words else line
                    words.append(token.word)
                continue
            if words:
                self._command(words, line, certain=not (open_blocks or chained or token.operator == "|"))
                words = []
            chained = token.operator in ("&&", "||", "|")
            if token.operator == "(":
                open_blocks.append(")")
            elif token.operator == ")" and open_blocks and open_blocks[-1] == ")":
                open_blocks.pop()

    def quoted(self, text: str) -> str:
        """A text as within double quotes, expanded."""
        return "".join(self._value(piece) for piece in _Lexer(text, self.source, self.depth + 1).pieces())

    def _command(self, words: list[_Word], line: int, *, certain: bool) -> None:
        declaring = (words[0].plain or "") in _DECLARING
        exporting = words[0].plain == "export" or (declaring and any(word.plain == "-x" for word in words))
        assigned: dict[str, list[str]] = {}
        rest = words[1:] if declaring else words
        lasting = declaring or all(map(self._assigns, words))  # else they are the one command's environment
        while rest and (declaring or self._assigns(rest[0])):
            name = self._assign(rest[0], assigned, line, certain=certain)
            if lasting:
                self.values |= assigned
            if name and exporting:
                self.exported.add(name)
            rest = rest[1:]
        if not rest:
            return
        fields = tuple(field for word in rest for field in self.fields(word))
        if len(fields) > _LONGEST or sum(map(len, fields)) > _LONGEST:
            raise InputError(f"{self.source}: line {line}: a command of more than {_LONGEST} characters")
        environment = {name: self.values[name][0] for name in self.exported if self.values.get(name)}
        environment |= {name: value[0] for name, value in assigned.items() if value}
        if fields[:1] == ("unset",):
            self._unset(fields[1:], line, certain=certain)
        elif fields:
            self.commands.append(Command(fields, environment, line))

    def _unset(self, names: tuple[str, ...], line: int, *, certain: bool) -> None:
        for name in names:
            if certain:
                self.values.pop(name, None)
            elif name in self.values:
                self.values[name] = [self._undecided(name, line)]

    @staticmethod
    def _undecided(name: str, line: int) -> str:
        return gap(f"${name}, which line {line} sets only in some cases (write the case you mean without if or loop)")

    @staticmethod
    def _assigns(word: _Word) -> bool:
        first = word.pieces[0] if word.pieces else None
        return first is not None and not first.quoted and first.kind == "text" and bool(_ASSIGNMENT.match(first.text))

    def _assign(self, word: _Word, assigned: dict[str, list[str]], line: int, *, certain: bool) -> str:
        """Note `NAME=value`, `NAME+=value` or an array of them; returns the name, also of `export NAME` alone."""
        if not self._assigns(word):
            return word.plain or ""
        match = _ASSIGNMENT.match(word.pieces[0].text)
        assert match is not None
        name, sign = match.groups()
        if word.array is None:
            first = word.pieces[0]._replace(text=word.pieces[0].text[match.end() :])
            value = ["".join(self._value(piece) for piece in (first, *word.pieces[1:]))]
        else:
            value = [field for element in word.array for field in self.fields(element)]
        if sign == "+=":
            before = assigned.get(name, self.values.get(name, []))
            value = before + value if word.array is not None else [(before or [""])[0] + value[0], *before[1:]]
        if sum(map(len, value)) > _LONGEST or len(value) > _LONGEST:
            raise InputError(f"{self.source}: line {line}: {name} grows beyond {_LONGEST} characters")
        assigned[name] = value if certain else [self._undecided(name, line)]
        return name

    def fields(self, word: _Word) -> list[str]:
        """The words that a word becomes: unquoted expansions are split at blanks, arrays are as many as they have."""
        fields: list[str] = []
        current: str | None = None
        if word.array is not None:
            raise InputError(f"{self.source}: an array stands where a word should")
        for piece in word.pieces:
            elements = self._elements(piece)
            if elements is None:
                value = self._value(piece)
                if piece.quoted or piece.kind == "text" or self._falls_back_on_quotes(piece.text):
                    current = (current or "") + value
                    continue
                elements = _split(value)
                if value[:1].isspace() and current is not None:
                    fields.append(current)
                    current = None
                trailing = value[-1:].isspace()
            else:
                trailing = False
            for index, element in enumerate(elements):
                if index and current is not None:
                    fields.append(current)
                    current = None
                current = (current or "") + element
            if trailing and current is not None:
                fields.append(current)
                current = None
        if not current and any(self._elements(piece) == [] for piece in word.pieces):
            return fields  # `"$@"` of nothing is no word, for all its quotes
        return fields if current is None else [*fields, current]

    def _falls_back_on_quotes(self, expression: str) -> bool:
        """Whether it is `${NAME:-"value"}` of a variable that is not set: quoted, the value is one word."""
        match = re.fullmatch(r"([A-Za-z_]\w*):?[-=](?:\"[^\"]*\"|'[^']*')", expression)
        return match is not None and not (self.values.get(match.group(1)) or [""])[0]

    def _elements(self, piece: _Piece) -> list[str] | None:
        """The elements of `${NAME[@]}`, or of the script's own arguments, which are none; None: no such piece."""
        if piece.kind != "variable":
            return None
        if piece.text in ("@", "*"):
            return []
        if not piece.text.endswith(("[@]", "[*]")) or not _NAME.fullmatch(piece.text[:-3]):
            return None
        name = piece.text[:-3]
        elements = self._spent(self.values.get(name, [gap(_unset(name))]))
        if piece.quoted and piece.text.endswith("[*]"):
            return [" ".join(elements)]
        return elements if piece.quoted else [part for element in elements for part in _split(element)]

    def _spent(self, texts: list[str]) -> list[str]:
        self.budget[0] -= sum(map(len, texts)) + len(texts)
        if self.budget[0] < 0:
            raise InputError(f"{self.source}: its variables stand for more than {_MOST_EXPANDED // 2**20} MiB of text")
        return texts

    def _value(self, piece: _Piece) -> str:
        if piece.kind == "text":
            return piece.text
        if piece.kind == "command":
            return gap(f"what `{_short(piece.text)}` prints, and nothing is run here")
        if piece.kind == "sum":
            return self._sum(piece.text)
        elements = self._elements(piece)
        return self._spent([self._expansion(piece.text)])[0] if elements is None else " ".join(elements)

    def _expansion(self, expression: str) -> str:
        """`${expression}`."""
        match = _NAME.match(expression)
        if match is None:
            what = "is given when the script is called" if expression.isdigit() else "is not worked out here"
            return gap(f"${{{_short(expression)}}}, which {what}")
        name, rest = match.group(), expression[match.end() :]
        value = self.values.get(name)
        if not rest or rest == "[0]":
            return value[0] if value else gap(_unset(name))
        if index := re.fullmatch(r"\[(\d{1,6})\]", rest):
            at = int(index.group(1))
            return value[at] if value and at < len(value) else gap(_unset(f"{name}[{at}]"))
        choice = re.match(r":?([-=?+])", rest)
        if choice is None:
            return gap(f"${{{_short(expression)}}}, which is not worked out here")
        there = bool(value) and (bool(value[0]) or not rest.startswith(":")) if value else False
        if choice.group(1) == "+":
            return self._alternative(rest[choice.end() :]) if there else ""
        if there:
            assert value is not None
            return value[0]
        if choice.group(1) == "?":
            return gap(_unset(name))
        given = self._alternative(rest[choice.end() :])
        if choice.group(1) == "=":
            self.values[name] = [given]
        return given

    def _alternative(self, text: str) -> str:
        """The other value in `${NAME:-value}`."""
        inner = _Shell(self.source, {}, self.depth + 1)
        inner.values, inner.budget = self.values, self.budget
        if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
            return text[1:-1] if text[0] == "'" else inner.quoted(text[1:-1])
        return inner.quoted(text)

    def _sum(self, text: str) -> str:
        """`$((text))`: whole numbers and variables."""
        unknown = gap(f"$(({_short(text)})), which is not worked out here")
        plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
        if len(plain) > 200:
            return unknown
        try:
            return str(self._number(ast.parse(plain, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return unknown

    def _number(self, node: ast.expr) -> int:
        value: int | None = None
        if isinstance(node, ast.Constant) and type(node.value) is int:
            value = node.value
        elif isinstance(node, ast.Name):
            value = int((self.values.get(node.id) or [""])[0])
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            value = _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))
        if value is None or not 0 <= value < 2**63:
            raise ValueError
        return value


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
"""Of whole numbers that are not negative, where the shell's division is Python's."""


def _unset(name: str) -> str:
    return f"${name}, which is not set"


def _short(text: str) -> str:
    line = " ".join(text.replace("\0", "").split())
    return line if len(line) <= 60 else line[:57] + "..."


def _split(value: str) -> list[str]:
    """At blanks, except inside a gap's reason."""
    if "\0" not in value:
        return value.split()
    parts = re.findall("(?:\0[^\0]*\0|[^\\s\0])+", value)
    return [str(part) for part in parts]
