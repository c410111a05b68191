"""The widget without a browser: what a front end sends, what comes back, what stands in a report."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

import labkit
from labkit import Workload
from labkit.errors import InputError
from labkit.explore import Explorer
from labkit.explore.confirm import Confirmation
from labkit.explore.state import GIVEN, MODE
from labkit.report.heading import Heading
from labkit.report.html import render
from tests.small import small

LONGEST_WAIT = 120.0
"""Seconds."""


@pytest.fixture
def explorer() -> Iterator[Explorer]:
    made = Explorer(small())
    yield made
    made.close()


def choose(explorer: Explorer, seq: int, start: str = GIVEN, **fields: Any) -> dict[str, Any]:
    """What a front end sends, and the answer."""
    picked = {name.replace("__", "."): value for name, value in fields.items()}
    explorer.choice = {"seq": seq, "start": start, "fields": picked}
    answer: dict[str, Any] = explorer.answer
    return answer


def settled(explorer: Explorer) -> dict[str, Any]:
    """The picture with the ledger's figures."""
    until = time.monotonic() + LONGEST_WAIT
    while not explorer.picture["settled"]:
        assert time.monotonic() < until
        time.sleep(0.02)
    picture: dict[str, Any] = explorer.picture
    return picture


def test_a_change_is_answered_at_once_and_settles_on_the_estimate(explorer: Explorer) -> None:
    answer = choose(explorer, 1, batch__seq_length=1024)
    case = small(batch__seq_length=1024)
    assert (answer["seq"], answer["can_run"], answer["findings"]) == (1, True, [])
    assert answer["values"]["batch.seq_length"] == 1024
    assert explorer.picture["seq"] == 1
    assert explorer.workload == case
    exact = labkit.estimate(case).summary
    assert explorer.picture["peak"] == pytest.approx(exact.peak_allocated_bytes, rel=0.05)
    assert settled(explorer)["peak"] == exact.peak_allocated_bytes


def test_what_cannot_run_leaves_the_last_picture(explorer: Explorer) -> None:
    before = explorer.picture["hash"]
    answer = choose(explorer, 1, parallelism__tensor_model_parallel_size=3)
    assert not answer["can_run"]
    assert answer["findings"][0]["severity"] == "error"
    assert "3 does not divide" in answer["findings"][0]["reason"]
    assert explorer.picture["hash"] == before
    assert settled(explorer)["hash"] == before
    with pytest.raises(InputError, match=r"explorer: parallelism\.tensor_model_parallel_size: 3 does not divide"):
        _ = explorer.workload
    assert choose(explorer, 2, batch__seq_length=512)["can_run"]
    assert explorer.picture["seq"] == 2


@pytest.mark.parametrize("fields", [{"model.name": "x"}, {"batch.seq_length": {}}, "nothing", None])
def test_a_message_of_another_form_is_answered_in_a_sentence(explorer: Explorer, fields: Any) -> None:
    explorer.choice = {"seq": 1, "start": GIVEN, "fields": fields}
    assert explorer.answer["seq"] == 1
    assert not explorer.answer["can_run"]
    assert explorer.workload == small(), "what was picked before"


def test_only_the_last_of_many_changes_settles(explorer: Explorer) -> None:
    for seq, length in enumerate((512, 1024, 2048, 768), start=1):
        choose(explorer, seq, batch__seq_length=length)
    assert settled(explorer)["seq"] == 4
    assert explorer.picture["peak"] == labkit.estimate(small(batch__seq_length=768)).summary.peak_allocated_bytes


def test_another_start_brings_its_own_values(explorer: Explorer) -> None:
    answer = choose(explorer, 1, "models/qwen3-8b")
    assert answer["start"] == "models/qwen3-8b"
    assert answer["values"]["batch.seq_length"] == 4096
    assert explorer.workload.model.name == "qwen3-8b"
    assert choose(explorer, 2, "models/qwen3-8b", **{MODE: "full uniform"})["can_run"]
    assert explorer.workload.recompute.label == "full uniform 1"


def test_it_opens_on_a_file_a_name_or_the_first_that_ships() -> None:
    named = Explorer("moonlight-16b")
    assert named.workload == Workload.load("data/workloads/moonlight-16b.yaml")
    assert named.picture["name"] == "moonlight-16b-a3b"
    named.close()
    first = Explorer()
    assert first.answer["start"] == "workloads/gpt-local"
    first.close()
    with pytest.raises(InputError, match="there is no such file"):
        Explorer("nowhere")


def test_buttons_are_answered(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(Explorer, "send", lambda _self, content, buffers=None: sent.append(content))
    for what in ("yaml", "python", "nothing known"):
        explorer._asked(explorer, {"do": what, "id": 7}, [])
    assert [each["kind"] for each in sent] == ["yaml", "python"]
    assert {each["id"] for each in sent} == {7}
    assert sent[0]["text"].startswith("model:\n  name: small")
    choose(explorer, 1, batch__seq_length=0)
    explorer._asked(explorer, {"do": "yaml"}, [])
    assert "seq_length" in sent[-1]["said"]


def test_no_torch_is_imported_and_updates_are_small() -> None:
    code = (
        "import json, sys; from labkit.explore import Explorer; e = Explorer('moonlight-16b')\n"
        "e.choice = {'seq': 1, 'start': 'models/deepseek-v3', 'fields': {}}\n"
        "print('torch' in sys.modules, len(json.dumps(e.answer)) + len(json.dumps(e.picture)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    torch, size = done.stdout.split()
    assert torch == "False"
    assert int(size) < 16_000


def test_in_a_report_stands_the_static_page_alone(explorer: Explorer) -> None:
    data, metadata = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    output = new_output("execute_result", data=data, metadata=metadata)
    notebook = new_notebook(cells=[new_code_cell("explorer", outputs=[output])])
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": explorer.get_state()}}
    page = render(json_round_trip(notebook), Heading(title="T"))
    peak = labkit.estimate(small()).summary.peak_allocated_bytes
    assert 'class="lk-explorer-static"' in page
    assert f"{peak / 2**30:.2f} GiB" in page
    for part in ("model_id", "_esm", "anywidget", "addEventListener('change', paint)"):
        assert part not in page
    assert data["text/plain"].startswith("small, 4 GPUs: TP 2")


def json_round_trip(notebook: Any) -> Any:
    """As it is read from a file."""
    import nbformat

    return nbformat.reads(json.dumps(notebook, default=str), as_version=4)


class _Told:
    """What a confirmation tells, until it ends."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []
        self._ended = threading.Event()

    def __call__(self, state: dict[str, Any]) -> None:
        self.states.append(state)
        if state["state"] != "tracing":
            self._ended.set()

    def wait(self) -> dict[str, Any]:
        assert self._ended.wait(LONGEST_WAIT)
        return self.states[-1]


def test_a_trace_confirms_the_estimate_in_the_background() -> None:
    told, case = _Told(), small()
    confirmation = Confirmation(told)
    confirmation.start(case)
    end = told.wait()
    assert end["state"] == "done"
    assert end["estimated"] == labkit.estimate(case).summary.peak_allocated_bytes
    assert end["difference"] == end["estimated"] / end["peak"] - 1
    assert abs(end["difference"]) < 0.01
    assert end["hash"] == case.content_hash
    assert sum(nbytes for _, nbytes in end["held"]) == end["peak"]
    begun = [each["begun"] for each in told.states if each["state"] == "tracing"]
    assert begun == list(range(len(begun)))
    assert begun[-1] == told.states[0]["expected"] == 9
    # Its worker is ready for the next one; what it cannot trace it says in a sentence.
    again = _Told()
    confirmation._told = again
    confirmation.start(small(parallelism__world_size=2**18, batch__global_batch_size=2**17))
    assert again.wait()["state"] == "failed"
    assert "262144 are more than 65536" in again.states[-1]["sentence"]
    confirmation.close()


def test_a_trace_can_be_cancelled() -> None:
    told = _Told()
    confirmation = Confirmation(told)
    confirmation.cancel()  # nothing to cancel
    confirmation.start(small())
    confirmation.start(small())  # one at a time
    server = None
    until = time.monotonic() + LONGEST_WAIT
    while server is None and time.monotonic() < until:
        server = confirmation._server
    confirmation.cancel()
    assert told.wait()["state"] == "cancelled"
    assert server is not None
    assert not server.alive
    time.sleep(0.2)
    assert [each["state"] for each in told.states].count("cancelled") == 1
    assert told.states[-1]["state"] == "cancelled", "what was under way says no more"


@pytest.mark.parametrize("given", [5, [], {}, True, b"x"])
def test_what_is_no_workload_is_one_sentence(given: Any) -> None:
    with pytest.raises(InputError, match="is no workload; give one, its file, or the name of one"):
        Explorer(given)


@pytest.mark.parametrize("content", [None, 5, [], "trace", {}, {"do": []}, {"do": "dance"}])
def test_a_message_that_no_button_sends_does_nothing(explorer: Explorer, content: Any) -> None:
    before = explorer.picture
    explorer._handle_custom_msg(content, [])
    assert explorer.picture == before
    assert explorer.tracing == {}
