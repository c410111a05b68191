"""What benchmarks share: their command lines, and running cases side by side."""

import argparse
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import NoReturn

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from labkit.console import Terminal, printable


class Parser(argparse.ArgumentParser):
    """Of a command line whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """End with the sentence on stderr, and exit code 2."""
        self.exit(2, f"error: {printable(' '.join(message.split()))}\n")


def at_least_one(text: str) -> int:
    """A number of things on the command line."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"should be a whole number from 1 on, not {text[:80]!r}")
    return int(text)


def traced_each[Case, Result](
    work: Callable[[Case], Result],
    cases: Sequence[Case],
    workers: int,
    *,
    said: Callable[[Result], str],
    kept: Callable[[Result], object] = lambda _: None,
) -> list[Result]:
    """What `work` makes of each case, in their order, `workers` at a time.

    As soon as a case is done `kept` is given its result, and stderr has a line with what `said` makes of it; a
    terminal also has a bar.
    """
    console = Terminal(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True) if console.is_terminal else nullcontext()
    with ThreadPoolExecutor(workers) as pool, progress as bar:
        task = None if bar is None else bar.add_task("tracing", total=len(cases))
        waiting = [pool.submit(work, case) for case in cases]
        for number, done in enumerate(as_completed(waiting), start=1):
            kept(done.result())
            console.print(Text(f"{number}/{len(cases)} {said(done.result())}"))
            if bar is not None and task is not None:
                bar.advance(task)
    return [future.result() for future in waiting]
