"""Reports built from invented frames, without running a kernel."""

from typing import Any

import nbformat
import polars as pl
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from labkit.report import prose
from labkit.report.charts import study as charts
from labkit.report.heading import Heading
from labkit.report.html import render
from labkit.report.tables import study as tables
from tests.report import frames

SENTENCES = (
    "Try [moe_act] first: it lowers the traced peak from 34.17 GiB to 33.54 GiB (-0.63 GiB) for 9.1 ms a step.",
    "Every traced choice fits NVIDIA H100 80GB HBM3 (79.10 GiB), the control with 45.06 GiB to spare.",
)


def shown(value: Any, source: str) -> NotebookNode:
    """A code cell that shows `value` as IPython would."""
    if hasattr(value, "_repr_mimebundle_"):
        data, metadata = value._repr_mimebundle_()
    else:
        data, metadata = {"text/html": value._repr_html_(), "text/plain": repr(value)}, {}
    cell: NotebookNode = new_code_cell(source, outputs=[new_output("execute_result", data=data, metadata=metadata)])
    return cell


def notebook(cells: pl.DataFrame) -> NotebookNode:
    """The executed notebook of a study with these cells."""
    made: NotebookNode = new_notebook(
        cells=[
            new_markdown_cell("# Recompute study\n\nPeaks are of one rank; 1 GiB is $2^{30}$ bytes."),
            new_markdown_cell("## What to try first"),
            shown(prose.lead(SENTENCES), "prose.lead(results.decided.sentences)"),
            shown(tables.decision(frames.decision(cells)), "tables.decision(results.decision)"),
            shown(prose.failures(cells), "prose.failures(results.cells)"),
            new_markdown_cell("## What memory costs"),
            shown(charts.tradeoff(frames.tradeoff(cells)), "charts.tradeoff(results.tradeoff)"),
            new_markdown_cell("## The peak of each choice"),
            shown(charts.peaks(cells), "charts.peaks(results.cells)"),
            new_markdown_cell("## What each choice saves"),
            shown(charts.differences(cells), "charts.differences(results.cells)"),
            new_markdown_cell("## What holds the peak"),
            shown(charts.holdings(frames.breakdown(cells), cells), "charts.holdings(results.breakdown, results.cells)"),
            new_markdown_cell("## How the peak comes about"),
            shown(charts.timeline(*frames.timeline(cells)), "charts.timeline(*results.timeline())"),
            new_markdown_cell("## How far to trust the figures"),
            shown(tables.accuracy(cells), "tables.accuracy(results.cells)"),
            new_markdown_cell("## How the figures came about"),
            shown(tables.contract(frames.contract()), "tables.contract(results.contract)"),
        ]
    )
    nbformat.validate(made)
    return made


def report(cells: pl.DataFrame, title: str = "Moonlight 16B: what to recompute", description: str = "") -> str:
    """The report of a study with these cells."""
    heading = Heading.of_study(title, description, "6 of 6 cells done", frames.contract())
    return render(notebook(cells), heading)
