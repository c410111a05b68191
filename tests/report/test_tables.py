import re
from typing import get_args

import polars as pl
import pytest
from great_tables import GT

from labkit.drivers.contract import Outcome
from labkit.report import prose
from labkit.report.data import OUTCOMES
from labkit.report.prose import ENDS
from labkit.report.tables import study as tables
from labkit.workload import Workload
from labkit.workload.files import data_directory
from tests.report import frames


def body(table: GT) -> list[list[str]]:
    html = table.as_raw_html()
    rows = re.findall(r"<tr>(.*?)</tr>", html[html.index("<tbody") :], flags=re.DOTALL)
    return [[cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL)] for row in rows]


def test_decision_puts_the_control_first_then_the_order_to_try() -> None:
    rows = body(tables.decision(frames.decision(frames.cells())))
    assert [row[0] for row in rows][:3] == ["[]", "[moe_act]", "[mla_up_proj]"]
    moe_act = rows[1]
    assert moe_act[1:3] == ["1", "fits"]
    assert moe_act[5] == "33.473"  # published, 35.941e9 bytes
    assert moe_act[7] == "+2.0"  # 466.26 ms against 457.18 ms
    assert moe_act[8:12] == ["5.10", "–", "1.000", "–"], "an estimate counts no regions"


def test_numbers_are_bare_so_that_a_spreadsheet_takes_them() -> None:
    for table in (tables.decision(frames.decision(frames.cells())), tables.accuracy(frames.cells())):
        html = table.as_raw_html()
        assert "−" not in html
        assert all(re.fullmatch(r"[+-]?\d+\.\d+|–", cell) for row in body(table) for cell in row[3:7])


def test_decision_says_what_failed_and_what_is_missing() -> None:
    cells = frames.cells({"[moe]": ("oom", "forward: out of memory"), "[core_attn]": ("missing", None)})
    rows = {row[0]: row for row in body(tables.decision(frames.decision(cells)))}
    assert rows["[moe]"][2] == "out of memory"
    assert rows["[moe]"][4] == "–"
    assert rows["[core_attn]"][2] == "not run yet"


def test_accuracy_sets_estimate_and_trace_against_the_published_peak() -> None:
    control = body(tables.accuracy(frames.cells()))[0]
    assert control == ["[]", "34.103", "34.175", "+0.21", "34.049", "-0.16", "20.996", "0.0", "8.382", "0.00"]


def test_accuracy_sets_estimate_and_trace_against_the_measured_peak() -> None:
    cells = frames.cells()
    gpus = cells.filter(source="traced").with_columns(
        source=pl.lit("measured"), peak_allocated_bytes=(pl.col("peak_allocated_bytes") / 1.01).cast(pl.Int64)
    )
    control = body(tables.accuracy(pl.concat([cells, gpus])))[0]
    assert control[1:9] == ["34.103", "33.836", "34.175", "+0.21", "+1.00", "34.049", "-0.16", "+0.63"]


def test_every_outcome_has_its_words() -> None:
    outcomes = {*get_args(Outcome), "missing"}
    assert set(OUTCOMES) == outcomes
    assert set(ENDS) == outcomes


def test_accuracy_lacks_only_what_was_not_published() -> None:
    rows = {row[0]: row for row in body(tables.accuracy(frames.cells({"[moe]": ("ok", None)})))}
    assert rows["[moe]"][1] == "–"
    assert rows["[moe]"][3] == "–"
    assert rows["[moe]"][2] != "–"


def test_nothing_published_is_no_columns() -> None:
    cells = (
        frames.cells().filter(pl.col("source") != "published").with_columns(error_vs_published=pl.lit(None, pl.Float64))
    )
    for table in (tables.decision(frames.decision(cells)), tables.accuracy(cells)):
        assert "ublished" not in table.as_raw_html()
    (control, *_) = body(tables.accuracy(cells))
    assert control == ["[]", "34.175", "34.049", "20.996", "0.0", "8.382", "0.00"]
    assert all("–" not in row[:6] for row in body(tables.decision(frames.decision(cells)))[1:2])


def test_what_fits_but_for_fragmentation_is_called_tight() -> None:
    frame = frames.decision(frames.cells()).with_columns(tight=pl.col("candidate") == "[moe_act]")
    assert [row[2] for row in body(tables.decision(frame))][:3] == ["fits", "fits, tight", "fits"]


def test_asked_lists_the_fields_that_were_stated() -> None:
    workload = {
        "model": {"name": "tiny", "qk_layernorm": True, "mixture_of_experts": {"moe_layer_freq": [0, 1, 1, 1]}},
        "parallelism": {"tensor_model_parallel_size": 2},
        "training": {},
        "routing": None,
    }
    assert body(tables.asked(workload)) == [
        ["model", "name tiny, qk_layernorm true, moe_layer_freq [0, 1 x 3]"],
        ["parallelism", "tensor_model_parallel_size 2"],
    ]


def test_asked_of_a_study_has_no_defaults() -> None:
    workload = Workload.load(data_directory() / "workloads" / "moonlight-16b.yaml")
    rows = dict(body(tables.asked(workload.model_dump(mode="json", exclude_unset=True))))
    assert rows["parallelism"] == (
        "world_size 8, tensor_model_parallel_size 2, expert_model_parallel_size 8, expert_tensor_parallel_size 1, "
        "sequence_parallel true"
    )
    assert "normalization" not in rows["model"]
    assert "q_lora_rank null" in rows["model"]


def test_contract_joins_what_came_about_alike() -> None:
    rows = body(tables.contract(frames.contract()))
    assert [row[:2] for row in rows] == [["traced", "all"], ["published", "all"]]
    assert rows[0][4:7] == ["2026-08-02 10:11", "69.0", "1"]


def test_ranks_are_shown_with_what_they_stand_for() -> None:
    frame = pl.DataFrame(
        {
            "candidate": ["[]", "[]"],
            "source": ["traced", "traced"],
            "rank": [0, 8],
            "stages": ["0", "1-6"],
            "parameters": [519_196_000, 464_014_000],
            "between_steps_bytes": [2**32, 2**31],
            "first_step_peak_bytes": [2**33, 2**32],
            "steady_peak_bytes": [2**33 + 2**29, None],
            "peak_reserved_bytes": [2**34, 2**33],
        }
    )
    shown = tables.ranks(frame)
    assert isinstance(shown, GT)
    assert body(shown) == [
        ["[]", "traced", "0", "0", "519.2", "4.000", "8.000", "8.500", "16.000"],
        ["[]", "traced", "1-6", "8", "464.0", "2.000", "4.000", "–", "8.000"],
    ]


def test_no_rank_is_a_sentence_and_nothing_known_is_no_column() -> None:
    nobody = tables.ranks(pl.DataFrame(schema={"candidate": pl.String}))
    assert isinstance(nobody, prose.Prose)
    assert nobody.sentences == ("No rank is traced or measured yet.",)
    published = tables.contract(frames.contract().filter(source="published")).as_raw_html()
    assert "Versions" not in published
    assert "2 of 17" in published


@pytest.mark.parametrize("hostile", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b"])
def test_hostile_text_is_escaped(hostile: str) -> None:
    cells = frames.cells({hostile: ("failed", hostile)})
    contract = frames.contract().with_columns(pl.lit(hostile).alias("versions"))
    for html in (
        tables.decision(frames.decision(cells)).as_raw_html(),
        tables.accuracy(cells).as_raw_html(),
        tables.contract(contract).as_raw_html(),
        tables.asked({"model": {"name": hostile}}).as_raw_html(),
        prose.failures(cells)._repr_html_(),
        prose.lead((hostile,))._repr_html_(),
        prose.left_open((hostile,))._repr_html_(),
    ):
        assert hostile not in html
        assert "<script" not in html
        assert "<img" not in html


def test_tables_are_the_same_every_time() -> None:
    cells = frames.cells()
    assert tables.accuracy(cells).as_raw_html() == tables.accuracy(cells).as_raw_html()
    assert 'id="labkit-accuracy"' in tables.accuracy(cells).as_raw_html()


def test_failures_are_named_with_their_reasons() -> None:
    cells = frames.cells(
        {
            "[core_attn]": ("missing", None),
            "[mla_up_proj]": ("missing", "x.zip is damaged: checksum"),
            "[moe]": ("failed", "backward: RuntimeError: boom.\n" + "x" * 10_000),
        }
    )
    damaged, failed = prose.failures(cells).sentences
    assert damaged == "[mla_up_proj] (traced) has no result: x.zip is damaged: checksum."
    assert failed.startswith("[moe] (traced) failed: backward: RuntimeError: boom. xxx")
    assert len(failed) < 700


def test_failures_say_when_there_are_none() -> None:
    assert prose.failures(frames.cells()).sentences == ("No cell failed.",)


def test_what_is_left_open_is_listed_and_what_is_stated_is_said() -> None:
    assert prose.left_open(("a is open", "b is open")).kind == "list"
    assert prose.left_open(()).sentences == ("The control states every field that decides its peak.",)


def test_parts_that_are_left_out_are_no_rows() -> None:
    shown = tables.asked({"batch": {"seq_length": 4096}, "routing": None}).as_raw_html()
    assert "seq_length 4096" in shown
    assert "routing" not in shown
