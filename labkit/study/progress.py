"""How a run shows itself: live in a terminal, silent elsewhere but for what the user must know."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from labkit.study.runner import Event, EventKind


@contextmanager
def show_progress(title: str, total: int) -> Iterator[Callable[[Event], None]]:
    """A listener for the events of a run of `total` cells; damage and failures are told everywhere, on stderr."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        overall = progress.add_task(escape(title), total=total, detail="")
        running: dict[str, TaskID] = {}

        def on_event(event: Event) -> None:
            label = event.cell.candidate.label
            match event.kind:
                case EventKind.STARTED:
                    running[label] = progress.add_task(f"  {escape(label)}", total=None, detail="")
                case EventKind.PHASE:
                    progress.update(running[label], detail=event.detail)
                case EventKind.DAMAGED:
                    progress.console.print(event.detail, style="yellow", markup=False, soft_wrap=True)
                case EventKind.KEPT | EventKind.DONE | EventKind.FAILED:
                    if label in running:
                        progress.remove_task(running.pop(label))
                    progress.advance(overall)
            if event.kind is EventKind.FAILED:
                progress.console.print(f"{label} failed: {event.detail}", style="red", markup=False, soft_wrap=True)

        yield on_event
