# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why it died
#
# Logs, out-of-memory messages, memory snapshots and launch arguments of one run: what happened, the line that shows it,
# where the memory was, and what to try next. Figures that the files say are called recorded, those of labkit's formulas
# estimated. 1 GiB is 2³⁰ bytes.

# %% tags=["parameters"]
files = ["data/examples/moonlight-oom.log"]
world_size = None
gpu = None

# %%
from labkit.diagnose import examine
from labkit.report import prose
from labkit.report.charts import diagnosis as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Diagnosis, input_path
from labkit.report.tables import diagnosis as tables
from labkit.workbench import diagnosis as view

parameters = Diagnosis.checked(files=files, world_size=world_size, gpu=gpu)
examined = examine(
    [input_path(file) for file in parameters.files], world_size=parameters.world_size, gpu=parameters.gpu
)

# %% [markdown]
# ## What happened

# %%
prose.lead(view.answer(examined))

# %%
tables.findings(view.findings(examined))

# %%
prose.listed(examined.diagnosis.notes, "What was run is taken as the files state it.")

# %% [markdown]
# ## Where the memory was
#
# As the out-of-memory messages say it: what tensors had, what PyTorch kept beside them, what the context, NCCL and
# libraries had outside of it, and what was still free on the GPU.

# %%
charts.failures(view.failures(examined))

# %%
tables.ranks(view.ranks(examined))

# %% [markdown]
# ## What the estimate says
#
# By formula, for the rank that holds most; it needs a file that says what was run: Megatron's block of arguments in the
# log, a launch script, or a labkit workload. At a failure the recorded figure is what was allocated and what was asked
# for together: what the rank needed at the least.

# %%
tables.beside(view.beside(examined))

# %%
charts.holdings(view.holdings(examined))

# %% [markdown]
# ## Through the run

# %%
charts.steps(view.steps(examined))

# %% [markdown]
# ## Through the snapshot
#
# A memory snapshot knows every allocation: what was live at the peak, by the line of source code that asked for it.

# %%
charts.snapshot(view.moments(examined))

# %%
tables.live(view.live(examined))

# %%
tables.compared(view.compared(examined))

# %%
finish(Heading.of_facts("Why it died", "", view.facts(examined)))
