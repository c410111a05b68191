"""What stands above a report: what was run, by what, how completely."""

import polars as pl

import labkit
from labkit.report.heading import Fact, Heading, workload_facts
from labkit.workload import Workload
from tests.report import frames


def facts(heading: Heading) -> dict[str, str]:
    return {fact.name: fact.value for fact in heading.facts}


def test_a_workload_is_said_in_a_few_words() -> None:
    said = facts(Heading.of_workload("T", "", Workload.load("moonlight-16b"), "estimated"))
    assert said == {
        "Model": "moonlight-16b-a3b: 27 layers, hidden 2,048, 64 experts, top 6",
        "Layout": "8 GPUs: TP 2 with sequence parallel, EP 8, ETP 1, DP 4",
        "Batch": "4,096 tokens x 1 a micro-batch, 4 a step, bf16",
        "Recompute": "[]",
        "GPU": "NVIDIA H100 80GB HBM3, 79.10 GiB",
        "Priced for": "Megatron Core 0.19.2, Transformer Engine 2.17.0, torch 2.14.1",
        "Figures": "estimated",
    }


def test_a_packed_batch_an_adapter_and_one_gpu_are_said() -> None:
    lora = workload_facts(Workload.load("qwen3.8-27b-lora"))
    assert lora["Model"].endswith(", LoRA rank 8 on a frozen base")
    assert lora["Batch"] == "2 sequences packed into 13,927 tokens a micro-batch, 2 a step, bf16"
    assert workload_facts(Workload.load("gpt-local"))["Layout"] == "1 GPU"


def test_a_study_says_its_drivers_versions_and_how_complete_they_are() -> None:
    said = facts(Heading.of_study("T", "", "6 of 6 cells done", frames.contract(), Workload.load("moonlight-16b")))
    assert said["Estimated with"] == f"labkit {labkit.__version__}"
    assert said["Contract fields"] == "traced 9 of 17; published 2 of 17 (a run on GPUs records all)"
    assert said["Last cell made"] == "2026-08-02 10:11 UTC"
    assert next(iter(said)) == "Model"


def test_cells_that_differ_in_completeness_give_a_range_and_none_gives_no_fact() -> None:
    some = frames.contract().with_columns(
        contract_recorded=pl.when(pl.col("candidate") == "[]").then(3).otherwise("contract_recorded")
    )
    assert "traced 3 to 9 of 17" in facts(Heading.of_study("T", "", "", some))["Contract fields"]
    assert "Contract fields" not in facts(Heading.of_study("T", "", "", some.clear()))


def test_a_fact_is_data() -> None:
    assert Heading.model_validate_json(Heading(title="T", facts=(Fact(name="a", value="<b>"),)).model_dump_json())
