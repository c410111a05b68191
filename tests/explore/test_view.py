"""What is shown, against `labkit.estimate`; and the texts and the static page that can be taken along."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import labkit
from labkit import Workload
from labkit.explore.state import Starts
from labkit.explore.static import static_html, static_text
from labkit.explore.texts import as_python, as_yaml
from labkit.explore.view import picture, settled, theme
from labkit.report.theme import STACK
from labkit.workload.gpu import GPUS, MIB
from tests.small import small

MOONLIGHT = Workload.load("data/workloads/moonlight-16b.yaml")
LLAMA = Starts().workload("models/llama-3.1-70b")
LLAMA = LLAMA.model_copy(
    update={"parallelism": LLAMA.parallelism.model_copy(update={"pipeline_model_parallel_size": 4})}
)
HOSTILE = [
    "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "\u202edlihc",
    "w" * 200,
    "a\tb",
    "a\x85b: c",
    "a\u2028b",
]


@pytest.mark.parametrize("workload", [MOONLIGHT, LLAMA], ids=["moonlight", "llama"])
def test_the_picture_is_near_the_estimate_and_settles_on_it(workload: Workload) -> None:
    shown, summary = picture(workload), labkit.estimate(workload).summary
    assert shown["peak"] == pytest.approx(summary.peak_allocated_bytes, rel=0.01)
    assert (shown["rank"], shown["iteration"], shown["phase"]) == (
        summary.rank,
        summary.peak_iteration,
        summary.peak_phase,
    )
    assert not shown["settled"]
    exact = settled(workload)
    stages = [[each.stage, each.layers, each.peak_tensor_bytes] for each in summary.stages]
    assert exact["stages"] == stages
    assert [
        each if each[2] else [*each[:2], stages[number][2]] for number, each in enumerate(shown["stages"])
    ] == stages
    assert not stages or all(shown["stages"][number][2] for number in (0, shown["stage"], -1))
    assert exact["settled"]
    assert exact["hash"] == shown["hash"] == summary.workload_hash
    assert exact["peak"] == summary.peak_allocated_bytes
    assert exact["margin"] == summary.margin_bytes
    assert dict(exact["held"]) == {share.category: share.bytes for share in summary.breakdown}


def test_every_part_is_drawn_from_the_same_figures() -> None:
    shown = picture(LLAMA)
    assert sum(nbytes for _, nbytes in shown["held"]) == shown["peak"]
    assert [name for name, _ in shown["held"]] == [name for name in STACK if name in dict(shown["held"])]
    line = shown["timeline"]
    assert len(line["at"]) == len(line["mib"][0]) <= 200
    totals = [sum(values) for values in zip(*line["mib"], strict=True)]
    assert max(totals) * MIB == pytest.approx(shown["peak"], abs=10 * MIB)
    assert line["phases"][0][:2] == ["forward", 0]
    assert line["phases"][-1][0] == "optimizer"
    assert shown["microbatches"] == LLAMA.num_microbatches


def test_fit_is_told_for_its_own_gpu_and_for_80_and_141_gb() -> None:
    def verdicts(seq_length: int, gpu: str = "a100-40gb") -> dict[str, str]:
        batch = MOONLIGHT.batch.model_copy(update={"seq_length": seq_length})
        training = MOONLIGHT.training.model_copy(update={"gpu": gpu})
        case = MOONLIGHT.model_copy(update={"batch": batch, "training": training})
        return {each["gpu"]: each["verdict"] for each in picture(case)["fits"]}

    assert verdicts(4096) == {"a100-40gb": "fits", "h100-80gb": "fits", "h200-141gb": "fits"}
    assert verdicts(65536) == {"a100-40gb": "no", "h100-80gb": "no", "h200-141gb": "no"}
    assert list(verdicts(4096, "h200-141gb")) == ["h200-141gb", "h100-80gb"]
    shown = picture(MOONLIGHT)
    for each in shown["fits"]:
        assert each["room"] == GPUS[each["gpu"]].total_memory_bytes - shown["peak"] - shown["margin"]


def test_between_peak_and_margin_it_is_tight() -> None:
    lengths = range(24576, 28672, 128)
    batches = (MOONLIGHT.batch.model_copy(update={"seq_length": length}) for length in lengths)
    found = [picture(MOONLIGHT.model_copy(update={"batch": batch}))["fits"][0] for batch in batches]
    verdicts = [each["verdict"] for each in found]
    assert list(dict.fromkeys(verdicts)) == ["fits", "tight", "no"]
    assert all((each["room"] > 0) == (each["verdict"] == "fits") for each in found)


def test_an_update_is_small() -> None:
    assert len(json.dumps(picture(LLAMA))) < 16_000
    assert json.loads(json.dumps(theme())) == theme()


WORKLOADS = [
    *(Starts().workload(each["key"]) for group in Starts().listed for each in group["starts"]),
    small(routing__kind="worst"),
    small(launch__arguments=["--log-params-norm"]),
    *(small(model__name=name) for name in HOSTILE),
    small(model__name="qwen3-8b"),
    small(model__name="../workloads/moonlight-16b.yaml"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each.model.name[:20])
def test_texts_give_an_equal_workload_again(workload: Workload, tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    file.write_text(as_yaml(workload), encoding="utf-8")
    names: dict[str, Any] = {}
    exec(as_python(workload), names)  # noqa: S102 (what a user would run)
    for again in (Workload.load(file), names["workload"]):
        assert again == workload
        assert again.content_hash == workload.content_hash
        assert again.model_dump(exclude_unset=True) == workload.model_dump(exclude_unset=True)


def test_a_shipped_model_is_named_in_texts() -> None:
    assert as_yaml(MOONLIGHT).startswith("model: moonlight-16b-a3b\n")
    assert "hidden_size" not in as_python(MOONLIGHT)


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", HOSTILE)
def test_the_static_page_is_plain_html_and_names_are_text(name: str) -> None:
    case = small(model__name=name)
    page = static_html(picture(case) | settled(case))
    parsed = _Tags(page)
    assert name in parsed.text
    assert set(parsed.tags) <= {"div", "p", "strong", "span", "table", "thead", "tbody", "tr", "th", "td"}
    assert page.count("<div") == page.count("</div>")


def test_the_static_page_has_the_estimate_s_figures() -> None:
    summary = labkit.estimate(MOONLIGHT).summary
    shown = picture(MOONLIGHT) | settled(MOONLIGHT)
    text = _Tags(static_html(shown)).text
    assert f"{summary.peak_allocated_bytes / 2**30:.2f} GiB" in text
    for share in summary.breakdown:
        assert f"{share.category}{share.bytes / 2**30:.3f}" in text
    assert "fits with the margin" in text
    assert "8 GPUs: TP 2 with sequence parallel, EP 8, ETP 1, DP 4" in text
    assert static_text(shown).startswith("moonlight-16b-a3b, 8 GPUs: TP 2")
