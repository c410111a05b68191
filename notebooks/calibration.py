# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Calibration
#
# How far labkit is from what machines measured: its estimates and its traces beside cells measured on H200, beside
# the peaks that Megatron-LM's own CI jobs logged on NVIDIA's machines, and beside published studies. Cells that a
# choice was made from are kept apart from those that were held out. Name a file of cells that you measured (`cells`,
# columns as in `data/published/h200_lora_peaks.csv`), and they are held out by nature.

# %% tags=["parameters"]
cells = None

# %%
from labkit.report import prose
from labkit.report.charts import calibration as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Calibration as Parameters
from labkit.report.parameters import input_path
from labkit.report.tables import calibration as tables
from labkit.workbench.calibration import FACETS, H200, JOB, OWN, Calibration

parameters = Parameters.checked(cells=cells)
found = Calibration.of(input_path(parameters.cells) if parameters.cells else None)

# %% [markdown]
# ## How far off
#
# Errors are in percent of the measured figure, positive where labkit is too high.

# %%
prose.lead(found.sentences)

# %%
tables.answers(found.answers)

# %% [markdown]
# *Held out*: no choice that lacks a source was made in view of the case; *calibrated*: one was. H200 figures are bytes
# above the baseline before forward; CI jobs' are peaks of one rank. Estimates of cells and studies were made just now;
# traces, and all figures of CI jobs, are kept ones (`data/traced`), made by `make cells` and `make jobs`; traces of
# published studies are in the studies' own results (`labkit study run`). *Covers*: how often the estimate with its
# margin (2 % and 64 MiB, 2.5 % with experts) is not below the measured figure; *headroom*: what it has above, on
# average and at least.

# %% [markdown]
# ## Cells on H200: estimated and traced against measured

# %%
charts.errors(found.cells, "cell_errors", "Errors against measured H200 cells", FACETS[H200])

# %%
charts.distribution(found.large, "cell_distribution", "H200 cells: how many are how near")

# %%
tables.groups(found.groups_of(OWN, H200), "cell-groups")

# %% [markdown]
# The rising lines and the groups are of figures from 1000 rows a rank, except where rows a rank are what is grouped by.
# These ten cases are furthest off, each by its furthest figure:

# %%
tables.worst(found.worst(OWN, H200), "worst-cells")

# %% [markdown]
# ## Megatron-LM's CI jobs: estimated and traced against measured
#
# No figure of theirs decided a formula; versions that the jobs do not state were chosen in view of some of them, which
# count as calibrated. Golden values before July 2026 come from other versions of Megatron.

# %%
charts.errors(found.peaks, "job_errors", "Errors against CI jobs, peaks", FACETS[JOB])

# %%
charts.distribution(found.recent, "job_distribution", "CI jobs: how many are how near")

# %%
tables.groups(found.groups_of(JOB), "job-groups")

# %%
tables.worst(found.worst(JOB), "worst-jobs")

# %% [markdown]
# ## What the margin covers
#
# The margin was chosen with the H200 cells in view, and never with the CI jobs'.

# %%
charts.coverage(found.margins, "coverage", "Estimate with margin, above the measured")

# %% [markdown]
# ## What has no trace
#
# A kept trace that was made of other work than today's is stale, and no figure of it is shown here: of a cell that is
# the workload that labkit makes of it, of a CI job the job as it was published.

# %%
prose.listed(found.untraced, "Every case has a trace.")

# %% [markdown]
# ## Every figure
#
# GiB are the measured ones, % how far off estimate and trace are. Of CI jobs those of July 2026 and later; older ones,
# and those that resume from a checkpoint, are in the data of the chart of their errors (CSV).

# %%
tables.figures(found.cells, "cells")

# %%
tables.figures(found.runs, "runs")

# %%
finish(Heading.of_facts("Calibration", found.description, found.facts))
