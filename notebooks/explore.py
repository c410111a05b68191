# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Explore
#
# Pick a model, a layout, lengths, recompute and training, and see at once what the fullest rank holds, when, and
# where it fits. Every figure is an estimate, in GiB of 2³⁰ bytes, until it is confirmed with a trace of the real
# Megatron Core code. In a report stands what the explorer was opened on.

# %% tags=["parameters"]
workload = "moonlight-16b"

# %%
from labkit import Explorer
from labkit.report.heading import Heading, finish
from labkit.report.parameters import Explore, workload_path

parameters = Explore.checked(workload=workload)
explorer = Explorer(workload_path(parameters.workload))

# %%
explorer

# %% [markdown]
# `explorer.workload` is the choice as it stands: `labkit.estimate(explorer.workload)` has every tensor of it.

# %%
finish(
    Heading.of_workload(
        f"Explore: {explorer.workload.model.name}",
        "What the fullest rank holds, and where it fits",
        explorer.workload,
        "estimated",
    )
)
