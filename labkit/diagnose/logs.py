"""Text that a run left behind: logs, messages, tables, of all ranks together or of one."""

from labkit.diagnose.reading import Reading, Source


def accepts(head: bytes) -> bool:
    """Whether it is text: no null bytes, no opcodes of a pickle."""
    return b"\0" not in head and not head.startswith(b"\x80")


def read(source: Source) -> Reading:
    """What a text says, line by line."""
    return Reading(source.name, "log")
