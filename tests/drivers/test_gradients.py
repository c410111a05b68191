"""Where autograd puts the sum of gradients that meet: the trace must book what a run without it allocates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import Variable

from labkit.drivers.trace import gradients
from labkit.drivers.trace.origin import Origin
from labkit.drivers.trace.tracker import StorageTracker


class Branch(torch.autograd.Function):
    """Makes a gradient of its own, which a list may keep."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[torch.Tensor] | None) -> torch.Tensor:
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        made = gradient.clone()
        if ctx.kept is not None:
            ctx.kept.append(made)
        return made, None


def _sum_of_two(device: str, *, first_kept: bool, second_kept: bool) -> tuple[list[int], int]:
    """Storages of the two gradients that were kept, in backward's order, and of their sum."""
    kept: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    x = torch.ones(1000, device=device, requires_grad=True)
    y = x * 1
    y.register_hook(sums.append)
    late, early = (Branch.apply(y, kept if keep else None) for keep in (second_kept, first_kept))
    (early + late).sum().backward()
    return [tensor.untyped_storage()._cdata for tensor in kept], sums[0].untyped_storage()._cdata


@pytest.mark.parametrize("first_kept", [False, True])
@pytest.mark.parametrize("second_kept", [False, True])
def test_sums_of_gradients_are_booked_as_the_engine_makes_them(first_kept: bool, second_kept: bool) -> None:
    real_kept, real_sum = _sum_of_two("cpu", first_kept=first_kept, second_kept=second_kept)
    with StorageTracker(Origin(), instead={torch.ops.aten.add.Tensor: gradients.adder()}):
        kept, traced_sum = _sum_of_two("meta", first_kept=first_kept, second_kept=second_kept)
    assert real_sum not in real_kept
    assert traced_sum not in kept


def custom_backward(loss: torch.Tensor) -> None:
    """As Megatron's of that name (`pipeline_parallel/schedules.py`), which calls the engine itself."""
    Variable._execution_engine.run_backward(
        tensors=(loss,),
        grad_tensors=(torch.ones_like(loss),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


@pytest.mark.parametrize("run_backward", [torch.Tensor.backward, custom_backward])
def test_the_first_gradient_takes_the_sum_when_it_is_free(run_backward: Callable[[torch.Tensor], None]) -> None:
    with StorageTracker(Origin(), instead={torch.ops.aten.add.Tensor: gradients.adder()}) as tracker:
        x = torch.ones(1000, device="meta", requires_grad=True)
        y = x * 1
        before = len(tracker.allocations)
        run_backward((Branch.apply(y, None) + Branch.apply(y, None)).sum())
        # Forward: two copies and their sum; backward: two copies and the product's gradient, none for the sum of both.
        made = [allocation.shape for allocation in tracker.allocations[before:]]
    assert made.count((1000,)) == 6


INDICES = torch.tensor([[1, 2], [0, 3]])
SELECTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda x: x[INDICES.to(x.device)],
    "gather": lambda x: x.gather(0, INDICES.to(x.device)),
    "index_select": lambda x: x.index_select(0, INDICES[0].to(x.device)),
    "topk": lambda x: x.topk(2)[0],
    "max": lambda x: x.max(1)[0],
    "sort": lambda x: x.sort()[0],
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_a_gradient_written_into_zeros_is_booked_once(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """On a GPU the nodes write in place into the zeros that they make; under a dispatch mode they would copy."""
    tracker = StorageTracker(Origin(), instead={**gradients.into_zeros()})
    x = torch.ones(300, 400, device="meta", requires_grad=True)
    with tracker:
        select(x).sum().backward()
        whole = [each for each in tracker.allocations if (each.shape, each.dtype) == ((300, 400), "float32")]
    made = [each for each in whole if each.dies is None]
    assert len(made) == 1
    passing = [each for each in whole if each.dies is not None and each.dies > made[0].born > each.born]
    assert not passing
