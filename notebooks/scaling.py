# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How memory scales, and how long sequences may be
#
# One workload, a size of it changed at a time: the peak by sequence length, layers, parallel sizes and micro-batch
# under several recompute choices, the longest sequence that fits each GPU in each layout, and what holds the memory
# there. All figures are estimated; no GPU is needed. 1 GiB is 2³⁰ bytes.

# %% tags=["parameters"]
workload = "moonlight-16b"
gpus = ["h100-80gb", "h200-141gb"]
longest = 1048576

# %%
from labkit import Workload
from labkit.report import prose
from labkit.report.charts import scaling as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Scaling as Parameters
from labkit.report.parameters import workload_path
from labkit.report.tables import scaling as tables
from labkit.report.tables.study import asked
from labkit.workbench.scaling import Scaling

parameters = Parameters.checked(workload=workload, gpus=gpus, longest=longest)
scaling = Scaling(Workload.load(workload_path(parameters.workload)), parameters.gpus, parameters.longest)

# %% [markdown]
# ## The answer

# %%
prose.lead(scaling.sentences)

# %% [markdown]
# ## The fit frontier
#
# The longest sequence whose estimated peak fits with the safety margin, to within a 64th of itself; the next length
# does not. Each size is doubled and halved alone, on as many GPUs, each rank with as many micro-batches as before.
# *Routing allowance* is the same layout with what labkit sets aside for a router that was not measured; replay is that
# at the workload's own length. *Fragments*: blocks fit, as expandable segments need it, but the caching allocator as it
# is set runs out of memory all the same, since it holds whole segments. *Allocator up to* (a bar in the chart): the
# longest up to which it gets along too at every sixteenth of the longest length from the half on; looked for in the
# layout as it is alone. CUDA's context and NCCL's buffers come on top of everything.

# %%
charts.frontier(scaling.frontier)

# %%
tables.frontier(scaling.frontier)

# %% [markdown]
# ## What holds the memory as sequences grow
#
# Each recompute choice at its longest length on the smallest GPU that it fits, and what each more token adds on the
# second half of the way there.

# %%
charts.holdings(scaling.holdings, scaling.limits)

# %%
tables.growth(scaling.growth)

# %% [markdown]
# ## One size at a time
#
# Curves are of outlines, which are within 1 or 2 % of the estimate. The global batch follows, so that each rank has as
# many micro-batches as before. Besides none and the workload's own choice, two lists of labels are followed: the one
# that saves most for its replay where sequences are long, and the one that holds least there.

# %%
charts.curve(scaling.curves, "sequence length", scaling.limits)

# %%
charts.curve(scaling.curves, "layers", scaling.limits)

# %%
charts.curve(scaling.curves, "TP", scaling.limits)

# %%
charts.curve(scaling.curves, "CP", scaling.limits)

# %%
charts.curve(scaling.curves, "EP", scaling.limits)

# %%
charts.curve(scaling.curves, "micro-batch", scaling.limits)

# %% [markdown]
# Settings that a rule of Megatron Core or labkit refuses:

# %%
tables.refused(scaling.refused)

# %% [markdown]
# ## What was asked

# %%
asked(scaling.workload.model_dump(mode="json", exclude_unset=True), "Stated")

# %%
finish(Heading.of_workload(scaling.title, "", scaling.workload, "estimated"))
