"""Notebooks run for real: papermill, a kernel, and the ways they fail."""

import sys
from pathlib import Path

import nbformat
import pytest

from labkit.errors import WorkError
from labkit.report.execute import convert, execute
from labkit.report.heading import Fact, Heading
from labkit.workload.base import Part

FINISH = """from labkit.report.heading import Fact, Heading, finish

# %%
finish(Heading(title=f'{name} {number}', facts=(Fact(name='a', value='b'),)))
"""
HEAD = '# %% tags=["parameters"]\nname = "nobody"\nnumber = 0\n\n# %% [markdown]\n# ## The work\n\n# %%\n'


class Parameters(Part):
    name: str = "it's <b>&"
    number: int = 3


def notebook(folder: Path, work: str) -> Path:
    path = folder / "some_notebook.py"
    path.write_text(HEAD + work, encoding="utf-8")
    return path


def fails(folder: Path, work: str) -> tuple[str, nbformat.NotebookNode]:
    """The sentence of the failure, and the notebook kept of it."""
    kept = folder / "kept" / "x.failed.ipynb"
    with pytest.raises(WorkError) as raised:
        execute(notebook(folder, work), Parameters().model_dump(), kept)
    return str(raised.value), nbformat.read(kept, as_version=4)


def test_a_notebook_runs_to_its_end_with_its_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = notebook(tmp_path, "import os, sys\nprint(os.getcwd(), sys.executable)\n\n# %%\n" + FINISH)
    run = execute(source, Parameters().model_dump(), tmp_path / "failed.ipynb")
    assert run.heading == Heading(title="it's <b>& 3", facts=(Fact(name="a", value="b"),))
    (shown,) = [output for cell in run.notebook.cells for output in cell.get("outputs", ())]
    assert shown.text == f"{tmp_path} {sys.executable}\n"
    assert not (tmp_path / "failed.ipynb").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some_notebook.py"]
    assert str(tmp_path) not in str(run.notebook.metadata)


def test_a_failing_cell_is_named_with_the_last_line_of_its_error(tmp_path: Path) -> None:
    said, kept = fails(tmp_path, "print('before')\nraise ValueError('first line\\nthe last line')\n\n# %%\n" + FINISH)
    assert said.startswith("some_notebook.py: cell 4 of 6 (The work): the last line; ")
    assert said.endswith("x.failed.ipynb")
    assert any("before" in str(cell.get("outputs")) for cell in kept.cells)


def test_a_kernel_that_dies_is_no_success(tmp_path: Path) -> None:
    said, _ = fails(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n\n# %%\n" + FINISH)
    assert "cell 4 of 6 (The work): the kernel " in said


def test_a_notebook_that_exits_early_is_no_success(tmp_path: Path) -> None:
    said, _ = fails(tmp_path, "import sys\nsys.exit(0)\n\n# %%\n" + FINISH)
    assert "(The work)" in said


def test_a_notebook_that_never_finishes_is_no_success(tmp_path: Path) -> None:
    said, _ = fails(tmp_path, "1 + 1\n")
    assert "the kernel ended before the last cell" in said


def test_cell_ids_depend_on_the_source_alone(tmp_path: Path) -> None:
    source = notebook(tmp_path, FINISH)
    assert [cell.id for cell in convert(source).cells] == [cell.id for cell in convert(source).cells]
    nbformat.validate(convert(source))
