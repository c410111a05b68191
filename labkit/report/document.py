"""From a notebook to its report: run headless, then rendered to one HTML file."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat

import labkit
from labkit.errors import WorkError
from labkit.files import write_atomically
from labkit.report.execute import execute
from labkit.report.files import check_output
from labkit.report.heading import Fact
from labkit.report.html import render
from labkit.report.notebooks import check_parameters, notebook_source


def study_report(study: Path, output: Path) -> Path:
    """Write the report of a study from the results that are there; results that are not are shown as missing.

    Args:
        study: the study file.
        output: as for `write_report`, which says what is raised.
    """
    return write_report(notebook_source("recompute_study"), {"study": str(study), "run": False}, output)


def write_report(source: Path, parameters: Mapping[str, Any], output: Path) -> Path:
    """Run a notebook and write its report.

    The executed notebook is kept beside the report (`NAME.executed.ipynb`), a half-executed one of a failed run as
    `NAME.failed.ipynb`.

    Args:
        source: the notebook, a jupytext percent script whose last cell calls `labkit.report.heading.finish`.
        parameters: values for its parameters cell; what they leave out keeps the cell's value.
        output: the HTML file to write; its folder is made.

    Returns:
        `output`.

    Raises:
        InputError: the parameters are wrong, or `check_output` refuses the output; nothing is written. Or a cell says
            that what it was given is wrong.
        WorkError: the notebook failed or the files cannot be written.
    """
    check_parameters(source, parameters)
    check_output(output)
    executed, failed = output.with_suffix(".executed.ipynb"), output.with_suffix(".failed.ipynb")
    run = execute(source, parameters, failed)
    now = datetime.now(UTC)
    made = f"{now:%Y-%m-%d %H:%M} UTC, labkit {labkit.__version__}"
    facts = (*run.heading.facts, Fact(name="Report made", value=made))
    about = {"facts": facts, "kind": source.stem.replace("_", " "), "made_at": now.isoformat(timespec="seconds")}
    heading = run.heading.model_copy(update=about)
    try:
        write_atomically(executed, nbformat.writes(run.notebook))
        write_atomically(output, render(run.notebook, heading))
        failed.unlink(missing_ok=True)
    except OSError as error:
        raise WorkError(f"{output}: the report cannot be written ({error.strerror or error})") from None
    return output
