"""Pipeline splits and micro-batch groups that Megatron Core refuses are refused with a sentence, others are not."""

from typing import Any

import pytest

from labkit import Workload
from labkit.workload.pipeline_rules import pipeline_findings
from tests.small import MODEL


def errors(layers: int, stages: int, micro_batches: int = 8, **layout: Any) -> list[str]:
    """The rules that a dense model's pipeline breaks."""
    workload = Workload.unchecked(
        {
            "model": {**MODEL, "num_layers": layers, "mixture_of_experts": None},
            "parallelism": {"world_size": stages, "pipeline_model_parallel_size": stages, **layout},
            "batch": {"seq_length": 256, "global_batch_size": micro_batches},
        }
    )
    return [str(finding) for finding in pipeline_findings(workload) if finding.severity == "error"]


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
CHUNKS, GROUP = "virtual_pipeline_model_parallel_size", "microbatch_group_size_per_vp_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("layers", "stages", "layout"),
    [
        (4, 1, {}),
        (4, 2, {}),
        (8, 2, {CHUNKS: 2}),
        (8, 2, {CHUNKS: 4}),
        (7, 2, {FIRST: 3}),
        (7, 2, {FIRST: 3, LAST: 4}),
        (8, 4, {FIRST: 1, LAST: 3}),
        (6, 2, {EMBEDDING: True, LOSS: True}),
        (7, 2, {LOSS: True}),
        (7, 2, {LOSS: True, CHUNKS: 2}),
        (8, 2, {CHUNKS: 2, GROUP: 3}),
        (8, 2, {FIRST: 2, CHUNKS: 2}),
    ],
)
def test_what_megatron_splits_is_not_refused(layers: int, stages: int, layout: dict[str, Any]) -> None:
    assert errors(layers, stages, **layout) == []


@pytest.mark.parametrize(
    ("layers", "stages", "layout"),
    [
        (5, 2, {}),
        (4, 1, {CHUNKS: 2}),
        (6, 2, {CHUNKS: 2}),
        (4, 1, {FIRST: 2}),
        (7, 2, {FIRST: 3, LAST: 3}),
        (8, 4, {FIRST: 1, LAST: 2}),
        (8, 4, {FIRST: 8}),
        (7, 2, {FIRST: 3, CHUNKS: 2}),
        (7, 2, {FIRST: 3, LOSS: True}),
        (8, 2, {LOSS: True}),
        (8, 2, {CHUNKS: 2, GROUP: 1}),
        (8, 2, {CHUNKS: 2, GROUP: 9}),
        (8, 2, {CHUNKS: 2, "micro_batches": 7}),
        (8, 4, {CHUNKS: 2, "micro_batches": 3}),
    ],
)
def test_what_megatron_cannot_split_is_refused(layers: int, stages: int, layout: dict[str, Any]) -> None:
    assert errors(layers, stages, **layout)


@pytest.mark.parametrize(
    ("layers", "stages", "layout", "text"),
    [
        (4, 1, {FIRST: 2}, "without a pipeline one stage has all 4 layers; leave it out"),
        (4, 1, {FIRST: 2, LAST: 2}, "without a pipeline one stage has all 4 layers"),
        (7, 2, {FIRST: 3, LAST: 3}, "the stages named have 6 layers, the model 7"),
        (8, 4, {FIRST: 9}, "the stages named have 9 layers, the model 8"),
        (8, 4, {FIRST: 8}, "0 layers are left for 3 other stages"),
    ],
)
def test_an_uneven_split_that_does_not_add_up_says_why(
    layers: int, stages: int, layout: dict[str, Any], text: str
) -> None:
    (sentence,) = errors(layers, stages, **layout)
    assert text in sentence


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "text"),
    [(8, 2, None, "Et*3|t*5L"), (9, 4, None, "E|(tt,|)*1t*7|L"), (8, 2, 2, "Et|(tt|)*2t*3L"), (4, 1, None, "EttttL")],
)
def test_a_layout_that_megatron_takes_is_not_refused(layers: int, stages: int, chunks: int | None, text: str) -> None:
    layout: dict[str, Any] = {CHUNKS: chunks, "pipeline_model_parallel_layout": text}
    assert errors(layers, stages, **layout) == []


@pytest.mark.parametrize("text", ["Et*3|t*4L", "Et*8L", "t*3|t*5L", "Et*3|t*5", "Et*3|t*5mL", "Et*3|t*5LE"])
def test_a_layout_that_megatron_refuses_is_one_sentence(text: str) -> None:
    (sentence,) = errors(8, 2, pipeline_model_parallel_layout=text)
    assert sentence.startswith("parallelism.pipeline_model_parallel_layout: ")
