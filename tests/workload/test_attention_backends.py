"""What `auto` becomes; the grid's family `devices` holds the same choices against Transformer Engine's own."""

from typing import Any

import pytest

from labkit.errors import InputError
from labkit.workload import Workload
from labkit.workload.attention_backends import attention_backend
from labkit.workload.kernels import flash_sums
from tests.memory.grid import changed, devices

DETERMINISTIC = {"training.kernels.deterministic_attention": True}
DROPOUT = {"model.attention_dropout": 0.1}


def dense(gpu: str, **changes: Any) -> Workload:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return changed(devices.BASE, devices.AUTO | {"training.gpu": gpu} | named, "case")


@pytest.mark.parametrize(
    ("gpu", "changes", "backend"),
    [
        ("a100-80gb", {}, "flash"),
        ("h100-80gb", {}, "fused"),
        ("gb200-186gb", {}, "fused"),
        ("gb200-186gb", {"model.kv_channels": 192}, "flash"),
        ("gb200-186gb", DETERMINISTIC, "fused"),
        ("gb200-186gb", DETERMINISTIC | DROPOUT, "flash"),
        ("gb200-186gb", DROPOUT, "fused"),
        ("h100-80gb", DETERMINISTIC | DROPOUT, "fused"),
        ("h100-80gb", {"model.kv_channels": 100}, "unfused"),
        ("h100-80gb", {"training.precision": "fp32"}, "unfused"),
        ("a100-80gb", {"parallelism.context_parallel_size": 2, "parallelism.world_size": 4}, "flash"),
    ],
)
def test_auto_is_the_kernel_transformer_engine_prefers(gpu: str, changes: dict[str, Any], backend: str) -> None:
    assert attention_backend(dense(gpu, **changes)) == backend


def test_auto_without_any_kernel_is_refused() -> None:
    context = {"parallelism.context_parallel_size": 2, "parallelism.world_size": 4, "model.kv_channels": 100}
    with pytest.raises(InputError, match="unfused attention has no context parallelism"):
        dense("h100-80gb", **context)


def test_a_deterministic_backward_keeps_a_sum_for_each_block_on_a_head() -> None:
    assert flash_sums(2, 8, 108) == 7
    assert flash_sums(4, 32, 108) == 1
