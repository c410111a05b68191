"""Running a benchmark's cases side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def traced_each[Case, Result](
    work: Callable[[Case], Result], cases: Sequence[Case], workers: int, console: Console
) -> list[Result]:
    """What `work` makes of each case, in their order, `workers` at a time; progress shows where someone watches."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True) if console.is_terminal else nullcontext()
    with ThreadPoolExecutor(workers) as pool, progress as bar:
        task = None if bar is None else bar.add_task("tracing", total=len(cases))
        waiting = [pool.submit(work, case) for case in cases]
        for _ in as_completed(waiting):
            if bar is not None and task is not None:
                bar.advance(task)
    return [future.result() for future in waiting]
