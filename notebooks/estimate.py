# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What one rank holds, and why
#
# The peak of the fullest rank of a training job, by formula alone: in which phase it comes, what holds it (by
# category, by part of the model, tensor by tensor), whether it fits a GPU with the safety margin, how sure that is, and
# what each recompute choice would change. No GPU and no torch are needed. 1 GiB is 2³⁰ bytes.

# %% tags=["parameters"]
workload = "moonlight-16b"
stage = None
gpus = ["h100-80gb", "h200-141gb"]

# %%
from labkit import Workload
from labkit.report import prose
from labkit.report.charts import estimate as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Estimate, workload_path
from labkit.report.tables import estimate as tables
from labkit.report.tables.study import asked
from labkit.workbench.estimate import Anatomy

parameters = Estimate.checked(workload=workload, stage=stage, gpus=gpus)
anatomy = Anatomy(Workload.load(workload_path(parameters.workload)), parameters.stage, parameters.gpus)

# %% [markdown]
# ## The answer

# %%
prose.lead(anatomy.sentences)

# %%
tables.fits(anatomy.fits)

# %% [markdown]
# All figures are estimated. *Peak* is what `torch.cuda.max_memory_allocated` would say; the *margin* is set aside above
# it and never hidden in a factor; *reserved* is what the caching allocator takes from the device where there is room
# (it gives cached blocks back before it fails). CUDA's context and NCCL's buffers come on top of all of them.

# %%
charts.choices(anatomy.choice_breakdown, anatomy.limits)

# %% [markdown]
# ## How sure this is
#
# Each tensor of the ledger says how its size is known; beside them the margin.

# %%
tables.certainty(anatomy.certainty)

# %% [markdown]
# What the workload leaves open is taken at its default; the peak with the other values:

# %%
tables.left_open(anatomy.left_open)

# %% [markdown]
# ## By part of the model
#
# DDP's buffers, which hold the parameters and gradients of all layers, are divided by the weights in them. Retained is
# what forward keeps for backward; transient, what only the running operation needs.

# %%
charts.parts(anatomy.part_breakdown)

# %%
tables.categories(anatomy.categories)

# %% [markdown]
# ## By tensor
#
# The largest tensors that are alive at the peak, like ones of all layers together. `*` stands for the number of a layer
# or an expert; a *label* is the recompute rule that touched a tensor.

# %%
tables.tensors(anatomy.tensors)

# %% [markdown]
# ## Through the step
#
# The steady step, in which the optimizer has its state; the first step has none until its end.

# %%
charts.timeline(*anatomy.timeline())

# %%
tables.phases(anatomy.phases)

# %% [markdown]
# ## Each pipeline stage
#
# A rank of every stage that can differ; stages that hold the same share a row. Passes under way are forward passes of a
# model chunk whose backward is still to come.

# %%
charts.stages(anatomy.stage_breakdown, anatomy.limits)

# %%
tables.stages(anatomy.stages)

# %% [markdown]
# ## What recompute would change
#
# Replay is what backward runs again each step, at the speed the GPU's data sheet allows: a lower bound. Launches and
# the host's work for each region come on top. The estimate counts each operation as if it were fused, a trace every
# launch: a traced bound is as high or higher, and so is the step it is a share of. The choices are priced on the stage
# that is fullest under each of them. *Not undercut*: of choices whose replay differs by less than 1 % of a step the one
# with the fewest regions stands for all, so that another may lie a little lower or further left.

# %%
charts.trade(anatomy.choices, anatomy.limits)

# %%
tables.best_choices(anatomy.best_choices)

# %% [markdown]
# A price *within 1 or 2 %* is one in blocks of fresh segments, and so is the control that its saving is taken from.
# That does not cancel the error: two such choices whose savings differ by less than 1 or 2 % of the peak are not told
# apart. `labkit estimate` of the choice, or a study, does.
#
# Each label alone, against no recompute (tensors, to the byte). What it retains less does not lower the peak where the
# peak is elsewhere: in the optimizer's step, or in a region that is run again.

# %%
tables.labels(anatomy.labels)

# %% [markdown]
# ## What was asked

# %%
asked(anatomy.workload.model_dump(mode="json", exclude_unset=True), "Stated")

# %% [markdown]
# ## The ledger itself
#
# Every figure above is a query of one table, a row for each tensor with the interval of a clock in which it is alive.
# `anatomy.estimate.ledger.frame` is all of it as a polars frame, `anatomy.held.frame` what is alive at the peak, of
# which the largest rows are:

# %%
tables.head(anatomy.head)

# %%
finish(Heading.of_workload(anatomy.title, "", anatomy.workload, "estimated"))
