"""Memory snapshots, diagnosed: sums against a naive replay, and what real recordings say."""

import contextlib
import gzip
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.console import Terminal
from labkit.diagnose import Diagnosis, diagnose
from labkit.diagnose.snapshot_compare import SnapshotComparison
from labkit.diagnose.snapshot_frames import NATIVE, moment_of, short_path, site_of
from labkit.diagnose.snapshot_holes import holes_at
from labkit.diagnose.snapshot_live import BEFORE
from labkit.diagnose.snapshot_page import DevicePage, SnapshotPage, chart_rows
from labkit.diagnose.snapshot_timeline import Timeline, timeline_of
from labkit.errors import InputError
from labkit.snapshot import Frame, Snapshot, parse_snapshot

RECORDED = Path(__file__).parents[1] / "pytorch_allocator"
STEP = gzip.decompress((RECORDED / "step.pickle.gz").read_bytes())
"""Eight training steps of 4 layers, each of which keeps its logits: they run out of memory in the fifth."""
OTHERS = [(RECORDED / f"snapshot_{name}.pickle").read_bytes() for name in ("default", "expandable")]


def timeline(content: bytes) -> tuple[Snapshot, Timeline]:
    snapshot = parse_snapshot(content)
    return snapshot, timeline_of(snapshot, 0)


def diagnosed(tmp_path: Path, *contents: bytes) -> Diagnosis:
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"{number}.pickle")
        paths[-1].write_bytes(content)
    return diagnose(paths)


def page_of(diagnosis: Diagnosis) -> DevicePage:
    (page,) = diagnosis.details
    assert isinstance(page, SnapshotPage)
    (device,) = page.devices
    return device


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    written = pickle.loads(STEP)  # noqa: S301
    change(written)
    return pickle.dumps(written)


def printed(diagnosis: Diagnosis) -> str:
    file = io.StringIO()
    Terminal(file=file).print(diagnosis)
    return file.getvalue()


# A device's life, made up: each draw frees something or allocates; streams finish late, and some history is lost.

type Entries = list[dict[str, Any]]


@st.composite
def lives(draw: st.DrawFn) -> tuple[Entries, dict[int, int], dict[int, int]]:
    """The entries, and at the end the blocks that are allocated and those that wait, by address with their bytes."""
    entries: Entries = []
    live: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for choice in draw(st.lists(st.integers(0, 9), max_size=60)):
        if choice < 5:
            address = 512 * draw(st.integers(1, 30).filter(lambda place: 512 * place not in live | waiting))
            live[address] = draw(st.integers(0, 512))
            entries.append({"action": "alloc", "addr": address, "size": live[address]})
        elif choice < 8 and live:
            address = draw(st.sampled_from(sorted(live)))
            waiting[address] = live.pop(address)
            entries.append({"action": "free_requested", "addr": address, "size": waiting[address]})
        elif waiting:
            address = draw(st.sampled_from(sorted(waiting)))
            entries.append({"action": "free_completed", "addr": address, "size": waiting.pop(address)})
        if choice == 9:
            entries.append({"action": draw(st.sampled_from(["segment_alloc", "segment_map"])), "addr": 0, "size": 2048})
    return entries, live, waiting


def snapshot_of(entries: Entries, live: dict[int, int], waiting: dict[int, int]) -> bytes:
    states = [(live, "active_allocated"), (waiting, "active_awaiting_free")]
    blocks = [
        {"address": address, "size": 512, "requested_size": nbytes, "state": state}
        for held, state in states
        for address, nbytes in held.items()
    ]
    segment = {"device": 0, "address": 0, "total_size": 2**20, "stream": 0, "blocks": blocks}
    return pickle.dumps({"segments": [segment], "device_traces": [[{"stream": 0, **each} for each in entries]]})


@settings(max_examples=100, deadline=None)
@given(lives(), st.integers(0, 60))
def test_sums_are_those_of_a_naive_replay(life: tuple[Entries, dict[int, int], dict[int, int]], lost: int) -> None:
    """Also where the first entries were lost, as of a ring that is full."""
    entries, live, waiting = life
    reserved = 2**20 - sum(each["size"] for each in entries if each["action"].startswith("segment"))
    held: dict[str, dict[int, int]] = {"live": {}, "waiting": {}}
    sums, sets = [], []
    for entry in entries:
        if entry["action"] == "alloc":
            held["live"][entry["addr"]] = entry["size"]
        elif entry["action"] == "free_requested":
            held["waiting"][entry["addr"]] = held["live"].pop(entry["addr"])
        elif entry["action"] == "free_completed":
            del held["waiting"][entry["addr"]]
        else:
            reserved += entry["size"]
        sums.append((sum(held["live"].values()), sum(held["waiting"].values()), reserved))
        sets.append(dict(held["live"]))
    _, found = timeline(snapshot_of(entries[lost:], live, waiting))
    if any(entry["action"] == "free_requested" for entry in entries[lost:]) or not lost:
        pairs = zip(found.allocated.tolist(), found.awaiting.tolist(), found.reserved.tolist(), strict=True)
        assert list(pairs) == sums[lost:]
        for place, expected in enumerate(sets[lost:]):
            there = found.lives.at(place)
            assert dict(zip(there.address.tolist(), there.nbytes.tolist(), strict=True)) == expected
    if entries[lost:] and (most := max(found.allocated.tolist())) >= found.start[0]:
        assert found.at(found.peak)[0] == most
        assert found.lives.at(found.peak).nbytes.sum() == most


@pytest.mark.parametrize("content", [STEP, *OTHERS], ids=["step", "default", "expandable"])
def test_recordings_add_up(content: bytes) -> None:
    """Replayed to the end, PyTorch's entries leave its blocks, its segments, and its free blocks as holes."""
    _, found = timeline(content)
    blocks = [block for segment in found.segments for block in segment.blocks]
    assert found.start == (0, 0)
    assert found.not_freed == 0
    assert found.allocated[-1] == sum(block.requested for block in blocks if block.is_allocated)
    assert found.reserved[-1] == sum(segment.nbytes for segment in found.segments)
    free = sorted(block.nbytes for block in blocks if block.state == "inactive")
    assert sorted(holes_at(found, len(found.trace) - 1).nbytes.tolist()) == free


@pytest.mark.parametrize("content", [STEP, *OTHERS], ids=["step", "default", "expandable"])
def test_holes_of_the_past_are_what_was_reserved_and_not_in_use(content: bytes) -> None:
    """Within what blocks are larger than requests: 512 bytes each, or a remainder of up to 1 MiB."""
    _, found = timeline(content)
    for entry in range(0, len(found.trace), 7):
        free = int(found.reserved[entry] - found.allocated[entry] - found.awaiting[entry])
        blocks = len(found.lives.at(entry).nbytes)
        assert 0 <= free - holes_at(found, entry).total <= 512 * blocks or holes_at(found, entry).total - free < 2**20


def test_a_recording_of_the_last_entries_knows_what_was_there_before() -> None:
    whole, cut = parse_snapshot(STEP), parse_snapshot(changed(lambda written: _keep(written, 300)))
    first, second = timeline_of(whole, 0), timeline_of(cut, 0)
    lost = len(first.trace) - 300
    assert np.array_equal(first.allocated[lost:], second.allocated)
    assert np.array_equal(first.reserved[lost:], second.reserved)
    assert second.start == first.at(lost - 1)


def _keep(written: dict[str, Any], last: int) -> None:
    written["device_traces"][0] = written["device_traces"][0][-last:]


# Stack traces.

TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
MEGATRON = "/workspace/megatron-lm/megatron/core"


def test_the_line_is_the_innermost_that_is_no_plumbing() -> None:
    stack = [
        Frame("", 0, "c10::cuda::CUDACachingAllocator::malloc"),
        Frame(f"{TORCH}/functional.py", 12, "einsum"),
        Frame(f"{TORCH}/../transformer_engine/pytorch/cpp_extensions/gemm.py", 90, "general_gemm"),
        Frame(f"{MEGATRON}/transformer/mlp.py", 140, "forward"),
        Frame(f"{TORCH}/nn/modules/module.py", 1775, "_wrapped_call_impl"),
        Frame(f"{MEGATRON}/transformer/module.py", 30, "__call__"),
        Frame(f"{MEGATRON}/transformer/transformer_layer.py", 470, "_forward_mlp"),
    ]
    assert site_of(stack).place == "megatron/core/transformer/mlp.py:140 forward"
    assert site_of(stack).caller == "megatron/core/transformer/transformer_layer.py:470 _forward_mlp"
    assert site_of(stack[:2]).place == "torch/functional.py:12 einsum"
    assert site_of(stack[:1]) == site_of([]) == NATIVE
    engine = [
        Frame("??", 0, "at::_ops::mm::call(at::Tensor const&, at::Tensor const&)"),
        Frame("??", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
        Frame("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)"),
    ]
    assert site_of(engine).place == "torch::autograd::generated::MmBackward0::apply"
    assert site_of(engine[:1]).place == "at::_ops::mm::call"
    assert (moment_of(engine), moment_of(engine[:1])) == ("backward", "unknown")
    assert short_path("/scratch/me/work/experiments/train.py") == "work/experiments/train.py"


@pytest.mark.parametrize(
    ("frames", "moment"),
    [
        ([(f"{MEGATRON}/transformer/mlp.py", "forward"), ("pretrain_gpt.py", "forward_step")], "forward"),
        ([(f"{TORCH}/autograd/function.py", "apply"), ("te/pytorch/module/linear.py", "backward")], "backward"),
        ([], "backward"),
        (
            [
                (f"{MEGATRON}/transformer/mlp.py", "forward"),
                (f"{MEGATRON}/tensor_parallel/random.py", "backward"),
                (f"{TORCH}/autograd/function.py", "apply"),
            ],
            "recompute",
        ),
        (
            [
                (f"{MEGATRON}/distributed/param_and_grad_buffer.py", "finish_grad_sync"),
                (f"{MEGATRON}/distributed/finalize_model_grads.py", "finalize_model_grads"),
            ],
            "grad_sync",
        ),
        ([(f"{MEGATRON}/distributed/distributed_data_parallel.py", "hook")], "backward"),
        (
            [
                (f"{MEGATRON}/distributed/param_and_grad_buffer.py", "finish_param_sync"),
                (f"{MEGATRON}/distributed/distributed_data_parallel.py", "hook"),
                (f"{MEGATRON}/transformer/transformer_layer.py", "forward"),
            ],
            "forward",
        ),
        ([(f"{TORCH}/optim/adamw.py", "step"), ("train.py", "train_step")], "optimizer"),
        ([(f"{MEGATRON}/distributed/param_and_grad_buffer.py", "__init__")], "setup"),
        ([(f"{MEGATRON}/optimizer/__init__.py", "get_megatron_optimizer"), ("train.py", "setup")], "setup"),
        ([("/srv/optimizer/train.py", "train_step")], "unknown"),
        ([("notebook.py", "<module>")], "unknown"),
    ],
)
def test_stacks_tell_the_phase(frames: list[tuple[str, str]], moment: str) -> None:
    assert moment_of([Frame(file, 1, name) for file, name in frames]) == moment


# Whole files.


def test_a_recording_that_ran_out_of_memory(tmp_path: Path) -> None:
    diagnosis = diagnosed(tmp_path, STEP)
    page = page_of(diagnosis)
    (failure,) = page.failures
    written = pickle.loads(STEP)["device_traces"][0][-1]  # noqa: S301
    assert (failure.requested_bytes, failure.device_free_bytes) == (written["size"], written["device_free"])
    assert failure.stream == 8
    assert failure.usable_bytes == 0 < failure.requested_bytes < failure.unallocated_bytes
    assert "start_grad_sync" in failure.site
    assert page.live[0].site == "megatron/core/tensor_parallel/layers.py:1020 forward"
    assert sum(line.bytes for line in page.live) == page.peak.allocated_bytes
    assert page.peak.allocated_bytes == max(point.allocated_bytes for point in page.timeline)
    assert {"setup", "forward", "backward", "optimizer"} <= {each.phase for each in page.phases}
    (streams,) = [each for each in diagnosis.findings if "segments of other streams" in each.happened]
    assert streams.cause == "fragmentation"
    assert [finding.weight for finding in diagnosis.findings].index("cause") == diagnosis.findings.index(streams)
    assert "capacity" in {finding.cause for finding in diagnosis.findings if finding.weight == "contributes"}
    text = printed(diagnosis)
    assert "no memory for 391.0 KiB on stream 8, asked for in backward by megatron/core/distributed" in text
    assert re.search(r"24\.8 MiB │ +26% │ +6 │ forward", text)
    assert json.loads(diagnosis.model_dump_json())["details"][0]["devices"][0]["peak"]["phase"] == "backward"


def test_pieces_that_are_too_small_are_fragmentation(tmp_path: Path) -> None:
    """20 MiB were asked for; the stream had more, in pieces of at most 15.3 MiB, in segments that expand already."""
    diagnosis = diagnosed(tmp_path, OTHERS[1])
    (failure,) = page_of(diagnosis).failures
    assert failure.largest_usable_bytes < failure.requested_bytes < failure.usable_bytes < failure.unallocated_bytes
    first = diagnosis.findings[0]
    assert (first.cause, first.weight) == ("fragmentation", "cause")
    assert "in pieces of at most 15.32 MiB" in first.happened
    assert not any("expandable" in remedy for remedy in first.remedies)


def test_memory_that_grows_from_step_to_step_is_put_down_to_a_line(tmp_path: Path) -> None:
    """Each step keeps 4,000,004 bytes of logits."""
    growth = page_of(diagnosis := diagnosed(tmp_path, STEP)).growth
    assert growth is not None
    (line,) = growth.lines
    assert line.bytes == growth.last.allocated_bytes - growth.first.allocated_bytes == (growth.steps - 1) * 4_000_004
    assert "_postprocess" in line.caller
    assert "growth" in {finding.cause for finding in diagnosis.findings}
    assert page_of(diagnosed(tmp_path, OTHERS[0])).growth is None


def test_what_two_snapshots_differ_in(tmp_path: Path) -> None:
    """The second step's end against the fifth's: kept logits, and nothing else."""

    def early(written: dict[str, Any]) -> None:
        trace = written["device_traces"][0]
        freed = [place for place, entry in enumerate(trace) if entry["action"] == "free_completed"]
        del trace[freed[len(freed) // 4] + 1 :]
        written["segments"] = []

    before, after = changed(early), STEP
    *_, compared = diagnosed(tmp_path, before, after).details
    assert isinstance(compared, SnapshotComparison)
    peak, end = compared.moments
    assert (peak.moment, end.moment) == ("peak", "end")
    line = peak.lines[0]
    assert "_postprocess" in line.caller
    assert line.change > 0
    assert sum(line.change for line in peak.lines) == peak.after_bytes - peak.before_bytes
    *_, same = diagnosed(tmp_path, after, after).details
    assert isinstance(same, SnapshotComparison)
    assert not any(moment.lines for moment in same.moments)
    assert "every line holds the same" in printed(diagnosed(tmp_path, after, after))


def test_lines_that_are_new_and_gone(tmp_path: Path) -> None:
    contents = []
    for name in ("old", "new"):
        frames = [{"filename": f"{name}.py", "line": 1, "name": "forward"}]
        block = {"size": 2**21, "requested_size": 2**21, "state": "active_allocated", "frames": frames}
        segment = {"device": 0, "address": 0, "total_size": 2**21, "stream": 0, "blocks": [block]}
        contents.append(pickle.dumps({"segments": [segment], "device_traces": []}))
    *_, compared = diagnosed(tmp_path, *contents).details
    assert isinstance(compared, SnapshotComparison)
    states = {line.site: line.state for line in compared.moments[1].lines}
    assert states == {"old.py:1 forward": "gone", "new.py:1 forward": "new"}


def test_private_pools_and_waiting_blocks_are_findings(tmp_path: Path) -> None:
    def pool_and_wait(written: dict[str, Any]) -> None:
        largest = max(written["segments"], key=lambda segment: segment["total_size"])
        largest["segment_pool_id"] = (1, 3)
        trace = written["device_traces"][0]
        last = {entry.get("addr"): entry for entry in trace if not entry["action"].startswith("segment")}
        never = [entry for entry in last.values() if entry["action"] == "free_completed"]
        written["device_traces"][0] = [entry for entry in trace if not any(entry is each for each in never)]

    diagnosis = diagnosed(tmp_path, changed(pool_and_wait))
    said = [finding.happened for finding in diagnosis.findings]
    assert any("1 private pool (CUDA graphs'" in sentence for sentence in said)
    assert any("free_requested without free_completed" in sentence for sentence in said)
    assert page_of(diagnosis).pools[0].pool == "(1, 3)"


def test_without_history_what_is_held_is_shown(tmp_path: Path) -> None:
    def forget(written: dict[str, Any]) -> None:
        written["device_traces"] = [[]]

    page = page_of(diagnosis := diagnosed(tmp_path, changed(forget)))
    assert page.peak == page.end == page.start
    assert page.live[0].site == "megatron/core/tensor_parallel/layers.py:1020 forward"
    assert "no history was recorded" in diagnosis.findings[0].happened


def test_what_was_freed_before_anybody_saw_it_allocated_has_a_line_of_its_own(tmp_path: Path) -> None:
    entries = [{"action": "free_requested", "addr": 512, "size": 300, "stream": 0, "frames": []}]
    frames = [{"filename": "train.py", "line": 1, "name": "forward"}]
    entries.append({"action": "alloc", "addr": 1024, "size": 40, "stream": 0, "frames": frames})
    content = pickle.dumps({"segments": [], "device_traces": [entries]})
    assert page_of(diagnosed(tmp_path, content)).live[0].site == BEFORE.place


class Runs:
    """Unpickled by Python it would run something."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return print, ("run",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("value", [Runs(), {"segments": [Runs()]}, [Runs()]], ids=["itself", "inside", "in a list"])
def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path: Path, value: object, protocol: int) -> None:
    with pytest.raises(InputError, match=r"it names (builtins|__builtin__)\.print$"):
        diagnosed(tmp_path, pickle.dumps(value, protocol))


def test_names_in_a_snapshot_are_text(tmp_path: Path) -> None:
    """No control characters, no markup of the terminal's."""

    def rename(written: dict[str, Any]) -> None:
        for entry in written["device_traces"][0]:
            for frame in entry["frames"]:
                frame["filename"], frame["name"] = "[red]\x1b[31m.py", "\x07[/]"

    text = printed(diagnosed(tmp_path, changed(rename)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]\\x1b[31m.py" in text


def test_long_tables_say_what_is_left_out(tmp_path: Path) -> None:
    entries = [
        {
            "action": "alloc",
            "addr": 512 * place,
            "size": 512,
            "stream": 0,
            "frames": [{"filename": f"{place}.py", "line": 1, "name": "forward"}],
        }
        for place in range(300)
    ]
    diagnosis = diagnosed(tmp_path, pickle.dumps({"segments": [], "device_traces": [entries]}))
    page = page_of(diagnosis)
    assert (len(page.live), page.left_out, page.left_out_bytes) == (200, 100, 51200)
    assert "285 more lines" in printed(diagnosis)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STEP) - 1), st.binary(max_size=2)), min_size=1, max_size=4))
def test_no_damage_crashes_a_diagnosis(changes: list[tuple[int, bytes]]) -> None:
    content = STEP
    for place, new in changes:
        content = content[:place] + new + content[place + 1 :]
    path = Path("damaged.pickle")
    with contextlib.suppress(InputError):
        from labkit.diagnose.reading import Source
        from labkit.diagnose.snapshots import read

        detail = read(Source("damaged", content[:100], io.BytesIO(content), path)).detail
        Terminal(file=io.StringIO()).print(detail)


def test_no_points_no_chart() -> None:
    assert chart_rows([]) == []
