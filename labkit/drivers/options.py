"""Options of Megatron-LM before its parser evaluates them, and its refusals as one sentence.

Sources: `megatron.training.arguments`, Megatron Core 0.19.
"""

import argparse
import enum
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import FunctionType

from labkit.errors import InputError, nearest
from labkit.workload import Workload
from labkit.workload.launched import listed
from labkit.workload.pipeline_layout import layout_stages


def groups(words: Iterable[str]) -> list[list[str]]:
    """Each option with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def nearest_option(name: str, known: Iterable[str]) -> str:
    """What an unknown option may have meant, as the end of a sentence."""
    close = get_close_matches(name[:80], list(known), n=3)
    return f"; did you mean {' or '.join(close)}?" if close else "; Megatron Core 0.19 has none like it"


def check_values(action: argparse.Action, group: list[str]) -> None:
    """Look at what Megatron writes out, which may be more than memory holds, and at what it has no sentence for.

    `group` is the option and its values.

    Raises:
        InputError: a value stands for too much, or is none of those that Megatron knows.
    """
    name, _, joined = group[0].partition("=")
    values = [*filter(None, [joined]), *group[1:]]
    for value in values[:1] if action.nargs is None else values:
        try:
            if action.dest == "pipeline_model_parallel_layout":
                layout_stages(value)
            elif getattr(action.type, "__name__", "").endswith("_freq_type") and "[" in value:
                listed(value)
            elif isinstance(action.type, FunctionType):
                action.type(value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise InputError(f"{name} {shown(value)}: {error}") from None
        except KeyError:  # some look into an enumeration
            names = [choice.name for choice in action.choices or () if isinstance(choice, enum.Enum)]
            raise InputError(f"{name} {shown(value)}: there is none{nearest(value[:80], names)}") from None


def refused(workload: Workload) -> str:
    """The sentence that says what Megatron refuses: what the workload's fields say has passed labkit's rules."""
    launched = workload.launch is not None and workload.launch.arguments
    return "launch.arguments: Megatron refuses them" if launched else "Megatron refuses the workload"


@contextmanager
def refusing(sentence: str, kinds: tuple[type[BaseException], ...] = (Exception, SystemExit)) -> Iterator[None]:
    """Whatever Megatron says when it refuses becomes an `InputError`: the `sentence`, a colon and what it says.

    `kinds` of exceptions: by default all, and its leaving the process.
    """
    try:
        yield
    except InputError:
        raise
    except kinds as error:
        raise InputError(f"{sentence}: {said(error)}") from None


def said(error: BaseException) -> str:
    """What an exception says, or the line that raised it."""
    text = "" if isinstance(error, SystemExit) else str(error)
    if not text.strip():
        frames = traceback.extract_tb(error.__traceback__)
        text = (frames[-1].line or "") if frames else ""
    kind = "" if isinstance(error, AssertionError | ValueError | SystemExit) else f"{type(error).__name__}: "
    return kind + shown(text, 400)


def shown(text: str, most: int = 80) -> str:
    """A text in one line of at most `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."
