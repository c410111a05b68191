# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Recompute study
#
# One control and candidates that should differ from it in one choice (where one differs in several, its verdict says
# so), in a sweep once for every setting: what each holds by closed-form estimate, by a trace of the real Megatron
# Core code without a GPU, measured on GPUs where that was done, and by publication; and which one to try first. Peaks
# are of one rank, that of the pipeline stage that holds most. 1 GiB is 2³⁰ bytes.

# %% tags=["parameters"]
study = "data/studies/moonlight-16b.yaml"
run = True
workers = None

# %%
from labkit import Study
from labkit.report import prose
from labkit.report.charts import study as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import RecomputeStudy, input_path
from labkit.report.tables import study as tables

parameters = RecomputeStudy.checked(study=study, run=run, workers=workers)
question = Study.load(input_path(parameters.study))

# %%
if parameters.run:
    question.run(workers=parameters.workers)
results = question.results()

# %% [markdown]
# ## What to try first

# %%
prose.lead(results.decided.sentences)

# %%
tables.decision(results.decision)

# %% [markdown]
# Peaks are the largest allocated bytes of one rank (`torch.cuda.max_memory_allocated`). Saved is against the control
# of the same source. Step time is the change against the control, from where the column's head says. Replay is what
# backward runs again each step, at the speed the GPU's data sheet allows: a lower bound, in ms and as a share of the
# control's whole step at that speed. Launches, waiting and lost overlap come on top, and so does the host's work for
# each region that is run again: where the host sets the pace, regions tell more than ms. A trace counts every launch,
# the estimate each operation as if it were fused: a traced bound is as high as an estimated one or higher, and so is
# the step it is a share of. The CUDA context, NCCL and cached blocks of the allocator come on top of every peak.

# %%
prose.failures(results.cells)

# %% [markdown]
# ## What memory costs
#
# A choice is worth its place if nothing saves as much for less replay: those are filled and joined. For each of the
# others there is a cheaper one that saves as much.

# %%
charts.tradeoff(results.tradeoff)

# %% [markdown]
# ## What was asked

# %%
tables.asked(question.matrix.control.workload.model_dump(mode="json", exclude_unset=True))

# %% [markdown]
# What the control leaves open of the fields that decide memory is estimated at its default; other values would move the
# peak.

# %%
prose.left_open(results.left_open)

# %% [markdown]
# ## The peak of each choice

# %%
charts.peaks(results.cells)

# %% [markdown]
# ## What each choice saves

# %%
charts.differences(results.cells)

# %% [markdown]
# ## What holds the peak

# %%
charts.holdings(results.breakdown, results.cells)

# %% [markdown]
# ## How the peak comes about

# %%
charts.timeline(*results.timeline())

# %% [markdown]
# ## How far to trust the figures
#
# The estimate is checked against the trace in its two halves: what is held between steps, and what the forward pass
# retains for backward. Both are checked against the published peak.

# %%
tables.accuracy(results.cells)

# %% [markdown]
# ## What each traced rank holds
#
# One rank of every pipeline stage that can differ is traced; a choice's peak is the largest of them. The first step
# runs before the optimizer has its state.

# %%
tables.ranks(results.ranks)

# %% [markdown]
# ## How the figures came about
#
# Contract fields are what a run on GPUs that passed records; a trace computes no loss and no time, and who publishes a
# peak seldom says the rest.

# %%
tables.contract(results.contract)

# %%
finish(
    Heading.of_study(
        question.matrix.title,
        question.matrix.description,
        question.status().sentence,
        results.contract,
        question.matrix.control.workload,
    )
)
