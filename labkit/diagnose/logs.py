"""Text that a run left behind: logs, messages, tables, of all ranks together or of one, read line by line."""

from collections import defaultdict
from dataclasses import replace

from labkit.diagnose import failures, launches, megatron_log, memory_summary, oom, tracebacks
from labkit.diagnose.facts import MOST, Evidence, Facts, Failure
from labkit.diagnose.lines import Line, Lines
from labkit.diagnose.memory_summary import Table
from labkit.diagnose.reading import Reading, Source
from labkit.diagnose.tracebacks import Traceback
from labkit.errors import InputError
from labkit.workload import Workload

KEYS = (
    *failures.KEYS,
    *megatron_log.PROGRESS,
    *("Traceback (most", tracebacks.KEY, "Tried to allocate", "has a total capac", "would exceed", "arguments ---"),
    *("memory summary", "padded vocab"),
)
"""One of these is in each line that matters."""
_MESSAGE_LINES = 15
"""Over which a message may be broken, by a terminal or a table."""
_MOST_RANKS = 2**14
_GONE_OVER = ("error", "collective error")
_CONTROL = frozenset(range(32)) - frozenset(b"\t\n\r\x1b\b\f\0")
_LEAST_PRINTABLE = 0.95


def accepts(head: bytes) -> bool:
    """Whether it is text: few control characters (null bytes are in messages of some versions of PyTorch)."""
    odd = sum(byte in _CONTROL for byte in head) + 20 * head.count(b"\0")
    return odd <= (1 - _LEAST_PRINTABLE) * len(head) or (b"\0" not in head and odd < 2)


def read(source: Source) -> Reading:
    """What a text says.

    Raises:
        InputError: nothing in it is known: it is no log, and states nothing that was run.
    """
    head = launches.whole(source)
    facts = _Reader(source).facts()
    stated = launches.stated(head, source.name, facts) if head is not None else None
    if stated is not None:
        return Reading(source.name, "workload" if isinstance(stated, Workload) else "launch arguments", stated=stated)
    if facts.empty:
        why = launches.refusal(head, source.name)
        raise InputError(f"{source.name}: nothing in it is known: no failure, no memory, no step of a log{why}")
    return Reading(source.name, "log", facts)


class _Reader:
    """Goes through the lines once; what is open (a message, a table, a block, tracebacks) is kept by rank."""

    def __init__(self, source: Source) -> None:
        self._lines = Lines(source.stream, KEYS)
        self._source = source.name
        self._facts = Facts()
        self._iteration: int | None = None
        self._tracebacks: defaultdict[int | None, Traceback] = defaultdict(Traceback)
        self._messages: dict[int | None, tuple[Line, str, int]] = {}
        self._tables: dict[int | None, Table] = {}
        self._arguments: megatron_log.ArgumentsBlock | None = None
        self._vocabulary: dict[str, str] = {}

    def facts(self) -> Facts:
        for line in self._lines:
            self._see(line)
        for rank in list(self._messages):
            self._end_message(rank)
        for rank in list(self._tables):
            self._end_table(rank)
        self._end_arguments()
        if self._facts.printed and self._vocabulary:
            last = self._facts.printed[-1]
            self._facts.printed[-1] = replace(last, values={**last.values, **self._vocabulary})
        return self._facts

    def _see(self, line: Line) -> None:
        if self._is_open and self._goes_on(line):
            return
        if tracebacks.KEY in line.text or tracebacks.BEGINS in line.text:
            self._traceback(line.rank).see(line)
        elif megatron_log.is_progress(line.text):
            ended = megatron_log.see(line, self._source, self._facts)
            if ended is not None:
                self._iteration = ended
                self._go_on()
            if oom.begins(line.text) is None:
                return
        self._vocabulary |= megatron_log.padded_vocabulary(line)
        if megatron_log.ARGUMENTS.search(line.text):
            self._end_arguments()
            self._arguments = megatron_log.ArgumentsBlock(line, self._source)
            self._lines.follow(1)
        if found := memory_summary.TITLE.search(line.text):
            self._end_table(line.rank)
            self._tables[line.rank] = Table(line, self._source, int(found[1]))
            self._lines.follow(memory_summary.LONGEST)
        begins = oom.begins(line.text)
        if begins is not None:
            self._end_message(line.rank)
            self._messages[line.rank] = (line, line.text[begins:], _MESSAGE_LINES)
            self._end_if_whole(line.rank)
        elif len(self._facts.failures) < MOST:
            self._fail(line)

    def _go_on(self) -> None:
        """A step was done: an error before it did not end the run."""
        if self._facts.failures:
            self._facts.failures[:] = [each for each in self._facts.failures if each.kind not in _GONE_OVER]

    @property
    def _is_open(self) -> bool:
        """Whether a message, a table or a block may go on."""
        return bool(self._messages or self._tables) or self._arguments is not None

    def _traceback(self, rank: int | None) -> Traceback:
        """A rank's; those of more ranks than there can be share one."""
        if rank in self._tracebacks or len(self._tracebacks) < _MOST_RANKS:
            return self._tracebacks[rank]
        return self._tracebacks[None]

    def _goes_on(self, line: Line) -> bool:
        """Whether a line belongs to a table or a block that is open; it may also go on with a message."""
        rank = line.rank
        if rank is None and rank not in self._messages and len(self._messages) == 1:
            (rank,) = self._messages  # a terminal broke the line
        if rank in self._messages and oom.begins(line.text) is None and tracebacks.BEGINS not in line.text:
            first, text, left = self._messages[rank]
            self._messages[rank] = (first, f"{text} {line.text}", left - 1)
            self._end_if_whole(rank)
        if line.rank in self._tables and "|" in line.text:
            if not self._tables[line.rank].see(line):
                self._end_table(line.rank)
            return True
        if self._arguments is None or megatron_log.ARGUMENTS.search(line.text):
            return False
        taken = self._arguments.see(line)
        if self._arguments.left:
            self._lines.follow(1)
        else:
            self._end_arguments()
        return taken  # other ranks may write in between

    def _end_if_whole(self, rank: int | None) -> None:
        _, text, left = self._messages[rank]
        if left and not oom.is_whole(text):
            self._lines.follow(1)
        else:
            self._end_message(rank)

    def _end_message(self, rank: int | None) -> None:
        if rank not in self._messages:
            return
        first, text, _ = self._messages.pop(rank)
        found = oom.parse(text, Evidence.quote(self._source, first.number, text), rank)
        known = self._facts.out_of_memory
        if len(known) >= MOST or any(found.figures == each.figures for each in known):
            return
        traceback = self._traceback(rank)
        known.append(
            replace(
                found,
                phase=traceback.phase,
                place=traceback.place,
                replays=traceback.replays,
                iteration=self._running,
            )
        )

    @property
    def _running(self) -> int | None:
        """The iteration that the last line of a step leaves under way."""
        return None if self._iteration is None else self._iteration + 1

    def _end_table(self, rank: int | None) -> None:
        table = self._tables.pop(rank, None)
        found = None if table is None else table.finished(rank, self._iteration)
        if found is not None:
            self._facts.memory.append(found)

    def _end_arguments(self) -> None:
        found = None if self._arguments is None else self._arguments.finished()
        self._arguments = None
        if found is not None and len(self._facts.printed) < MOST:
            self._facts.printed.append(found)

    def _fail(self, line: Line) -> None:
        found = failures.sign(line.text)
        if found is None:
            return
        kind, at = found
        phase = self._traceback(line.rank).phase
        evidence = Evidence.quote(self._source, line.number, line.text, at)
        self._facts.failures.append(Failure(kind=kind, evidence=evidence, rank=line.rank, phase=phase))
