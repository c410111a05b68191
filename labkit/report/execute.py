"""A notebook's source, run headless to its end: jupytext to .ipynb, papermill in a process of its own.

Papermill alone cannot tell success: a kernel that dies leaves every cell marked complete. A run counts only if the
process ended well, no cell failed or is pending, and the last cell wrote the notebook's heading
(`labkit.report.heading.finish`).
"""

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import yaml
from nbconvert.filters import strip_ansi
from nbformat import NotebookNode

from labkit.console import Terminal
from labkit.errors import InputError, WorkError
from labkit.files import temporary_folder, write_atomically
from labkit.report.heading import RESULT_VARIABLE, Heading
from labkit.report.kernel import kernel_environment

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 10.0
_MARKER = "papermill-error-cell-tag"


@dataclass(frozen=True)
class Executed:
    """A notebook that ran to its end, and the heading its last cell wrote."""

    notebook: NotebookNode
    heading: Heading


def execute(
    source: Path, parameters: Mapping[str, Any], failed: Path, show: Callable[[str], None] | None = None
) -> Executed:
    """Run a notebook in the working directory of the caller.

    Args:
        source: a jupytext percent script.
        parameters: values for its parameters cell; already checked.
        failed: where the half-executed notebook is kept if the run fails.
        show: told which cell the run is at, five times a second, and may end it by raising; by default a terminal shows
            it.

    Raises:
        InputError: a cell says that what it was given is wrong.
        WorkError: a cell failed otherwise, the kernel died, or the last cell was not reached; names the cell and why.
    """
    with temporary_folder("labkit-notebook-") as run:
        given, executed, values, result = (run / name for name in ("in.ipynb", "out.ipynb", "in.yaml", "result.json"))
        nbformat.write(convert(source), given)
        values.write_text(yaml.safe_dump(dict(parameters)), encoding="utf-8")
        environment = {**kernel_environment(run), RESULT_VARIABLE: str(result)}
        command = [sys.executable, "-m", "labkit.report.worker", str(given), str(executed), str(values)]
        with (run / "log").open("w+", encoding="utf-8") as log:
            with nullcontext(show) if show is not None else _status(source.name) as told:
                code = _run(command, environment, log, executed, told)
            log.seek(0)
            complaint = _last_line(log.read())
        notebook = _read(executed)
        if notebook is None:
            raise WorkError(f"{source.name}: could not be started: {complaint or f'exit code {code}'}")
        problem = _problem(notebook, code)
        heading = _heading(result)
        if problem is None and heading is None:
            problem = f"{_place(notebook, _last_started(notebook))}: the kernel ended before the last cell"
        for name in ("input_path", "output_path"):  # paths of this run, gone when it ends
            notebook.metadata.papermill.pop(name, None)
        if problem is not None or heading is None:
            _keep(notebook, failed)
            if (refusal := _refusal(notebook)) is not None:
                raise InputError(f"{source.name}: {refusal}")
            raise WorkError(f"{source.name}: {problem}; the notebook as far as it came is {failed}")
        return Executed(notebook, heading)


def convert(source: Path) -> NotebookNode:
    """The notebook of a percent script; the same script gives the same notebook, cell ids included."""
    notebook: NotebookNode = jupytext.reads(source.read_text(encoding="utf-8"), fmt="py:percent")
    python = {"name": "python3", "language": "python", "display_name": "Python 3 (ipykernel)"}
    notebook.metadata.setdefault("kernelspec", python)  # papermill asks for the language
    for place, cell in enumerate(notebook.cells):
        cell.id = hashlib.sha256(f"{place}:{cell.source}".encode()).hexdigest()[:12]
    return notebook


@contextmanager
def _status(name: str) -> Iterator[Callable[[str], None]]:
    with Terminal(stderr=True).status(f"{name}: starting") as line:
        yield lambda place: line.update(f"{name}: {place}")


def _run(command: list[str], environment: dict[str, str], log: Any, executed: Path, show: Callable[[str], None]) -> int:
    """Run the worker and show which cell it is at; whatever ends this ends the worker."""
    # A session of its own: Ctrl-C reaches this process alone, which then stops the worker in order.
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    )
    try:
        seen, place = 0.0, "starting"
        while worker.poll() is None:
            time.sleep(_POLL_SECONDS)
            if executed.exists() and (changed := executed.stat().st_mtime) != seen:
                seen = changed
                if (notebook := _read(executed)) is not None:
                    place = _place(notebook, _last_started(notebook))
            show(place)
        return worker.returncode
    finally:
        try:
            worker.communicate(timeout=_PATIENCE_SECONDS)  # ends its input, which stops it
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _read(path: Path) -> NotebookNode | None:
    """The notebook as papermill last saved it; None while there is none or it is being written."""
    try:
        notebook: NotebookNode = nbformat.read(path, as_version=4)
        # Papermill marks a failure with cells of its own, which would shift the numbers of the others.
        notebook.cells = [cell for cell in notebook.cells if _MARKER not in cell.metadata.get("tags", ())]
    except (OSError, ValueError, nbformat.reader.NotJSONError):
        return None
    return notebook


def _refusal(notebook: NotebookNode) -> str | None:
    """The sentence of a cell that ended in labkit's `InputError`."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if output.output_type == "error" and output.ename == InputError.__name__:
                return _last_line(strip_ansi(output.evalue))
    return None


def _problem(notebook: NotebookNode, code: int) -> str | None:
    """Why the run does not count; None if papermill has nothing against it."""
    for index, cell in enumerate(notebook.cells):
        if cell.metadata.get("papermill", {}).get("status") == "failed":
            errors = [output for output in cell.get("outputs", ()) if output.output_type == "error"]
            reason = strip_ansi(f"{errors[-1].ename}: {errors[-1].evalue}") if errors else "failed"
            return f"{_place(notebook, index)}: {_last_line(reason)}"
    pending = [
        cell for cell in notebook.cells if cell.metadata.get("papermill", {}).get("status") in ("pending", "running")
    ]
    if code != 0 or pending:
        return f"{_place(notebook, _last_started(notebook))}: the kernel died (exit code {code})"
    return None


def _last_started(notebook: NotebookNode) -> int:
    """Index of the last cell that the kernel took on."""
    started = (
        index for index, cell in enumerate(notebook.cells) if cell.metadata.get("papermill", {}).get("start_time")
    )
    return max(started, default=0)


def _place(notebook: NotebookNode, index: int) -> str:
    """`cell 7 of 19 (What holds the peak)`, the words being the heading it stands under."""
    above = (
        line.strip("# ")
        for cell in notebook.cells[: index + 1]
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("#")
    )
    heading = list(above)[-1:]
    return f"cell {index + 1} of {len(notebook.cells)}" + (f" ({heading[0]})" if heading else "")


def _heading(result: Path) -> Heading | None:
    try:
        return Heading.model_validate_json(result.read_bytes())
    except FileNotFoundError:
        return None


def _keep(notebook: NotebookNode, path: Path) -> None:
    try:
        write_atomically(path, nbformat.writes(notebook))
    except OSError as error:
        raise WorkError(f"{path}: the failed notebook cannot be kept ({error.strerror or error})") from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
