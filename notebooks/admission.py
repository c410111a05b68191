# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Admission
#
# Requests of many lengths, a memory budget, and who decides which of them run together: a rule of thumb that counts
# tokens, the estimate with what the template keeps (the floor), or the estimate under full recompute. What each admits,
# splits and refuses, what that needs of the budget, and where the rule admits what would not fit. 1 GiB is 2³⁰
# bytes; everything is estimated.

# %% tags=["parameters"]
workload = "qwen3.8-27b-lora"
requests = None
budget = None
rule_tokens = None
count = 43
seed = 1

# %%
from labkit import Workload
from labkit.report import prose
from labkit.report.charts import admission as charts
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Admission, input_path, workload_path
from labkit.report.tables import admission as tables
from labkit.workbench.admission import Planning

parameters = Admission.checked(
    workload=workload, requests=requests, budget=budget, rule_tokens=rule_tokens, count=count, seed=seed
)
asked = Workload.load(workload_path(parameters.workload))
planning = Planning(
    asked,
    None if parameters.requests is None else input_path(parameters.requests),
    parameters.budget,
    rule_tokens=parameters.rule_tokens,
    count=parameters.count,
    seed=parameters.seed,
)

# %% [markdown]
# ## What it comes to

# %%
prose.lead(planning.answer)

# %%
tables.policies(planning.policies)

# %% [markdown]
# A micro-batch needs its peak, the estimate's margin, and what is set aside for segments of the allocator that cannot
# be handed out; it fits where that is within the budget. The CUDA context and NCCL come on top. A split is found by
# rules, the least number of micro-batches is proven. Seconds are those of forward and backward of all micro-batches, by
# work at the GPU's data-sheet speed: lower bounds.

# %% [markdown]
# ## What was asked, and the rule of thumb

# %%
prose.note(planning.requested)

# %%
prose.note(planning.rule_said)

# %% [markdown]
# The rule counts the tokens of all sequences, a shared prefix each time, as a data loader does, and fills micro-batches
# with the longest first. It leaves no margin, and knows neither what is shared nor what short sequences take beside
# their tokens. Such a rule once predicted 5.9 GB for a call of a 27B model that ran out of 107 GB (docs/admission.md).

# %% [markdown]
# ## What each micro-batch needs

# %%
charts.micro_batches(planning.micro_batches, planning.budget.bytes)

# %%
tables.micro_batches(planning.micro_batches)

# %% [markdown]
# What is admitted shows bounds of the peak, with and without its margin, which no estimate is above (0.1 to 2 % below
# for large models); what is reserved is an allowance for fragmentation, which an estimate's segments may exceed. What
# does not fit shows the estimate's own figures.

# %% [markdown]
# ## What becomes of each length

# %%
tables.lengths(planning.lengths)

# %% [markdown]
# ## Where the boundaries are

# %%
charts.boundary(planning.boundary)

# %%
tables.boundary(planning.boundary)

# %% [markdown]
# ## What was refused, and what would work

# %%
prose.listed(planning.refusals, "Nothing was refused.")

# %% [markdown]
# What would work for the largest that is refused, each priced by the estimate before it is named.

# %%
tables.remedies(planning.remedies)

# %% [markdown]
# ## What the prices rest on

# %%
prose.listed(planning.assumptions, "The template states every field that decides the prices.")

# %%
finish(
    Heading.of_workload(
        f"Admission: {asked.model.name}",
        "Which requests may run together within a budget, by a rule of thumb, the floor and full recompute",
        asked,
        "estimated",
        planning.facts,
    )
)
