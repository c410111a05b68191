"""The registry of what a trace replaces: each replacement names its target and what the real thing allocates."""

from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from operator import delitem, setitem
from typing import Any, NamedTuple

_ABSENT = object()

NOTHING = "nothing on the device"


class Replacement(NamedTuple):
    """An attribute of a module or class, or an item of a mapping, that is someone else's while a trace runs."""

    owner: Any
    name: Any
    value: Any
    allocates: str
    """What the real thing takes from the device's allocator, and so what `value` must take from the tracker."""


@contextmanager
def installed(replacements: Iterable[Replacement]) -> Iterator[list[Replacement]]:
    """Install replacements in order and take them back in reverse order.

    The iterable is drawn one by one, each installed before the next is asked for: a generator may import a module
    that must see what it yielded before. Yields what was installed.
    """
    done: list[Replacement] = []
    with ExitStack() as stack:
        for replacement in replacements:
            owner, name, value, _ = replacement
            mapping = isinstance(owner, MutableMapping)
            # `vars`, not `getattr`: an attribute inherited from a base class must be deleted again, not copied down.
            original = (owner if mapping else vars(owner)).get(name, _ABSENT)
            put, drop = (setitem, delitem) if mapping else (setattr, delattr)
            put(owner, name, value)
            stack.callback(*((drop, owner, name) if original is _ABSENT else (put, owner, name, original)))
            done.append(replacement)
        yield done
