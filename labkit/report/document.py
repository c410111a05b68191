"""From a study to its report: the notebook run headless, then rendered to one HTML file."""

from datetime import UTC, datetime
from pathlib import Path

import nbformat

import labkit
from labkit.errors import WorkError
from labkit.files import write_atomically
from labkit.report.execute import execute
from labkit.report.files import check_output
from labkit.report.heading import Fact
from labkit.report.html import render
from labkit.report.parameters import RecomputeStudy

_PACKAGE = Path(labkit.__file__).resolve().parent


def write_report(study: Path, output: Path) -> Path:
    """Write the report of a study from the results that are there; results that are not are shown as missing.

    The executed notebook is kept beside the report (`NAME.executed.ipynb`), a half-executed one of a failed run as
    `NAME.failed.ipynb`.

    Args:
        study: the study file.
        output: the HTML file to write; its folder is made.

    Returns:
        `output`.

    Raises:
        InputError: the study file is not there, or `check_output` refuses the output; nothing is written.
        WorkError: the notebook failed or the files cannot be written.
    """
    parameters = RecomputeStudy.checked(study=str(study), run=False)
    check_output(output)
    executed, failed = output.with_suffix(".executed.ipynb"), output.with_suffix(".failed.ipynb")
    run = execute(notebook_source("recompute_study"), parameters.model_dump(), failed)
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, labkit {labkit.__version__}"
    facts = (*run.heading.facts, Fact(name="Report made", value=made))
    heading = run.heading.model_copy(update={"facts": facts})
    try:
        write_atomically(executed, nbformat.writes(run.notebook))
        write_atomically(output, render(run.notebook, heading))
        failed.unlink(missing_ok=True)
    except OSError as error:
        raise WorkError(f"{output}: the report cannot be written ({error.strerror or error})") from None
    return output


def notebook_source(name: str) -> Path:
    """`notebooks/NAME.py` inside an installed wheel, or beside the package in a checkout."""
    installed = _PACKAGE / "notebooks"
    return (installed if installed.is_dir() else _PACKAGE.parent / "notebooks") / f"{name}.py"
