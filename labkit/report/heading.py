"""What stands above a report; written by a notebook's last cell, which is how its runner knows it got there."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import polars as pl

import labkit
from labkit.files import write_atomically
from labkit.workload import Workload
from labkit.workload.base import Many, Part
from labkit.workload.gpu import GPUS, gib

RESULT_VARIABLE = "LABKIT_NOTEBOOK_RESULT"
"""Environment variable with the path `finish` writes to; unset where a person runs the notebook."""


class Fact(Part):
    """One thing a reader wants to know before the figures."""

    name: str
    value: str


class Heading(Part):
    """The title of a report with what was run, by what, when."""

    title: str
    description: str = ""
    facts: Many[Fact] = ()
    """What was run, by what, when."""

    kind: str = ""
    """What the report is, `recompute study`, and when it was written, ISO 8601 in UTC: known to who writes it."""
    made_at: str = ""

    @classmethod
    def of_facts(cls, title: str, description: str, facts: Mapping[str, str]) -> Self:
        """The heading of a report of what `facts` names."""
        named = tuple(Fact(name=name, value=value) for name, value in facts.items())
        return cls(title=title, description=" ".join(description.split()), facts=named)

    @classmethod
    def of_workload(
        cls, title: str, description: str, workload: Workload, sources: str, facts: Mapping[str, str] | None = None
    ) -> Self:
        """The heading of a notebook about one workload.

        Args:
            title: what the report answers, the model in it.
            description: a sentence below the title.
            workload: what was run or priced.
            sources: where the figures come from: `estimated`, or `estimated; traced, seconds a cell`.
            facts: what else a reader wants to know, after what was run.
        """
        return cls.of_facts(title, description, {**workload_facts(workload), "Figures": sources, **(facts or {})})

    @classmethod
    def of_study(
        cls, title: str, description: str, state: str, contract: pl.DataFrame, control: Workload | None = None
    ) -> Self:
        """The heading of a study's report.

        Args:
            title: the study's title.
            description: the study's description.
            state: how many of its cells are done, in words.
            contract: the study's `contract` frame.
            control: the control's workload.
        """
        facts = {**(workload_facts(control) if control else {}), "Cells": state}
        facts["Estimated with"] = f"labkit {labkit.__version__}"
        for name, source, column in (
            ("Traced with", "traced", "versions"),
            ("Measured with", "measured", "versions"),
            ("Recorded by", "recorded", "origin"),
            ("Published by", "published", "origin"),
        ):
            rows = contract.filter(pl.col("source") == source)
            facts[name] = "; ".join(value for value in rows[column].unique(maintain_order=True).to_list() if value)
        dates = [value for value in contract.filter(pl.col("source") != "published")["created_at"] if value]
        facts["Contract fields"] = _completeness(contract)
        facts["Last cell made"] = _date(max(dates)) if dates else ""
        return cls.of_facts(title, description, {name: value for name, value in facts.items() if value})


_SIZES: Final = (("TP", "tp"), ("CP", "cp"), ("PP", "pp"), ("VPP", "vpp"), ("EP", "ep"), ("ETP", "etp"), ("DP", "dp"))


def workload_facts(workload: Workload) -> dict[str, str]:
    """What was run, in a few words each: the model, its layout, batch and recompute, the GPU, the versions.

    >>> workload_facts(Workload.load("moonlight-16b"))["Layout"]
    '8 GPUs: TP 2 with sequence parallel, EP 8, ETP 1, DP 4'
    """
    model, layout, batch, training = workload.model, workload.parallelism, workload.batch, workload.training
    experts = model.mixture_of_experts
    parts = [f"{model.num_layers} layers", f"hidden {model.hidden_size:,}"]
    parts += [f"{experts.num_moe_experts} experts, top {experts.moe_router_topk}"] if experts else []
    usual = {"ETP": layout.tp}
    sizes = [
        f"{name} {size}" + (" with sequence parallel" if name == "TP" and layout.sequence_parallel else "")
        for name, attribute in _SIZES
        if (size := getattr(layout, attribute)) != usual.get(name, 1) and (name != "ETP" or experts)
    ]
    rows = f"{batch.seq_length:,} tokens x {batch.micro_batch_size}"
    if batch.packed is not None:
        rows = f"{len(batch.packed.lengths)} sequences packed into {batch.packed.rows:,} tokens"
    gpu, software = GPUS[training.gpu], training.software
    lora = f", LoRA rank {training.lora.rank} on a frozen base" if training.lora else ""
    gpus = f"{layout.world_size} GPUs: {', '.join(sizes)}" if sizes else "1 GPU"
    return {
        "Model": f"{model.name}: {', '.join(parts)}{lora}",
        "Layout": gpus,
        "Batch": f"{rows} a micro-batch, {batch.global_batch_size:,} a step, {training.precision}",
        "Recompute": workload.recompute.label,
        "GPU": f"{gpu.name}, {gib(gpu.total_memory_bytes)}",
        "Priced for": f"Megatron Core {software.megatron_core}, Transformer Engine {software.transformer_engine}, "
        f"torch {software.torch}",
    }


def _completeness(contract: pl.DataFrame) -> str:
    """`traced 9 of 17; published 2 of 17`: from the emptiest to the fullest cell of each source."""
    said = []
    for source in contract["source"].unique(maintain_order=True):
        rows = contract.filter(pl.col("source") == source, pl.col("contract_fields").is_not_null())
        if rows.is_empty():
            continue
        recorded = sorted(rows["contract_recorded"].to_list())
        low, high = recorded[0], recorded[-1]
        said.append(f"{source} {low if low == high else f'{low} to {high}'} of {rows['contract_fields'][0]}")
    return f"{'; '.join(said)} (a run on GPUs records all)" if said else ""


def finish(heading: Heading) -> None:
    """Say that the notebook ran to its end; its last cell calls this."""
    path = os.environ.get(RESULT_VARIABLE)
    if path:
        write_atomically(Path(path), heading.model_dump_json())


def _date(moment: str) -> str:
    """`2026-08-01 12:30 UTC` of an ISO 8601 moment in UTC."""
    return f"{moment[:16].replace('T', ' ')} UTC"
