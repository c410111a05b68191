# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Expert routing
#
# A router sends more rows to some experts than to others, and the rank that has them holds more memory. This says how
# much: for balanced rows, for the allowance that labkit sets aside where nobody measured, for histograms that somebody
# did, and at worst; at every expert-parallel size of these ranks. 1 GiB is 2³⁰ bytes.

# %% tags=["parameters"]
workload = "moonlight-16b"
histograms = None
concentrated = 0.5
seed = 1
gpus = ["h100-80gb", "h200-141gb"]

# %%
from labkit import Workload
from labkit.report import prose
from labkit.report.charts import routing as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import ExpertRouting, input_path, workload_path
from labkit.report.tables import routing as tables
from labkit.workbench import routing

parameters = ExpertRouting.checked(
    workload=workload, histograms=histograms, concentrated=concentrated, seed=seed, gpus=gpus
)
counted = None if parameters.histograms is None else input_path(parameters.histograms)
asked = Workload.load(workload_path(parameters.workload))
found = routing.ExpertRouting(asked, counted, parameters.concentrated, parameters.seed, parameters.gpus)

# %% [markdown]
# ## What it comes to

# %%
prose.lead(found.answer)

# %% [markdown]
# Every peak is estimated: the largest allocated bytes of the fullest rank. What fits is asked of the peak with the
# estimate's margin. The CUDA context, NCCL and cached blocks of the allocator come on top.

# %%
prose.note(found.certainty)

# %% [markdown]
# ## What the words mean
#
# The even share is all rows over the number of expert-parallel ranks. *Balanced* is that share; the *allowance* is what
# labkit sets aside where routing is not stated, by default 1.4, 1.6 and 2.0 times the even share at EP 2, 4 and 8;
# *concentrated* is a stated part of all rows on one rank; *worst* is every choice of every token there, as far as it
# has experts. A histogram decides its own share, layer by layer, of the rank that holds most.

# %%
tables.shares(found.shares)

# %% [markdown]
# In rows of one micro-batch, at the size of the workload. A rank's rows are taken to lie evenly over its experts.

# %%
tables.rows(found.rows)

# %% [markdown]
# ## How the rows lie

# %%
prose.note(found.source)

# %%
charts.loads(found.loads)

# %%
charts.strip(found.strip)

# %% [markdown]
# ## The peak at every expert-parallel size

# %%
charts.peaks(found.peaks, found.limits)

# %%
tables.fit(found.peaks)

# %% [markdown]
# ## Which layer decides
#
# Without recompute every layer's rows stay until backward, and skew adds up over the layers; under full recompute one
# layer at a time holds its rows, and the one with most decides.

# %%
prose.listed(found.deciding, "No layer's skew raises the peak.")

# %%
charts.by_layer(found.by_layer)

# %% [markdown]
# Ranks of the workload's own size with their own rows, in blocks of fresh segments (within 3 % of the estimate).

# %%
tables.ranks(found.ranks)

# %% [markdown]
# ## What would change it
#
# `moe_act` drops the experts' activations, `moe` the whole layer's, and backward computes them again. A capacity factor
# limits each expert to so many times its even share and drops the rest, which changes what is learned; padding gives
# every expert exactly that much, whatever the router does.

# %%
charts.options(found.options)

# %%
tables.options(found.options)

# %%
finish(
    Heading.of_workload(
        f"Expert routing: {asked.model.name}",
        "What a router's imbalance does to the memory of the fullest rank",
        asked,
        "estimated",
        {"Rows": found.rows_from},
    )
)
