"""Operators that a GPU, or a compiler, runs otherwise than eager code on the meta device; Megatron's refusals."""

from typing import Any

import pytest

from labkit.drivers.trace.server import TraceServer
from labkit.errors import InputError, WorkError
from labkit.ledger import Row
from labkit.workload import Workload
from tests.small import MODEL, full, small

ROWS, HIDDEN, WIDTH = 256, 256, 512 // 2
"""Tokens and sizes of the small dense workload, on one of two tensor-parallel ranks."""
DENSE: dict[str, Any] = {
    "model__mixture_of_experts": None,
    "parallelism__expert_model_parallel_size": 1,
}
PLAIN: dict[str, Any] = {"model__gated_linear_unit": False}
SQUARED_RELU = DENSE | PLAIN | {"model__activation_func": "squared_relu"}
EAGER: dict[str, Any] = {"training__kernels__bias_activation_fusion": False}


def kept(server: TraceServer, **changes: Any) -> list[Row]:
    return list(server.run(small(**changes)).ledger.retained().rows)


def test_dropout_keeps_one_byte_an_element(server: TraceServer) -> None:
    rows = kept(server, model__hidden_dropout=0.1, **DENSE)
    masks = [row for row in rows if row.dtype == "bool" and row.bytes >= ROWS // 2 * HIDDEN]
    # Two in each layer and one behind the embedding, each of a sequence-parallel shard.
    assert [row.bytes for row in masks] == [ROWS // 2 * HIDDEN] * (2 * MODEL["num_layers"] + 1)


def test_compiled_squared_relu_keeps_its_input_and_output(server: TraceServer) -> None:
    rows = kept(server, **SQUARED_RELU, **EAGER)
    in_layer = [row for row in rows if row.layer == 0 and row.kind == "mlp" and row.bytes == 2 * ROWS * WIDTH]
    assert [row.module.rpartition("mlp")[2] for row in in_layer] == [".linear_fc1", ""]


def test_native_loss_makes_one_more_copy_in_backward(server: TraceServer) -> None:
    logits = 4 * ROWS * 1024 // 2
    ledger = server.run(small(training__kernels__cross_entropy_fusion_impl="native", **DENSE)).ledger
    copies = [row for row in ledger.rows if row.dtype == "fp32" and row.bytes == logits and row.kind == "head"]
    assert [row.phase for row in copies] == ["forward", "backward"] * 2


@pytest.mark.parametrize(
    "changes",
    [
        SQUARED_RELU,
        DENSE | PLAIN,
        DENSE | PLAIN | {"model__activation_func": "gelu"},
        DENSE | {"model__mtp_num_layers": 1, "recompute": full("uniform", 2)},
    ],
)
def test_what_is_refused_fails_in_megatron(server: TraceServer, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        small(**changes)
    with pytest.raises(WorkError):
        server.run(_unchecked(changes))


def _unchecked(changes: dict[str, Any]) -> Workload:
    data = small(**DENSE).model_dump()
    for path, value in changes.items():
        *sections, last = path.split("__")
        at = data
        for section in sections:
            at = at[section]
        at[last] = value
    return Workload.unchecked(data)


@pytest.mark.parametrize(
    "changes",
    [
        DENSE | PLAIN | EAGER,
        DENSE | PLAIN | {"model__activation_func": "gelu", "model__add_bias_linear": True},
        DENSE | {"model__mtp_num_layers": 1, "recompute": full("block", 2)},
        {"model__mtp_num_layers": 1},
    ],
)
def test_what_is_not_refused_runs(server: TraceServer, changes: dict[str, Any]) -> None:
    assert server.run(small(**changes)).peak_allocated_bytes > 0
