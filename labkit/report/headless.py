"""One notebook run many times, each with other parameters: headless, side by side, resumable.

A run is named by the hash of the notebook's source, its parameters and labkit's version, and leaves `<name>.ipynb`
(executed) and then `<name>.json` (`Run`) in its folder. It counts as done where that record says so; whatever else is
there is run again. A run that failed keeps the notebook as far as it came, `<name>.failed.ipynb`. Several processes may
share a folder.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import nbformat
import yaml
from pydantic import JsonValue, ValidationError

import labkit
from labkit.errors import InputError, LabkitError, WorkError
from labkit.files import claimed, read_regular, write_atomically
from labkit.report.execute import execute
from labkit.report.notebooks import check_parameters, find_notebook
from labkit.workload.base import Many, Part
from labkit.workload.workload import content_hash

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_MAXIMUM_BYTES = 16 * 2**20
_POLL_SECONDS = 0.2


class Run(Part):
    """What came of one run; also the content of its `<name>.json`."""

    schema_name: Literal["labkit.notebook-run/1"] = "labkit.notebook-run/1"
    name: str
    parameters: dict[str, JsonValue]
    state: Literal["done", "failed", "running"]
    """running: another process has it."""
    reason: str = ""
    """Why it failed: the cell, the heading it stands under, the last line of the error."""
    notebook: str
    """The executed notebook, as far as it came."""
    created_at: str = ""
    wall_seconds: float | None = None


class Runs(Part):
    """All runs of a notebook: the `--json` object of `labkit notebook`."""

    schema_name: Literal["labkit.notebook-runs/1"] = "labkit.notebook-runs/1"
    source: str
    runs: Many[Run]

    @property
    def done(self) -> bool:
        """Every run is."""
        return all(run.state == "done" for run in self.runs)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.table import Table
        from rich.text import Text

        done = sum(run.state == "done" for run in self.runs)
        yield Text.assemble((self.source, "bold"), f"  {done} of {len(self.runs)} runs done")
        table = Table()
        for column in ("parameters", "state", "notebook", "reason"):
            table.add_column(column, overflow="fold")
        for run in self.runs:
            values = ", ".join(f"{name}={value}" for name, value in run.parameters.items())
            table.add_row(Text(values), run.state, Text(run.notebook), Text(run.reason))
        yield table


def run_all(
    source: Path,
    parameters: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    workers: int = 1,
    force: bool = False,
    say: Callable[[str], None],
) -> Runs:
    """Run a notebook once for each of the parameters, but for those that are done.

    Args:
        source: A jupytext percent script whose last cell calls `labkit.report.heading.finish`, or the name of one of
            labkit's.
        parameters: Names and values for the cell tagged `parameters`, for each run.
        folder: Where the runs are kept.
        workers: Runs at once, each in processes of its own.
        force: Also run again what is done.
        say: Told of each run as it ends.

    Raises:
        InputError: there is no such notebook, or parameters that it has not; nothing is run.
        WorkError: the folder cannot be written.
        KeyboardInterrupt: interrupted; what was finished is kept.
    """
    source = find_notebook(source)
    for values in parameters:
        check_parameters(source, values)
    sweep = _Sweep(source, folder, force, say)
    with ThreadPoolExecutor(workers, thread_name_prefix="labkit-notebook") as pool:
        try:
            running = [pool.submit(sweep.run, values) for values in parameters]
            waiting = set(running)
            while waiting:
                # Not without a timeout: a signal that another thread happens to receive would not wake this one.
                ended, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
                for future in ended:
                    future.result()
        except BaseException:
            sweep.stopped.set()
            raise
    return Runs(source=str(source), runs=tuple(future.result() for future in running))


def load_parameters(path: Path) -> list[dict[str, Any]]:
    """The runs that a YAML file asks for: a mapping of parameters, or a list of them.

    Raises:
        InputError: it cannot be read or is neither.
    """
    try:
        stated = yaml.safe_load(read_regular(path, _MAXIMUM_BYTES))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: cannot be read as YAML ({str(error).splitlines()[0]})") from None
    runs = stated if isinstance(stated, list) else [stated]
    if not runs or not all(isinstance(run, dict) and all(isinstance(name, str) for name in run) for run in runs):
        raise InputError(f"{path}: should be a mapping of a notebook's parameters, or a list of such mappings")
    return runs


class _Stopped(WorkError):
    """The sweep ends, and with it this run."""


class _Sweep:
    """What the threads of `run_all` share."""

    def __init__(self, source: Path, folder: Path, force: bool, say: Callable[[str], None]) -> None:
        self.stopped = threading.Event()
        self._source = source
        self._text = source.read_text(encoding="utf-8")
        self._folder = folder
        self._force = force
        self._say = say

    def run(self, values: Mapping[str, Any]) -> Run:
        """Make one run, unless it is done or another process has it.

        Raises:
            WorkError: the folder cannot be written, or the sweep was stopped.
        """
        hashed = content_hash({"source": self._text, "parameters": dict(values), "labkit": labkit.__version__})
        name = f"{self._source.stem}-{hashed[:16]}"
        record = self._folder / f"{name}.json"
        if self.stopped.is_set():
            raise _Stopped(f"{name}: stopped")
        try:
            with claimed(self._folder / f"{name}.part") as mine:
                if not mine:
                    return self._record(name, values, "running", self._folder / f"{name}.ipynb")
                kept = None if self._force else _done(record)
                return kept or self._make(name, values, record)
        except OSError as error:
            raise WorkError(f"{self._folder}: cannot be written ({error.strerror or error})") from None

    def _make(self, name: str, values: Mapping[str, Any], record: Path) -> Run:
        executed, failed = record.with_suffix(".ipynb"), record.with_suffix(".failed.ipynb")
        began = time.monotonic()
        try:
            made = execute(self._source, values, failed, self._go_on)
        except _Stopped:
            raise
        except LabkitError as error:
            run = self._record(name, values, "failed", failed, str(error), time.monotonic() - began)
        else:
            write_atomically(executed, nbformat.writes(made.notebook))
            failed.unlink(missing_ok=True)
            run = self._record(name, values, "done", executed, "", time.monotonic() - began)
        write_atomically(record, run.model_dump_json())
        self._say(f"{name}: {run.state}" + (f", {run.reason}" if run.reason else ""))
        return run

    def _go_on(self, place: str) -> None:
        if self.stopped.is_set():
            raise _Stopped(f"stopped at {place}")

    def _record(
        self,
        name: str,
        values: Mapping[str, Any],
        state: Literal["done", "failed", "running"],
        notebook: Path,
        reason: str = "",
        seconds: float | None = None,
    ) -> Run:
        return Run(
            name=name,
            parameters=dict(values),
            state=state,
            reason=reason,
            notebook=str(notebook),
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            wall_seconds=None if seconds is None else round(seconds, 3),
        )


def _done(record: Path) -> Run | None:
    """The record of a run that is done and has its notebook; None if there is none to trust."""
    try:
        run = Run.model_validate_json(read_regular(record, _MAXIMUM_BYTES))
        nbformat.read(record.with_suffix(".ipynb"), as_version=4)
    except (OSError, ValidationError, ValueError, nbformat.reader.NotJSONError):
        return None
    return run if run.state == "done" else None
