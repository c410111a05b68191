"""Bytes by part of the model: nothing is lost, nothing counted twice, each layer's share where it belongs."""

from collections import Counter

import pytest

from labkit import estimate
from labkit.memory.parameters import parameter_count
from labkit.summary import breakdown
from labkit.workbench.parts import PARTS, held_by_part, layer_counts, part_of
from labkit.workload import Workload
from tests.memory.grid import FAMILIES, NAMES, workload

EACH_KIND = [next(name for name in NAMES if name.startswith(f"{family}:")) for family in FAMILIES]
INTERLEAVED = "inputs: interleaved, prediction, full uniform 1"


@pytest.mark.parametrize("name", [*EACH_KIND, INTERLEAVED])
def test_parts_sum_to_the_peak_category_by_category(name: str) -> None:
    case = workload(name)
    for stage in {0, case.parallelism.pp - 1}:
        ledger = estimate(case, stage).ledger
        rows = ledger.at(ledger.peak().clock)
        held = held_by_part(case, stage, rows)
        found: Counter[str] = Counter()
        for each in held:
            assert each.bytes > 0
            assert each.part in PARTS
            found[each.category] += each.bytes
        assert found == breakdown(rows)


def test_a_buffer_is_divided_by_the_weights_in_it() -> None:
    case = Workload.load("gpt-local")
    ledger = estimate(case).ledger
    held = held_by_part(case, 0, ledger.between_steps())
    gradients = Counter({each.part: each.bytes for each in held if each.category == "gradient buffers"})
    model, size = case.model, 4 if case.training.data_parallel.grad_reduce_in_fp32 else 2
    embedded = case.padded_vocab_size // case.parallelism.tp * model.hidden_size
    assert gradients["embedding"] >= embedded * size
    if case.parallelism.tp == case.parallelism.pp == 1:
        assert sum(gradients.values()) - gradients["padding of buffers"] == size * parameter_count(model)
    assert gradients["padding of buffers"] < 2**20


def test_layers_of_a_mixed_model_go_to_their_own_kinds() -> None:
    case = Workload.load("nemotron-3-nano")
    assert layer_counts(case, 0) == {"Mamba": 23, "mixture of experts": 23, "attention": 6}
    first: dict[str, int] = {
        str(kind.mixer or kind.mlp): layer for layer, kind in reversed([*enumerate(case.model.layers)])
    }
    for kind, path, part in (
        ("mamba", "mixer.in_proj", "Mamba"),
        ("attention", "self_attention.linear_qkv", "attention"),
        ("moe", "mlp.experts.linear_fc1", "mixture of experts"),
    ):
        layer = first[kind]
        assert part_of(case, f"decoder.layers.{layer}.{path}", "moe", layer) == part
    assert part_of(case, "output_layer", "head", None) == "head and loss"
    assert part_of(case, "mtp.layers.0.mtp_model_layer.mlp", "moe", None) == "multi-token prediction"
