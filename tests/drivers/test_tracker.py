import gc

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from labkit.drivers.trace.cublas import CublasWorkspaces
from labkit.drivers.trace.origin import OUTSIDE, Maker, Origin
from labkit.drivers.trace.tracker import StorageTracker


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, device="meta")


def live_bytes(tracker: StorageTracker) -> int:
    return sum(allocation.bytes for allocation in tracker.allocations if allocation.dies is None)


def peak_bytes(tracker: StorageTracker) -> int:
    sizes, total, peak = {0: 0}, 0, 0
    for serial, nbytes in tracker.events:
        sizes[serial] = nbytes
        total += nbytes if serial > 0 else -sizes[-serial]
        peak = max(peak, total)
    return peak


def test_a_storage_is_booked_once_in_units_of_512_bytes_and_freed_with_its_last_view() -> None:
    with StorageTracker(Origin()) as tracker:
        tensor = zeros(3, 50)
        view = tensor.view(-1)[10:].reshape(70, 2)
        del tensor
        assert tracker.events == [(1, 1024)]
        del view
    assert tracker.events == [(1, 1024), (-1, 0)]
    assert tracker.allocations[0].shape == (3, 50)
    assert tracker.allocations[0].dtype == "float32"


def test_host_and_empty_tensors_do_not_count() -> None:
    with StorageTracker(Origin()) as tracker:
        kept = [torch.zeros(1000), zeros(0), torch.ones(3) * 2]
    assert tracker.events == []
    assert len(kept) == 3


def test_a_storage_that_is_emptied_and_refilled_is_two_allocations() -> None:
    with StorageTracker(Origin()) as tracker:
        tensor = zeros(1024)
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4096)
        assert tracker.events == [(1, 4096), (-1, 0), (2, 4096)]
        del tensor
    assert tracker.events[-1] == (-2, 0)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_shared_memory_counts_once_and_lives_as_long_as_both() -> None:
    with StorageTracker(Origin()) as tracker:
        saved, replayed = zeros(1024), None
        saved.untyped_storage().resize_(0)
        replayed = zeros(1024)
        tracker.share(saved, replayed)
        assert live_bytes(tracker) == 4096
        del replayed
        assert live_bytes(tracker) == 4096, "the storage that shows it is still alive"
        assert saved.untyped_storage().nbytes() == 4096
        del saved
    assert live_bytes(tracker) == 0


def test_a_tensor_that_shows_anothers_memory_is_not_booked_and_keeps_nothing_alive() -> None:
    with StorageTracker(Origin()) as tracker:
        tensor = zeros(256)
        shown = tracker.shown(tensor)
        view = shown.detach().view(2, 128)
        assert live_bytes(tracker) == 1024
        del tensor
        assert live_bytes(tracker) == 0
        assert view.shape == (2, 128)
    assert len(tracker.allocations) == 1


def test_phases_and_clocks() -> None:
    with StorageTracker(Origin()) as tracker:
        tracker.phase(0, "setup")
        weight = zeros(128)
        tracker.phase(1, "forward")
        hidden = weight * 2
        tracker.phase(1, "backward")
        del hidden
    assert [tuple(moment) for moment in tracker.moments] == [(0, 0, "setup"), (1, 1, "forward"), (2, 1, "backward")]
    assert [(a.phase, a.born, a.dies) for a in tracker.allocations] == [("setup", 0, None), ("forward", 1, 2)]


def test_only_what_outlives_a_fused_region_is_booked() -> None:
    with StorageTracker(Origin()) as tracker:
        x = zeros(1024)
        with tracker.fused():
            y = (x.sigmoid() * x).exp()
        assert tracker.events == [(1, 4096), (2, 4096)]
        assert tracker.allocations[1].maker.producer == "exp"
        del y
    assert live_bytes(tracker) == 4096


class Block(torch.nn.Module):
    def __init__(self, replay: bool) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 256, device="meta")
        self.second = torch.nn.Linear(256, 64, device="meta")
        self.replay = replay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = checkpoint(self._inner, x, use_reentrant=True) if self.replay else self._inner(x)
        return x + inner

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.nn.functional.gelu(self.first(x)))
        return result


@pytest.mark.parametrize("replay", [False, True])
def test_forward_and_backward_know_their_module(replay: bool) -> None:
    origin = Origin()
    model = torch.nn.Sequential(Block(replay), Block(replay))
    with StorageTracker(origin) as tracker, origin.watching(model):
        tracker.phase(1, "forward")
        loss = model(zeros(32, 64).requires_grad_()).sum()
        tracker.phase(1, "backward")
        loss.backward()
    made = {(a.phase, a.maker.module, a.maker.producer) for a in tracker.allocations}
    assert {("forward", "0.first", "addmm"), ("forward", "1", "gelu"), ("forward", "1", "add")} <= made
    assert ("forward", OUTSIDE, "sum") in made
    backward = {(module, producer) for phase, module, producer in made if phase == "backward"}
    assert {("0.first", "mm"), ("1.second", "mm"), ("0", "gelu_backward"), ("1", "gelu_backward")} <= backward
    assert (("0.first", "addmm") in backward) is replay, "a replayed module names itself"
    assert {module for module, _ in backward} <= {OUTSIDE, "0", "1", "0.first", "0.second", "1.first", "1.second"}


def test_side_streams_are_known_in_forward_and_backward() -> None:
    current = [0]
    origin = Origin(stream=lambda: current[0])
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, device="meta"), torch.nn.Linear(64, 64, device="meta"))

    def aside(module: torch.nn.Module, args: object) -> None:
        current[0] = 7

    def back(module: torch.nn.Module, args: object, output: object) -> None:
        current[0] = 0

    with StorageTracker(origin) as tracker, origin.watching(model):
        # The tracker's own hooks are global ones, which run before a module's pre-hooks and after its own hooks.
        model[1].register_forward_pre_hook(aside)
        loss = model(zeros(8, 64).requires_grad_()).sum()
        current[0] = 0
        loss.backward()
    streams = {a.maker.stream for a in tracker.allocations if a.maker == Maker("1", "addmm", 7)}
    assert streams == {7}
    assert ("1", "mm", 7) in {tuple(a.maker) for a in tracker.allocations}
    assert ("0", "mm", 0) in {tuple(a.maker) for a in tracker.allocations}


def test_cublas_workspaces_appear_with_the_first_product_of_each_thread() -> None:
    workspaces = CublasWorkspaces(32 * 2**20)
    tracker = StorageTracker(Origin(), before=lambda operator: workspaces.before_operator(tracker, operator))
    with tracker:
        weight = zeros(64, 64).requires_grad_()
        for _ in range(2):
            (zeros(64, 64) @ weight).sum().backward()
    booked = [a for a in tracker.allocations if a.maker.producer == "CublasHandlePool"]
    assert [(a.maker.module, a.bytes, a.dies) for a in booked] == [
        ("forward thread", 32 * 2**20, None),
        ("autograd thread", 32 * 2**20, None),
    ]


def test_operators_can_be_answered_instead_of_run() -> None:
    answers = {torch.ops.aten._local_scalar_dense.default: lambda tensor: 0.0}
    with StorageTracker(Origin(), instead=answers):
        assert zeros(1).item() == 0.0


def test_peak_and_live_bytes_agree_with_torchs_own_memory_tracker() -> None:
    def train() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(*(Block(replay=False) for _ in range(3)))
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        model(zeros(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        return model, optimizer

    theirs, meta = MemTracker(), torch.device("meta")
    with theirs:
        kept = train()
        their_live = theirs.get_tracker_snapshot("current")[meta]["Total"]
        their_peak = theirs.get_tracker_snapshot("peak")[meta]["Total"]
    del kept
    with StorageTracker(Origin()) as ours:
        kept = train()
        our_live, our_peak = live_bytes(ours), peak_bytes(ours)
    del kept
    assert our_peak > 2**20
    assert abs(our_live - their_live) < 0.01 * 2**20
    assert abs(our_peak - their_peak) < 0.01 * 2**20


def test_what_a_shape_function_answered_under_another_default_dtype_is_not_remembered() -> None:
    whole = torch.ones(8, 6, dtype=torch.int64, device="meta")
    before, found = torch.get_default_dtype(), []
    with StorageTracker(Origin()):
        try:
            for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
                torch.set_default_dtype(dtype)
                found.append(((whole / whole).dtype, torch.sigmoid(whole).dtype))
        finally:
            torch.set_default_dtype(before)
    assert found == [(torch.float32,) * 2, (torch.bfloat16,) * 2] * 2
