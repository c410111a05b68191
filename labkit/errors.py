"""What labkit says when it cannot go on: one sentence, what is wrong, where, and what would work."""

from collections.abc import Iterable
from difflib import get_close_matches


class LabkitError(Exception):
    """Base of every error labkit raises on purpose; its text is fit to be shown to a user as it is."""


class InputError(LabkitError):
    """The user's input (YAML, names, parameters, paths) is wrong; the CLI ends with exit code 2."""


class WorkError(LabkitError):
    """The input was fine but the work failed (a trace that died, a full disk); exit code 1."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a valid name is close to `name`, else the valid names in a short list."""
    names = sorted(valid)
    close = get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    return f"; valid are: {shown}" if names else ""
