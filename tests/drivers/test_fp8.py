"""What Transformer Engine's Python keeps in FP8, against sizes worked out by hand from its C++ (`quantizer.cpp`)."""

from typing import Any

import pytest

from labkit import Workload
from labkit.drivers.trace.driver import Trace
from labkit.drivers.trace.server import TraceServer
from labkit.ledger import rounded
from tests.small import MODEL, small

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
HIDDEN, LOCAL, GATHERED = 256, 128, 256
"""Width; tokens of a rank, and of its two tensor-parallel ranks."""
FFN = 256
"""Width of the dense MLP and of its gate on one of two ranks, each."""
EXPERT_ROWS, EXPERT_FFN, EXPERTS = 128, 128, 2
"""Rows that balanced routing sends each of a rank's experts, and their width."""


def in_fp8(recipe: str, *others: str, **changes: Any) -> Workload:
    arguments = ["--fp8-format e4m3", f"--fp8-recipe {recipe}", *others]
    gpu = {"training__gpu": "b200-180gb"} if recipe == "mxfp8" else {}
    return small(launch={"arguments": arguments}, **gpu, **changes)


@pytest.fixture(scope="module")
def traces(server: TraceServer) -> dict[str, Trace]:
    return {recipe: server.run(in_fp8(recipe)) for recipe in RECIPES}


def kept(trace: Trace, module: str) -> list[tuple[tuple[int, ...], str]]:
    rows = [row for row in trace.ledger.retained().rows if row.module == module]
    return sorted((row.shape, row.dtype) for row in rows)


def columnwise(recipe: str, rows: int, columns: int, *between: int) -> list[tuple[tuple[int, ...], str]]:
    """What a product's second operand keeps for the weight gradient: (rows, columns) over rows, and its scales.

    Per tensor: the transpose, one scale. Blocks: the transpose, a scale for 128 rows of a column, columns in fours.
    MXFP8: not transposed, a byte for 32 rows of a column; rows of scales in fours, columns in multiples of 128.
    """
    match recipe:
        case "delayed":
            return [((), "fp32"), ((columns, rows, *between), "uint8")]
        case "tensorwise":
            return [((1,), "fp32"), ((columns, rows, *between), "uint8")]
        case "blockwise":
            scales = (-(-rows // 128), -(-columns // 4) * 4)
            return [(scales, "fp32"), ((columns, rows, *between), "uint8")]
    scales = (-(-rows // 32 // 4) * 4, -(-columns // 128) * 128)
    return [(scales, "uint8"), ((rows, *between, columns), "uint8")]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_keeps_its_input_in_the_direction_of_the_weight_gradient(
    traces: dict[str, Trace], recipe: str
) -> None:
    fc2 = kept(traces[recipe], "decoder.layers.0.mlp.linear_fc2")
    assert fc2 == sorted(columnwise(recipe, GATHERED, FFN, 1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fused_norm_linear_keeps_the_norms_output_quantized(traces: dict[str, Trace], recipe: str) -> None:
    fc1 = kept(traces[recipe], "decoder.layers.0.mlp.linear_fc1")
    of_the_norm, product = ((LOCAL,), "fp32"), ((GATHERED, 2 * FFN), "bf16")
    if recipe in ("delayed", "tensorwise"):
        # Backward gathers it over the tensor-parallel ranks, which per-tensor scales allow before transposing.
        scale: tuple[int, ...] = () if recipe == "delayed" else (1,)
        expected = [(scale, "fp32"), ((LOCAL, HIDDEN), "uint8")]
    else:
        expected = columnwise(recipe, LOCAL, HIDDEN)
    assert fc1 == sorted([*expected, of_the_norm, product])


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_inputs_are_quantized_each_alone_or_all_in_one_buffer(traces: dict[str, Trace], recipe: str) -> None:
    product = ((EXPERTS * EXPERT_ROWS, 2 * EXPERT_FFN), "bf16")
    for name, width, output in (("linear_fc1", HIDDEN, [product]), ("linear_fc2", EXPERT_FFN, [])):
        found = kept(traces[recipe], f"decoder.layers.1.mlp.experts.{name}")
        alone = columnwise(recipe, EXPERT_ROWS, width)
        if recipe in ("delayed", "tensorwise"):
            assert found == sorted([*alone * EXPERTS, *output]), name
        else:
            scale_bytes = width * 4 if recipe == "blockwise" else EXPERT_ROWS // 32 * width
            together = EXPERTS * (EXPERT_ROWS * width + scale_bytes)
            assert found == sorted([((together,), "uint8"), *output]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_kept_in_both_directions_beside_the_parameters(traces: dict[str, Trace], recipe: str) -> None:
    rows = [
        row for row in traces[recipe].ledger.between_steps().rows if row.module == "decoder.layers.0.mlp.linear_fc2"
    ]
    data = [row for row in rows if row.dtype == "uint8" and row.bytes >= HIDDEN * FFN]
    # Blackwell multiplies per-tensor FP8 in any layout, and so needs no transpose; none of these runs there.
    assert sum(row.bytes for row in data) == 2 * HIDDEN * FFN


def test_parameters_in_fp8_take_a_byte_in_place_of_two(server: TraceServer, traces: dict[str, Trace]) -> None:
    gathered = server.run(in_fp8("tensorwise", "--fp8-param-gather"))
    name = "decoder.layers.0.mlp.linear_fc2"

    def held(trace: Trace) -> int:
        return sum(row.bytes for row in trace.ledger.between_steps().rows if row.module == name)

    # With the parameter in FP8 there is no copy beside it, but its transpose stays.
    assert gathered.ledger.between_steps().total() < traces["tensorwise"].ledger.between_steps().total()
    assert held(gathered) <= held(traces["tensorwise"])
    buffers = [row for row in gathered.ledger.between_steps().rows if row.tensor == "param_data"]
    assert {row.dtype for row in buffers} == {"uint8", "bf16"}


def test_first_and_last_layers_may_stay_in_bf16(server: TraceServer) -> None:
    four = {**MODEL, "num_layers": 4, "mixture_of_experts": None}
    trace = server.run(in_fp8("tensorwise", "--first-last-layers-bf16", model=four, **DENSE))
    first, second = (kept(trace, f"decoder.layers.{layer}.mlp.linear_fc2") for layer in (0, 1))
    assert first == []  # the activation's output in bf16, which the activation made
    assert second == sorted(columnwise("tensorwise", GATHERED, FFN, 1))


DENSE = {"parallelism": {"world_size": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True}}


def test_recomputed_layers_keep_their_input_alone(server: TraceServer) -> None:
    changes = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    trace = server.run(in_fp8("delayed", recompute=changes))
    rows = trace.ledger.retained().rows
    assert not [row for row in rows if row.module.startswith("decoder.layers.0") and row.dtype == "uint8"]
    assert rounded(LOCAL * HIDDEN * 2) in {row.bytes for row in rows}
